"""Tools through OpenAI's own client, with a model too small to call them by itself: grammars make it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.harness import Api, Server

SEEDS = range(5)
TEXTS = ['a "quoted" ď\n</tool_call>', "plain"]
STORE: Any = {
    "type": "function",
    "function": {
        "name": "store",
        "parameters": {
            "type": "object",
            "properties": {
                "s": {"enum": TEXTS},
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
                "o": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
            },
            "required": ["s", "n", "o"],
        },
    },
}
PING: Any = {
    "type": "function",
    "function": {
        "name": "ping",
        "parameters": {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"]},
    },
}
Calls = list[tuple[str, str]]


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def fields(seed: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Store a record."}]
    return {"model": MODEL, "messages": messages, "seed": seed, "max_tokens": 60, "tools": [STORE, PING], **more}


async def whole(client: openai.AsyncOpenAI, **body: Any) -> tuple[str, Calls, str]:
    choice = (await client.chat.completions.create(**body)).choices[0]
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    found = [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]
    return choice.message.content or "", found, choice.finish_reason


async def streamed(client: openai.AsyncOpenAI, **body: Any) -> tuple[str, Calls, str, int]:
    """And the largest number of pieces that a call's arguments came in."""
    content, finish, calls, pieces = "", "", list[list[str]](), list[int]()
    async for chunk in await client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for piece in choice.delta.tool_calls or []:
            assert piece.function is not None
            if piece.index == len(calls):
                assert piece.id
                assert piece.type == "function"
                calls.append([piece.function.name or "", ""])
                pieces.append(0)
            else:
                assert piece.id is None
                assert piece.function.name is None
            calls[piece.index][1] += piece.function.arguments or ""
            pieces[piece.index] += bool(piece.function.arguments)
    return content, [(name, arguments) for name, arguments in calls], finish, max(pieces, default=0)


def check_arguments(name: str, text: str) -> None:
    arguments = json.loads(text)
    if name == "ping":
        assert arguments in ({"k": "a"}, {"k": "b"})
        return
    assert name == "store"
    assert arguments.keys() == {"s", "n", "o"}
    assert arguments["s"] in TEXTS
    assert arguments["n"] in range(100)
    assert arguments["o"] in ({"x": True}, {"x": False})


@pytest.mark.parametrize(
    "choice",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 2.0},
        {"tool_choice": {"type": "function", "function": {"name": "store"}}},
    ],
    ids=["required", "one", "named"],
)
async def test_case_58_forced_calls_fit_and_streams_are_the_same(
    client: openai.AsyncOpenAI, choice: dict[str, Any]
) -> None:
    bodies = [fields(seed, **choice) for seed in SEEDS]
    plain = await asyncio.gather(*(whole(client, **body) for body in bodies))
    streams = await asyncio.gather(*(streamed(client, **body) for body in bodies))
    for (content, calls, finish), (*others, pieces) in zip(plain, streams, strict=True):
        assert [content, calls, finish] == others
        assert content == ""
        if finish == "length":
            calls = calls[:-1]
        else:
            assert finish == "tool_calls"
            assert calls
            assert pieces > 1
            assert len(calls) == 1 or choice == {"tool_choice": "required"}
        for name, arguments in calls:
            check_arguments(name, arguments)
    if isinstance(choice["tool_choice"], dict):
        assert {name for _, calls, _ in plain for name, _ in calls} == {"store"}


async def test_auto_and_none_answer_in_text(client: openai.AsyncOpenAI) -> None:
    for choice in ("auto", "none"):
        body = fields(1, tool_choice=choice, temperature=0, max_tokens=12)
        content, calls, finish, _ = await streamed(client, **body)
        assert (content, calls, finish) == await whole(client, **body)
        assert content
        assert not calls


async def test_results_go_back_in(client: openai.AsyncOpenAI) -> None:
    body = fields(1, tool_choice="required", parallel_tool_calls=False, temperature=0)
    message = (await client.chat.completions.create(**body)).choices[0].message
    assert message.tool_calls is not None
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "stored as number 7"}
    body |= {"messages": [*body["messages"], message, result], "tool_choice": "auto", "max_tokens": 20}
    content, _, _ = await whole(client, **body)
    assert content


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "["}}},
        {"type": "object", "properties": {"x": {"$ref": "http://127.0.0.1:1/s.json"}}},
        {"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}},
        {"type": "object", "properties": {"x": {"type": "foo"}}},
    ],
    ids=["pattern", "url", "ref", "type"],
)
async def test_schemas_that_cannot_be_compiled_name_the_tools(api: Api, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = await api.chat("hi", tools=[tool], tool_choice="required")
    assert answer.status == 400
    assert answer.json["error"]["param"].startswith("tools")
