"""BadWords: which tokens would complete a banned run.

Knows: runs of tokens, the output so far. Must not know: text, sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class BadWords:
    """The runs of one request, by their last token but one: a step looks at those alone whose end may be near."""

    def __init__(self, runs: Iterable[tuple[int, ...]]) -> None:
        self._single: list[int] = []
        self._by_previous: dict[int, list[tuple[int, ...]]] = {}
        for run in runs:
            if len(run) == 1:
                self._single.append(run[0])
            else:
                self._by_previous.setdefault(run[-2], []).append(run)

    def banned_next(self, tokens: array[int], num_prompt_tokens: int) -> list[int]:
        """Tokens that must not come after `tokens`, of which the first `num_prompt_tokens` are not output."""
        banned = list(self._single)
        for run in self._by_previous.get(tokens[-1], ()):
            first = len(tokens) - (len(run) - 1)
            if first >= num_prompt_tokens and tuple(tokens[first:]) == run[:-1]:
                banned.append(run[-1])
        return banned
