"""DiskTier: KV pages in files of one folder. Implements tier.Tier.

Knows: files, the lock, faults of the disk. Must not know: threads, the prefix tree, what a page holds.

    DIR/lock                     held (flock) by the one process that uses DIR, with its number inside
    DIR/writing.tmp              the page that is being written; renamed once it is whole
    DIR/NAMESPACE/KEY.PARENT.kv  a page (page_file.py); all names in hex
    DIR/trash-*                  what `clear` took out of use, until it is deleted
The size limit is for all namespaces together. Files of other names are left alone. Nothing is forced to the disk: what
a killed process has written is in the kernel's hands and safe; what a power failure tears, the checksum finds.
Prompts can be read from these files as they can be from memory: they are for this user alone (0700, 0600).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
import time
from io import FileIO
from pathlib import Path

from pinnate.core.autoconfig import size_text
from pinnate.core.errors import ConfigError
from pinnate.kvcache.tiers.disk_index import DiskIndex, FileId
from pinnate.kvcache.tiers.page_file import Data, header_bytes, make_header, problem_of
from pinnate.kvcache.tiers.tier import PageName, TierUsage

log = logging.getLogger(__name__)

LOCK_SECONDS = 5.0  # a process that was killed may take a while to be gone
RETRY_SECONDS = 30.0  # after a write failed
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.kv")


class DiskTier:
    """Used by one process at a time. `namespace` (16 bytes) stands for everything that pages depend on besides
    their tokens: files of another one are never read, but count and go as the others do.

    Raises:
        ConfigError: another process uses the folder, or `max_bytes` hold no page.
        OSError: the folder cannot be made, read or written.
    """

    name = "disk"

    def __init__(self, folder: Path, namespace: bytes, *, page_size: int, page_bytes: int, max_bytes: int) -> None:
        self._file_bytes = header_bytes(page_size) + page_bytes
        if max_bytes < self._file_bytes:
            raise ConfigError(f"--kv-disk-size {max_bytes} holds no page: one takes {self._file_bytes} bytes")
        self._folder = folder
        self._namespace = namespace
        self._own = namespace.hex()
        self._page_bytes = page_bytes
        self._header_bytes = header_bytes(page_size)
        self._buffer = bytearray(self._file_bytes + 1)  # one more, so that a file that is too long shows
        self._index = DiskIndex(max_bytes)
        self._mutex = threading.Lock()  # for the index, and for what of the folder must agree with it
        self._epoch = 0  # of `clear`
        self._fault: int | None = None  # errno of the last write
        self._retry_at = 0.0
        self._num_rejected = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _lock(folder / "lock")
        try:
            self._own_folder().mkdir(mode=0o700, exist_ok=True)
            self._write_file(b"", b"")  # whether it can be written
            self._scan()
        except OSError:
            self._lock.close()
            raise
        self._tell_size()

    def has(self, key: bytes) -> bool:
        return (self._own, key.hex()) in self._index

    def read(self, name: PageName) -> memoryview | None:
        if not self.has(name.key):
            return None
        path = self._path(FileId(self._own, name.key.hex(), name.parent.hex()))
        try:
            with path.open("rb", buffering=0) as file:
                size = file.readinto(self._buffer) or 0
                os.utime(file.fileno())
            content = memoryview(self._buffer)[:size]
            problem = problem_of(content, self._namespace, name, self._page_bytes)
        except OSError as error:
            content, problem = memoryview(b""), error.strerror or str(error)
        if problem is None:
            with self._mutex:
                self._index.touch(self._own, name.key.hex())
            return content[self._header_bytes :]
        log.warning("KV disk tier: %s is skipped, its tokens are computed again: %s", path, problem)
        self._num_rejected += 1
        with self._mutex:
            self._index.remove(self._own, name.key.hex())
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def write(self, name: PageName, data: Data) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        file = FileId(self._own, name.key.hex(), name.parent.hex())
        epoch = self._epoch
        try:
            with self._mutex:
                gone = self._index.make_room(self._file_bytes)
            for old in gone:
                self._path(old).unlink(missing_ok=True)
            temporary = self._write_file(make_header(self._namespace, name, data), data)
            with self._mutex:
                if epoch != self._epoch:
                    return False
                temporary.replace(self._path(file))
                self._index.add(file, self._file_bytes)
        except OSError as error:
            self._note_fault(error)
            return False
        if self._fault is not None:
            self._fault = None
            log.warning("KV disk tier %s: pages can be written again", self._folder)
        return True

    def clear(self) -> None:
        with self._mutex:
            self._epoch += 1
            self._index.remove_folder(self._own)
            try:
                self._own_folder().rename(self._folder / f"trash-{time.time_ns()}")
                self._own_folder().mkdir(mode=0o700)
            except OSError as error:
                self._note_fault(error)

    def tidy(self) -> None:
        for trash in self._folder.glob("trash-*"):
            shutil.rmtree(trash, ignore_errors=True)

    def usage(self) -> TierUsage:
        return TierUsage(self._index.count(self._own), self._index.num_bytes, self._index.max_bytes, self._num_rejected)

    def close(self) -> None:
        self._lock.close()

    def _tell_size(self) -> None:
        index = self._index
        used, limit = size_text(index.num_bytes), size_text(index.max_bytes)
        own = index.count(self._own)
        log.info("KV disk tier %s: %d pages, %d of this model; %s of %s", self._folder, len(index), own, used, limit)

    def _own_folder(self) -> Path:
        return self._folder / self._own

    def _path(self, file: FileId) -> Path:
        return self._folder / file.folder / f"{file.key}.{file.parent}.kv"

    def _scan(self) -> None:
        found: list[tuple[int, FileId, int]] = []
        for folder in os.scandir(self._folder):
            if not _NAMESPACE.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                match = _FILE.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    facts = entry.stat(follow_symlinks=False)
                    found.append((facts.st_mtime_ns, FileId(folder.name, match[1], match[2]), facts.st_size))
        for _, file, size in sorted(found):
            self._index.add(file, size)
        for file in self._index.make_room(0):
            self._path(file).unlink(missing_ok=True)

    def _write_file(self, header: bytes, data: Data) -> Path:
        path = self._folder / "writing.tmp"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            left = [memoryview(header), memoryview(data)]
            while left := [part for part in left if len(part)]:
                written = os.writev(handle, left)
                for i, part in enumerate(left):
                    taken = min(written, len(part))
                    left[i] = part[taken:]
                    written -= taken
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, 0)  # give a full disk its room back
            raise
        finally:
            os.close(handle)
        return path

    def _note_fault(self, error: OSError) -> None:
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if error.errno == self._fault:
            return  # said already
        self._fault = error.errno
        log.warning(
            "KV disk tier %s: a page could not be written (%s): serving goes on, nothing is stored; next try in %.0f s",
            self._folder, error.strerror or error, RETRY_SECONDS,
        )  # fmt: skip


def _lock(path: Path) -> FileIO:
    """The open lock file. Closing it, or the end of the process, gives the lock back.

    Raises:
        ConfigError: another process has it, and did not end within LOCK_SECONDS.
    """
    file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
    end = time.monotonic() + LOCK_SECONDS
    while not _try_lock(file):
        if time.monotonic() > end:
            holder = file.read(20).decode(errors="replace").strip() or "?"
            file.close()
            raise ConfigError(
                f"--kv-disk {path.parent} is in use by process {holder}; each server needs a folder of its own"
            )
        time.sleep(0.05)
    with contextlib.suppress(OSError):  # a full disk: the number is for people only
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
    return file


def _try_lock(file: FileIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
