"""Anthropic's own client on /v1/messages, unchanged but for base_url: plain, streamed, tools, counts, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.harness import Api, Server

USER: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}


@pytest.fixture
async def client(server: Server) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as opened:
        yield opened


async def test_create_and_stream_are_the_same(client: anthropic.AsyncAnthropic, api: Api) -> None:
    asked: Any = {"model": MODEL, "messages": USER, "max_tokens": 16, "extra_body": {"temperature": 0}}
    plain = await client.messages.create(**asked)
    assert plain.content[0].type == "text"
    assert plain.content[0].text == (await api.chat("hi", max_tokens=16)).text
    assert plain._request_id
    usage = plain.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == 31
    async with client.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == plain.content[0].text
    assert [block.type for block in final.content] == ["text"]
    assert final.stop_reason == plain.stop_reason
    assert final.usage.output_tokens == plain.usage.output_tokens
    raw = await client.messages.create(**asked, stream=True)
    kinds = [event.type async for event in raw]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_stop_reasons(client: anthropic.AsyncAnthropic) -> None:
    asked: Any = {"model": MODEL, "messages": USER, "extra_body": {"temperature": 0}}
    short = await client.messages.create(**asked, max_tokens=2)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    stopped = await client.messages.create(**asked, max_tokens=50, stop_sequences=["!"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "!")
    large = await client.messages.create(**asked, max_tokens=20_000)
    assert large.stop_reason == "end_turn"
    prefilled = await client.messages.create(
        **asked | {"messages": [*USER, {"role": "assistant", "content": "The capital of France is"}]}, max_tokens=4
    )
    assert "Paris" in prefilled.content[0].text


async def test_tools(client: anthropic.AsyncAnthropic) -> None:
    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: Any = {
        "model": MODEL, "max_tokens": 100, "tools": [TOOL], "extra_body": {"temperature": 0},
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }  # fmt: skip
    answer = await client.messages.create(messages=question, **asked)
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert use.name == "get_weather"
    assert set(use.input) == {"city", "unit"}
    assert answer.stop_reason == "tool_use"
    async with client.messages.stream(messages=question, **asked) as stream:
        final = await stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [use.input]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns = [*question, answer.to_param(), {"role": "user", "content": [result]}]
    after = await client.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=[TOOL])
    assert after.role == "assistant"


async def test_counts_and_errors(client: anthropic.AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(model=MODEL, messages=USER)
    assert counted.input_tokens == 31
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="absent", messages=USER, max_tokens=4)
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x"}}
    shown: Any = [{"role": "user", "content": [image]}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client.messages.create(model=MODEL, messages=shown, max_tokens=4)
    assert "image" in str(caught.value)
    assert caught.value.request_id


async def test_a_client_that_leaves(client: anthropic.AsyncAnthropic, api: Api) -> None:
    story: Any = [{"role": "user", "content": "Tell me a long story."}]
    stream = await client.messages.create(model=MODEL, messages=story, max_tokens=1500, stream=True)
    async for event in stream:
        if event.type == "content_block_delta":
            break
    await stream.close()
    await api.until_idle()


def test_the_blocking_client(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(model=MODEL, messages=USER, max_tokens=8) as stream:
            text = "".join(stream.text_stream)
        assert text
        assert client.messages.create(model=MODEL, messages=USER, max_tokens=8).content
        assert [model.display_name for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).type == "model"
