"""A page's file: whatever is done to it, it is that page or it is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pinnate.kvcache.tiers.page_file import header_bytes, make_header, problem_of
from tests.unit.kvcache.tiers.helpers import PAGE_BYTES, PAGE_SIZE, chain, content, names

SPACE = b"s" * 16
NAME = names(2)[1]
FILE = make_header(SPACE, NAME, content(7)) + content(7)


def problem(file: bytes, space: bytes = SPACE, name=NAME, size: int = PAGE_BYTES) -> str | None:
    return problem_of(memoryview(file), space, name, size)


def test_a_file_is_its_page() -> None:
    assert problem(FILE) is None
    assert len(FILE) == header_bytes(PAGE_SIZE) + PAGE_BYTES
    assert FILE.endswith(content(7))


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(at: int, change: int) -> None:
    damaged = bytearray(FILE)
    damaged[at] ^= change
    assert problem(bytes(damaged)) is not None


@given(st.integers(0, len(FILE) - 1), st.binary(max_size=50))
def test_any_cut_is_found_and_so_is_what_is_too_much(end: int, more: bytes) -> None:
    assert "bytes instead of" in (problem(FILE[:end]) or "")
    assert (problem(FILE + more) is None) == (more == b"")


def test_files_of_others_are_named() -> None:
    assert problem(b"x" * len(FILE)) == "it is no page of KV memory"
    other = "it is another page, or one of another model"
    assert problem(FILE, space=b"t" * 16) == other
    assert problem(FILE, name=names(1)[0]) == other
    assert problem(FILE, name=chain([9] * 4, [1] * 4)[1]) == other
    assert problem(FILE, name=NAME._replace(tokens=names(1)[0].tokens)) == other
    damaged = FILE[:-1] + b"\0"
    assert problem(damaged) == "its checksum is wrong"
