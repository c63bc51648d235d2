"""Pace: how much of a prompt a step takes along while sequences decode, from how long steps have taken.

Knows: token counts and seconds of past steps. Must not know: sequences, queues, what a step computes.

A step that decodes lasts as long as its weights take to be read; tokens of a prompt beside it add what they take to be
computed. Many of them keep the products full, and delay the next token of every stream. How many delay it by how much
differs by an order of magnitude between machines (64 tokens cost 1.5 to 2 times a step of 32 streams with AVX-512, half
of one with tile registers), so it is measured while it runs. What is computed does not depend on it, only when.
"""

from __future__ import annotations

from typing import Final

# Bounds of the answer, which is the lower one until both kinds of step have been seen. Fewer would starve the products.
LEAST_PROMPT_TOKENS: Final = 64
MOST_PROMPT_TOKENS: Final = 512
LONGEST_STEP: Final = 2.25  # of a step that takes prompt tokens along, in steps that only decode
ROUNDED_TO: Final = 16  # rows that products compute together
WEIGHT_OF_NEWEST: Final = 1 / 8
MOST_CHANGE: Final = 2.0  # what one step may say, as a multiple of what was known: others use the machine too


class Pace:
    """`prompt_tokens`: how many a step that decodes may take along."""

    def __init__(self) -> None:
        self.prompt_tokens = LEAST_PROMPT_TOKENS
        self._decode_seconds: float | None = None
        self._prompt_token_seconds: float | None = None

    def note(self, num_decoding: int, num_prompt: int, seconds: float) -> None:
        """A step has taken `seconds` for the next token of `num_decoding` sequences and `num_prompt` of prompts."""
        if num_decoding == 0:
            return
        if num_prompt == 0:
            self._decode_seconds = _moved(self._decode_seconds, seconds)
        elif self._decode_seconds is not None and num_prompt >= LEAST_PROMPT_TOKENS // 2:  # of few, noise is the most
            each = max(0.0, seconds - self._decode_seconds) / num_prompt
            self._prompt_token_seconds = _moved(self._prompt_token_seconds, each)
            self.prompt_tokens = self._affordable(self._decode_seconds, self._prompt_token_seconds)

    @staticmethod
    def _affordable(decode_seconds: float, prompt_token_seconds: float) -> int:
        spare = (LONGEST_STEP - 1) * decode_seconds
        if spare >= prompt_token_seconds * MOST_PROMPT_TOKENS:
            return MOST_PROMPT_TOKENS
        return max(LEAST_PROMPT_TOKENS, int(spare / prompt_token_seconds) // ROUNDED_TO * ROUNDED_TO)


def _moved(known: float | None, seen: float) -> float:
    if known is None:
        return seen
    return known + WEIGHT_OF_NEWEST * (min(max(seen, known / MOST_CHANGE), known * MOST_CHANGE) - known)
