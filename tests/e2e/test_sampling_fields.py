"""Sampling and output fields, end to end: greedy facts of the default model, plain and streamed alike."""

from __future__ import annotations

from typing import Any

import pytest

from pinnate import LLM, SamplingParams
from tests.e2e.harness import Api, ids_of

P1, P1_NEXT = "1, 2, 3, 4, 5, 6, 7,", " 8, 9, 10, 11,"
BLANK, COMMA = 216, 28


async def both(api: Api, **fields: Any) -> str:
    """The text of a completion of P1, which is the same in a stream."""
    plain = await api.complete(P1, **fields)
    assert plain.status == 200, plain.body
    streamed = await api.stream(P1, **fields)
    assert streamed.text() == plain.text
    return plain.text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"bad_words": [" "], "max_tokens": 1}, " and"),
        ({"bad_words": ["elephant"], "max_tokens": 14}, P1_NEXT),
        ({"allowed_token_ids": [284, 256], "max_tokens": 1}, " and"),
        ({"allowed_token_ids": list(range(300)), "bad_words": [" "], "max_tokens": 1}, " and"),
        ({"allowed_token_ids": list(range(28, 42)), "max_tokens": 3, "temperature": 1.0, "seed": 1}, "ANY DIGITS"),
        ({"stop": [COMMA], "max_tokens": 14}, " 8"),
        ({"stop": ["9", "10"], "max_tokens": 14, "min_tokens": 5}, " 8, 9, "),
        ({"stop_token_ids": [COMMA], "include_stop_str_in_output": True}, " 8,"),
        ({"logit_bias": {str(BLANK): -100}, "max_tokens": 1}, " and"),
        ({"truncate_prompt_tokens": 20, "max_tokens": 14}, P1_NEXT),
    ],
)
async def test_greedy_facts(api: Api, fields: dict[str, Any], text: str) -> None:
    shown = await both(api, **fields)
    assert shown == text or (text == "ANY DIGITS" and set(shown) <= set(",-./0123456789"))


async def test_a_bad_word_of_several_tokens_is_cut_before_its_end(api: Api) -> None:
    text = await both(api, bad_words=["9, 10", "9, 1x"], max_tokens=14)
    assert text.startswith(P1_NEXT[:8])
    assert "9, 10" not in text


async def test_bad_words_disturb_nobody_else(api: Api) -> None:
    plain = await api.complete([P1, P1], bad_words=["8"])
    assert not any("8" in text for text in plain.texts)
    assert (await api.complete(P1)).text == P1_NEXT[:8]


async def test_streamed_prompt_logprobs_are_those_of_a_plain_answer(api: Api) -> None:
    fields = {"prompt_logprobs": 2, "return_token_ids": True, "max_tokens": 2}
    plain = (await api.complete(P1, **fields)).choice()
    first = (await api.stream(P1, **fields)).choices()[0]
    assert first["prompt_logprobs"] == plain["prompt_logprobs"]
    assert first["prompt_token_ids"] == plain["prompt_token_ids"] == ids_of(P1)
    assert plain["prompt_logprobs"][0] is None
    for entry, token in zip(plain["prompt_logprobs"][1:], ids_of(P1)[1:], strict=True):
        assert str(token) in entry
    chat = await api.chat("hi", **fields)
    assert (await api.stream_chat("hi", **fields)).events[0]["prompt_logprobs"] == chat.json["prompt_logprobs"]


async def test_timings_add_up(api: Api) -> None:
    timings = (await api.complete(P1, return_timings=True, cache_salt="timings")).json["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, 20, 8)
    assert timings["predicted_per_second"] == pytest.approx(8000 / timings["predicted_ms"])


async def test_unknown_fields_are_answered_and_logged(api: Api) -> None:
    answer = await api.complete(P1, mirostat=2)
    assert [warning["param"] for warning in answer.json["warnings"]] == ["mirostat"]
    assert answer.text == P1_NEXT[:8]
    assert "without effect: ['mirostat']" in api.server.text()


async def test_allowed_tokens_and_a_language_hold_together(api: Api) -> None:
    ids = [32 + digit for digit in (3, 5, 7)]
    answer = await api.complete(P1, structured_outputs={"regex": "[0-9]{4}"}, allowed_token_ids=[*ids, COMMA])
    assert len(answer.text) == 4
    assert set(answer.text) <= set("357")
    stuck = await api.complete(P1, allowed_token_ids=[BLANK], bad_words=[" "])
    assert (stuck.status, stuck.error["param"]) == (400, "allowed_token_ids")


def test_llm_takes_the_same_fields() -> None:
    with LLM(max_model_len=256, max_num_seqs=4) as llm:
        greedy = {"temperature": 0.0, "max_tokens": 1}
        given = ({"bad_words": (" ",)}, {"allowed_token_ids": (284, 256)}, {"logprobs": 0, "logprob_token_ids": (284,)})
        results = llm.generate([P1] * 3, [SamplingParams(**greedy, **fields) for fields in given], use_tqdm=False)
    first, second, third = [result.outputs[0] for result in results]
    assert [first.text, second.text, third.text] == [" and", " and", " "]
    assert third.logprobs is not None
    ((token, logprob),) = third.logprobs[0].chosen
    assert (token, logprob) == (284, pytest.approx(-4.0734, abs=0.15))
