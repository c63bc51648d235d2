"""Datasets: what a load sends. Seeded, so that two servers get the same requests.

Knows: lengths, where text comes from. Must not know: how requests are sent.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pinnate.core.errors import ConfigError
from pinnate.text.tokenizer import Tokenizer

Prompt = str | list[int]

# ShareGPT conversations outside these bounds say little about serving: the usual limits, in tokens.
SHAREGPT_MIN = 4
SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048
_HUMAN, _MACHINE = ("human", "user"), ("gpt", "chatgpt", "assistant")

_PLAIN_WORDS = (
    "time", "people", "way", "water", "day", "year", "man", "thing", "world", "life", "hand", "part", "child", "eye",
    "place", "work", "week", "case", "point", "group", "fact", "river", "stone", "winter", "paper", "window", "letter",
)  # fmt: skip
_WORD_TOKEN = re.compile(rb" [a-z]{3,}")
_WORDS_WANTED = 4000
_FITTING_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: a prompt, its length in tokens as far as it is known here, and the tokens asked for."""

    prompt: Prompt
    prompt_len: int
    output_len: int


Conversation = tuple[Turn, ...]  # sent one after the other, each with all that came before


class TextSource(Protocol):
    """Where random prompts come from."""

    def text(self, rng: random.Random, tokens: int) -> str: ...

    def ids(self, rng: random.Random, tokens: int) -> list[int]:
        """
        Raises:
            ConfigError: without a vocabulary there are no ids.
        """
        ...

    def count(self, text: str) -> int: ...


