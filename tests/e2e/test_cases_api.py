"""Requests that broke other engines: streams, fields, messages. The numbers are those of the collection of cases.

Facts about SmolLM2-135M-Instruct used here: digits, comma and blank are one token each, so that in counting texts a
token is a character; the greedy continuations have logit gaps above 0.6 and are the same in bfloat16 and float32.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.harness import Api, counting, ids_of

P1, P1_NEXT = "1, 2, 3, 4, 5, 6, 7,", " " + counting(60, 8)
P2, P2_NEXT = "10, 20, 30, 40, 50, 60,", " 70, 80, 90, 100, 110, 120"
P3, P3_NEXT = "0 1 0 1 0 1 0 1 0 1 0 1", " 1" * 40
P4 = "The weather today is"
ALPHABET = "Here is the English alphabet: ABC"
SPLIT = "ď ď ď ď ď ď ď ď"  # each ` ď` is two tokens

P1_LOGPROBS = [
    None, -2.0278, -0.6285, -1.0697, -1.8430, -0.0991, -0.4401, -0.2072, -0.0773, -0.1149,
    -0.1019, -0.0777, -0.0690, -0.1594, -0.1150, -0.0507, -0.1256, -0.0531, -0.0438, -0.0452,
]  # fmt: skip
P1_TOP = {" ": -0.0370, " and": -4.0734, "  ": -5.0374, "\n": -6.4989, " ...": -6.7567}
BF16 = 0.15  # what bfloat16 may differ by in a log-probability


async def test_case_1_no_torn_characters(api: Api) -> None:
    plain = (await api.complete(SPLIT, return_token_ids=True)).choice()
    streamed = await api.stream(SPLIT)
    assert plain["text"] == streamed.text() == " ď ď ď ď"
    assert not any("\ufffd" in piece for piece in streamed.pieces())
    decoded = (await api.post("/detokenize", {"tokens": plain["token_ids"]})).json["prompt"]
    assert decoded == plain["text"]
    forced = {"logit_bias": {"24488": 100, "233": 99}, "max_tokens": 4}
    assert (await api.chat("hi", **forced)).text == (await api.stream_chat("hi", **forced)).text()


STOPS: list[tuple[str, str, str, dict[str, Any]]] = [
    (P1, "10", " 8, 9, ", {}),
    (ALPHABET, "DEFGHIJ", "", {}),
    (ALPHABET, "DE", "", {}),
    (ALPHABET, "EF", "D", {}),
    (P1, "10", " 8, 9, 10", {"include_stop_str_in_output": True}),
]


@pytest.mark.parametrize(("prompt", "stop", "text", "fields"), STOPS)
async def test_case_3_stop_strings_never_leak(
    api: Api, prompt: str, stop: str, text: str, fields: dict[str, Any]
) -> None:
    plain = await api.complete(prompt, stop=stop, max_tokens=18, **fields)
    streamed = await api.stream(prompt, stop=stop, max_tokens=18, **fields)
    assert plain.text == streamed.text() == text
    assert plain.choice()["finish_reason"] == "stop"
    assert plain.choice()["stop_reason"] == stop
    assert streamed.finish() == ["stop"]


async def test_case_3_the_first_to_complete_wins(api: Api) -> None:
    assert (await api.complete(P1, stop=["9, 10", "9, 1"], max_tokens=18)).text == " 8, "
    for empty in ([], None):
        assert (await api.complete(P1, stop=empty)).text == P1_NEXT[:8]


@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_case_5_shape_of_chunks(api: Api, options: Any) -> None:
    fields = {} if options == "absent" else {"stream_options": options}
    streamed = await api.stream_chat("hi", max_tokens=5, **fields)
    wanted = isinstance(options, dict) and options.get("include_usage") is True
    usages = [event["usage"] for event in streamed.events if event.get("usage")]
    assert [usage["total_tokens"] for usage in usages] == ([36] if wanted else [])
    assert all("finish_reason" in choice for choice in streamed.choices())
    assert [bool(choice["delta"].get("role")) for choice in streamed.choices()].count(True) == 1
    assert streamed.finish() == ["length"]
    assert streamed.done == 1
    assert streamed.complete


@pytest.mark.parametrize("fields", [{"n": 0}, {"model": "no-such-model"}, {"prompt": ids_of(counting(2000)[:3000])}])
async def test_case_7_early_errors_are_statuses(api: Api, fields: dict[str, Any]) -> None:
    streamed = await api.stream_of("/v1/completions", {**api.completion_body(P1, stream=True), **fields})
    assert streamed.status in (400, 404)
    assert b'"error"' in streamed.body


async def test_case_8_lengths(api: Api) -> None:
    assert (await api.complete(P1, max_tokens=None)).text == P1_NEXT[:16]
    assert (await api.chat("hi", max_tokens=None, stop="!")).text == "Hello there"
    answer = await api.complete(ids_of(counting(2000)[:2049]))
    for number in ("2048", "2049"):
        assert number in answer.error["message"]


BAD_PROMPTS: list[Any] = [
    "", [""], [], [[]], [49152], [999999], [-1], [1.5], [True], [[19556], [-1]], [19556, "x"], [2**40], None,
]  # fmt: skip


async def test_case_10_empty_prompts_and_bad_ids_stop_nothing(api: Api) -> None:
    """The tokenizer gives no BOS, so that an empty text has no token to start from."""
    for prompt in BAD_PROMPTS:
        answer = await api.complete(prompt, max_tokens=2)
        assert (answer.status, answer.error["param"]) == (400, "prompt"), prompt
    assert (await api.chat([])).error["param"] == "messages"
    assert (await api.complete(P1)).text == P1_NEXT[:8]
    assert api.server.health() == 200


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30])
async def test_case_11_tiny_temperatures_are_greedy(api: Api, temperature: float) -> None:
    assert (await api.complete(P1, temperature=temperature)).text == P1_NEXT[:8]


async def test_case_12_mixed_rows_do_not_disturb_each_other(api: Api) -> None:
    rows: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_k": 0},
        {"temperature": 1, "top_k": -1}, {"temperature": 1, "top_k": 10**9}, {"temperature": 1, "min_p": 0.9},
        {"temperature": 1, "top_p": 0.1}, {"temperature": 1, "top_k": 3, "top_p": 0.9, "min_p": 0.01},
    ]  # fmt: skip
    alone = [(await api.complete(P1, seed=50 + i, **row)).text for i, row in enumerate(rows)]
    for i in (0, 1, 5, 6):
        assert alone[i] == P1_NEXT[:8]
    together = await asyncio.gather(*(api.complete(P1, seed=50 + i, **row) for i, row in enumerate(rows)))
    assert [answer.text for answer in together] == alone


HUGE: list[tuple[str, dict[str, Any]]] = [
    *(("n", {"n": n}) for n in (0, -1, 129, 5_000_000)),
    *(("logprobs", {"logprobs": n}) for n in (-1, 49153, 10**9)),
    ("best_of", {"n": 3, "best_of": 2}),
]


async def test_case_14_huge_costs_are_refused_before_they_are_paid(api: Api) -> None:
    await asyncio.gather(api.complete(P1, temperature=1), api.chat("hi", logprobs=True))  # a first use costs more
    before = await api.bytes_beside_kv()
    for field, fields in HUGE:
        answer, neighbour = await asyncio.gather(api.complete(P1, temperature=1, **fields), api.complete(P1))
        assert (answer.status, answer.error["param"]) == (400, field), fields
        assert neighbour.text == P1_NEXT[:8]
    for top in (-1, 21, 49153, 10**9):
        answer = await api.chat("hi", logprobs=True, top_logprobs=top)
        assert (answer.status, answer.error["param"]) == (400, "top_logprobs"), top
    assert (await api.chat("hi", top_logprobs=3)).status == 400
    assert await api.bytes_beside_kv() - before < 50 << 20
    most = await api.complete(P4, n=32, temperature=1, max_tokens=2)
    assert [choice["index"] for choice in most.json["choices"]] == list(range(32))
    scored = (await api.chat("hi", logprobs=True, max_tokens=2)).choice()["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in scored] == [[], []]


async def test_case_16_max_completion_tokens(api: Api) -> None:
    for fields in ({"max_tokens": None, "max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        answer = await api.chat("hi", **fields)
        assert answer.json["usage"]["completion_tokens"] == 3
        assert answer.choice()["finish_reason"] == "length"


def chat_of(message: str) -> bytes:
    return b'{"max_tokens": 2, "messages": ' + message.encode() + b"}"


MALFORMED = [
    b"not json", b"", b"[]", b"{}", b"null", b"5", chat_of("[]")[:-9], chat_of('{"role": "user", "content": "hi"}'),
    chat_of('[{"content": "hi"}]'), chat_of('[{"role": "wizard", "content": "hi"}]'), chat_of('["hi"]'),
    chat_of('[{"role": "user", "content": ' + "[" * 10_000 + "]" * 10_000 + "}]"),
]  # fmt: skip


async def test_case_17_malformed_bodies_get_the_error_object(api: Api) -> None:
    for body in MALFORMED:
        answer = await api.request("POST", "/v1/chat/completions", body)
        assert answer.status == 400, body[:60]
        assert answer.error["message"]
    good = chat_of('[{"role": "user", "content": "hi"}]')
    assert (await api.request("POST", "/v1/chat/completions", good)).status == 200  # no model: the one that is served
    assert (await api.request("POST", "/v1/chat/completions", good, Content_Type="text/plain")).status == 415
    twice = good[:-1] + b', "max_tokens": 3}'
    answer = await api.request("POST", "/v1/chat/completions", twice)
    assert answer.json["usage"]["completion_tokens"] == 3  # of duplicate keys the last counts


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_case_17_unknown_models_and_other_methods(api: Api, path: str) -> None:
    asked = {"prompt": P1, "messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 2}
    known = {"/v1/completions": ("prompt",), "/v1/responses": ("input",)}.get(path, ("messages", "max_tokens"))
    answer = await api.post(path, {"model": "no-such-model", **{key: asked[key] for key in known}})
    assert answer.status == 404
    assert "no-such-model" in answer.json["error"]["message"]
    for method in ("GET", "PUT", "DELETE"):
        assert (await api.request(method, path, b"{}")).status == 405
    assert (await api.get("/v1/models/no-such-model")).error["code"] == "model_not_found"


async def test_case_18_parts_and_prefill(api: Api) -> None:
    part = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert (await api.chat("hi")).text == (await api.chat(part)).text
    flags = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 6}
    for content in (P1, [{"type": "text", "text": P1}]):
        messages = [{"role": "user", "content": "Count on."}, {"role": "assistant", "content": content}]
        assert (await api.chat(messages, **flags)).text == P1_NEXT[:6]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", [P1, ids_of(P1)], ids=["text", "ids"])
async def test_case_21_echo_scores_the_prompt(api: Api, prompt: Any, max_tokens: int) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    plain, streamed = await api.complete(prompt, **fields), await api.stream(prompt, **fields)
    scores = plain.choice()["logprobs"]
    assert plain.text == streamed.text() == P1 + " " * max_tokens
    assert scores["tokens"] == list(plain.text)
    assert scores["text_offset"] == list(range(20 + max_tokens))
    assert scores["token_logprobs"][0] is None
    assert scores["token_logprobs"][1:20] == pytest.approx(P1_LOGPROBS[1:], abs=BF16)
    joined = [value for choice in streamed.choices() for value in choice["logprobs"]["token_logprobs"]]
    assert joined == scores["token_logprobs"]
    assert plain.json["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize("as_ids", [False, True])
async def test_case_22_prompts_times_n(api: Api, as_ids: bool) -> None:
    prompts = [ids_of(p) for p in (P1, P2, P3)] if as_ids else [P1, P2, P3]
    fields: dict[str, Any] = {"n": 2, "max_tokens": 6, "stop": ["8", "80"]}
    wanted = [" ", " ", " 70, ", " 70, ", " 1 1 1", " 1 1 1"]
    plain = await api.complete(prompts, **fields)
    assert plain.texts == wanted
    assert [choice["index"] for choice in plain.json["choices"]] == list(range(6))
    assert plain.json["usage"]["prompt_tokens"] == 66
    streamed = await api.stream(prompts, **fields)
    assert [streamed.text(i) for i in range(6)] == wanted
    assert all(len(streamed.finish(i)) == 1 for i in range(6))


async def test_case_23_no_second_bos(api: Api) -> None:
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    written = f"<|im_start|>system\n{default}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    chat, by_hand = await api.chat("hi"), await api.complete(written)
    assert chat.json["usage"]["prompt_tokens"] == by_hand.json["usage"]["prompt_tokens"] == 31
    assert chat.text == by_hand.text
    short = await api.chat([{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}])
    assert short.json["usage"]["prompt_tokens"] == 16


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "hi"}],
        [{"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}],
        [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": "S"}],
    ],
)
async def test_case_24_odd_conversations_are_answered(api: Api, messages: list[dict[str, str]]) -> None:
    assert (await api.chat(messages, max_tokens=2)).status == 200


@pytest.mark.parametrize(
    ("fields", "token"),
    [
        ({"frequency_penalty": 2}, " "),
        ({"presence_penalty": 2}, " "),
        ({"repetition_penalty": 1.3}, " and"),
        ({"logit_bias": {"216": -100}}, " and"),
        ({"logit_bias": {"284": 100}}, " and"),
    ],
)
async def test_case_41_which_tokens_penalties_count(api: Api, fields: dict[str, Any], token: str) -> None:
    answers = await asyncio.gather(api.complete(P1, max_tokens=1, **fields), *(api.complete(p) for p in (P1, P2, P3)))
    assert [answer.text for answer in answers] == [token, P1_NEXT[:8], P2_NEXT[:8], P3_NEXT[:8]]


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 2}, {"temperature": 1, "top_p": 0.1}, {"temperature": 1, "top_k": 1}]
)
async def test_case_45_logprobs_are_raw_at_every_setting(api: Api, fields: dict[str, Any]) -> None:
    scores = (await api.complete(P1, max_tokens=1, logprobs=5, seed=1, **fields)).choice()["logprobs"]
    top = scores["top_logprobs"][0]
    assert len(top) in (5, 6)
    assert top[scores["tokens"][0]] == scores["token_logprobs"][0]
    assert {token: top[token] for token in P1_TOP} == pytest.approx(P1_TOP, abs=2 * BF16)


async def test_case_74_the_turn_ends(api: Api) -> None:
    answer = await api.chat("hi", max_tokens=60)
    assert answer.choice()["finish_reason"] == "stop"
    assert "<|im" not in answer.text
    forced = {"logit_bias": {"2": 100}, "max_tokens": 4}
    ended = await api.complete(P1, **forced)
    assert (ended.text, ended.json["usage"]["completion_tokens"], ended.choice()["stop_reason"]) == ("", 1, None)
    ignored = await api.complete(P1, ignore_eos=True, **forced)
    assert ignored.choice()["finish_reason"] == "length"
    assert ignored.json["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("url", ["file:///etc/hostname", "file:///etc/no-such-file", "http://127.0.0.1:{port}/x"])
async def test_case_76_no_url_is_ever_opened(api: Api, url: str) -> None:
    visits: list[int] = []
    listener = await asyncio.start_server(lambda *_: visits.append(1), "127.0.0.1", 0)
    async with listener:
        at = url.format(port=listener.sockets[0].getsockname()[1])
        answer = await api.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": at}}]}])
        await asyncio.sleep(0.05)
    assert (answer.status, answer.error["code"]) == (400, "unsupported")
    assert "etc" not in answer.error["message"]
    assert not visits
