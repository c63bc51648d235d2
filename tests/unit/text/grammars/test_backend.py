"""Grammars over real vocabularies: what a matcher allows spells the language and nothing else, whatever is drawn."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from pinnate.core.errors import GrammarError
from pinnate.core.structured import StructuredOutput
from pinnate.text.grammars.backend import REMEMBERED_BYTES, Grammar, GrammarMatcher, LLGuidanceBackend, VocabularyBytes
from pinnate.text.grammars.source import checked, grammar_of
from pinnate.text.tokenizer import Tokenizer
from tests.unit.text.helpers import byte_level_metadata, default_tokenizer, sentencepiece_metadata

SCHEMAS = json.loads((Path(__file__).parents[3] / "data" / "schemas.json").read_text(encoding="utf-8"))


def default() -> Tokenizer:
    return default_tokenizer()


def small() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata())


def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata())


VOCABULARIES = [default, small, sentencepiece]


@cache
def backend_of(tokenizer: Callable[[], Tokenizer]) -> LLGuidanceBackend:
    made = tokenizer()
    return LLGuidanceBackend(VocabularyBytes.of(made, made.vocab_size, made.eos_token_ids))


def start(tokenizer: Callable[[], Tokenizer], kind: Any, text: str) -> GrammarMatcher:
    return backend_of(tokenizer).compile(checked(StructuredOutput(kind=kind, text=text))).start()


def mask_of(matcher: GrammarMatcher, vocab_size: int) -> int:
    mask = memoryview(bytearray((vocab_size + 31) // 32 * 4))
    matcher.fill(mask.cast("I"))
    return int.from_bytes(mask, "little")


def allowed(matcher: GrammarMatcher, vocab_size: int) -> list[int]:
    bits = f"{mask_of(matcher, vocab_size):b}"[::-1]
    return [token for token, bit in enumerate(bits) if bit == "1"]


def pick(bits: int, vocab_size: int, rng: random.Random) -> int:
    """One of the bits; a lone one takes no random number."""
    if bits & (bits - 1):
        while bits.bit_count() > 100:
            token = rng.randrange(vocab_size)
            if bits >> token & 1:
                return token
        for _ in range(rng.randrange(bits.bit_count())):
            bits &= bits - 1
    return (bits & -bits).bit_length() - 1


def draw(
    tokenizer: Callable[[], Tokenizer], matcher: GrammarMatcher, rng: random.Random, most: int = 60, skip: bool = False
) -> tuple[list[int], bool]:
    """Random tokens, as the mask allows; whether the language ended. With `skip` forced ones are not drawn."""
    made = tokenizer()
    ends = set(made.eos_token_ids)
    drawn: list[int] = []
    while len(drawn) < most and not matcher.is_terminated:
        forced = matcher.forced() if skip else []
        if forced:
            for token in forced:
                drawn.append(token)
                matcher.advance(token)
            continue
        token = pick(mask_of(matcher, made.vocab_size), made.vocab_size, rng)
        matcher.advance(token)
        if token in ends:
            return drawn, True
        drawn.append(token)
    return drawn, matcher.is_terminated


def text_of(tokenizer: Callable[[], Tokenizer], tokens: list[int]) -> str:
    made = tokenizer()
    return b"".join(made.token_bytes(token) for token in tokens).decode()  # strict: whole characters


@pytest.mark.parametrize("tokenizer", VOCABULARIES, ids=lambda t: t.__name__)
@pytest.mark.parametrize(
    "pattern", ["", "abc", "[0-9]{3}", "a|aa", "(😀|😁)+ď", "ab?c{2,4}(d|<|>)*", " x y", "[^a-z]{1,3}"]
)
def test_every_draw_of_a_regex_matches_it(tokenizer: Callable[[], Tokenizer], pattern: str) -> None:
    for seed in range(3):
        drawn, ended = draw(tokenizer, start(tokenizer, "regex", pattern), random.Random(seed), most=60)
        assert not ended or re.fullmatch(pattern, text_of(tokenizer, drawn), re.DOTALL)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_what_ends_fits_its_schema_and_skipping_forced_tokens_changes_nothing(name: str) -> None:
    kind = jsonschema.validators.validator_for(SCHEMAS[name], jsonschema.Draft202012Validator)
    validator = kind(SCHEMAS[name], format_checker=kind.FORMAT_CHECKER)
    for seed in range(2):
        matchers = [start(default, "json_schema", json.dumps(SCHEMAS[name])) for _ in range(2)]
        # A forced token uses up no random number when it is skipped, and is the only choice when it is drawn.
        drawn, ended = draw(default, matchers[0], random.Random(seed))
        skipped, also = draw(default, matchers[1], random.Random(seed), skip=True)
        count = min(len(drawn), len(skipped))
        assert drawn[:count] == skipped[:count]
        assert ended == also or count >= 60
        if ended and "multipleOf" not in str(SCHEMAS[name]):
            validator.validate(json.loads(text_of(default, drawn)))


@pytest.mark.parametrize("tokenizer", VOCABULARIES, ids=lambda t: t.__name__)
def test_special_tokens_never_stand_for_their_text(tokenizer: Callable[[], Tokenizer]) -> None:
    made = tokenizer()
    special = [token for token in range(made.vocab_size) if made.is_special(token)]
    assert special
    for token in special:
        text = made.token_bytes(token).decode()
        matcher = start(tokenizer, "choice", json.dumps([f"{text}x"]))
        drawn, ended = draw(tokenizer, matcher, random.Random(0))
        assert ended
        assert not set(drawn) & set(special)
        assert text_of(tokenizer, drawn) == f"{text}x"
    anything = allowed(start(tokenizer, "regex", "(.|\n)*"), made.vocab_size)
    assert set(anything) & set(special) <= set(made.eos_token_ids)


@pytest.mark.parametrize("tokenizer", VOCABULARIES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("text", ["abc", "1, 2, 3", " 😀 ďábel", "é e\u0301", "the hello", "<tool>"])
def test_forced_tokens_are_the_tokenizers_own(tokenizer: Callable[[], Tokenizer], text: str) -> None:
    made = tokenizer()
    drawn, ended = draw(tokenizer, start(tokenizer, "choice", json.dumps([text])), random.Random(0), skip=True)
    assert ended
    assert text_of(tokenizer, drawn) == text
    if not made.strips_leading_space:
        assert drawn == made.encode(text, add_special_tokens=False)


def test_the_tokens_of_a_text_are_remembered_unless_it_is_long() -> None:
    made, asked = default(), []

    class Counting:
        strips_leading_space = False

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            asked.append(text)
            return made.encode(text, add_special_tokens=add_special_tokens)

    known = VocabularyBytes.of(made, made.vocab_size, made.eos_token_ids)
    counted = VocabularyBytes(known.tokens, known.special_token_ids, known.eos_token_ids, Counting())  # type: ignore[arg-type]
    counted.build()
    asked.clear()
    short, long = '", "name": "', "name " * REMEMBERED_BYTES
    for text in (short, long, short, long):
        ids = counted(text)
        assert ids == made.encode(text, add_special_tokens=False)
        ids.clear()  # the caller's own
    assert asked == [short, long, long]


@pytest.mark.parametrize("most", [3, 12, 20, 40])
def test_groups_of_tokens_change_no_mask(most: int) -> None:
    """Neither those of the library nor ours: without any, each token is walked."""
    made = default()
    vocabulary = VocabularyBytes.of(made, made.vocab_size, made.eos_token_ids)
    schema = json.dumps({"type": "array", "items": {"type": "string", "maxLength": most}, "minItems": 3})
    grammar = grammar_of(checked(StructuredOutput(kind="json_schema", text=schema)))
    one_by_one = Grammar(LLMatcher(vocabulary.build().with_slices([]), grammar)).start()
    matcher, rng = start(default, "json_schema", schema), random.Random(most)
    for _ in range(40):
        bits = mask_of(matcher, made.vocab_size)
        assert bits == mask_of(one_by_one, made.vocab_size)
        token = pick(bits, made.vocab_size, rng)
        if token in made.eos_token_ids:
            break
        matcher.advance(token)
        one_by_one.advance(token)


def test_clones_go_their_own_ways() -> None:
    first = start(default, "regex", "a+b|a+c")
    second = first.clone()
    tokens = {text: default().encode(text, add_special_tokens=False)[0] for text in "abc"}
    first.advance(tokens["a"])
    third = first.clone()
    first.advance(tokens["b"])
    third.advance(tokens["c"])
    assert first.is_terminated
    assert third.is_terminated
    assert tokens["a"] in allowed(second, default().vocab_size)
    assert not second.is_accepting


def test_a_token_that_is_not_allowed_spoils_the_grammar_and_no_mask_is_left() -> None:
    compiled = backend_of(default).compile(StructuredOutput(kind="regex", text="[0-9]+"))
    matcher = compiled.start()
    with pytest.raises(GrammarError, match="cannot go on"):
        matcher.advance(default().encode("x")[0])
    assert compiled.is_spoilt
    matcher.fill(memoryview(bytearray(default().vocab_size // 8)).cast("I"))  # does not raise
    with pytest.raises(GrammarError):
        matcher.raise_error()


def test_the_end_is_allowed_exactly_where_the_language_may_end() -> None:
    eos = default().eos_token_ids[0]
    matcher = start(default, "regex", "[0-9]{1,2}")
    assert eos not in allowed(matcher, default().vocab_size)
    matcher.advance(default().encode("4")[0])
    assert eos in allowed(matcher, default().vocab_size)
    matcher.advance(default().encode("2")[0])
    assert matcher.is_terminated


def test_a_vocabulary_smaller_or_larger_than_the_tokenizers() -> None:
    for size in (100, small().vocab_size + 40):
        made = LLGuidanceBackend(VocabularyBytes.of(small(), size, small().eos_token_ids[:1] if size > 200 else (99,)))
        found = allowed(made.compile(StructuredOutput(kind="regex", text="[a-b]")).start(), size)
        assert set(found) == {97, 98}
