"""Streamed text equals whole text, for any tokens, any cut into steps and any stop strings."""

import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from pinnate.text.detokenizer import IncrementalDetokenizer
from pinnate.text.stop import StopMatcher
from pinnate.text.tokenizer import Tokenizer
from pinnate.text.vocabulary import byte_level_alphabet
from tests.unit.text.helpers import byte_level_tokenizer, default_tokenizer, sentencepiece_tokenizer

UNTIMED = settings(deadline=None, max_examples=200)  # a first call may load the default model's vocabulary
NASTY = st.sampled_from([0xC3, 0xA9, 0xE0, 0x80, 0xA0, 0xED, 0xF0, 0x9F, 0x98, 0xF4, 0x90, 0xFF, 0x20, 0x41])
BYTE_LEVEL_IDS = st.lists(st.one_of(NASTY, st.integers(0, byte_level_tokenizer().vocab_size + 1)), max_size=40)
SENTENCEPIECE_IDS = st.lists(
    st.one_of(st.integers(3, 258), st.integers(0, sentencepiece_tokenizer().vocab_size - 1)), max_size=40
)
CUTS = st.lists(st.integers(0, 4), min_size=1, max_size=8)


def in_steps(items: list[int], cuts: list[int]) -> list[list[int]]:
    """`items` cut into runs whose lengths follow `cuts`, again and again."""
    steps, position, turn = [], 0, 0
    while position < len(items):
        size = cuts[turn % len(cuts)] or (1 if all(cut == 0 for cut in cuts) else 0)
        steps.append(items[position : position + size])
        position, turn = position + size, turn + 1
    return steps


def check_stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    out, done = "", []
    for step in in_steps(ids, cuts):
        out += detokenizer.push(step)
        done += step
        whole = tokenizer.decode(done, skip_special_tokens=skip)
        # Held: nothing, or the beginning of a character (of a surrogate, ED then A0 to BF: two ill-formed parts).
        assert whole in (out, out + "\ufffd", out + "\ufffd\ufffd")
    assert out + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


@UNTIMED
@given(BYTE_LEVEL_IDS, CUTS, st.booleans())
def test_byte_level_deltas_join_to_one_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    check_stream(byte_level_tokenizer(), ids, cuts, skip)


@UNTIMED
@given(SENTENCEPIECE_IDS, CUTS, st.booleans())
def test_sentencepiece_deltas_join_to_one_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    check_stream(sentencepiece_tokenizer(), ids, cuts, skip)


@UNTIMED
@given(BYTE_LEVEL_IDS, st.booleans())
def test_byte_level_decode_equals_the_librarys(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level_tokenizer()
    known = [token for token in ids if token < tokenizer.vocab_size]
    expected = tokenizer._vocabulary.backend.decode(known, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@UNTIMED
@given(st.text(max_size=60))
def test_default_model_round_trip(text: str) -> None:
    tokenizer = default_tokenizer()
    data = text.encode()
    # The vocabulary lacks a few bytes; like the reference it drops them.
    alphabet = {byte: char for char, byte in byte_level_alphabet().items()}
    kept = bytes(byte for byte in data if tokenizer.token_id(alphabet[byte]) is not None)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == kept.decode("utf-8", "replace")


@UNTIMED
@given(
    st.text(alphabet=st.one_of(st.sampled_from(" \n\t0195²½Ⅷ٣ab."), st.characters(max_codepoint=0x2FF)), max_size=30)
)
def test_default_model_takes_digits_alone(text: str) -> None:
    tokenizer = default_tokenizer()
    parts = "".join(f"|{c}|" if unicodedata.category(c)[0] == "N" else c for c in text.replace("|", "")).split("|")
    joined = [token for part in parts for token in tokenizer.encode(part)]
    assert tokenizer.encode(text.replace("|", "")) == joined


@UNTIMED
@given(st.text(alphabet="ab", max_size=20), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4), CUTS)
def test_stop_matcher_equals_the_definition(text: str, stop: list[str], cuts: list[int]) -> None:
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(word) for word in stop)]
    end = ends[0] if ends else len(text)
    winner = max((word for word in stop if text[:end].endswith(word)), key=len, default=None) if ends else None
    for include in (False, True):
        expected = text[:end] if include or winner is None else text[: end - len(winner)]
        matcher, out, seen, matched = StopMatcher(stop, include=include), "", "", None
        for step in in_steps(list(range(len(text))), cuts):
            piece = "".join(text[i] for i in step)
            emitted, matched = matcher.push(piece)
            out, seen = out + emitted, seen + piece
            if matched is not None:
                break
            open_ends = [seen[-k:] for k in range(1, len(seen) + 1) if any(w.startswith(seen[-k:]) for w in stop)]
            held = "" if include else max(open_ends, key=len, default="")
            assert out + held == seen  # not a character more or less than needed is held back
        out += matcher.finish()
        assert (out, matched) == (expected, winner)
