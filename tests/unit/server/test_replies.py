"""Plain answers: shapes, order, logprobs, usage; and what reaches the engine."""

from __future__ import annotations

import pytest

from pinnate.core.request import FinishReason
from pinnate.engine.output_processor import OutputDelta
from tests.unit.server.conftest import Client, score, spell


async def test_chat_answer(client: Client) -> None:
    body = (await client.chat()).json
    assert set(body) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ok", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == len(b"[user]hi[assistant]")
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_completion_answer(client: Client) -> None:
    answer = await client.complete()
    body = answer.json
    assert body["id"].startswith("cmpl-")
    assert answer.headers["x-request-id"] == body["id"]
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("prompt", [["a", "bb", "ccc"], [[97], [98, 98], [99, 99, 99]]])
async def test_choices_are_ordered_by_prompt_then_choice(client: Client, prompt: list[object]) -> None:
    client.engine.script = lambda number, _: [
        OutputDelta(k, f"{number}{k}", [50], finish_reason=FinishReason.LENGTH, num_cached_tokens=1) for k in (1, 0)
    ]
    body = (await client.complete(prompt=prompt, n=2)).json
    assert [(c["index"], c["text"]) for c in body["choices"]] == list(enumerate(["00", "01", "10", "11", "20", "21"]))
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3  # once for each prompt, whatever n is


async def test_stop_reason_is_told(client: Client) -> None:
    client.engine.script = lambda *_: [OutputDelta(0, "a", [97], finish_reason=FinishReason.STOP, stop_reason="END")]
    assert (await client.complete(stop="END")).json["choices"][0]["stop_reason"] == "END"
    assert client.engine.submitted[0].params.stop == ("END",)


async def test_chat_logprobs(client: Client) -> None:
    client.engine.script = lambda *_: [
        OutputDelta(0, "o", [111], logprobs=[score(111, -0.5, 1, [(111, -0.5), (112, -1.0)])]),
        OutputDelta(0, "", [0xC4], logprobs=[score(0xC4, -3.0, 9, [(111, -0.5), (112, -1.0)])],
                    finish_reason=FinishReason.LENGTH),
    ]  # fmt: skip
    content = (await client.chat(logprobs=True, top_logprobs=2)).json["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "o",
        "logprob": -0.5,
        "bytes": [111],
        "top_logprobs": [
            {"token": "o", "logprob": -0.5, "bytes": [111]},
            {"token": "p", "logprob": -1.0, "bytes": [112]},
        ],
    }
    # the sampled token is outside of the list: one entry more, and its bytes are exact where its text cannot be
    assert [entry["bytes"] for entry in content[1]["top_logprobs"]] == [[111], [112], [0xC4]]
    assert client.engine.submitted[0].params.logprobs == 2


async def test_chat_logprobs_without_alternatives(client: Client) -> None:
    client.engine.script = lambda *_: [
        OutputDelta(0, "o", [111], logprobs=[score(111)], finish_reason=FinishReason.LENGTH)
    ]
    content = (await client.chat(logprobs=True)).json["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]]


async def test_scoring_echoes_and_generates_nothing(client: Client) -> None:
    client.engine.script = lambda *_: [
        OutputDelta(
            0, "", [], logprobs=[], finish_reason=FinishReason.LENGTH,
            prompt_logprobs=[None, score(0xC4, -1.0), score(0x8F, -2.0), score(105, -3.0)],
        )
    ]  # fmt: skip
    for prompt in ("hďi", [104, 0xC4, 0x8F, 105]):
        body = (await client.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=0)).json
        choice = body["choices"][0]
        assert choice["text"] == "hďi"
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == ["h", "bytes:\\xc4", "bytes:\\x8f", "i"]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2]
        assert body["usage"]["completion_tokens"] == 0
    assert client.engine.submitted[0].params.max_tokens == 0
    assert (await client.complete(echo=True, max_tokens=0)).json["choices"][0]["text"] == "hi"
    assert client.engine.submitted[2].params.prompt_logprobs == 0


