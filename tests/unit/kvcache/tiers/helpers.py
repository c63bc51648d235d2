"""Names of pages, pages of bytes in memory, and a tier in memory: the contract without a disk."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pinnate.kvcache.tiers.tier import PageName, TierUsage, page_key, root_key

PAGE_SIZE = 4
PAGE_BYTES = 32


def chain(*pages: Sequence[int], salt: str = "") -> list[PageName]:
    """Names of consecutive pages from the beginning of a sequence."""
    names, key = [], root_key(("", salt))
    for tokens in pages:
        own = array("i", tokens)
        names.append(PageName(page_key(key, own), key, own))
        key = names[-1].key
    return names


def names(count: int, first: int = 0) -> list[PageName]:
    return chain(*([first + i] * PAGE_SIZE for i in range(count)))


def content(number: int) -> bytes:
    return bytes([number % 256]) * PAGE_BYTES


class MemoryIO:
    """The pool's pages as bytes."""

    page_bytes = PAGE_BYTES

    def __init__(self, num_pages: int = 16) -> None:
        self.pages = [bytearray(content(page)) for page in range(num_pages + 1)]

    def read_pages(self, pages: array[int], out: bytearray | memoryview) -> None:
        out[:] = b"".join(self.pages[page] for page in pages)

    def write_pages(self, pages: array[int], data: bytes | bytearray | memoryview) -> None:
        for i, page in enumerate(pages):
            self.pages[page][:] = data[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]


class MemoryTier:
    """As an accelerator's host memory would be. `broken` makes it raise what a tier must not raise; `full` refuses."""

    name = "memory"

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.reads: list[bytes] = []
        self.broken = self.full = self.closed = False
        self.tidied = 0

    def has(self, key: bytes) -> bool:
        return key in self.pages

    def read(self, name: PageName) -> memoryview | None:
        if self.broken:
            raise RuntimeError("a defect")
        self.reads.append(name.key)
        data = self.pages.get(name.key)
        return None if data is None else memoryview(data)

    def write(self, name: PageName, data: bytes | bytearray | memoryview) -> bool:
        if self.broken:
            raise RuntimeError("a defect")
        if not self.full:
            self.pages[name.key] = bytes(data)
        return not self.full

    def clear(self) -> None:
        self.pages.clear()

    def tidy(self) -> None:
        self.tidied += 1

    def usage(self) -> TierUsage:
        return TierUsage(len(self.pages), len(self.pages) * PAGE_BYTES, 1 << 20, 0)

    def close(self) -> None:
        self.closed = True
