"""OpenAI's own client on /v1/responses with another base_url: answers, streams, tools, conversations, background."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.harness import Api, Server

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def test_create_and_stream_are_the_same_text(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "hi", "temperature": 0, "max_output_tokens": 16}
    plain = await client.responses.create(**asked)
    chat = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=16
    )
    assert plain.output_text == chat.choices[0].message.content
    assert plain.usage is not None
    assert chat.usage is not None
    assert plain.usage.input_tokens == chat.usage.prompt_tokens
    async with client.responses.stream(**asked) as stream:
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        if plain.status == "completed":
            final = await stream.get_final_response()
            assert final.output_text == plain.output_text
    assert "".join(texts) == plain.output_text
    cut = await client.responses.create(**asked | {"max_output_tokens": 3}, stream=True)
    last = [event async for event in cut][-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"


async def test_a_conversation_and_what_is_stored(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="My name is Ada.", temperature=0, max_output_tokens=8)
    second = await client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id, temperature=0, max_output_tokens=8
    )
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert (await client.responses.retrieve(second.id)).output_text == second.output_text
    items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.type for item in items] == ["message"] * 3
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


async def test_parse(client: openai.AsyncOpenAI) -> None:
    class City(pydantic.BaseModel):
        name: Literal["Paris", "London"]
        inhabitants: Literal[1, 2, 3]

    parsed = await client.responses.parse(
        model=MODEL, input="Name a city.", text_format=City, temperature=0, max_output_tokens=64
    )
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.name in ("Paris", "London")


async def test_tools(client: openai.AsyncOpenAI) -> None:
    asked: Any = {
        "model": MODEL, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0,
        "max_output_tokens": 100,
    }  # fmt: skip
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = await client.responses.create(input=messages, **asked)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    async with client.responses.stream(input=messages, **asked) as stream:
        pieces = [e.delta async for e in stream if e.type == "response.function_call_arguments.delta"]
        final = await stream.get_final_response()
    assert "".join(pieces) == call.arguments == final.output[-1].arguments  # type: ignore[union-attr]
    messages += answer.output
    messages.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    after = await client.responses.create(model=MODEL, input=messages, tools=[TOOL], temperature=0, max_output_tokens=8)
    assert after.output


async def test_background(client: openai.AsyncOpenAI, api: Api) -> None:
    asked: Any = {"model": MODEL, "input": "Tell me a story.", "background": True, "extra_body": {"ignore_eos": True}}
    started = await client.responses.create(**asked, max_output_tokens=20)
    assert started.status == "queued"
    async with asyncio.timeout(30):
        while (shown := await client.responses.retrieve(started.id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    assert shown.status == "incomplete"
    assert shown.output_text
    long = await client.responses.create(**asked, max_output_tokens=1500)
    assert (await client.responses.cancel(long.id)).status == "cancelled"
    assert (await client.responses.cancel(long.id)).status == "cancelled"
    await api.until_idle()


async def test_a_background_stream_is_resumed(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "hi", "temperature": 0, "max_output_tokens": 8}
    stream = await client.responses.create(**asked, background=True, stream=True)
    response_id, seen = "", 0
    async for event in stream:
        seen = event.sequence_number
        if event.type == "response.created":
            response_id = event.response.id
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    rest = await client.responses.retrieve(response_id, stream=True, starting_after=seen)
    later = [event async for event in rest]
    assert [event.sequence_number for event in later] == list(range(seen + 1, seen + 1 + len(later)))
    plain = await client.responses.create(**asked)
    assert later[-1].response.output_text == plain.output_text  # type: ignore[union-attr]


async def test_errors_and_counts(client: openai.AsyncOpenAI) -> None:
    counted = await client.responses.input_tokens.count(model=MODEL, input="hi")
    assert counted.input_tokens == 31
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="absent", input="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="hi", tools=[{"type": "web_search"}])
    assert caught.value.param == "tools[0].type"


def test_the_blocking_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.stream(model=MODEL, input="hi", temperature=0, max_output_tokens=12) as stream:
            kinds = [event.type for event in stream]
        assert kinds[0] == "response.created"
        plain = client.responses.create(model=MODEL, input="hi", temperature=0, max_output_tokens=12, store=False)
        assert plain.output_text
