"""Fields that decide what an answer shows beside its text, plain and streamed alike."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pinnate.core.request import FinishReason
from pinnate.engine.output_processor import OutputDelta
from pinnate.server.logprobs import LEAST, finite
from tests.unit.server.conftest import ByteTokenizer, Client, FakeEngine, make_client, score, spell

PREFILL = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
SCORES = [None, score(105, -1.5, 7, [(104, -0.5)])]
SHOWN = [
    None,
    {
        "104": {"logprob": -0.5, "rank": 1, "decoded_token": "h"},
        "105": {"logprob": -1.5, "rank": 7, "decoded_token": "i"},
    },
]


def scored(*_: Any) -> list[OutputDelta]:
    tokens = [score(97, -math.inf, 1, [(97, math.nan), (98, -2.0)]), score(0, -0.25, 1, [(0, -0.25)])]
    return [
        OutputDelta(0, "a", [97], tokens[:1], prompt_logprobs=SCORES),
        OutputDelta(0, "", [0], tokens[1:], FinishReason.STOP),
    ]


def chunks(events: list[Any]) -> list[dict[str, Any]]:
    return [choice for event in events[:-1] for choice in event["choices"]]


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan, -1e9])
def test_json_has_finite_numbers_only(value: float) -> None:
    assert finite(value) == (value if value == math.inf else LEAST)
    assert finite(-3.5) == -3.5


async def test_logprobs_without_infinities(client: Client) -> None:
    client.engine.script = scored
    content = (await client.chat(logprobs=True, top_logprobs=2)).json["choices"][0]["logprobs"]["content"]
    assert content[0]["logprob"] == LEAST
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [LEAST, -2.0]
    older = (await client.complete(logprobs=2, prompt_logprobs=2)).json["choices"][0]["logprobs"]
    assert older["token_logprobs"] == [LEAST, -0.25]
    assert older["top_logprobs"][0] == {"a": LEAST, "b": -2.0}


async def test_prompt_logprobs_come_with_the_first_chunk(client: Client) -> None:
    client.engine.script = scored
    events = (await client.chat(stream=True, prompt_logprobs=1)).events()
    assert events[0]["prompt_logprobs"] == SHOWN
    assert not any("prompt_logprobs" in event for event in events[1:-1])
    first, *others = chunks((await client.complete(stream=True, prompt_logprobs=1)).events())
    assert first["prompt_logprobs"] == SHOWN
    assert not any("prompt_logprobs" in choice for choice in others)


async def test_tokens_as_ids(client: Client) -> None:
    client.engine.script = scored
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 2}
    plain = (await client.chat(**fields)).json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in plain] == ["token_id:97", "token_id:0"]
    assert [entry["token"] for entry in plain[0]["top_logprobs"]] == ["token_id:97", "token_id:98"]
    assert plain[0]["bytes"] == [97]
    streamed = chunks((await client.chat(stream=True, **fields)).events())
    assert [e for c in streamed if c["logprobs"] for e in c["logprobs"]["content"]] == plain
    older = (await client.complete(**{**fields, "logprobs": 2, "top_logprobs": None})).json["choices"][0]["logprobs"]
    assert older["tokens"] == ["token_id:97", "token_id:0"]
    assert older["top_logprobs"][0] == {"token_id:97": LEAST, "token_id:98": -2.0}
    assert older["text_offset"] == [0, 1]


async def test_prompt_ids_come_once_in_a_chat(client: Client) -> None:
    client.engine.script = lambda *_: [[*step] for step in zip(spell("ab", 0), spell("cd", 1), strict=True)]
    events = (await client.chat(stream=True, return_token_ids=True, n=2)).events()
    assert ["prompt_token_ids" in event for event in events[:-1]] == [True] + [False] * (len(events) - 2)
    assert [event["choices"][0]["index"] for event in events[:-1] if event["choices"][0]["delta"].get("role")] == [0, 1]


class Alike(ByteTokenizer):
    """Tokens 97 and 98 are written alike, as a byte's token and a letter's are in some vocabularies."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"a" if token_id == 98 else super().token_bytes(token_id)