async def test_hidden_special_tokens_take_no_room_in_the_text(client: Client) -> None:
    client.engine.script = lambda *_: [
        OutputDelta(0, "ab", [97, 0, 98], logprobs=[score(97), score(0), score(98)], finish_reason=FinishReason.LENGTH)
    ]
    hidden = (await client.complete(logprobs=0)).json["choices"][0]["logprobs"]
    assert hidden["text_offset"] == [0, 1, 1]
    shown = (await client.complete(logprobs=0, skip_special_tokens=False)).json["choices"][0]["logprobs"]
    assert shown["text_offset"] == [0, 1, 6]


async def test_prompt_logprobs(client: Client) -> None:
    scores = [None, score(105, -1.5, 7, [(104, -0.5)])]
    client.engine.script = lambda *_: [
        OutputDelta(0, "a", [97], finish_reason=FinishReason.LENGTH, prompt_logprobs=scores)
    ]
    shown = [
        None,
        {
            "104": {"logprob": -0.5, "rank": 1, "decoded_token": "h"},
            "105": {"logprob": -1.5, "rank": 7, "decoded_token": "i"},
        },
    ]
    assert (await client.complete(prompt_logprobs=1)).json["choices"][0]["prompt_logprobs"] == shown
    assert (await client.chat(prompt_logprobs=1)).json["prompt_logprobs"] == shown
    assert (await client.complete(prompt_logprobs=1, max_tokens=0)).status == 200
    assert client.engine.submitted[2].params.max_tokens == 0


async def test_token_ids_on_request(client: Client) -> None:
    body = (await client.complete(return_token_ids=True)).json
    assert body["choices"][0]["token_ids"] == [111, 107, 0]
    assert body["choices"][0]["prompt_token_ids"] == [104, 105]
    body = (await client.chat(return_token_ids=True)).json
    assert body["choices"][0]["token_ids"] == [111, 107, 0]
    assert body["prompt_token_ids"] == client.engine.submitted[1].prompt


async def test_every_sampling_field_reaches_the_engine(client: Client) -> None:
    given = {
        "n": 2, "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5, "seed": 3, "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 4,
        "bad_words": ("x", " y"), "allowed_token_ids": (5, 6),
    }  # fmt: skip
    client.engine.script = lambda *_: [[*spell("a", 0), *spell("b", 1)]]
    client.engine.tokenizer.token_bytes(1)
    fields = {**given, "logprobs": None, "stop": ["x"], "stop_token_ids": [5], "logit_bias": {"5": -100}}
    answer = await client.complete(**fields, cache_salt="s", priority=4)
    assert answer.status == 200
    submitted = client.engine.submitted[0]
    assert (submitted.salt, submitted.priority) == ("s", 4)
    for name, value in given.items():
        if name != "logprobs":
            assert getattr(submitted.params, name) == value
    assert submitted.params.logit_bias == {5: -100.0}
    assert submitted.params.stop_token_ids == (5,)


async def test_lengths_by_default(client: Client) -> None:
    await client.complete()
    await client.complete(prompt="x" * 95)
    await client.chat()
    await client.chat(max_completion_tokens=3)
    assert [s.params.max_tokens for s in client.engine.submitted] == [16, 5, None, 3]


async def test_messages_as_the_template_gets_them(client: Client) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await client.chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "ann"},
            {"role": "assistant", "content": "so"},
        ],
        continue_final_message=True,
    )
    assert bytes(client.engine.submitted[0].prompt) == b"[system]be brief[user ann]one\ntwo[assistant]so"
    await client.chat(add_generation_prompt=False, chat_template_kwargs={"extra": "!"})
    assert bytes(client.engine.submitted[1].prompt) == b"[user]hi!"


async def test_long_conversations_are_rendered_alike(client: Client) -> None:
    client.engine.max_model_len = 10**6
    await client.chat(messages=[{"role": "user", "content": "y" * 30_000}])
    assert bytes(client.engine.submitted[0].prompt) == b"[user]" + b"y" * 30_000 + b"[assistant]"


async def test_without_a_template_chat_says_how_to_pass_one(client: Client) -> None:
    client.engine.chat_template = None
    answer = await client.chat()
    assert answer.status == 400
    assert "--chat-template" in answer.error["message"]
    assert (await client.complete()).status == 200
