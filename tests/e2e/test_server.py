"""The API over real HTTP with the real engine: OpenAI's own client, raw sockets, bad input, leaving clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.harness import Api, Server, fresh_ids

P1, P1_NEXT = "1, 2, 3, 4, 5, 6, 7,", " 8, 9, 10, 11, 12, 13"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def test_openai_client_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_tokens=6, user="me")  # type: ignore[arg-type]
    assert (answer.choices[0].message.content or "").startswith("Hello")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (31, 6)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


async def test_openai_client_streams(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_completion_tokens=6, stream=True,  # type: ignore[arg-type]
        stream_options={"include_usage": True}, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    plain = await client.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_completion_tokens=6)  # type: ignore[arg-type]
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    scored = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
    assert len(scored) == 6
    assert all(len(entry.top_logprobs) in (2, 3) for entry in scored)


async def test_openai_client_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=[P1, P1], temperature=0, max_tokens=8, n=2, logprobs=1)
    assert [choice.text for choice in answer.choices] == [P1_NEXT[:8]] * 4
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    stream = await client.completions.create(model=MODEL, prompt=P1, temperature=0, max_tokens=8, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == P1_NEXT[:8]


async def test_openai_client_models_and_errors(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).object == "model"
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.chat.completions.create(model="no-such-model", messages=USER)  # type: ignore[arg-type]
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=USER, temperature=-1)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"
    assert "temperature" in bad.value.message


BAD_INPUT: list[tuple[int, str | None, Any]] = [
    (400, None, b"{broken"),
    (404, "model", {"model": "no-such-model", "prompt": P1}),
    (400, "prompt", {"prompt": fresh_ids(2049)}),
    (400, "prompt", {"prompt": fresh_ids(4096), "stream": True}),
    (400, "max_tokens", {"prompt": P1, "max_tokens": 0}),
    (400, "max_tokens", {"prompt": P1, "max_tokens": -1}),
    (400, "max_tokens", {"prompt": P1, "max_tokens": 10**9}),
    (400, None, b'{"prompt": "x", "temperature": NaN}'),
    (400, "temperature", {"prompt": P1, "temperature": -1}),
    (400, "top_p", {"prompt": P1, "top_p": 0}),
    (400, "n", {"prompt": P1, "n": 0}),
    (400, "n", {"prompt": P1, "n": 33}),
    (400, "seed", {"prompt": P1, "seed": 2**64}),
    (400, "logit_bias", {"prompt": P1, "logit_bias": {"49152": 1}}),
    (400, "stop_token_ids", {"prompt": P1, "stop_token_ids": [49152]}),
    (400, "suffix", {"prompt": P1, "suffix": "the end"}),
    (400, "audio_data", {"prompt": P1, "audio_data": ["x"]}),
    (413, None, b'{"prompt": "' + b"x" * 100_000_000 + b'"}'),
]


@pytest.mark.parametrize(
    ("status", "param", "body"), BAD_INPUT, ids=[f"{s}-{p}-{i}" for i, (s, p, _) in enumerate(BAD_INPUT)]
)
async def test_bad_input_is_named_and_hurts_nobody(api: Api, status: int, param: str | None, body: Any) -> None:
    neighbour = asyncio.create_task(api.complete(P1, max_tokens=20))
    answer = await api.post("/v1/completions", body)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert (await neighbour).text == P1_NEXT[:20]
    assert (await api.get("/health")).status == 200


async def test_messages_must_not_be_empty(api: Api) -> None:
    assert (await api.chat([])).error["param"] == "messages"


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_place(api: Api, stream: bool, reset: bool) -> None:
    before = await api.until_idle()
    body = api.completion_body(fresh_ids(30), max_tokens=1900, ignore_eos=True, stream=stream)
    await asyncio.gather(*(api.drop(body, 0.1 * i, reset=reset) for i in range(4)))
    after = await api.until_idle(3)
    await asyncio.sleep(0.3)
    assert (await api.metrics())["generation_tokens_total"] == after["generation_tokens_total"]
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 4 * 1900
    assert after["kv_cache_usage_perc"] == 0
    assert (await api.complete(P1)).text == P1_NEXT[:8]


async def test_choices_and_prompts_end_with_their_client(api: Api) -> None:
    for prompt, n in ((P1, 4), ([P1, P1, P1], 2)):
        streamed = await api.stream(prompt, leave_after=1, n=n, max_tokens=1900, ignore_eos=True, temperature=1)
        assert streamed.status == 200
        await api.until_idle(3)


async def test_operator_routes(api: Api) -> None:
    await api.complete(fresh_ids(100))
    await api.until_idle()
    assert (await api.post("/flush_cache", b"")).status == 200
    values = await api.metrics()
    assert values["kv_pages_cached"] == 0
    assert values["kv_pages_free"] == values["kv_pages"]
    info = (await api.get("/server_info")).json
    assert info["engine"]["max_model_len"] == 2048
    tokens = (await api.post("/tokenize", {"prompt": "😀"})).json["tokens"]
    assert tokens == [10813, 242, 218]
    assert (await api.post("/detokenize", {"tokens": tokens})).json == {"prompt": "😀"}
    assert (await api.post("/tokenize", {"messages": USER})).json["count"] == 31


async def test_keep_alive_serves_one_request_after_another(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for body, status in (
        (b'{"prompt": "x", "max_tokens": 1}', b"200"),
        (b"{", b"400"),
        (b'{"prompt": "y", "max_tokens": 1}', b"200"),
    ):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] == status
        length = next(
            int(v) for k, _, v in (line.partition(b":") for line in head.split(b"\r\n")) if k == b"content-length"
        )
        await reader.readexactly(length)
    writer.close()
