"""POST /generate: SGLang's shapes, plain, as a batch and streamed; abort; its other routes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pinnate.core.request import FinishReason
from pinnate.core.sampling import SamplingParams
from pinnate.engine.output_processor import OutputDelta
from tests.unit.server.conftest import EOS, Answer, Client, FakeEngine, make_client, score, spell

META = {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency"}
LOGPROBS = {"input_token_logprobs", "output_token_logprobs"}
TOP = {"input_top_logprobs", "output_top_logprobs"}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("text", {}),
    ("text", {"text": "x", "input_ids": [5]}),
    ("text", {"text": ""}),
    ("text", {"text": []}),
    ("text", {"text": ["x", ""]}),
    ("text", {"text": "x" * 101}),
    ("text", {"text": 5}),
    ("input_ids", {"input_ids": []}),
    ("input_ids", {"input_ids": [[]]}),
    ("input_ids", {"input_ids": [5, [6]]}),
    ("input_ids", {"input_ids": [999]}),
    ("sampling_params", {"text": "x", "sampling_params": 5}),
    ("sampling_params", {"text": ["x", "y"], "sampling_params": [{}]}),
    ("sampling_params", {"text": ["x", "y"], "sampling_params": [{"n": 2}, {"n": 1}]}),
    ("sampling_params.max_new_tokens", {"text": "x", "sampling_params": {"max_new_tokens": -1}}),
    ("sampling_params.max_new_tokens", {"text": "x", "sampling_params": {"max_new_tokens": "5"}}),
    ("sampling_params.min_new_tokens", {"text": "x", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}}),
    ("sampling_params.temperature", {"text": "x", "sampling_params": {"temperature": -1}}),
    ("sampling_params.top_k", {"text": "x", "sampling_params": {"top_k": -2}}),
    ("sampling_params.stop_regex", {"text": "x", "sampling_params": {"stop_regex": "a+"}}),
    ("sampling_params.custom_params", {"text": "x", "sampling_params": {"custom_params": {"a": 1}}}),
    ("sampling_params[1].n", {"text": ["x", "y"], "sampling_params": [{}, {"n": "2"}]}),
    ("return_logprob", {"text": "x", "return_logprob": [True, False]}),
    ("logprob_start_len", {"text": "x", "return_logprob": True, "logprob_start_len": 5}),
    ("logprob_start_len", {"text": "x", "return_logprob": True, "logprob_start_len": -2}),
    ("top_logprobs_num", {"text": "x", "return_logprob": True, "top_logprobs_num": 21}),
    ("token_ids_logprob", {"text": "x", "token_ids_logprob": [5, [6]]}),
    ("rid", {"text": "x", "rid": "a b"}),
    ("rid", {"text": ["x", "y"], "rid": ["a"]}),
    ("lora_path", {"text": "x", "lora_path": "/etc"}),
    ("image_data", {"text": "x", "image_data": ["AAAA"]}),
    ("extra_key", {"text": "x", "extra_key": "a", "cache_salt": "b"}),
]


async def generate(client: Client, **fields: Any) -> Answer:
    return await client.post("/generate", {"text": "hi", **fields})


def scored(*_: Any) -> list[OutputDelta]:
    """The prompt `hi`, then `a` and the end."""
    entries = [score(97, -0.1, 1, [(97, -0.1), (98, -2.0)]), score(EOS, -0.2, 1, [(EOS, -0.2), (98, -3.0)])]
    prompt = [None, score(105, -1.5, 7, [(104, -0.5), (103, -0.6)])]
    return [
        OutputDelta(0, "a", [97], entries[:1], prompt_logprobs=prompt, num_cached_tokens=1),
        OutputDelta(0, "", [EOS], entries[1:], FinishReason.STOP),
    ]


async def test_plain_answer(client: Client) -> None:
    answer = (await generate(client, rid="me")).json
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert (answer["text"], answer["output_ids"]) == ("ok", [111, 107, EOS])
    info = answer["meta_info"]
    assert set(info) == META
    assert info["e2e_latency"] > 0
    assert {**info, "e2e_latency": 0} == {
        "id": "me", "finish_reason": {"type": "stop", "matched": EOS}, "prompt_tokens": 2, "completion_tokens": 3,
        "cached_tokens": 0, "e2e_latency": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ({"finish_reason": FinishReason.LENGTH}, {"type": "length", "length": 1}),
        ({"finish_reason": FinishReason.STOP, "stop_reason": "x"}, {"type": "stop", "matched": "x"}),
        ({"finish_reason": FinishReason.STOP, "stop_reason": 97}, {"type": "stop", "matched": 97}),
        ({"finish_reason": FinishReason.ABORT}, {"type": "abort", "message": "Aborted"}),
    ],
)
async def test_reasons_to_finish(client: Client, end: dict[str, Any], shown: dict[str, Any]) -> None:
    client.engine.script = lambda *_: [OutputDelta(0, "a", [97], **end)]
    assert (await generate(client)).json["meta_info"]["finish_reason"] == shown


async def test_sampling_params_by_their_names(client: Client) -> None:
    sampling = {
        "max_new_tokens": 9, "min_new_tokens": 2, "stop": ["x", "y"], "stop_token_ids": [5], "temperature": 0.5,
        "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.6,
        "repetition_penalty": 1.5, "logit_bias": {"6": 1.0}, "sampling_seed": 3, "ignore_eos": True,
        "skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True,
        "stream_interval": 4,
    }  # fmt: skip
    answer = await generate(client, sampling_params=sampling, priority=3, extra_key="s", log_metrics=False)
    assert "warnings" not in answer.json["meta_info"]
    sent = client.engine.submitted[0]
    assert (sent.salt, sent.priority) == ("s", 3)
    assert sent.params == SamplingParams(
        max_tokens=9, min_tokens=2, stop=("x", "y"), stop_token_ids=(5,), temperature=0.5, top_p=0.9, top_k=7,
        min_p=0.1, frequency_penalty=0.5, presence_penalty=0.6, repetition_penalty=1.5, logit_bias={6: 1.0}, seed=3,
        ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True,
    )  # fmt: skip


async def test_length_by_default(client: Client) -> None:
    await generate(client)
    assert client.engine.submitted[0].params.max_tokens == 98  # 128, or what the context leaves
    refused = await generate(client, sampling_params={"max_new_tokens": 128})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")


async def test_nothing_is_generated_for_a_length_of_0(client: Client) -> None:
    client.engine.script = lambda *_: [
        OutputDelta(0, "", [], finish_reason=FinishReason.LENGTH, prompt_logprobs=[None])
    ]
    answer = (await generate(client, sampling_params={"max_new_tokens": 0})).json
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == ("", {"type": "length", "length": 0})
    assert not LOGPROBS & set(answer["meta_info"])


async def test_batches_are_lists_in_their_order(client: Client) -> None:
    client.engine.script = lambda number, _: list(spell("ab"[number % 2]))
    answers = (await client.post("/generate", {"text": ["x", "yz"], "rid": ["r", "s"]})).json
    assert [(a["text"], a["meta_info"]["id"], a["meta_info"]["prompt_tokens"]) for a in answers] == [
        ("a", "r", 1),
        ("b", "s", 2),
    ]
    assert isinstance((await client.post("/generate", {"input_ids": [[5]]})).json, list)
    assert (await client.post("/generate", {"input_ids": [5, 6]})).json["meta_info"]["prompt_tokens"] == 2


async def test_members_of_a_batch_have_their_own_parameters(client: Client) -> None:
    client.engine.script = lambda number, _: scored() if number else list(spell("x"))
    fields = {
        "text": ["hi", "hi"],
        "sampling_params": [{"temperature": 0}, {"top_k": 3}],
        "return_logprob": [False, True],
    }
    answers = (await client.post("/generate", {**fields, "rid": "batch"})).json
    assert [sent.params.temperature for sent in client.engine.submitted] == [0, 1]
    assert [sent.params.logprobs for sent in client.engine.submitted] == [None, 0]
    assert [set(answer["meta_info"]) >= LOGPROBS for answer in answers] == [False, True]
    assert [answer["meta_info"]["id"] for answer in answers] == ["batch_0", "batch_1"]


async def test_n_choices_follow_one_another(client: Client) -> None:
    client.engine.script = lambda *_: [[*spell("a", 0), *spell("b", 1)]]
    answers = (await generate(client, sampling_params={"n": 2}, rid="r")).json
    assert [answer["text"] for answer in answers] == ["a", "b"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1"]


async def test_logprobs_of_the_output_alone_by_default(client: Client) -> None:
    client.engine.script = scored
    info = (await generate(client, return_logprob=True)).json["meta_info"]
    assert client.engine.submitted[0].params.prompt_logprobs is None
    assert set(info) == META | LOGPROBS
    assert info["input_token_logprobs"] == []
    assert info["output_token_logprobs"] == [[-0.1, 97, None], [-0.2, EOS, None]]


@pytest.mark.parametrize(("start", "first"), [(0, 0), (1, 1), (2, 2)])
async def test_logprobs_of_the_prompt_from_a_token_on(client: Client, start: int, first: int) -> None:
    client.engine.script = scored
    fields = {
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    info = (await generate(client, **fields)).json["meta_info"]
    assert set(info) == META | LOGPROBS | TOP
    assert info["input_token_logprobs"] == [[None, 104, "h"], [-1.5, 105, "i"]][first:]
    assert info["input_top_logprobs"] == [None, [[-0.5, 104, "h"], [-0.6, 103, "g"]]][first:]
    assert info["output_top_logprobs"][0] == [[-0.1, 97, "a"], [-2.0, 98, "b"]]


async def test_logprobs_of_chosen_tokens(client: Client) -> None:
    entry = score(97, -0.1)
    chosen = type(entry)(97, -0.1, 1, [], [(5, -7.0), (6, -8.0)])
    client.engine.script = lambda *_: [OutputDelta(0, "a", [97], [chosen], FinishReason.LENGTH)]
    info = (await generate(client, return_logprob=True, token_ids_logprob=[5, 6])).json["meta_info"]
    assert client.engine.submitted[0].params.logprob_token_ids == (5, 6)
    assert info["output_token_ids_logprobs"] == [[[-7.0, 5, None], [-8.0, 6, None]]]
    assert info["input_token_ids_logprobs"] == []
    many = await generate(client, return_logprob=True, logprob_start_len=0, token_ids_logprob=list(range(17)))
    assert many.error["param"] == "token_ids_logprob"


async def test_streams_send_all_there_is_so_far(client: Client) -> None:
    client.engine.script = scored
    *events, done = (await generate(client, stream=True, return_logprob=True)).events()
    assert done == "[DONE]"
    assert [event["text"] for event in events] == ["a", "a"]
    assert [event["output_ids"] for event in events] == [[97], [97, EOS]]
    assert [event["meta_info"]["finish_reason"] for event in events] == [None, {"type": "stop", "matched": EOS}]
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events] == [1, 2]
    assert all("index" not in event for event in events)


async def test_the_last_events_of_a_stream_are_the_plain_answer(client: Client) -> None:
    client.engine.script = lambda number, _: list(spell("ab"[number % 2] * 3))
    fields: dict[str, Any] = {"text": ["x", "y"], "rid": ["r", "s"]}
    plain = (await client.post("/generate", fields)).json
    *events, _ = (await client.post("/generate", {**fields, "stream": True})).events()
    last = {event.pop("index"): event for event in events}
    for answer in (*plain, *last.values()):
        answer["meta_info"]["e2e_latency"] = 0
    assert [last[0], last[1]] == plain


@pytest.mark.parametrize(("param", "fields"), BAD, ids=lambda value: str(value)[:60])
async def test_bad_fields_are_named(client: Client, param: str, fields: dict[str, Any]) -> None:
    answer = await client.post("/generate", fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert not client.engine.streams or all(stream.aborted for stream in client.engine.streams)


async def test_unknown_fields(client: Client) -> None:
    body = {"frobnicate": 1, "sampling_params": {"top_n_sigma": 1}}
    warnings = (await generate(client, **body)).json["meta_info"]["warnings"]
    assert [warning["param"] for warning in warnings] == ["frobnicate", "sampling_params.top_n_sigma"]
    first, last, _ = [
        e for e in (await generate(client, stream=True, **body)).events() if e == "[DONE]" or e["text"] != "o"
    ]
    assert "warnings" not in last["meta_info"]
    assert first["text"] == "ok"
    strict = make_client(FakeEngine(), strict=True)
    assert (await generate(strict, **body)).error["param"] == "frobnicate"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", [{"rid": "r"}, {"abort_all": True}])
async def test_abort_ends_the_answer(client: Client, stream: bool, how: dict[str, Any]) -> None:
    client.engine.script = lambda *_: [OutputDelta(0, "a", [97]), asyncio.Event()]
    asked = asyncio.create_task(generate(client, rid="r", stream=stream))
    while not (client.engine.streams and len(client.engine.streams[0].steps) == 1):
        await asyncio.sleep(0)
    assert (await client.post("/abort_request", {"rid": "other"})).json == {"aborted": 0}
    assert (await client.post("/abort_request", how)).json == {"aborted": 1}
    answer = await asked
    last = answer.events()[-2] if stream else answer.json
    assert last["text"] == "a"
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await client.post("/abort_request", how)).json == {"aborted": 0}


async def test_openai_requests_are_aborted_by_their_ids_too(client: Client) -> None:
    client.engine.script = lambda *_: [asyncio.Event()]
    for rid in ("job", "cmpl-job"):
        asked = asyncio.create_task(client.complete(request_id="job"))
        while not client.state.running.abort(rid):
            await asyncio.sleep(0)
        assert (await asked).json["choices"][0]["finish_reason"] == "abort"


async def test_abort_says_whom(client: Client) -> None:
    assert (await client.post("/abort_request", {})).error["param"] == "rid"


async def test_abort_all_is_the_operators(engine: FakeEngine) -> None:
    client = make_client(engine, api_keys=("user",), admin_api_keys=("admin",))
    answers = [
        await client.post("/abort_request", body, headers={"authorization": f"Bearer {key}"})
        for body in ({"rid": "x"}, {"abort_all": True})
        for key in ("user", "admin")
    ]
    assert [answer.status for answer in answers] == [200, 200, 403, 200]


async def test_facts_of_server_and_model(client: Client) -> None:
    info = (await client.call("GET", "/get_server_info")).json
    assert info == (await client.call("GET", "/server_info")).json
    assert (info["served_model_name"], info["context_length"], info["max_running_requests"]) == ("Tiny", 100, 64)
    assert info["internal_states"][0]["num_running"] == 0
    model = (await client.call("GET", "/model_info")).json
    assert model == (await client.call("GET", "/get_model_info")).json
    assert model["is_generation"] is True
    assert model["model_path"] == "/models/Tiny.Q4_1.gguf"


async def test_health_generate_generates(client: Client) -> None:
    assert (await client.call("GET", "/health_generate")).status == 200
    assert client.engine.submitted[0].params.max_tokens == 1


async def test_health_generate_gives_up(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pinnate.server.sglang.HEALTH_SECONDS", 0.01)
    client.engine.script = lambda *_: [asyncio.Event()]
    answer = await client.call("GET", "/health_generate")
    assert (answer.status, answer.error["code"]) == (500, "engine_error")
