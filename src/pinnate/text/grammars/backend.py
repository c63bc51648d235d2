"""Grammars over a vocabulary: compiled, then followed token by token. The one place that drives llguidance.

Knows: tokens and their bytes, llguidance. Must not know: requests, sequences, sampling. Imported only when a structured
output is asked for; numpy is not needed here.

llguidance (https://github.com/guidance-ai/llguidance) follows the language with an Earley parser over derivatives of
regular expressions, and walks a trie of the vocabulary to find which tokens fit.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pinnate.core.errors import GrammarError
from pinnate.core.structured import StructuredOutput
from pinnate.text.grammars import limits
from pinnate.text.grammars.source import grammar_of

if TYPE_CHECKING:
    from pinnate.text.tokenizer import Tokenizer

PROBED_TOKENS = 12
REMEMBERED_TEXTS, REMEMBERED_BYTES = 4096, 256  # forced texts whose tokens are kept: how many, each how long at most
_STRING = r'[^"\\\x00-\x1F\x7F]'
# Tokens are walked in groups: a group all of whose tokens fit is taken as a whole. These are the library's own and one
# more, for a string that may have no more than 20 or 25 characters: nearly every token fits there.
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_STRING}{{1,{n}}}" for n in (10, 15, 30)), f"{_STRING}+"]
_SENTINEL = "\x02"  # stands before a text that follows other text; never merged with it


class GrammarBackend(Protocol):
    """Compiles languages for one vocabulary. Thread-safe; works without the GIL where it takes long."""

    def compile(self, structured: StructuredOutput) -> Grammar:
        """
        Raises:
            GrammarError: it cannot be compiled, with the reason.
        """
        ...


class VocabularyBytes:
    """The vocabulary as llguidance takes it: the bytes of each token, and how a text becomes tokens.

    `tokens[i]` is empty for an id that names no token. Special tokens never stand for their text.
    """

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int], tokenizer: Tokenizer | None = None
    ) -> None:
        """Without `tokenizer` nothing can be forced: enough to check a grammar."""
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos[0]
        self.eos_token_ids = list(eos)
        self.bos_token_id: int | None = None
        self._tokenizer = tokenizer
        self._special = frozenset(special)
        self._greedy: LLTokenizer | None = None
        self._remembered = lru_cache(REMEMBERED_TEXTS)(self._spell)

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> VocabularyBytes:
        """`vocab_size` is the model's, which may have more or fewer ids than the tokenizer."""
        special = [token for token in range(vocab_size) if tokenizer.is_special(token)]
        tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        ends = [token for token in eos if 0 <= token < vocab_size]
        return cls(tokens, special, ends, tokenizer)

    def build(self) -> LLTokenizer:
        self._greedy = LLTokenizer(TokenizerWrapper(self), eos_token=self.eos_token_ids, slices=SLICES)
        self._remembered.cache_clear()  # of texts that were spelled without it
        return self._greedy

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens that spell exactly `text`, a part of an output. Those that the tokenizer would choose, where it can
        spell it (it may normalise, or take a part for a special token). What stands between the values of a JSON object
        comes again and again."""
        spelled = text.encode() if isinstance(text, str) else text
        return list((self._remembered if len(spelled) <= REMEMBERED_BYTES else self._spell)(spelled))

    def _spell(self, spelled: bytes) -> list[int]:
        ids = self._canonical(spelled.decode("utf-8", "replace")) if self._tokenizer is not None else []
        if any(token in self._special for token in ids) or b"".join([self.tokens[i] for i in ids]) != spelled:
            return [] if self._greedy is None else self._greedy.greedy_tokenize(spelled.decode("utf-8", "replace"))
        return ids

    def _canonical(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        if not self._tokenizer.strips_leading_space:
            return self._tokenizer.encode(text, add_special_tokens=False)
        ids = self._tokenizer.encode(_SENTINEL + text, add_special_tokens=False)
        mark = _SENTINEL.encode()
        start = next((i for i, token in enumerate(ids) if self.tokens[token] == mark), len(ids))
        return ids[start + 1 :]


class LLGuidanceBackend:
    """A GrammarBackend. Building it makes the trie: about 0.1 s for 50,000 tokens."""

    def __init__(self, vocabulary: VocabularyBytes) -> None:
        self._tokenizer = vocabulary.build()
        self._ends = frozenset(vocabulary.eos_token_ids)
        self._mask_words = (len(vocabulary.tokens) + 31) // 32
        self._limits = LLParserLimits(
            max_items_in_row=limits.MAX_ITEMS_IN_ROW,
            initial_lexer_fuel=limits.INITIAL_LEXER_FUEL,
            step_lexer_fuel=limits.STEP_LEXER_FUEL,
            step_max_items=limits.STEP_MAX_ITEMS,
            max_lexer_states=limits.MAX_LEXER_STATES,
            max_grammar_size=limits.MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )

    def compile(self, structured: StructuredOutput) -> Grammar:
        return self.compile_text(grammar_of(structured))

    def compile_text(self, grammar: str) -> Grammar:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        return Grammar(matcher)

    def check(self, grammar: str) -> None:
        """Compiles, and follows it for a few tokens: most of what goes beyond a limit does so early.

        Raises:
            GrammarError: the reason why it cannot be followed.
        """
        matcher = self.compile_text(grammar).start()
        chance = random.Random(0)
        for _ in range(PROBED_TOKENS):
            mask = bytearray(self._mask_words * 4)
            matcher.fill(memoryview(mask).cast("I"))
            matcher.raise_error()
            token = _any_bit(int.from_bytes(mask, "little"), chance)
            if token is None or token in self._ends:
                return
            matcher.advance(token)
            if matcher.is_terminated:
                return


def _any_bit(bits: int, chance: random.Random) -> int | None:
    """One that is set, the first behind a place drawn at random; None where there is none."""
    start = chance.randrange(bits.bit_length() or 1)
    rest = bits >> start << start or bits
    return (rest & -rest).bit_length() - 1 if rest else None


class Grammar:
    """A compiled language. `is_spoilt` once a matcher of it went beyond a limit: they share the lexer's states, whose
    number is limited, so compile it anew."""

    def __init__(self, initial: LLMatcher) -> None:
        self._initial = initial
        self.is_spoilt = False

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self._initial.deep_copy(), self, None)


class GrammarMatcher:
    """Implements core.structured.Matcher."""

    __slots__ = ("_forced", "_grammar", "_inner")

    def __init__(self, inner: LLMatcher, grammar: Grammar, forced: list[int] | None) -> None:
        self._inner = inner
        self._grammar = grammar
        self._forced = forced  # None: not yet asked for

    @property
    def is_terminated(self) -> bool:
        return self._inner.is_stopped()

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._inner.is_accepting()

    def advance(self, token: int) -> None:
        if not self._inner.consume_token(token) or self._inner.is_error():
            self._grammar.is_spoilt = True
            raise GrammarError(f"the structured output cannot go on: {_reason(self._inner)}")
        self._forced = self._forced[1:] or None if self._forced and self._forced[0] == token else None

    def raise_error(self) -> None:
        """Raises GrammarError if the last mask could not be computed."""
        if self._inner.is_error():
            raise GrammarError(_reason(self._inner))

    def forced(self) -> list[int]:
        if self._forced is None:
            self._forced = self._inner.compute_ff_tokens()
        return list(self._forced)

    def clone(self) -> GrammarMatcher:
        return GrammarMatcher(
            self._inner.deep_copy(), self._grammar, None if self._forced is None else list(self._forced)
        )

    def fill(self, mask: memoryview) -> None:
        forced = self.forced()
        if forced:
            mask[forced[0] // 32] |= 1 << forced[0] % 32
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(mask))
        self._inner.unsafe_compute_mask_ptr(address, mask.nbytes)


def _reason(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().split())[:500] or "nothing fits"
