"""KV memory as it was before paging: one contiguous run of memory for each request, reserved when it starts.

Knows: runs of pages, first fit, how much each scheme reserves. The engine's scheduler drives it in place of
kvcache.manager, so that nothing but the allocator differs. The schemes are those that the PagedAttention paper
(Kwon et al., SOSP 2023, section 6.1) compares with, under the names it gives them. Runs start and end at pages,
because the kernels read pages: up to page_size - 1 slots at the end of a run are that alignment's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pinnate.core.errors import UnsupportedError
from pinnate.core.layer_groups import PageNeeds
from pinnate.core.request import Request, Sequence
from pinnate.kvcache.integrity import IntegrityError
from pinnate.kvcache.radix_cache import NO_MATCH, PrefixMatch
from pinnate.kvcache.tiers.lower import NoTiers
from pinnate.scheduler.admission import AdmissionControl

Reservation = Callable[[Request, int], int]  # (request, max_model_len) -> tokens


def reserve_max(request: Request, max_model_len: int) -> int:  # noqa: ARG001
    """The longest that any sequence may become."""
    return max_model_len


def reserve_pow2(request: Request, max_model_len: int) -> int:
    """The prompt and the next power of two of the output: its length is known up to a factor of two."""
    output = 1 << (request.max_tokens - 1).bit_length()
    return min(len(request.prompt_token_ids) + output, max_model_len)


def reserve_oracle(request: Request, max_model_len: int) -> int:  # noqa: ARG001
    """What will be stored, known beforehand. The last token of a sequence is never computed."""
    return len(request.prompt_token_ids) + request.max_tokens - 1


RESERVATIONS: Mapping[str, Reservation] = MappingProxyType(
    {"max": reserve_max, "pow2": reserve_pow2, "oracle": reserve_oracle}
)


class RunPool:
    """Pages 1..num_pages; hands out runs of neighbours, each the first that is long enough."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._starts = [1]  # of the free runs, ascending; no two touch
        self._lengths = [num_pages]

    @property
    def num_free(self) -> int:
        return sum(self._lengths)

    def free_runs(self) -> list[tuple[int, int]]:
        """(start, length), ascending."""
        return list(zip(self._starts, self._lengths, strict=True))

    def fits(self, length: int) -> bool:
        return any(free >= length for free in self._lengths)

    def take(self, length: int) -> int | None:
        """The first page of a run of `length` >= 1 pages; None, and nothing changed, if no free run is long enough."""
        i = next((i for i, free in enumerate(self._lengths) if free >= length), None)
        if i is None:
            return None
        start = self._starts[i]
        if self._lengths[i] == length:
            del self._starts[i], self._lengths[i]
        else:
            self._starts[i] += length
            self._lengths[i] -= length
        return start

    def give(self, start: int, length: int) -> None:
        """Takes a run back and joins it with free neighbours.

        Raises:
            ValueError: part of it is free already, or outside the pool.
        """
        i = bisect_left(self._starts, start)
        before = self._starts[i - 1] + self._lengths[i - 1] if i else 1
        after = self._starts[i] if i < len(self._starts) else self.num_pages + 1
        if start < before or start + length > after:
            raise ValueError(f"pages {start}..{start + length - 1} were not handed out")
        self._starts.insert(i, start)
        self._lengths.insert(i, length)
        for left in (i, i - 1):
            if 0 <= left < len(self._starts) - 1 and self._starts[left] + self._lengths[left] == self._starts[left + 1]:
                self._lengths[left] += self._lengths[left + 1]
                del self._starts[left + 1], self._lengths[left + 1]


class ContiguousCache:
    """What the scheduler expects of a KVCacheManager, with one run a sequence. Nothing is shared or cached."""

    enable_prefix_caching = False
    pinnable_pages = evicted_pages = num_cached_pages = 0
    tiers = NoTiers()

    def __init__(self, num_pages: int, page_size: int, reservation: Reservation, max_model_len: int) -> None:
        self.page_size = page_size
        self.needs = PageNeeds(page_size=page_size)
        self.runs = RunPool(num_pages)
        self._reservation = reservation
        self._max_model_len = max_model_len
        self._leases: dict[int, Sequence] = {}  # by seq_id

    @property
    def num_pages(self) -> int:
        return self.runs.num_pages

    num_request_pages = num_pages

    @property
    def num_free_pages(self) -> int:
        return self.runs.num_free

    num_available_pages = num_free_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def run_length(self, seq: Sequence) -> int:
        """Pages that the sequence takes for its whole life."""
        return self.pages_for(self._reservation(seq.request, self._max_model_len))

    def match(self, seq: Sequence, limit: int) -> PrefixMatch:  # noqa: ARG002
        return NO_MATCH

    def num_idle_pages(self, match: PrefixMatch) -> int:  # noqa: ARG002
        return 0

    def adopt(self, seq: Sequence, match: PrefixMatch) -> int:  # noqa: ARG002
        """Reserves the sequence's run; admission has seen that there is one."""
        length = self.run_length(seq)
        start = self.runs.take(length)
        assert start is not None, "started without room"
        seq.page_table = array("i", range(start, start + length))
        self._leases[seq.seq_id] = seq
        return 0

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """
        Raises:
            IntegrityError: the sequence outgrows its reservation.
        """
        if seq.num_computed_tokens + num_tokens > len(seq.page_table) * self.page_size:
            raise IntegrityError(f"sequence {seq.seq_id} outgrows its {len(seq.page_table)} pages")
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:  # noqa: ARG002
        raise UnsupportedError("a contiguous run cannot be forked", param="n")

    def commit(self, seq: Sequence) -> None:
        """Nothing is cached."""

    def release(self, seq: Sequence, *, keep: bool = True) -> None:  # noqa: ARG002
        del self._leases[seq.seq_id]
        self.runs.give(seq.page_table[0], len(seq.page_table))
        seq.page_table = array("i")

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        return ()

    def end_step(self) -> None:
        """There are no copies."""

    def flush(self) -> int:
        return 0

    def check_integrity(self) -> None:
        """Raises IntegrityError unless runs and free runs cover each page of the pool exactly once."""
        held = [page for seq in self._leases.values() for page in seq.page_table]
        free = [page for start, length in self.runs.free_runs() for page in range(start, start + length)]
        if sorted(held + free) != list(range(1, self.num_pages + 1)):
            raise IntegrityError("runs overlap, or pages are lost")


class ContiguousAdmission(AdmissionControl):
    """A sequence starts when a free run is long enough for all it will ever take; nothing is reserved for later."""

    def __init__(self, cache: ContiguousCache, *args: object) -> None:
        super().__init__(cache, *args)  # type: ignore[arg-type]
        self._runs = cache

    def demand(self, seq: Sequence, num_choices: int) -> int:  # noqa: ARG002
        return 0

    def has_room(self, seq: Sequence, num_choices: int, match: PrefixMatch, reserved: int) -> bool:  # noqa: ARG002
        return self._runs.runs.fits(self._runs.run_length(seq))
