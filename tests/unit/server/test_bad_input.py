"""Each bad input is a 4xx with the error object that names the field, and reaches no engine."""

from __future__ import annotations

from typing import Any

import pytest

from pinnate.server.limits import ServerLimits
from tests.unit.server.conftest import Client, FakeEngine, make_client

COMPLETION_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": True}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": True}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.1}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 0.01}),
    ("min_p", {"min_p": 2}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("frequency_penalty", {"frequency_penalty": -3}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("n", {"n": 0}),
    ("n", {"n": -1}),
    ("n", {"n": 5_000_000}),
    ("seed", {"seed": 2**64}),
    ("seed", {"seed": 1.5}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"05": 1}}),
    ("logit_bias", {"logit_bias": {"5": 101}}),
    ("logit_bias", {"logit_bias": {"5": "much"}}),
    ("logit_bias", {"logit_bias": [1]}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": 5}),
    ("stop", {"stop": ["x"] * 17}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": True}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("allowed_token_ids", {"allowed_token_ids": ["5"]}),
    ("bad_words", {"bad_words": [""]}),
    ("bad_words", {"bad_words": "word"}),
    ("bad_words", {"bad_words": ["x"] * 1025}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 101}),
    ("truncation_side", {"truncation_side": "left"}),
    ("truncation_side", {"truncation_side": "middle", "truncate_prompt_tokens": 5}),
    ("request_id", {"request_id": ""}),
    ("request_id", {"request_id": "two words"}),
    ("request_id", {"request_id": "line\nbreak"}),
    ("request_id", {"request_id": "x" * 129}),
    ("request_id", {"request_id": 5}),
    ("stop", {"stop": ["a", 1.5]}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "echo": True, "logprobs": 2}),
    ("best_of", {"best_of": 2, "n": 3}),
    ("best_of", {"best_of": 2, "n": 3, "use_beam_search": True}),
    ("best_of", {"best_of": 65}),
    ("best_of", {"best_of": 65, "use_beam_search": True}),
    ("best_of", {"best_of": 2, "stream": True}),
    ("best_of", {"best_of": 1.5}),
    ("use_beam_search", {"use_beam_search": "yes"}),
    ("length_penalty", {"length_penalty": 2}),
    ("length_penalty", {"length_penalty": 100, "use_beam_search": True}),
    ("early_stopping", {"early_stopping": True}),
    ("early_stopping", {"early_stopping": "always", "use_beam_search": True}),
    ("early_stopping", {"early_stopping": 1, "use_beam_search": True}),
    ("max_tokens", {"use_beam_search": True, "echo": True, "max_tokens": 0}),
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(257)}, "use_beam_search": True}),
    ("stop_token_ids", {"stop_token_ids": list(range(257)), "use_beam_search": True}),
    ("cache_salt", {"cache_salt": ""}),
    ("cache_salt", {"cache_salt": 5}),
    ("cache_salt", {"cache_salt": []}),
    ("priority", {"priority": 2**31}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {}}),
    ("stream_options", {"stream_options": {"include_usage": True}, "stream": False}),
    ("stream_options.include_usage", {"stream_options": {"include_usage": 1}, "stream": True}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": [""]}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [999999]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [1.5]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [[5], [-1]]}),
    ("prompt", {"prompt": [5, "x"]}),
    ("prompt", {"prompt": ["x", [5]]}),
    ("prompt", {"prompt": [2**40]}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": {}}),
    ("prompt", {"prompt": ["x"] * 1025}),
    ("prompt", {"prompt": "x" * 200}),
    ("model", {"model": 5}),
]

UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("suffix", {"suffix": "end"}),
    ("temperature", {"use_beam_search": True, "temperature": 0.7}),
    ("top_p", {"use_beam_search": True, "top_p": 0.5}),
    ("top_k", {"use_beam_search": True, "top_k": 5}),
    ("min_p", {"use_beam_search": True, "min_p": 0.5}),
    ("presence_penalty", {"use_beam_search": True, "presence_penalty": 1}),
    ("repetition_penalty", {"use_beam_search": True, "repetition_penalty": 1.5}),
    ("regex", {"use_beam_search": True, "regex": "a"}),
    ("guided_whitespace_pattern", {"guided_whitespace_pattern": " "}),
    ("lora_request", {"lora_request": {}}),
    ("lora", {"lora": [{"id": 0, "scale": 1}]}),
    ("images", {"images": ["AAAA"]}),
    ("bad_words", {"use_beam_search": True, "bad_words": ["x"]}),
    ("allowed_token_ids", {"use_beam_search": True, "allowed_token_ids": [1]}),
    ("store", {"store": True}),
]