class TokenizerSource:
    """Lengths by the served model's own tokenizer. Text is made of words that are one token each, so it has exactly the
    length asked for; where a vocabulary has no such words, nearly."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: list[str] = []  # filled when text is first asked for

    def text(self, rng: random.Random, tokens: int) -> str:
        self._words = self._words or self._find_words()
        words = rng.choices(self._words, k=tokens)
        text = "".join(words).lstrip()
        for _ in range(_FITTING_ROUNDS):
            count = self.count(text)
            if count == tokens:
                break
            fitting = max(1, len(words) * tokens // count)
            words = words[:fitting] + rng.choices(self._words, k=max(0, fitting - len(words)))
            text = "".join(words).lstrip()
        return text

    def ids(self, rng: random.Random, tokens: int) -> list[int]:
        size = self._tokenizer.vocab_size
        low = min(100, size // 2)  # the special tokens of most vocabularies come first
        return [rng.randrange(low, size) for _ in range(tokens)]

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _find_words(self) -> list[str]:
        words: list[str] = []
        alone = self.count("a")
        for token in range(self._tokenizer.vocab_size):
            data = self._tokenizer.token_bytes(token)
            if not _WORD_TOKEN.fullmatch(data):
                continue
            word = data.decode()
            if self.count(word.lstrip()) == 1 and self.count(f"a{word}") == alone + 1:  # at the start and after others
                words.append(word)
            if len(words) == _WORDS_WANTED:
                break
        return words or [f" {word}" for word in _PLAIN_WORDS]


class WordSource:
    """Where the tokenizer is not at hand: lengths are in common words, about one token each."""

    def text(self, rng: random.Random, tokens: int) -> str:
        return " ".join(rng.choices(_PLAIN_WORDS, k=tokens))

    def ids(self, rng: random.Random, tokens: int) -> list[int]:  # noqa: ARG002
        raise ConfigError("--prompt-format ids needs the model's vocabulary: name it with --tokenizer")

    def count(self, text: str) -> int:
        return len(text.split())


def _prompt(source: TextSource, rng: random.Random, tokens: int, *, as_ids: bool) -> Turn:
    if as_ids:
        return Turn(source.ids(rng, tokens), tokens, 0)
    text = source.text(rng, tokens)
    return Turn(text, source.count(text), 0)


def random_prompts(
    source: TextSource,
    rng: random.Random,
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    as_ids: bool = False,
) -> list[Conversation]:
    """Lengths are uniform in [len * (1 - range_ratio), len * (1 + range_ratio)], at least 1.

    Raises:
        ConfigError: the ratio is not in [0, 1).
    """
    if not 0.0 <= range_ratio < 1.0:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {range_ratio}")

    def spread(length: int) -> int:
        return max(1, rng.randint(int(length * (1 - range_ratio)), int(length * (1 + range_ratio))))

    found: list[Conversation] = []
    for _ in range(count):
        asked, wanted = spread(input_len), spread(output_len)
        made = _prompt(source, rng, asked, as_ids=as_ids)
        found.append((Turn(made.prompt, made.prompt_len, wanted),))
    return found


def prefix_repetition(
    source: TextSource,
    rng: random.Random,
    count: int,
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    as_ids: bool = False,
) -> list[Conversation]:
    """`num_prefixes` prefixes, each before equally many suffixes of their own (+-1), in random order."""
    prefixes = [_prompt(source, rng, prefix_len, as_ids=as_ids) for _ in range(num_prefixes)]
    found: list[Conversation] = []
    for number in range(count):
        prefix = prefixes[number % num_prefixes].prompt
        suffix = _prompt(source, rng, suffix_len, as_ids=as_ids).prompt
        if isinstance(prefix, str):
            text = f"{prefix} {suffix}"
            found.append((Turn(text, source.count(text), output_len),))
        else:
            found.append((Turn([*prefix, *suffix], prefix_len + suffix_len, output_len),))
    rng.shuffle(found)
    return found


def multi_turn(
    source: TextSource, rng: random.Random, *, users: int, turns: int, input_len: int, output_len: int
) -> list[Conversation]:
    """A conversation for each user; `input_len` new tokens a turn. Turns are text: answers come back as text."""

    def turn() -> Turn:
        text = source.text(rng, input_len)
        return Turn(text, source.count(text), output_len)

    return [tuple(turn() for _ in range(turns)) for _ in range(users)]


def sharegpt(
    source: TextSource, rng: random.Random, count: int, *, path: Path, output_len: int | None = None
) -> list[Conversation]:
    """The first question and answer of `count` conversations; the answer's length is what is asked for, unless
    `output_len` says otherwise.

    Raises:
        ConfigError: the file cannot be read, is not in the ShareGPT format, or has too few usable conversations.
    """
    pairs = _read_sharegpt(path)
    rng.shuffle(pairs)
    found: list[Conversation] = []
    for question, answer in pairs:
        if len(found) == count:
            break
        asked = source.count(question)
        wanted = output_len if output_len is not None else source.count(answer)
        if asked < SHAREGPT_MIN or (wanted < SHAREGPT_MIN and output_len is None):
            continue
        if asked > SHAREGPT_MAX_PROMPT or asked + wanted > SHAREGPT_MAX_TOTAL:
            continue
        found.append((Turn(question, asked, wanted),))
    if len(found) < count:
        raise ConfigError(f"--num-prompts {count}: {path} has only {len(found)} usable conversations")
    return found


def _read_sharegpt(path: Path) -> list[tuple[str, str]]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path {path}: {error}") from None
    if not isinstance(document, list):
        raise ConfigError(f"--dataset-path {path}: not a list of conversations (the ShareGPT format)")
    pairs = [pair for entry in document if (pair := _first_exchange(entry)) is not None]
    if not pairs:
        raise ConfigError(f"--dataset-path {path}: no conversation has a question and an answer (the ShareGPT format)")
    return pairs


def _first_exchange(entry: Any) -> tuple[str, str] | None:
    said = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(said, list):
        return None
    spoken = [(s.get("from"), s.get("value")) for s in said if isinstance(s, dict)]
    for (who, question), (whom, answer) in itertools.pairwise(spoken):
        if who in _HUMAN and whom in _MACHINE and isinstance(question, str) and isinstance(answer, str):
            return question, answer
    return None


def total_turns(conversations: Sequence[Conversation]) -> int:
    return sum(len(turns) for turns in conversations)
