"""Null is not given: with every optional field null, at the top and inside, each route answers as if none was there.
And ids: a request that has been given a name can be ended by it, a header's id comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from pinnate.server.operations import operations
from pinnate.server.protocol import anthropic, chat, common, generate, responses
from tests.unit.server.conftest import Client, FakeEngine, make_client
from tests.unit.server.test_unknown_everywhere import MESSAGES
from tests.unit.server.test_whole_numbers import scoring_engine

# The least that each route needs.
LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/generate": {"text": "hi"},
    "/score": {"query": "q", "items": ["a"], "label_token_ids": [5]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
    "/abort_request": {"rid": "r"},
}


def nulls(*structs: type[msgspec.Struct]) -> dict[str, None]:
    return {field.name: None for struct in structs for field in msgspec.structs.fields(struct) if not field.required}


@pytest.mark.parametrize("path", LEAST)
async def test_at_the_top(path: str) -> None:
    struct = operations()[f"POST {path}"].request
    clients = [make_client(scoring_engine(), strict=True) for _ in range(2)]
    plain = await clients[0].post(path, LEAST[path])
    answer = await clients[1].post(path, nulls(struct) | LEAST[path])
    assert (plain.status, answer.status) == (200, 200), answer.body
    assert clients[0].engine.submitted == clients[1].engine.submitted
    assert answer.json.keys() == plain.json.keys() if isinstance(answer.json, dict) else True


NESTED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [nulls(chat.ChatMessage) | MESSAGES[0]]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "stream_options": nulls(common.StreamOptions)}),
    ("/generate", {"text": "hi", "sampling_params": nulls(generate.GenerateSampling)}),
    ("/v1/responses", {"input": [nulls(responses.InputMessage) | MESSAGES[0]]}),
    (
        "/v1/responses",
        {
            "input": [
                nulls(responses.InputCall) | {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                nulls(responses.InputCallOutput) | {"type": "function_call_output", "call_id": "c", "output": "x"},
                nulls(responses.InputReasoning) | {"type": "reasoning"},
                {"role": "user", "content": [nulls(responses.InputPart) | {"type": "input_text", "text": "x"}]},
            ],
            "text": nulls(responses.TextOptions),
            "reasoning": nulls(responses.ReasoningOptions),
            "tools": [nulls(responses.FunctionTool) | {"type": "function", "name": "f"}],
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [nulls(anthropic.TextBlockParam) | {"type": "text", "text": "x"}]},
                {
                    "role": "assistant",
                    "content": [
                        nulls(anthropic.ThinkingBlockParam) | {"type": "thinking", "thinking": "t"},
                        nulls(anthropic.ToolUseBlockParam) | {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [nulls(anthropic.ToolResultBlockParam) | {"type": "tool_result", "tool_use_id": "t"}],
                },
            ],
            "max_tokens": 5,
            "metadata": nulls(anthropic.MetadataParam),
            "output_config": nulls(anthropic.OutputConfig),
            "thinking": nulls(anthropic.ThinkingParam) | {"type": "disabled"},
            "tools": [nulls(anthropic.ToolParam) | {"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": nulls(anthropic.ToolChoiceParam) | {"type": "auto"},
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), NESTED)
async def test_inside(path: str, body: dict[str, Any]) -> None:
    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_nulls(member) for name, member in value.items() if member is not None}
        return [without_nulls(item) for item in value] if isinstance(value, list) else value

    clients = [make_client(FakeEngine(max_model_len=4000), strict=True) for _ in range(2)]
    for client, given in zip(clients, (without_nulls(body), body), strict=True):
        answer = await client.post(path, given)
        assert answer.status == 200, answer.body
    assert clients[0].engine.submitted == clients[1].engine.submitted


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/v1/completions", {"prompt": "hi"}, {"request_id": "me"}),
        ("/v1/chat/completions", {"messages": MESSAGES}, {"request_id": "me"}),
        ("/v1/responses", {"input": "hi"}, {"request_id": "me"}),
        ("/v1/responses", {"input": "hi"}, {"request_id": "me", "background": True}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}, {"request_id": "me"}),
        ("/generate", {"text": "hi"}, {"rid": "me"}),
    ],
)
async def test_ended_by_the_name_it_was_given(path: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
    engine = FakeEngine(script=lambda *_: [asyncio.Event()])
    client = make_client(engine)
    call = asyncio.create_task(client.post(path, body | fields))
    async with asyncio.timeout(10):
        while not engine.streams:
            await asyncio.sleep(0.001)
        while (await client.post("/abort_request", {"rid": "me"})).json != {"aborted": 1}:
            await asyncio.sleep(0.001)
        answer = await call
        while client.state.ongoing:
            await asyncio.sleep(0.001)
    assert answer.status == 200
    name = next(iter(fields))
    bad = await client.post(path, body | {name: "two words"})
    message = bad.json["error"]["message"]
    assert (bad.status, message.startswith(name)) == (400, True)


async def test_the_id_of_the_header_comes_back(client: Client) -> None:
    for name in sorted(operations()):
        method, _, path = name.partition(" ")
        answer = await client.call(method, path.replace("{", "").replace("}", ""), headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine", name
        assert ("request-id" in answer.headers) == path.startswith("/v1/messages"), name
