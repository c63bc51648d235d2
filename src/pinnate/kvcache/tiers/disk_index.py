"""Which page files there are, how much they take, and which go first.

Knows: keys, parents, sizes, order of use. Touches no file.

The one used longest ago goes first, but none before the pages that continue it: those could no longer be reached.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple


class FileId(NamedTuple):
    """A page file: `folder` is its namespace's, `parent` the key of the page before it; all in hex."""

    folder: str
    key: str
    parent: str


class DiskIndex:
    """Not thread-safe, but for `in`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._files: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()  # (folder, key) -> (parent, size)
        self._children: Counter[tuple[str, str]] = Counter()  # by the parent's (folder, key), there or not
        self._counts: Counter[str] = Counter()  # by folder

    def __contains__(self, place: tuple[str, str]) -> bool:
        return place in self._files

    def __len__(self) -> int:
        return len(self._files)

    def count(self, folder: str) -> int:
        return self._counts[folder]

    def add(self, file: FileId, size: int) -> None:
        """As the one used last."""
        self.remove(file.folder, file.key)
        self._files[file.folder, file.key] = (file.parent, size)
        self._children[file.folder, file.parent] += 1
        self._counts[file.folder] += 1
        self.num_bytes += size

    def touch(self, folder: str, key: str) -> None:
        if (folder, key) in self._files:
            self._files.move_to_end((folder, key))

    def remove(self, folder: str, key: str) -> FileId | None:
        found = self._files.pop((folder, key), None)
        if found is None:
            return None
        parent, size = found
        self._children[folder, parent] -= 1
        if not self._children[folder, parent]:
            del self._children[folder, parent]
        self._counts[folder] -= 1
        self.num_bytes -= size
        return FileId(folder, key, parent)

    def remove_folder(self, folder: str) -> None:
        for place in [place for place in self._files if place[0] == folder]:
            self.remove(*place)

    def make_room(self, size: int) -> list[FileId]:
        """Removes what must go so that `size` more bytes fit; returns it."""
        gone = []
        while self._files and self.num_bytes + size > self.max_bytes:
            # Names in a folder are not ours alone to choose: should they form a circle, there is no leaf.
            leaf = next((place for place in self._files if place not in self._children), next(iter(self._files)))
            file = self.remove(*leaf)
            assert file is not None
            gone.append(file)
        return gone
