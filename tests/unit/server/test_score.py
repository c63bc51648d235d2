"""POST /score: prompts, probabilities, refusals."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from pinnate.core.batch import TokenLogprobs
from pinnate.core.request import FinishReason
from pinnate.core.sampling import SamplingParams
from pinnate.engine.output_processor import OutputDelta
from tests.unit.server.conftest import Client

LOGPROBS = {5: -1.0, 6: -3.0}
PATHS = ("/score", "/v1/score", "/generative_scoring")
BODY: dict[str, Any] = {"query": "is it? ", "items": ["yes", "no"], "label_token_ids": [5, 6]}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("query", {"query": None}),
    ("items", {"items": None}),
    ("items", {"items": []}),
    ("items", {"items": ["x", ""]}),
    ("items", {"items": ["x", [5]]}),
    ("items", {"items": [[5]]}),
    ("items", {"query": [5], "items": ["x"]}),
    ("items", {"query": [5], "items": [5, [6]]}),
    ("items", {"query": [5], "items": [[]]}),
    ("items", {"items": ["x"] * 1025}),
    ("items", {"items": ["x" * 200]}),
    ("items", {"query": [5] * 60, "items": [[5] * 60]}),
    ("items", {"query": [999], "items": [[5]]}),
    ("label_token_ids", {"label_token_ids": None}),
    ("label_token_ids", {"label_token_ids": []}),
    ("label_token_ids", {"label_token_ids": [999]}),
    ("label_token_ids", {"label_token_ids": [5] * 129}),
    ("label_token_ids", {"label_token_ids": ["yes"]}),
    ("apply_softmax", {"apply_softmax": 1}),
    ("text_1", {"text_1": "x"}),
    ("cache_salt", {"cache_salt": ""}),
]


def script(_: int, params: SamplingParams) -> list[OutputDelta]:
    assert (params.max_tokens, params.logprob_token_ids) == (1, (5, 6))
    entry = TokenLogprobs(9, -0.1, 1, [], list(LOGPROBS.items()))
    return [OutputDelta(0, "x", [9], [entry], FinishReason.LENGTH, num_cached_tokens=2)]


@pytest.mark.parametrize("path", PATHS)
async def test_probabilities_of_labels(client: Client, path: str) -> None:
    client.engine.script = script
    answer = (await client.post(path, {**BODY, "request_id": "me"})).json
    assert set(answer) == {"id", "object", "created", "model", "scores", "data", "usage"}
    assert (answer["id"], answer["object"], answer["model"]) == ("score-me", "scoring", "Tiny")
    assert answer["scores"] == [[pytest.approx(math.exp(-1)), pytest.approx(math.exp(-3))]] * 2
    assert answer["data"] == [
        {"index": index, "object": "score", "score": answer["scores"][index][0]} for index in range(2)
    ]
    assert answer["usage"]["prompt_tokens"] == len("is it? yes") + len("is it? no")
    assert [bytes(sent.prompt).decode() for sent in client.engine.submitted] == ["is it? yes", "is it? no"]


async def test_softmax_is_over_the_labels(client: Client) -> None:
    client.engine.script = script
    row = (await client.post("/score", {**BODY, "apply_softmax": True})).json["scores"][0]
    assert sum(row) == pytest.approx(1)
    assert row[0] / row[1] == pytest.approx(math.exp(2))


@pytest.mark.parametrize("softmax", [False, True])
async def test_impossible_labels_are_no_fault(client: Client, softmax: bool) -> None:
    entry = TokenLogprobs(9, -0.1, 1, [], [(5, -math.inf), (6, -2000.0)])
    client.engine.script = lambda *_: [OutputDelta(0, "x", [9], [entry], FinishReason.LENGTH)]
    answer = await client.post("/score", {**BODY, "apply_softmax": softmax})
    assert answer.json["scores"][0] == ([0.0, 1.0] if softmax else [0.0, 0.0])


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({"items": "yes"}, [b"is it? yes"]),
        ({"item_first": True}, [b"yesis it? ", b"nois it? "]),
        ({"query": [1, 2], "items": [[3], [4, 5]]}, [bytes([1, 2, 3]), bytes([1, 2, 4, 5])]),
        ({"query": [1, 2], "items": [3, 4]}, [bytes([1, 2, 3, 4])]),
        ({"query": [1], "items": [[3]], "item_first": True}, [bytes([3, 1])]),
        ({"query": ""}, [b"yes", b"no"]),
    ],
)
async def test_forms_of_prompts(client: Client, fields: dict[str, Any], prompts: list[bytes]) -> None:
    client.engine.script = script
    assert (await client.post("/score", {**BODY, **fields})).status == 200
    assert [bytes(sent.prompt) for sent in client.engine.submitted] == prompts


@pytest.mark.parametrize(("param", "fields"), BAD, ids=lambda value: str(value)[:50])
async def test_bad_fields_are_named(client: Client, param: str, fields: dict[str, Any]) -> None:
    answer = await client.post("/score", {**BODY, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert client.engine.submitted == []


async def test_unknown_fields_get_a_warning(client: Client) -> None:
    client.engine.script = script
    answer = (await client.post("/score", {**BODY, "frobnicate": 1})).json
    assert [warning["param"] for warning in answer["warnings"]] == ["frobnicate"]


async def test_an_aborted_score_is_an_error(client: Client) -> None:
    client.engine.script = lambda *_: [asyncio.Event()]
    asked = asyncio.create_task(client.post("/score", BODY))
    while client.state.running.abort(None) < 2:
        await asyncio.sleep(0)
    answer = await asked
    assert (answer.status, answer.error["code"]) == (500, "engine_error")
