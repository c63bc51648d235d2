"""Chunks: shapes as OpenAI's, one write a step, one end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pinnate.core.errors import EngineDeadError, EngineError
from pinnate.core.request import FinishReason
from pinnate.core.sampling import SamplingParams
from pinnate.engine.output_processor import OutputDelta
from tests.unit.server.conftest import Answer, Client, FakeEngine, make_client, score, spell


def choices(answer: Answer, index: int = 0) -> list[dict[str, Any]]:
    chunks = [event for event in answer.events() if event != "[DONE]"]
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


async def test_chat_chunks(client: Client) -> None:
    answer = await client.chat(stream=True)
    events = answer.events()
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    for chunk in events[:-1]:
        assert set(chunk) == {"id", "object", "created", "model", "system_fingerprint", "choices"}
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["model"] == "Tiny"
        assert chunk["id"] == events[0]["id"]
        assert all("finish_reason" in choice and "logprobs" in choice for choice in chunk["choices"])
    deltas = [choice["delta"] for choice in choices(answer)]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "o"}, {"content": "k"}, {}]
    assert [choice["finish_reason"] for choice in choices(answer)] == [None, None, None, "stop"]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_usage_is_sent_only_when_asked_for(client: Client, options: Any) -> None:
    events = (await client.chat(stream=True, stream_options=options)).events()
    assert all("usage" not in chunk for chunk in events[:-1])


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_usage_comes_last_and_alone(client: Client, route: str) -> None:
    client.engine.script = lambda *_: list(spell("okay", cached=1))
    events = (await getattr(client, route)(stream=True, stream_options={"include_usage": True})).events()
    *chunks, last, done = events
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    prompt_tokens = len(client.engine.submitted[0].prompt)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": prompt_tokens + 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_completion_chunks(client: Client) -> None:
    answer = await client.complete(stream=True)
    assert [choice["text"] for choice in choices(answer)] == ["o", "k", ""]
    assert [choice["finish_reason"] for choice in choices(answer)] == [None, None, "stop"]
    assert all(event["object"] == "text_completion" for event in answer.events()[:-1])


async def test_each_choice_has_its_own_role_and_end(client: Client) -> None:
    def script(_: int, params: SamplingParams) -> list[Any]:
        assert params.n == 2
        return [
            [OutputDelta(0, "a", [97]), OutputDelta(1, "b", [98])],
            [OutputDelta(0, "c", [99], finish_reason=FinishReason.LENGTH), OutputDelta(1, "d", [100])],
            [OutputDelta(1, "", [0], finish_reason=FinishReason.STOP)],
        ]

    client.engine.script = script
    answer = await client.chat(stream=True, n=2)
    for index, text, reason in ((0, "ac", "length"), (1, "bd", "stop")):
        own = choices(answer, index)
        assert [choice["delta"].get("role") for choice in own] == ["assistant", *[None] * (len(own) - 1)]
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [reason]
    assert len(answer.writes) == 3  # one for each step, whatever the number of choices


async def test_the_last_step_and_the_end_are_one_write(client: Client) -> None:
    answer = await client.complete(stream=True)
    assert len(answer.writes) == 3
    assert answer.writes[-1].endswith(b"data: [DONE]\n\n")


async def test_held_bytes_make_no_chunk(client: Client) -> None:
    client.engine.script = lambda *_: [
        OutputDelta(0, "a", [97]),
        OutputDelta(0, "", [0xC4]),
        OutputDelta(0, "ď", [0x8F], finish_reason=FinishReason.LENGTH),
    ]
    assert [choice["delta"].get("content") for choice in choices(await client.chat(stream=True))] == [
        "", "a", "ď", None,
    ]  # fmt: skip
    assert [choice["text"] for choice in choices(await client.complete(stream=True))] == ["a", "ď"]


async def test_prompts_times_n_are_streamed_under_their_index(client: Client) -> None:
    client.engine.script = lambda number, _: [
        [OutputDelta(k, f"{number}{k}", [50], finish_reason=FinishReason.LENGTH) for k in (1, 0)]
    ]
    answer = await client.complete(prompt=["a", "b", "c"], n=2, stream=True)
    assert ["".join(c["text"] for c in choices(answer, i)) for i in range(6)] == ["00", "01", "10", "11", "20", "21"]


async def test_echo_streams_the_prompt_first(client: Client) -> None:
    scores = [None, score(105, -1.5)]
    client.engine.script = lambda *_: [
        OutputDelta(
            0, "o", [111], logprobs=[score(111, -0.25, top=[(111, -0.25), (112, -2.0)])], prompt_logprobs=scores
        ),
        OutputDelta(0, "k", [107], logprobs=[score(107)], finish_reason=FinishReason.LENGTH),
    ]
    answer = await client.complete(prompt="hi", echo=True, logprobs=1, stream=True)
    first, second = choices(answer)
    assert first["text"] == "hio"
    assert first["logprobs"]["tokens"] == ["h", "i", "o"]
    assert first["logprobs"]["token_logprobs"] == [None, -1.5, -0.25]
    assert first["logprobs"]["top_logprobs"] == [None, {"i": -1.5}, {"o": -0.25, "p": -2.0}]
    assert first["logprobs"]["text_offset"] == [0, 1, 2]
    assert second["logprobs"]["text_offset"] == [3]
    assert client.engine.submitted[0].params.prompt_logprobs == 1


async def test_token_ids_on_request(client: Client) -> None:
    answer = await client.chat(stream=True, return_token_ids=True)
    assert answer.events()[0]["prompt_token_ids"] == client.engine.submitted[0].prompt
    assert [c.get("token_ids") for c in choices(answer)] == [None, [111], [107], [0], None]
    completed = choices(await client.complete(stream=True, return_token_ids=True))
    assert completed[0]["prompt_token_ids"] == [104, 105]
    assert [c["token_ids"] for c in completed] == [[111], [107], [0]]


@pytest.mark.parametrize(("error", "status"), [(EngineDeadError("gone"), 503), (EngineError("odd"), 500)])
async def test_an_error_before_the_first_token_is_a_real_status(client: Client, error: Exception, status: int) -> None:
    client.engine.script = lambda *_: [error]
    for stream in (True, False):
        answer = await client.complete(stream=stream)
        assert answer.status == status
        assert answer.error["message"] in ("gone", "odd")


async def test_an_error_later_is_one_last_event(client: Client) -> None:
    client.engine.script = lambda *_: [OutputDelta(0, "a", [97]), EngineDeadError("the engine process died")]
    events = (await client.chat(stream=True)).events()
    assert events[-1]["error"]["message"] == "the engine process died"
    assert events[-1]["error"]["code"] == "engine_dead"
    assert "[DONE]" not in events
    assert sum("error" in event for event in events) == 1


async def test_an_error_of_one_prompt_ends_the_stream_of_all(client: Client) -> None:
    hang = asyncio.Event()
    client.engine.script = lambda number, _: (
        [OutputDelta(0, "a", [97]), hang] if number == 0 else [OutputDelta(0, "b", [98]), EngineError("odd")]
    )
    async with asyncio.timeout(5):
        events = (await client.complete(prompt=["x", "y"], stream=True)).events()
    assert events[-1]["error"]["code"] == "engine_error"
    assert client.engine.streams[0].aborted


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("prompts", [1, 2])
async def test_a_client_that_leaves_aborts_all(client: Client, stream: bool, after: int, prompts: int) -> None:
    hang = asyncio.Event()
    client.engine.script = lambda *_: [*spell("abc")[:after], hang]
    call = asyncio.create_task(client.complete(prompt=["x", "y"][:prompts], stream=stream))
    while len(client.engine.streams) < prompts:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert len(client.state.ongoing) == 1
    client.gone.set()
    async with asyncio.timeout(5):
        await call
    assert [s.aborted for s in client.engine.streams] == [True] * prompts
    assert not client.state.ongoing
    assert client.state.metrics.finished == {"abort": prompts}
    assert not client.state.metrics.rejected


async def test_requests_ended_by_the_server_say_so() -> None:
    hang = asyncio.Event()
    client = make_client(FakeEngine(script=lambda number, _: [*spell("abc")[: number % 2], hang]))
    calls = []
    for stream in (True, True, False):
        calls.append(asyncio.create_task(client.complete(stream=stream)))
        while len(client.engine.streams) < len(calls):
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    client.state.stop_requests()
    async with asyncio.timeout(5):
        queued, running, plain = await asyncio.gather(*calls)
    assert (queued.status, queued.error["code"]) == (503, "shutting_down")
    assert (running.status, running.events()[-1]["error"]["code"]) == (200, "shutting_down")
    assert (plain.status, plain.error["code"]) == (503, "shutting_down")
