"""StopMatcher: finds stop strings in streamed text without ever letting a part of one out.

Knows: strings. Must not know: tokens, requests.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Searches one output for several stop strings, one character at a time (Knuth, Morris, Pratt 1977).

    The string that is complete first in the text wins; of several that are complete with the same character the
    longest, as it leaves the least behind. Text that may be the beginning of a stop string is held back; with
    `include` the stop string is part of the output, so nothing needs to be held.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        # Longest first: the first one found complete at a character is the one that wins there.
        self._stop = sorted(dict.fromkeys(stop), key=len, reverse=True)
        if any(not text for text in self._stop):
            raise ValueError("an empty stop string matches everywhere")
        self._fallback = [_fallback_table(text) for text in self._stop]
        self._progress = [0] * len(self._stop)  # characters of each stop string that the text now ends with
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to emit, the stop string if it is now complete). After a match everything is swallowed."""
        if self._matched is not None:
            return "", self._matched
        if not self._stop:
            return text, None
        for index, char in enumerate(text):
            matched = self._advance(char)
            if matched is None:
                continue
            self._matched = matched
            seen = self._held + text[: index + 1]
            self._held = ""
            return (text[: index + 1] if self._include else seen[: len(seen) - len(matched)]), matched
        if self._include:
            return text, None
        seen = self._held + text
        keep = len(seen) - max(self._progress)
        self._held = seen[keep:]
        return seen[:keep], None

    def finish(self) -> str:
        """The held text: the output ended, so it was not a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        winner: str | None = None
        for which, stop in enumerate(self._stop):
            length = self._progress[which]
            while length and stop[length] != char:
                length = self._fallback[which][length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                winner = winner or stop
                length = 0  # never read again: a match ends the search
            self._progress[which] = length
        return winner


def _fallback_table(text: str) -> list[int]:
    """For each prefix of `text`: the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table
