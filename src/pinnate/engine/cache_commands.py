"""Commands of an operator that concern the prefix cache: pin, unpin, describe, explain, publish it whole.

Knows: the commands' names, arguments and results. Must not know: how they travel (messages), HTTP, the loop.
Each runs between two steps of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from pinnate.core.errors import UnsupportedError
from pinnate.engine.commands import CommandHandler
from pinnate.kvcache.debug_view import describe_cache
from pinnate.kvcache.explain import MatchExplainer
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.pins import Pin, Pins, sequence_of
from pinnate.kvcache.tiers.manager import TierManager


class Resync(Protocol):
    def resync(self) -> int: ...


class PrefixArguments(msgspec.Struct, frozen=True):
    """Of `pin` and `explain_match`."""

    token_ids: list[int]
    cache_salt: str = ""


class UnpinArguments(msgspec.Struct, frozen=True):
    pin_id: str


class CacheCommands:
    """The handlers. They raise RequestError for what the caller can mend."""

    def __init__(
        self,
        cache: KVCacheManager,
        explainer: MatchExplainer | None = None,
        events: Resync | None = None,
        tiers: TierManager | None = None,
    ) -> None:
        """Without `explainer` nothing is told of the cache's content; `events` is where KV events are published."""
        self._cache = cache
        self._explainer = explainer
        self._events = events
        self._tiers = tiers
        self._pins = Pins(cache)

    def handlers(self) -> Mapping[str, CommandHandler]:
        return {
            "pin": self.pin,
            "unpin": self.unpin,
            "describe_cache": self.describe,
            "explain_match": self.explain,
            "resync_kv_events": self.resync,
        }

    def pin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """`pinned: false` and nothing else where the prefix is not all cached: compute it first."""
        asked = msgspec.convert(arguments, PrefixArguments)
        pin = self._pins.pin(asked.token_ids, asked.cache_salt)
        if pin is None:
            return {"pinned": False}
        return {"pinned": True, **self._describe(pin), **self._quota()}

    def unpin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"unpinned_pages": self._pins.unpin(msgspec.convert(arguments, UnpinArguments).pin_id), **self._quota()}

    def describe(self, arguments: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        self._require_explainer()
        pins = [self._describe(pin) for pin in self._pins.all()]
        tiers = [] if self._tiers is None else [self._tiers.describe()]
        return describe_cache(self._cache) | {"pins": pins, "tiers": tiers}

    def explain(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The report that a request with these tokens would get now. The cache does not notice."""
        explainer = self._require_explainer()
        asked = msgspec.convert(arguments, PrefixArguments)
        seq = sequence_of(asked.token_ids, asked.cache_salt)
        limit = seq.num_tokens - 1
        report = explainer.explain(seq.token_ids, seq.request.namespace, self._cache.match(seq, limit), limit)
        return {"report": msgspec.to_builtins(report)}

    def resync(self, arguments: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Publishes everything that is cached, in one batch that begins with AllBlocksCleared."""
        if self._events is None:
            raise UnsupportedError("the server was started without --kv-events-config")
        return {"sequence_number": self._events.resync()}

    def _require_explainer(self) -> MatchExplainer:
        if self._explainer is None:
            raise UnsupportedError("the server was started without --cache-report all")
        return self._explainer

    def _describe(self, pin: Pin) -> dict[str, Any]:
        return {"pin_id": pin.pin_id, "num_tokens": pin.num_tokens, "num_pages": len(pin.seq.page_table)}

    def _quota(self) -> dict[str, Any]:
        return {"pinned_pages": self._pins.num_pages, "quota_pages": self._cache.pinnable_pages}
