"""Commands of an operator that concern the prefix cache: pin, unpin.

Knows: the commands' names, arguments and results. Must not know: how they travel (messages), HTTP, the loop.
Each runs between two steps of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.pins import Pin, Pins

CommandHandler = Callable[[dict[str, Any]], dict[str, Any]]


class PinArguments(msgspec.Struct, frozen=True):
    """`pin`. The result has `pinned: false` and nothing else where the prefix is not all cached: compute it first."""

    token_ids: list[int]
    cache_salt: str = ""


class UnpinArguments(msgspec.Struct, frozen=True):
    pin_id: str


class CacheCommands:
    """The handlers. They raise RequestError for what the caller can mend."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._pins = Pins(cache)

    def handlers(self) -> Mapping[str, CommandHandler]:
        return {"pin": self.pin, "unpin": self.unpin}

    def pin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        asked = msgspec.convert(arguments, PinArguments)
        pin = self._pins.pin(asked.token_ids, asked.cache_salt)
        if pin is None:
            return {"pinned": False}
        return {"pinned": True, **self._describe(pin), **self._quota()}

    def unpin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"unpinned_pages": self._pins.unpin(msgspec.convert(arguments, UnpinArguments).pin_id), **self._quota()}

    def _describe(self, pin: Pin) -> dict[str, Any]:
        return {"pin_id": pin.pin_id, "num_tokens": pin.num_tokens, "num_pages": len(pin.seq.page_table)}

    def _quota(self) -> dict[str, Any]:
        return {"pinned_pages": self._pins.num_pages, "quota_pages": self._cache.pinnable_pages}
