"""StopScan finds a stop string where StopMatcher does, at the same token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.text.stop import StopMatcher
from pinnate.text.stop_scan import MATCHED, StopScan
from tests.fakes import EOS, PAD, ByteTokenizer


class PieceTokenizer(ByteTokenizer):
    """Token i is pieces[i]."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id] if token_id < len(self.pieces) else super().token_bytes(token_id)


def scan(stop: list[str], pieces: list[bytes], *, skip: bool = True) -> int | None:
    """The number of the piece that completes a stop string."""
    scanner = StopScan(stop, PieceTokenizer(pieces), skip_special_tokens=skip)  # type: ignore[arg-type]
    state = 0
    for number in range(len(pieces)):
        state = scanner.advance(state, number)
        if state == MATCHED:
            return number
    return None


alphabet = st.text(alphabet="abč€", min_size=1, max_size=4)


@given(
    stop=st.lists(alphabet, min_size=1, max_size=4), texts=st.lists(st.text(alphabet="abč€", max_size=5), max_size=12)
)
def test_as_the_matcher_of_texts(stop: list[str], texts: list[str]) -> None:
    matcher = StopMatcher(stop)
    expected = next((i for i, text in enumerate(texts) if matcher.push(text)[1] is not None), None)
    assert scan(stop, [text.encode() for text in texts]) == expected


@given(stop=st.lists(alphabet, min_size=1, max_size=4), text=st.text(alphabet="abč€", max_size=12))
def test_byte_by_byte(stop: list[str], text: str) -> None:
    data = text.encode()
    ends = [len(text[: at + len(s)].encode()) for s in stop for at in range(len(text)) if text.startswith(s, at)]
    assert scan(stop, [data[i : i + 1] for i in range(len(data))]) == (min(ends) - 1 if ends else None)


def test_states_of_two_hypotheses_do_not_meet() -> None:
    scanner = StopScan(["abc"], ByteTokenizer(), skip_special_tokens=True)  # type: ignore[arg-type]
    a, b = scanner.advance(scanner.advance(0, ord("a")), ord("b")), scanner.advance(0, ord("c"))
    assert scanner.advance(b, ord("c")) != MATCHED
    assert scanner.advance(a, ord("c")) == MATCHED


@pytest.mark.parametrize(("skip", "state"), [(True, MATCHED), (False, 0)])
def test_hidden_tokens_do_not_part_a_stop_string(skip: bool, state: int) -> None:
    scanner = StopScan(["ab"], ByteTokenizer(), skip_special_tokens=skip)  # type: ignore[arg-type]
    inside = scanner.advance(scanner.advance(0, ord("a")), PAD)
    assert scanner.advance(inside, ord("b")) == state
    assert StopScan(["<eos>"], ByteTokenizer(), skip_special_tokens=False).advance(0, EOS) == MATCHED  # type: ignore[arg-type]
