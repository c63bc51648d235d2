"""Routes beside generation: models, tokens, the prefix cache."""

from __future__ import annotations

from typing import Any

import msgspec


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a text, or a chat as it would be sent to the model."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] = []
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class PrefixRequest(TokenizeRequest, kw_only=True):
    """POST /pin_prefix and /debug/match: a text, ids, or the first messages of a chat."""

    prompt: str | list[int] | None = None  # type: ignore[assignment]
    cache_salt: str | None = None


class UnpinRequest(msgspec.Struct, kw_only=True):
    pin_id: str


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """GET /tokenizer_info. `chat_template`: Jinja source."""

    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "pinnate"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]
