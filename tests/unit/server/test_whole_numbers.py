"""Integers written with a point: 1.0 is 1 wherever an integer is wanted, on every route; 1.5 and "1" are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect as types

from pinnate.core.batch import TokenLogprobs
from pinnate.core.errors import InvalidRequestError
from pinnate.core.request import FinishReason
from pinnate.core.sampling import SamplingParams
from pinnate.engine.output_processor import OutputDelta
from pinnate.server.body import convert
from pinnate.server.operations import operations
from pinnate.server.whole_numbers import MAX_EXACT, with_integers
from tests.unit.server.conftest import EOS, Client, FakeEngine, make_client, score

MESSAGES = [{"role": "user", "content": "hi"}]
# A body with whole numbers, as many as the route has fields for; what they are is seen in what the engine gets.
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [65, 66], "max_tokens": 3, "n": 2, "top_k": 4, "stop_token_ids": [7], "seed": 9}),
    ("/v1/completions", {"prompt": [[65], [66]], "logprobs": 2, "stop": ["x", 9], "priority": 1, "best_of": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 20, "top_k": 3, "seed": 5}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "top_k": 2}),
    (
        "/generate",
        {"input_ids": [[65], [66]], "sampling_params": {"max_new_tokens": 3, "top_k": 2, "stop_token_ids": [5]}},
    ),
    ("/generate", {"text": "hi", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}),
    ("/generate", {"text": ["a", "b"], "return_logprob": True, "token_ids_logprob": [[1], [2, 3]]}),
]


def with_points(value: Any) -> Any:
    """Every integer as a float."""
    if isinstance(value, dict):
        return {name: with_points(member) for name, member in value.items()}
    if isinstance(value, list):
        return [with_points(item) for item in value]
    return float(value) if type(value) is int else value


def scoring_engine() -> FakeEngine:
    """Each choice is one token, with whatever log-probabilities were asked for."""
    engine = FakeEngine()

    def script(number: int, params: SamplingParams) -> list[OutputDelta]:
        prompt = engine.submitted[number].prompt
        scores = None if params.prompt_logprobs is None else [None, *(score(token) for token in prompt[1:])]
        chosen = [(token, -1.0) for token in params.logprob_token_ids]
        own = None if params.logprobs is None else [TokenLogprobs(EOS, -0.5, 1, [], chosen)]
        return [
            OutputDelta(index, "", [EOS], own, FinishReason.STOP, prompt_logprobs=scores) for index in range(params.n)
        ]

    engine.script = script
    return engine


@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: str(value)[:60])
async def test_points_make_no_difference(path: str, body: dict[str, Any]) -> None:
    clients = [make_client(scoring_engine()) for _ in range(2)]
    answers = [await client.post(path, each) for client, each in zip(clients, (body, with_points(body)), strict=True)]
    assert [answer.status for answer in answers] == [200, 200], answers[1].body
    assert clients[0].engine.submitted == clients[1].engine.submitted


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 1.0}, "prompt"),
        ("/detokenize", {"tokens": [65.5]}, "tokens"),
        ("/v1/score", {"query": [65.5], "items": [[66]], "label_token_ids": [1]}, "query"),
        ("/generate", {"text": "hi", "sampling_params": {"n": 1.5}}, "sampling_params.n"),
        ("/generate", {"text": "hi", "top_logprobs_num": "1"}, "top_logprobs_num"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 1e300}, "max_tokens"),
        ("/v1/completions", {"prompt": "hi", "stream": 1.0}, "stream"),
    ],
)
async def test_others_are_refused_by_name(client: Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = await client.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert client.engine.submitted == []


async def test_ids_with_points(client: Client) -> None:
    assert (await client.post("/detokenize", {"tokens": [65.0, 66]})).json["prompt"] == "AB"


def integer_fields() -> list[Any]:
    """(struct, field) of all integers in the bodies that the routes take."""
    structs = {operation.request for operation in operations().values() if operation.request is not None}
    for operation in operations().values():
        structs |= {kind for kind in operation.refined.values() if isinstance(kind, type)}
    found = []
    for struct in sorted(
        (kind for kind in structs if issubclass(kind, msgspec.Struct)), key=lambda kind: kind.__name__
    ):
        described = types.type_info(struct)
        assert isinstance(described, types.StructType)
        for field in described.fields:
            kinds = field.type.types if isinstance(field.type, types.UnionType) else (field.type,)
            if any(isinstance(kind, types.IntType) for kind in kinds):
                found.append(pytest.param(struct, field.name, id=f"{struct.__name__}.{field.name}"))
    return found


def required(struct: Any) -> dict[str, Any]:
    samples: dict[type, Any] = {types.StrType: "x", types.IntType: 1, types.ListType: [], types.DictType: {}}
    described = types.type_info(struct)
    assert isinstance(described, types.StructType)
    found = {}
    for field in described.fields:
        if field.required:
            kind = field.type.types[0] if isinstance(field.type, types.UnionType) else field.type
            found[field.name] = samples[type(kind)]
    return found


@pytest.mark.parametrize(("struct", "field"), integer_fields())
def test_every_integer_field(struct: Any, field: str) -> None:
    base = required(struct)
    assert getattr(convert({**base, field: 2.0}, struct), field) == 2
    assert type(getattr(convert({**base, field: 2.0}, struct), field)) is int
    for bad in (1.5, 2 * MAX_EXACT, {}):
        with pytest.raises(InvalidRequestError) as caught:
            convert({**base, field: bad}, struct)
        assert caught.value.param == field


def test_what_is_no_integer_stays() -> None:
    class Mixed(msgspec.Struct):
        text: str | list[str | int] = []
        share: float = 0.0
        free: Any = None

    given = {"text": ["a", 1.0], "share": 1.0, "free": [1.0], "other": 1.0}
    assert with_integers(given, Mixed) == {"text": ["a", 1], "share": 1.0, "free": [1.0], "other": 1.0}
    assert type(with_integers(given, Mixed)["share"]) is float
    assert type(with_integers(given, Mixed)["free"][0]) is float
    assert type(given["text"][1]) is float  # type: ignore[index]
