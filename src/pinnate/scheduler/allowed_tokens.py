"""AllowedTokens: a Matcher that lets a fixed set of tokens pass, of those that another one lets pass.

Knows: sets of token ids as bits. Must not know: languages, sampling.
"""

from __future__ import annotations

from collections.abc import Iterable

from pinnate.core.errors import GrammarError
from pinnate.core.structured import Matcher


def only_allowed(matcher: Matcher | None, token_ids: Iterable[int] | None) -> Matcher | None:
    """`matcher` with no other tokens than `token_ids`; None of them: as it was."""
    if token_ids is None:
        return matcher
    bits = bytearray(8 * (max(token_ids := tuple(token_ids)) // 64 + 1))
    for token in token_ids:
        bits[token >> 3] |= 1 << (token & 7)
    return AllowedTokens(matcher, int.from_bytes(bits, "little"))


class AllowedTokens:
    """`bits` has a 1 for each allowed token; clones share it. It never ends by itself."""

    def __init__(self, inner: Matcher | None, bits: int) -> None:
        self._inner = inner
        self._bits = bits

    @property
    def is_terminated(self) -> bool:
        return self._inner is not None and self._inner.is_terminated

    def advance(self, token: int) -> None:
        """
        Raises:
            GrammarError: the token is not allowed: there was none to draw, for others were banned.
        """
        if not self._bits >> token & 1:
            raise GrammarError("allowed_token_ids leaves no token to draw here: what else is asked for bans them all")
        if self._inner is not None:
            self._inner.advance(token)

    def forced(self) -> list[int]:
        return []

    def clone(self) -> AllowedTokens:
        return AllowedTokens(None if self._inner is None else self._inner.clone(), self._bits)

    def fill(self, mask: memoryview) -> None:
        raw = mask.cast("B")
        bits = self._bits
        if self._inner is not None:
            self._inner.fill(mask)
            bits &= int.from_bytes(raw, "little")
        raw[:] = (bits & ((1 << 8 * len(raw)) - 1)).to_bytes(len(raw), "little")
