"""Tokenizer: text to token ids and back, for one model.

Knows: ids, their bytes, which of them are special or end a turn. Must not know: chat roles (chat_template), streaming
(detokenizer), the model's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pinnate.core.errors import InvalidRequestError
from pinnate.text.gguf_tokenizer import vocabulary_from_gguf
from pinnate.text.hf_tokenizer import vocabulary_from_hf
from pinnate.text.vocabulary import Vocabulary, byte_level_alphabet, piece_bytes


class Tokenizer:
    """Encodes and decodes. Safe to use from several threads; `encode` runs without the GIL.

    Text that spells a special token becomes that token, in prompts and in messages alike.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._alphabet = byte_level_alphabet()
        self._bytes: dict[int, bytes] = {}  # filled as tokens are first seen
        bos = vocabulary.bos_token_id
        adds_bos = bos is not None and vocabulary.backend.encode("", add_special_tokens=True).ids[:1] == [bos]
        self._doubled_bos = [bos, bos] if adds_bos else None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the `tokenizer.*` keys of a GGUF file.

        Raises:
            ModelError: a key is missing or malformed, or the kind of tokenizer is not supported; names it.
        """
        return cls(vocabulary_from_gguf(metadata))

    @classmethod
    def from_hf(cls, folder: str | Path) -> Tokenizer:
        """From a Hugging Face folder: tokenizer.json, with tokenizer_config.json and its companions where present.

        Raises:
            ModelError: a file is missing, corrupt or of an unsupported kind; names it.
        """
        return cls(vocabulary_from_hf(Path(folder)))

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    @property
    def bos_token_id(self) -> int | None:
        return self._vocabulary.bos_token_id

    @property
    def bos_token(self) -> str | None:
        return self._vocabulary.bos_token

    @property
    def eos_token(self) -> str | None:
        return self._vocabulary.eos_token

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a turn, the model's main one first."""
        return self._vocabulary.eos_token_ids

    @property
    def chat_template(self) -> str | None:
        """The model's default chat template (Jinja), if it has one."""
        return self._vocabulary.chat_template

    @property
    def strips_leading_space(self) -> bool:
        """Whether a decoded text drops one space at its very start."""
        return self._vocabulary.strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A BOS that the text already starts with is not added a second time.

        Raises:
            InvalidRequestError: the text holds lone surrogates, which no encoding of text allows.
        """
        try:
            # The batch call, unlike the single one, releases the GIL and skips the offsets nobody asks for.
            encoding = self._vocabulary.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except TypeError:  # how the library says that a str has no UTF-8 form
            raise InvalidRequestError("text holds a lone surrogate: not valid Unicode", param="prompt") from None
        ids: list[int] = encoding.ids
        if add_special_tokens and self._doubled_bos is not None and ids[:2] == self._doubled_bos:
            return ids[1:]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, one for each maximal ill-formed part (Unicode 3.9)."""
        special = self._vocabulary.special if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token) for token in ids if token not in special])
        if self._vocabulary.strips_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: possibly a part of a character; empty for an id that names no token."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        self._bytes[token_id] = result = self._lookup(token_id)
        return result

    def token_id(self, token: str) -> int | None:
        """The id of the token spelled exactly `token`, or None."""
        found: int | None = self._vocabulary.backend.token_to_id(token)
        return found

    def is_special(self, token_id: int) -> bool:
        return token_id in self._vocabulary.special

    def _lookup(self, token_id: int) -> bytes:
        vocabulary = self._vocabulary
        added = vocabulary.added.get(token_id)
        if added is not None:
            return added.encode("utf-8", "replace")
        text = vocabulary.backend.id_to_token(token_id) if 0 <= token_id < vocabulary.size else None
        return b"" if text is None else piece_bytes(text, vocabulary.byte_rule, self._alphabet)
