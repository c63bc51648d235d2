"""What a tokenizer is made of, whichever file it came from.

Knows: how the text of a token becomes bytes, for the two families of vocabularies that pinnate reads. Must not know:
file formats (gguf_tokenizer, hf_tokenizer) or how a Tokenizer is used.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import tokenizers

SPACE_MARK = "\u2581"  # how SentencePiece writes a space inside a token
_BYTE_TOKEN_LENGTH = len("<0x00>")


class ByteRule(enum.Enum):
    """How token text spells bytes.

    BYTE_LEVEL: every byte is one printable character (GPT-2's table).
    SENTENCEPIECE: plain text with a mark for the space; `<0xNN>` is one byte.
    """

    BYTE_LEVEL = "byte_level"
    SENTENCEPIECE = "sentencepiece"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A loaded tokenizer and the facts about its tokens.

    `backend` has truncation and padding off. `added` are the tokens that are matched in text before anything else
    (their text is literal), `special` the subset that `skip_special_tokens` hides. `strips_leading_space`: a decoded
    text drops one space at its very start (the encoder put it there).
    """

    backend: tokenizers.Tokenizer
    byte_rule: ByteRule
    size: int
    added: dict[int, str]
    special: frozenset[int]
    strips_leading_space: bool = False
    bos_token: str | None = None
    eos_token: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level BPE (Radford et al. 2019).

    Printable Latin-1 characters stand for themselves; the other bytes take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def piece_bytes(text: str, rule: ByteRule, alphabet: dict[str, int]) -> bytes:
    """The bytes that an ordinary (not added) token stands for."""
    if rule is ByteRule.BYTE_LEVEL:
        try:
            return bytes(alphabet[char] for char in text)
        except KeyError:  # text outside the alphabet is literal
            return text.encode("utf-8", "replace")
    if len(text) == _BYTE_TOKEN_LENGTH and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes((int(text[3:5], 16),))
        except ValueError:
            pass
    return text.replace(SPACE_MARK, " ").encode("utf-8", "replace")
