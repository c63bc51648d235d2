"""POST /v1/score: how likely each label is as the next token (SGLang's `/v1/score`, vLLM's `/generative_scoring`)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from pinnate.server.body import FieldWarning, Neutral
from pinnate.server.protocol.common import Usage, never


class ScoreRequest(msgspec.Struct, kw_only=True):
    """`query` and each of `items` make one prompt; all of them are texts or all are token ids."""

    query: str | list[int]
    items: str | list[str | int | list[int]]
    label_token_ids: list[int]
    model: str | None = None
    apply_softmax: bool = False
    item_first: bool = False
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None  # no effect


# The fields of scores by cross-encoders, which are models of another kind.
UNSUPPORTED_SCORE: Mapping[str, Neutral] = dict.fromkeys(
    ("text_1", "text_2", "queries", "documents", "truncate_prompt_tokens"), never
)


class ItemScore(msgspec.Struct, frozen=True, kw_only=True):
    """`score`: of the first label."""

    index: int
    object: str = "score"
    score: float


class Scores(msgspec.Struct, kw_only=True):
    """`scores[i][l]` is of item i and label l, `data` has the first label alone, as vLLM does."""

    id: str
    object: str = "scoring"
    created: int
    model: str
    scores: list[list[float]]
    data: list[ItemScore]
    usage: Usage
    warnings: list[FieldWarning] | UnsetType = UNSET
