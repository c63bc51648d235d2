"""SlotMemory: KV memory that remembers, for every slot, which token prefix was computed into it.

It stands for the executor's tensors in the property tests: reading back a page table says whether a sequence
sees exactly its own past, whatever was shared, copied, evicted and written again meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pinnate.core.batch import SchedulerOutput

MASK = (1 << 61) - 1


def extend(prefix: int, token: int) -> int:
    return (prefix * 1_000_003 + token + 7) & MASK


def prefix_hashes(tokens: Sequence[int], namespace: str = "") -> list[int]:
    """hashes[i] stands for tokens[:i]."""
    hashes = [len(namespace) + 1]
    for token in tokens:
        hashes.append(extend(hashes[-1], token))
    return hashes


class SlotMemory:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots = [[0] * page_size for _ in range(num_pages + 1)]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = [c[0] for c in copies], [c[1] for c in copies]
        assert not set(sources) & set(targets), "a copy's source is the target of another one of the step"
        assert len(set(targets)) == len(targets), "two copies into one page"
        for source, target in copies:
            self.slots[target] = self.slots[source][:]

    def write(self, page_table: Sequence[int], position: int, prefix: int) -> None:
        page = page_table[position // self.page_size]
        assert page != 0, "a write into the null page"
        self.slots[page][position % self.page_size] = prefix

    def check(self, page_table: Sequence[int], hashes: Sequence[int], end: int) -> None:
        """Positions below `end` read back as hashes[1:]."""
        seen = [self.slots[page_table[p // self.page_size]][p % self.page_size] for p in range(end)]
        assert seen == list(hashes[1 : end + 1]), f"{page_table} reads back {seen}, not {hashes[1 : end + 1]}"

    @property
    def page_bytes(self) -> int:
        return 8 * self.page_size

    def read_pages(self, pages: Sequence[int], out: bytearray) -> None:
        memoryview(out).cast("B")[:] = b"".join(array("q", self.slots[page]).tobytes() for page in pages)

    def write_pages(self, pages: Sequence[int], data: bytes) -> None:
        values = array("q", bytes(data))
        for i, page in enumerate(pages):
            assert page != 0, "a load into the null page"
            self.slots[page] = values[i * self.page_size : (i + 1) * self.page_size].tolist()

    def scribble(self, output: SchedulerOutput) -> None:
        """A step that fails half-way: whatever it would have written may be anything now."""
        for _, target in output.copies:
            self.slots[target] = [-1] * self.page_size
        for part in output.sequences:
            for position in range(part.start, part.start + len(part.token_ids)):
                self.write(part.page_table, position, -1)
