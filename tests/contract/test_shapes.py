"""Answers have the recorded shapes, and OpenAI's objects are what OpenAI documents: its client's types read them
strictly, with no member that they do not know but ours. (Responses, batches and Anthropic's objects are read so in
tests/unit/server.)"""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.contract.shapes import CALLS, RECORDED, ask, shape
from tests.e2e.harness import Server
from tests.unit.server.strict_types import strict

SHAPES = json.loads(RECORDED.read_text())
# What our answers have beyond OpenAI's (docs/http-api.md). Those of the second line only where asked for.
ALWAYS = frozenset({"stop_reason", "max_model_len"})
ASKED = frozenset({"token_ids", "prompt_token_ids", "prompt_logprobs", "timings", "warnings"})
TYPES = {
    "chat": ChatCompletion,
    "chat logprobs": ChatCompletion,
    "chat tools": ChatCompletion,
    "chat with our fields": ChatCompletion,
    "chat stream": ChatCompletionChunk,
    "chat stream logprobs": ChatCompletionChunk,
    "chat stream tools": ChatCompletionChunk,
    "completion": Completion,
    "completion echo logprobs": Completion,
    "completion with our fields": Completion,
    "completion stream": Completion,
    "completion stream logprobs": Completion,
    "model": Model,
}


def test_every_call_is_recorded() -> None:
    assert set(SHAPES) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_the_shape_is_the_recorded_one(server: Server, name: str) -> None:
    answer = ask(server.url, CALLS[name])
    assert shape(answer) == SHAPES[name]
    if name in TYPES:
        ours = ALWAYS | ASKED if "our fields" in name else ALWAYS
        for one in answer if isinstance(answer, list) else [answer]:
            _read(TYPES[name], one, ours, is_stream=isinstance(answer, list))


def _read(kind: Any, value: dict[str, Any], ours: frozenset[str], *, is_stream: bool) -> None:
    if kind is Completion:
        value = {**value, "choices": [_documented(choice, is_stream) for choice in value["choices"]]}
    strict(kind, value, ours)


def _documented(choice: dict[str, Any], is_stream: bool) -> dict[str, Any]:
    """What OpenAI documents and its client's types do not know: a chunk before the end has no finish_reason, and the
    first token of an echo, which nothing precedes, has null for log-probabilities."""
    choice = dict(choice)
    if is_stream and choice["finish_reason"] is None:
        choice["finish_reason"] = "stop"
    logprobs = choice["logprobs"]
    if logprobs is not None and logprobs["text_offset"][0] == 0 and logprobs["token_logprobs"][0] is None:
        first = {"token_logprobs": [0.0], "top_logprobs": [{}]}
        choice["logprobs"] = {**logprobs, **{name: [*v, *logprobs[name][1:]] for name, v in first.items()}}
    return choice


def test_a_changed_shape_is_noticed() -> None:
    answer = {"id": "x", "choices": [{"index": 0, "text": None}]}
    assert shape(answer) != shape({**answer, "extra": 1})
    assert shape(answer) != shape({**answer, "choices": [{"index": 0, "text": "a"}]})
    assert shape([1, 2.5, "a", True, None]) == ["number", "string", "boolean", "null"]
