"""DiskTier on a real file system: restarts, the limit, the lock, and faults that are caused, not pretended."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pinnate.core.errors import ConfigError
from pinnate.kvcache.tiers import disk
from pinnate.kvcache.tiers.disk import DiskTier
from pinnate.kvcache.tiers.page_file import header_bytes
from tests.unit.kvcache.tiers.helpers import PAGE_BYTES, PAGE_SIZE, chain, content, names

FILE_BYTES = header_bytes(PAGE_SIZE) + PAGE_BYTES
SPACE = b"m" * 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a" / "kv"


def opened(folder: Path, pages: int = 100, space: bytes = SPACE, page_bytes: int = PAGE_BYTES) -> DiskTier:
    limit = pages * (header_bytes(PAGE_SIZE) + page_bytes)
    return DiskTier(folder, space, page_size=PAGE_SIZE, page_bytes=page_bytes, max_bytes=limit)


@pytest.fixture
def tier(folder: Path) -> Iterator[DiskTier]:
    tier = opened(folder)
    yield tier
    tier.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)


def fill(tier: DiskTier, count: int, first: int = 0) -> None:
    for number, name in enumerate(names(count, first)):
        assert tier.write(name, content(number))


def test_pages_come_back_also_after_a_restart(folder: Path, tier: DiskTier) -> None:
    fill(tier, 3)
    for again in (False, True):
        if again:
            tier.close()
            tier = opened(folder)
        for number, name in enumerate(names(3)):
            assert tier.has(name.key)
            assert tier.read(name) == content(number)
        assert not tier.has(names(4)[3].key)
        assert tier.read(names(4)[3]) is None
        assert tier.usage() == (3, 3 * FILE_BYTES, 100 * FILE_BYTES, 0)


def test_files_are_for_this_user_alone(folder: Path, tier: DiskTier) -> None:
    fill(tier, 1)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (*files(folder), folder / "lock")} == {0o600}


def test_the_limit_holds_and_the_longest_unused_goes_first(folder: Path) -> None:
    tier = opened(folder, pages=4)
    fill(tier, 2)
    fill(tier, 2, first=10)
    assert tier.read(names(2)[0]) is not None  # page 1 of the first chain is used longest ago now, ...
    tier.write(chain([30] * 4)[0], content(3))
    assert [tier.has(name.key) for name in (*names(2), *names(2, 10))] == [True, False, True, True]
    tier.write(chain([31] * 4)[0], content(3))
    assert [tier.has(name.key) for name in (*names(2), *names(2, 10))] == [
        True,
        False,
        True,
        False,
    ]  # ... then the leaf
    assert len(files(folder)) == 4
    tier.close()
    tier = opened(folder, pages=2)  # a smaller limit counts from the start
    assert len(files(folder)) == 2
    assert tier.usage().num_pages == 2
    tier.close()


def test_use_is_remembered_across_restarts(folder: Path) -> None:
    tier = opened(folder, pages=3)
    singles = [chain([n] * 4)[0] for n in range(4)]
    for number, name in enumerate(singles[:3]):
        tier.write(name, content(number))
        time.sleep(0.01)
    tier.read(singles[0])
    tier.close()
    tier = opened(folder, pages=3)
    tier.write(singles[3], content(3))
    assert [tier.has(name.key) for name in singles] == [True, False, True, True]
    tier.close()


def test_another_model_neither_sees_nor_keeps_them(folder: Path) -> None:
    tier = opened(folder, pages=3)
    fill(tier, 2)
    tier.close()
    other = opened(folder, pages=3, space=b"o" * 16)
    assert not other.has(names(1)[0].key)
    assert other.usage().num_pages == 0
    assert other.usage().num_bytes == 2 * FILE_BYTES
    fill(other, 3, first=50)
    assert other.usage() == (3, 3 * FILE_BYTES, 3 * FILE_BYTES, 0)
    other.close()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "instead of"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "its checksum is wrong"),
        (lambda path: path.write_bytes(b""), "instead of"),
        (lambda path: path.write_bytes(b"x" * FILE_BYTES), "it is no page"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    ],
)
def test_a_damaged_file_is_skipped_with_a_warning(folder, tier, damage, said, caplog) -> None:
    fill(tier, 2)
    (path,) = [path for path in files(folder) if path.name.startswith(names(1)[0].key.hex())]
    damage(path)
    assert tier.read(names(1)[0]) is None
    assert [said in record.message for record in caplog.records] == [True]
    assert str(path) in caplog.text
    assert not tier.has(names(1)[0].key)
    assert tier.usage().num_rejected == 1
    assert tier.read(names(1)[0]) is None  # said once
    assert len(caplog.records) == 1
    assert tier.read(names(2)[1]) == content(1)
    if not path.is_dir():
        assert tier.write(names(1)[0], content(9))
        assert tier.read(names(1)[0]) == content(9)


def test_a_file_under_a_wrong_name_is_not_believed(folder: Path, tier: DiskTier) -> None:
    fill(tier, 2)
    first, second = (next(folder.glob(f"*/{name.key.hex()}.*")) for name in names(2))
    second.write_bytes(first.read_bytes())
    assert tier.read(names(2)[1]) is None


def test_strange_files_are_left_alone(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "README").write_text("mine")
    (folder / ("a" * 32)).mkdir()
    strange = folder / ("a" * 32) / "notes.kv"
    strange.write_text("mine")
    tier = opened(folder, pages=1)
    fill(tier, 1)
    fill(tier, 1, first=7)
    assert (strange.read_text(), (folder / "README").read_text()) == ("mine", "mine")
    assert tier.usage().num_bytes == FILE_BYTES
    tier.close()


def test_cleared_pages_are_gone_at_once_and_their_files_later(folder: Path, tier: DiskTier) -> None:
    fill(tier, 3)
    tier.clear()
    assert not any(tier.has(name.key) for name in names(3))
    assert tier.usage()[:2] == (0, 0)
    assert not files(folder / SPACE.hex())
    tier.tidy()
    assert not list(folder.glob("trash-*"))
    fill(tier, 2)
    assert tier.usage().num_pages == 2


def test_a_page_written_while_the_tier_is_cleared_is_not_kept(folder: Path, tier: DiskTier, monkeypatch) -> None:
    write = tier._write_file

    def cleared_meanwhile(header: bytes, data: bytes) -> Path:
        tier.clear()
        return write(header, data)

    monkeypatch.setattr(tier, "_write_file", cleared_meanwhile)
    assert not tier.write(names(1)[0], content(1))
    assert not tier.has(names(1)[0].key)
    assert not files(folder)


def test_a_size_that_holds_no_page_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"--kv-disk-size 10 holds no page: one takes {FILE_BYTES} bytes"):
        DiskTier(folder, SPACE, page_size=PAGE_SIZE, page_bytes=PAGE_BYTES, max_bytes=10)


def test_two_tiers_do_not_share_a_folder(folder: Path, tier: DiskTier, monkeypatch) -> None:
    monkeypatch.setattr(disk, "LOCK_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}; each server needs a folder"):
        opened(folder)
    tier.close()
    opened(folder).close()


def test_a_folder_that_cannot_be_used_raises_what_the_system_says(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        opened(tmp_path / "file" / "kv")
    (tmp_path / "kv" / "lock").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        opened(tmp_path / "kv")


AS_ANOTHER_USER = """
import os, sys, errno
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from pinnate.kvcache.tiers.disk import DiskTier
os.setgid(65534), os.setuid(65534)
try:
    DiskTier(Path(sys.argv[1]), b"m" * 16, page_size=4, page_bytes=32, max_bytes=1 << 20)
