from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pinnate.bench.datasets import (
    Conversation,
    TextSource,
    TokenizerSource,
    Turn,
    WordSource,
    multi_turn,
    prefix_repetition,
    random_prompts,
    sharegpt,
    total_turns,
)
from pinnate.core.errors import ConfigError
from pinnate.text.tokenizer import Tokenizer
from tests.unit.text.helpers import byte_level_metadata, default_tokenizer, sentencepiece_metadata


@pytest.fixture(scope="module")
def exact() -> TokenizerSource:
    return TokenizerSource(default_tokenizer())


def rng() -> random.Random:
    return random.Random(11)


def only(conversations: list[Conversation]) -> list[Turn]:
    assert all(len(turns) == 1 for turns in conversations)
    return [turns[0] for turns in conversations]


@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
def test_text_has_exactly_the_tokens_asked_for(exact: TokenizerSource, tokens: int) -> None:
    for seed in range(5):
        text = exact.text(random.Random(seed), tokens)
        assert len(default_tokenizer().encode(text, add_special_tokens=False)) == tokens
        assert text == text.strip()


def test_text_is_measured_where_words_are_many_tokens() -> None:
    source = TokenizerSource(Tokenizer.from_gguf(byte_level_metadata()))  # no token is a word: plain words are cut
    text = source.text(rng(), 40)
    assert abs(source.count(text) - 40) <= 7  # a plain word has at most 7 bytes with its blank
    pieces = TokenizerSource(Tokenizer.from_gguf(sentencepiece_metadata()))
    assert pieces.count(pieces.text(rng(), 25)) == 25


def test_ids_are_in_the_vocabulary_and_clear_of_special_tokens(exact: TokenizerSource) -> None:
    ids = exact.ids(rng(), 2000)
    assert min(ids) >= 100
    assert max(ids) < default_tokenizer().vocab_size
    assert len(set(ids)) > 1900


def test_without_a_tokenizer_lengths_are_words() -> None:
    source = WordSource()
    assert source.count(source.text(rng(), 31)) == 31
    with pytest.raises(ConfigError, match="--tokenizer"):
        source.ids(rng(), 3)


def test_random_lengths_are_exact_without_a_range_and_within_it_with_one(exact: TokenizerSource) -> None:
    turns = only(random_prompts(exact, rng(), 5, input_len=20, output_len=7))
    assert {(t.prompt_len, t.output_len) for t in turns} == {(20, 7)}
    assert len({t.prompt for t in turns}) == 5  # type: ignore[arg-type]
    turns = only(random_prompts(exact, rng(), 400, input_len=20, output_len=10, range_ratio=0.5, as_ids=True))
    assert {t.prompt_len for t in turns} == set(range(10, 31))
    assert {t.output_len for t in turns} == set(range(5, 16))
    assert all(len(t.prompt) == t.prompt_len for t in turns)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan")])
def test_a_range_outside_0_to_1_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="--random-range-ratio"):
        random_prompts(WordSource(), rng(), 1, input_len=2, output_len=2, range_ratio=ratio)


def test_a_length_is_at_least_1() -> None:
    turns = only(random_prompts(WordSource(), rng(), 50, input_len=1, output_len=1, range_ratio=0.9))
    assert {(t.prompt_len, t.output_len) for t in turns} == {(1, 1)}


@pytest.mark.parametrize("as_ids", [False, True])
def test_prefixes_are_shared_evenly(exact: TokenizerSource, as_ids: bool) -> None:
    sizes = {"prefix_len": 12, "suffix_len": 5, "num_prefixes": 3, "output_len": 4}
    turns = only(prefix_repetition(exact, rng(), 10, as_ids=as_ids, **sizes))
    ids = [t.prompt if as_ids else default_tokenizer().encode(t.prompt, add_special_tokens=False) for t in turns]  # type: ignore[arg-type]
    shared = Counter(tuple(i[:12]) for i in ids)
    assert sorted(shared.values()) == [3, 3, 4]
    assert len({tuple(i) for i in ids}) == 10
    assert {t.output_len for t in turns} == {4}
    if as_ids:
        assert {t.prompt_len for t in turns} == {17}


def test_multi_turn_gives_each_user_turns_of_their_own() -> None:
    talks = multi_turn(WordSource(), rng(), users=3, turns=4, input_len=9, output_len=6)
    assert [len(turns) for turns in talks] == [4, 4, 4]
    assert total_turns(talks) == 12
    assert len({turn.prompt for turns in talks for turn in turns}) == 12  # type: ignore[arg-type]
    assert all(turn.prompt_len == 9 and turn.output_len == 6 for turns in talks for turn in turns)


@pytest.mark.parametrize("source", [WordSource(), TokenizerSource(default_tokenizer())])
def test_the_seed_decides_everything(source: TextSource) -> None:
    def make(seed: int) -> list[Conversation]:
        return random_prompts(source, random.Random(seed), 6, input_len=10, output_len=3, range_ratio=0.3)

    assert make(4) == make(4)
    assert make(4) != make(5)


def words(count: int, word: str = "word") -> str:
    return " ".join([word] * count)


def said(*lines: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in lines]}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    entries = [
        said(("human", words(10)), ("gpt", words(20, "answer"))),
        said(("system", "be kind"), ("user", words(30)), ("assistant", words(40))),  # other names, a system message
        said(("gpt", words(9)), ("human", words(11)), ("gpt", words(12))),  # begins with an answer
        said(("human", words(3)), ("gpt", words(20))),  # question too short
        said(("human", words(20)), ("gpt", words(2))),  # answer too short
        said(("human", words(1025)), ("gpt", words(20))),  # question too long
        said(("human", words(1000)), ("gpt", words(1049))),  # too long together
        said(("human", words(20))),  # no answer
        {"other": 1},
        "nonsense",
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries))
    return path


def test_sharegpt_takes_first_questions_with_the_lengths_of_their_answers(recorded: Path) -> None:
    turns = only(sharegpt(WordSource(), rng(), 3, path=recorded))
    assert {(t.prompt_len, t.output_len) for t in turns} == {(10, 20), (30, 40), (11, 12)}
    assert all(t.prompt == words(t.prompt_len) for t in turns)


def test_sharegpt_with_a_length_for_all_outputs(recorded: Path) -> None:
    turns = only(sharegpt(WordSource(), rng(), 5, path=recorded, output_len=2))
    assert sorted((t.prompt_len, t.output_len) for t in turns) == [(10, 2), (11, 2), (20, 2), (30, 2), (1000, 2)]


def test_too_few_conversations_are_counted(recorded: Path) -> None:
    with pytest.raises(ConfigError, match=r"--num-prompts 4: .* only 3 usable"):
        sharegpt(WordSource(), rng(), 4, path=recorded)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("{", "Expecting"), ("{}", "not a list"), ("[1, {}]", "no conversation")],
)
def test_what_is_not_sharegpt_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as raised:
        sharegpt(WordSource(), rng(), 1, path=path)
    assert str(path) in str(raised.value)
