"""StopScan: stop strings in the text of many hypotheses at once, each of which is one integer.

Knows: bytes of tokens. Must not know: requests, sequences. StopMatcher (stop.py) cuts one output's text; this only
tells where it will.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pinnate.text.tokenizer import Tokenizer

MATCHED = -1


class StopScan:
    """An automaton over the bytes of UTF-8 (Aho, Corasick 1975). State 0 is the start of a text; a state is what the
    text ends with that a stop string begins with. UTF-8 makes a match of bytes a match of characters.
    """

    def __init__(
        self, stop: Sequence[str], tokenizer: Tokenizer, *, skip_special_tokens: bool, kept: Sequence[int] = ()
    ) -> None:
        self._kept = frozenset(kept)
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._next: list[dict[int, int]] = [{}]
        self._fallback = [0]
        self._is_end = [False]
        for text in stop:
            self._add(text.encode("utf-8", "replace"))
        self._link()

    def advance(self, state: int, token: int) -> int:
        """The state after one more token; MATCHED if a stop string is complete within it."""
        if self._skip_special_tokens and self._tokenizer.is_special(token) and token not in self._kept:
            return state
        for byte in self._tokenizer.token_bytes(token):
            state = self._step(state, byte)
            if self._is_end[state]:
                return MATCHED
        return state

    def _step(self, state: int, byte: int) -> int:
        while state and byte not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(byte, 0)

    def _add(self, data: bytes) -> None:
        state = 0
        for byte in data:
            if byte not in self._next[state]:
                self._next[state][byte] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._is_end.append(False)
            state = self._next[state][byte]
        self._is_end[state] = True

    def _link(self) -> None:
        """Gives each state the longest proper suffix that is a state too; breadth first: shorter ones are done."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for byte, following in self._next[state].items():
                self._fallback[following] = self._step(self._fallback[state], byte)
                self._is_end[following] |= self._is_end[self._fallback[following]]
                queue.append(following)
