"""IncrementalDetokenizer: token ids in, text out, as they come.

Knows: bytes of tokens, UTF-8. Must not know: stop strings, requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from pinnate.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns one run of output tokens into text deltas; O(new tokens) each.

    Special tokens are left out with `skip_special_tokens`, but for the `kept` ones.
    Bytes that may still become a character are held back. The deltas and `finish()` joined equal
    `tokenizer.decode(all ids)`. With `continuation` the run follows other text (a prompt), so the space that a
    SentencePiece vocabulary drops at the start of a text is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept: Collection[int] = (),
        continuation: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._kept = frozenset(kept)
        self._skip_special_tokens = skip_special_tokens
        self._strip_space = tokenizer.strips_leading_space and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain after these tokens and was not returned before."""
        tokenizer = self._tokenizer
        if self._skip_special_tokens:
            kept = self._kept
            token_ids = [token for token in token_ids if not tokenizer.is_special(token) or token in kept]
        data = b"".join([tokenizer.token_bytes(token) for token in token_ids])
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What was still held: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)
