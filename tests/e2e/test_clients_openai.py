"""What programs do with OpenAI's own client: streams, tools, agents, structured answers; sync and async."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.conftest import MODEL
from tests.e2e.harness import Server

HI: list[Any] = [{"role": "user", "content": "hi"}]


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    mood: Literal["glad", "sad"]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def weather_tool() -> Any:
    return openai.pydantic_function_tool(GetWeather, name="get_weather")


def test_sync_stream_equals_plain(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=8)
    with client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=8, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == plain.choices[0].message.content


async def test_async_streams_at_once(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def one(seed: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=HI, seed=seed, max_tokens=12, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        together = await asyncio.gather(*(one(seed) for seed in range(6)))
        assert together == [await one(seed) for seed in range(6)]


def test_the_stream_helper_gathers_the_final_answer(client: openai.OpenAI) -> None:
    kinds = []
    with client.chat.completions.stream(
        model=MODEL, messages=HI, temperature=0, max_tokens=64, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    plain = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=64, logprobs=True)
    assert final.choices[0].message.content == plain.choices[0].message.content
    assert final.usage == plain.usage
    assert final.choices[0].logprobs is not None
    assert plain.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == plain.choices[0].logprobs.content
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(kinds)


def test_an_agent_calls_a_tool_and_answers(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[weather_tool()], tool_choice="required", temperature=0, max_tokens=200
    )
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_weather"
    asked = GetWeather.model_validate_json(call.function.arguments)
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"city": asked.city, "sky": "clear"})},
    ]
    second = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[weather_tool()], tool_choice="none", temperature=0, max_tokens=8
    )
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls


def test_streamed_tools_are_parsed_by_the_helper(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": HI,
        "tools": [weather_tool()],
        "tool_choice": named,
        "temperature": 0,
        "max_tokens": 64,
    }
    with client.chat.completions.stream(**asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, GetWeather)
    assert [event.name for event in done] == ["get_weather"]
    plain = client.chat.completions.create(**asked)
    assert plain.choices[0].message.tool_calls
    assert plain.choices[0].message.tool_calls[0].function.arguments == calls[0].function.arguments


def test_parse_gives_the_model_class(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "response_format": Person, "max_tokens": 80}
    parsed = client.chat.completions.parse(**asked, temperature=0)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    with client.chat.completions.stream(**asked, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed


def test_parse_says_when_the_limit_cut_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=HI, response_format=Person, max_tokens=2)


def test_extra_fields_and_raw_answers(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="1, 2, 3, 4, 5, 6, 7,", max_tokens=4, extra_body={"top_k": 1, "return_token_ids": True}
    )
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].model_extra["token_ids"] == [216, 40, 28, 216]  # type: ignore[index]


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=HI)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=MODEL,
            messages=HI,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}},
        )
    assert refused.value.param
    with pytest.raises(openai.BadRequestError, match="tool"):
        client.chat.completions.create(model=MODEL, messages=HI, tool_choice="required")