CHAT_UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("audio", {"audio": {"voice": "x", "format": "wav"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": {"name": "f"}}),
    ("reasoning_effort", {"reasoning_effort": "low"}),
    ("chat_template", {"chat_template": "{{ x }}"}),
    ("prediction", {"prediction": {"type": "content", "content": "x"}}),
    ("messages[0].role", {"messages": [{"role": "function", "name": "f", "content": "5"}]}),
    ("messages[0].function_call", {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}),
    (
        "messages[0].content[1].type",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}
            ]
        },
    ),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"x": 1}]}]}),
]

CHAT_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": {"role": "user", "content": "hi"}}),
    ("messages", {"messages": ["hi"]}),
    ("messages[0].role", {"messages": [{"content": "hi"}]}),
    ("messages[0].role", {"messages": [{"role": "wizard", "content": "hi"}]}),
    ("messages[0].role", {"messages": [{"role": 5, "content": "hi"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_tokens", {"max_tokens": 0, "echo": True}),
    ("max_completion_tokens", {"max_completion_tokens": -3}),
    ("max_completion_tokens", {"max_completion_tokens": 5, "max_tokens": 3}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("logprobs", {"logprobs": 5}),
    ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
]


@pytest.mark.parametrize(("param", "fields"), COMPLETION_FIELDS, ids=lambda v: str(v)[:60])
async def test_bad_completion_fields_are_named(client: Client, param: str, fields: dict[str, Any]) -> None:
    answer = await client.complete(**fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert param.partition("[")[0] in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert not client.engine.streams or all(stream.aborted for stream in client.engine.streams)


@pytest.mark.parametrize(("param", "fields"), CHAT_FIELDS, ids=lambda v: str(v)[:60])
async def test_bad_chat_fields_are_named(client: Client, param: str, fields: dict[str, Any]) -> None:
    answer = await client.chat(**fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert not client.engine.submitted


@pytest.mark.parametrize(("param", "fields"), UNSUPPORTED, ids=lambda v: str(v)[:40])
async def test_what_is_not_offered_is_refused_by_name(client: Client, param: str, fields: dict[str, Any]) -> None:
    answer = await client.complete(**fields)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported", param)
    assert not client.engine.submitted


@pytest.mark.parametrize(("param", "fields"), CHAT_UNSUPPORTED, ids=lambda v: str(v)[:40])
async def test_what_chat_does_not_offer_is_refused_by_name(client: Client, param: str, fields: dict[str, Any]) -> None:
    answer = await client.chat(**fields)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported", param)


NEUTRAL: dict[str, Any] = {
    "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True,
    "prompt_cache_key": "k", "safety_identifier": "s", "tools": [], "tool_choice": "none", "logit_bias": None,
    "response_format": {"type": "text"}, "modalities": ["text"], "audio": None, "stop": None, "functions": None,
}  # fmt: skip


async def test_what_asks_for_nothing_is_accepted(client: Client) -> None:
    assert (await client.chat(**NEUTRAL)).status == 200
    assert (await client.complete(suffix="", best_of=1, use_beam_search=False, max_tokens=None)).status == 200


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "logit_bias"]
)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_not_json_are_refused(client: Client, field: str, value: str) -> None:
    member = f'{{"5": {value}}}' if field == "logit_bias" else value
    answer = await client.post("/v1/completions", f'{{"prompt": "hi", "{field}": {member}}}'.encode())
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    "body",
    [b"", b"  ", b"not json", b"[]", b"null", b"5", b'{"prompt": "hi"', b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}',
     b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", b"[" * 1_000_000, b'{"a":' * 100_000],
    ids=range(12),
)  # fmt: skip
async def test_bodies_that_are_no_object_are_refused(client: Client, body: bytes) -> None:
    answer = await client.post("/v1/completions", body)
    assert answer.status == 400
    assert answer.error["code"] in ("invalid_json", "invalid_request")


async def test_an_empty_object_lacks_its_prompt(client: Client) -> None:
    assert (await client.post("/v1/completions", {})).error["param"] == "prompt"
    assert (await client.post("/v1/chat/completions", {})).error["param"] == "messages"


async def test_of_duplicate_keys_the_last_counts(client: Client) -> None:
    answer = await client.post("/v1/completions", b'{"prompt": "hi", "max_tokens": 3, "max_tokens": 7}')
    assert answer.status == 200
    assert client.engine.submitted[0].params.max_tokens == 7


async def test_other_media_types_are_refused(client: Client) -> None:
    body = b'{"prompt": "hi"}'
    assert (await client.post("/v1/completions", body, headers={"content-type": "text/plain"})).status == 415
    assert (await client.post("/v1/completions", body, headers={"content-type": ""})).status == 200
    typed = {"content-type": "application/json; charset=utf-8"}
    assert (await client.post("/v1/completions", body, headers=typed)).status == 200


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused_while_it_is_read(engine: FakeEngine, declared: bool) -> None:
    client = make_client(engine, limits=ServerLimits(max_body_bytes=10_000))
    body = b'{"prompt": "' + b"x" * 100_000 + b'"}'
    headers = {"content-length": str(len(body))} if declared else {}
    answer = await client.post("/v1/completions", body, headers=headers, chunk=1000)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert "10000" in answer.error["message"]
    assert (await client.complete()).status == 200


async def test_unknown_model_is_404_on_every_route(client: Client) -> None:
    for answer in (
        await client.complete(model="no-such-model"),
        await client.chat(model="no-such-model"),
        await client.call("GET", "/v1/models/no-such-model"),
        await client.post("/generate", {"model": "no-such-model", "text": "x"}),
        await client.post("/tokenize", {"model": "no-such-model", "prompt": "x"}),
        await client.post("/detokenize", {"model": "no-such-model", "tokens": [5]}),
    ):
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert "/models" not in answer.error["message"]


async def test_one_bad_prompt_of_several_fails_the_whole_request(client: Client) -> None:
    answer = await client.complete(prompt=[[5, 6], [999]])
    assert answer.status == 400
    assert [stream.aborted for stream in client.engine.streams] == [True]


async def test_an_error_quotes_long_names_in_part_only(client: Client) -> None:
    for answer in (await client.complete(model="x" * 10**6), await client.complete(**{"x" * 10**6: 1})):
        assert answer.status in (200, 404)
        assert len(answer.body) < 1000


async def test_a_hopelessly_long_text_is_refused_unread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    encode = client.engine.tokenizer.encode
    monkeypatch.setattr(
        client.engine.tokenizer, "encode", lambda text, **kw: read.append(len(text)) or encode(text, **kw)
    )
    # The fake vocabulary's longest token is <eos>, 5 bytes: 100 tokens spell 500 characters at most.
    for length, at_least in ((101, "101"), (1600, "1600"), (1601, "321"), (10**6, "200000")):
        answer = await client.complete(prompt="x" * length)
        assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "prompt")
        assert "100" in answer.error["message"]
        assert at_least in answer.error["message"]
    assert read == [101, 1600]
    chat = await client.chat(messages=[{"role": "user", "content": "x" * 10**6}])
    assert chat.error["param"] == "messages"