@pytest.mark.parametrize(("drawn", "top"), [(97, {"a": -1.0, "c": -1.5}), (98, {"a": -2.0, "c": -1.5})])
async def test_tokens_that_look_alike(drawn: int, top: dict[str, float]) -> None:
    alternatives = [(97, -1.0), (99, -1.5), (98, -2.0)]
    chosen = score(drawn, dict(alternatives)[drawn], 1, alternatives)
    delta = OutputDelta(0, "a", [drawn], [chosen], FinishReason.LENGTH)
    client = make_client(FakeEngine(script=lambda *_: [delta], tokenizer=Alike()))
    logprobs = (await client.complete(logprobs=3)).json["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [top]
    assert logprobs["token_logprobs"] == [top["a"]]
    assert next(iter(logprobs["top_logprobs"][0])) == "a"


async def test_chat_echo_shows_the_message_that_is_continued(client: Client) -> None:
    fields: dict[str, Any] = {"messages": PREFILL, "continue_final_message": True, "echo": True}
    assert (await client.chat(**fields)).json["choices"][0]["message"]["content"] == "Well,ok"
    deltas = [choice["delta"] for choice in chunks((await client.chat(stream=True, **fields)).events())]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "Well,"}]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well,ok"
    assert (await client.chat(echo=True)).json["choices"][0]["message"]["content"] == "ok"  # the user's is not echoed


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "llo"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "hel"),
        ({"truncate_prompt_tokens": -1}, "hello"),
    ],
)
async def test_truncated_prompts(client: Client, fields: dict[str, Any], kept: str) -> None:
    for prompt in ("hello", list(b"hello")):
        answer = await client.complete(prompt=prompt, echo=True, **fields)
        assert answer.json["choices"][0]["text"] == kept + "ok"
        assert bytes(client.engine.submitted[-1].prompt).decode() == kept
        assert answer.json["usage"]["prompt_tokens"] == len(kept)
    await client.chat(**fields)
    whole = "[user]hi[assistant]"
    left, cut = fields.get("truncation_side") != "right", fields["truncate_prompt_tokens"] == 3
    expected = (whole[-3:] if left else whole[:3]) if cut else whole
    assert bytes(client.engine.submitted[-1].prompt).decode() == expected


@pytest.mark.parametrize(("fields", "kept"), [({}, 99), ({"max_tokens": 40}, 60), ({"max_tokens": 100}, 1)])
async def test_minus_one_leaves_room_for_the_output(client: Client, fields: dict[str, Any], kept: int) -> None:
    answer = await client.complete(prompt="x" * 150, truncate_prompt_tokens=-1, **fields)
    assert len(client.engine.submitted[0].prompt if client.engine.submitted else "x") == kept
    assert answer.status == (200 if kept > 1 else 400)


async def test_request_ids_name_the_answer(client: Client) -> None:
    assert (await client.complete(request_id="job-7:a")).json["id"] == "cmpl-job-7:a"
    events = (await client.chat(request_id="x" * 128, stream=True)).events()
    assert {event["id"] for event in events[:-1]} == {"chatcmpl-" + "x" * 128}
    assert (await client.complete()).json["id"] != (await client.complete()).json["id"]


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_timings_when_asked_for(client: Client, route: str) -> None:
    client.engine.script = lambda *_: list(spell("okay", cached=1))
    call = getattr(client, route)
    plain = (await call(return_timings=True)).json["timings"]
    *_, last, done = (await call(return_timings=True, stream=True)).events()
    assert (last["choices"], done) == ([], "[DONE]")
    for timings in (plain, last["timings"]):
        prompt = len(client.engine.submitted[0].prompt)
        assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (1, prompt - 1, 5)
        assert timings["prompt_ms"] > 0
        assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 5)
    assert "timings" not in (await call()).json


async def test_timings_share_the_chunk_of_the_usage(client: Client) -> None:
    fields = {"stream": True, "return_timings": True, "stream_options": {"include_usage": True}}
    *chunked, last, _ = (await client.chat(**fields)).events()
    assert set(last) >= {"usage", "timings"}
    assert not any("timings" in chunk for chunk in chunked)


async def test_stop_takes_texts_and_token_ids(client: Client) -> None:
    await client.complete(stop=["x", 5, "y"], stop_token_ids=[6])
    params = client.engine.submitted[0].params
    assert (params.stop, params.stop_token_ids) == (("x", "y"), (6, 5))


async def test_operator_sets_the_limit_of_logprobs() -> None:
    client = make_client(FakeEngine(script=scored), max_logprobs=30)
    assert (await client.complete(logprobs=30)).status == 200
    refused = await client.complete(logprobs=31)
    assert (refused.status, refused.error["param"]) == (400, "logprobs")
    none = make_client(FakeEngine(), max_logprobs=0)
    assert (await none.chat(logprobs=True, top_logprobs=1)).error["param"] == "top_logprobs"