except PermissionError as error:
    print("refused", error.errno)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user_is_refused() -> None:
    """Below a folder that anybody may enter, unlike pytest's own."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        folder = Path(place) / "kv"
        folder.mkdir(mode=0o755)
        done = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER_USER, str(folder), *(p for p in sys.path if p)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == f"refused {errno.EACCES}", done.stderr


def test_a_disk_that_is_full_is_said_once_and_tried_again(folder: Path, caplog, monkeypatch) -> None:
    """RLIMIT_FSIZE: the system takes the first bytes of a file and refuses the rest."""
    caplog.set_level(logging.WARNING)
    tier = opened(folder, page_bytes=100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    page = bytes(100_000)
    try:
        assert tier.write(names(1)[0], page)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        for number in range(1, 5):
            assert not tier.write(names(5)[number], page)
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 31)
        assert not tier.write(names(5)[1], page)
        assert [record.message for record in caplog.records] == [
            f"KV disk tier {folder}: a page could not be written (File too large): serving goes on, nothing is stored; "
            "next try in 30 s"
        ]
        assert (folder / "writing.tmp").stat().st_size == 0  # the disk has its room back
        assert tier.read(names(1)[0]) == page  # what there is can be read
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 31)
    assert tier.write(names(5)[1], page)
    assert "can be written again" in caplog.text
    assert tier.read(names(5)[1]) == page
    tier.close()


WRITER = """
import sys
from array import array
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from pinnate.kvcache.tiers.disk import DiskTier
from pinnate.kvcache.tiers.tier import PageName, page_key, root_key
tier = DiskTier(Path(sys.argv[1]), b"m" * 16, page_size=4, page_bytes=4_000_000, max_bytes=1 << 30)
print("ready", flush=True)
key, number = root_key(("", "")), 0
while True:
    own = array("i", [number] * 4)
    name = PageName(page_key(key, own), key, own)
    tier.write(name, bytes([number % 256]) * 4_000_000)
    key, number = name.key, number + 1
    if number == 200:
        tier.clear()
        key, number = root_key(("", "")), 0
"""


@pytest.mark.parametrize("seconds", [0.011, 0.037, 0.053, 0.071])
def test_a_process_killed_in_the_middle_of_a_write_leaves_whole_pages_only(
    folder: Path, seconds: float, caplog
) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), *(p for p in sys.path if p)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    time.sleep(seconds)
    writer.kill()
    writer.wait()
    tier = DiskTier(folder, SPACE, page_size=4, page_bytes=4_000_000, max_bytes=1 << 30)
    there = tier.usage().num_pages
    for number, name in enumerate(names(there)):
        assert tier.read(name) == bytes([number % 256]) * 4_000_000
    assert not caplog.records
    assert not tier.has(names(there + 1)[there].key)
    tier.close()
