"""Pins: prefixes that an operator keeps cached, whatever else is evicted.

Knows: which prefixes are pinned, how many pages that takes, the quota. Must not know: how a prefix came into the cache.

A pin is a sequence that never runs: it holds the prefix's whole pages as any sequence would, so eviction, sharing and
the integrity check need to know nothing of pins. Its tail inside a page is not pinned.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from pinnate.core.errors import InvalidRequestError, NotFoundError, UnsupportedError
from pinnate.core.request import Request, Sequence
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_pool import NULL_PAGE

NO_SAMPLING = SamplingParams(max_tokens=1, seed=0)


@dataclass(frozen=True, slots=True)
class Pin:
    pin_id: str
    seq: Sequence

    @property
    def num_tokens(self) -> int:
        return self.seq.num_tokens


def sequence_of(tokens: list[int], cache_salt: str) -> Sequence:
    """A sequence that is never run."""
    request = Request(request_id="", prompt_token_ids=tokens, sampling=NO_SAMPLING, cache_salt=cache_salt)
    return Sequence(0, request, 0, token_ids=array("i", tokens))


class Pins:
    """Belongs to the engine's thread, like the cache. The quota is `cache.pinnable_pages`; pages that several pins
    share count once."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._pins: dict[str, Pin] = {}
        self._made = 0

    @property
    def num_pages(self) -> int:
        return len(self._pages())

    def all(self) -> list[Pin]:
        """In the order in which they were made."""
        return list(self._pins.values())

    def pin(self, tokens: list[int], cache_salt: str = "") -> Pin | None:
        """Pins the whole pages of `tokens`; None if not all of them are cached. A prefix that is pinned already gives
        the pin it has.

        Raises:
            UnsupportedError: nothing can be pinned in this engine.
            InvalidRequestError: less than a page, or over the quota; with the numbers.
        """
        cache = self._cache
        if not cache.pinnable_pages or not cache.enable_prefix_caching:
            need = "--pin-quota" if cache.enable_prefix_caching else "prefix caching"
            raise UnsupportedError(f"pinning is off: the server was started without {need}")
        whole = len(tokens) - len(tokens) % cache.page_size
        if not whole:
            raise InvalidRequestError(
                f"the prefix has {len(tokens)} tokens; at least one page of {cache.page_size} can be pinned",
                param="prompt",
            )
        seq = sequence_of(tokens[:whole], cache_salt)
        for pin in self._pins.values():
            if pin.seq.token_ids == seq.token_ids and pin.seq.request.namespace == seq.request.namespace:
                return pin
        match = cache.match(seq, whole)
        window_pages = cache.pages_matched(match) - len(match.pages)
        self._check_quota(whole // cache.page_size + window_pages, match.pages)
        if match.num_tokens < whole:
            return None
        self._made += 1
        seq.seq_id = -self._made
        seq.num_computed_tokens = cache.adopt(seq, match, count_hit=False)
        pin = Pin(f"pin-{self._made}", seq)
        self._pins[pin.pin_id] = pin
        return pin

    def unpin(self, pin_id: str) -> int:
        """Returns how many pages are pinned no longer. They stay cached until they are evicted.

        Raises:
            NotFoundError: there is no such pin.
        """
        if pin_id not in self._pins:
            raise NotFoundError(f"there is no pin {pin_id[:64]!r}", param="pin_id")
        before = self.num_pages
        self._cache.release(self._pins.pop(pin_id).seq)
        return before - self.num_pages

    def _pages(self) -> set[int]:
        pinned = [table for pin in self._pins.values() for table in (pin.seq.page_table, *pin.seq.window_tables)]
        return {page for table in pinned for page in table} - {NULL_PAGE}

    def _check_quota(self, wanted: int, cached: array[int]) -> None:
        pinned = self._pages()
        new = wanted - len(pinned.intersection(cached))
        quota = self._cache.pinnable_pages
        if len(pinned) + new > quota:
            raise InvalidRequestError(
                f"the prefix needs {new} more pages; {len(pinned)} of the {quota} that may be pinned are taken "
                f"(--pin-quota, of a pool of {self._cache.num_pages} pages)",
                param="prompt",
                code="pin_quota_exceeded",
            )
