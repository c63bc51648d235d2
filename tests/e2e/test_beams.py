"""Beam search and best_of over real HTTP with OpenAI's client, and LLM.beam_search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from pinnate import LLM
from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.core.request import FinishReason
from tests.e2e.conftest import MODEL
from tests.e2e.harness import Api, Server, counting, fresh_ids

P1, P1_NEXT = "1, 2, 3, 4, 5, 6, 7,", " 8, 9, 10, 11, 12, 13"
P4 = "The weather today is"
BEAMS: dict[str, Any] = {"use_beam_search": True, "length_penalty": 0}
USER = [{"role": "user", "content": "Name a colour."}]
EOS = "2"


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def sums(choices: list[dict[str, Any]]) -> list[float]:
    return [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]


async def test_openai_client_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=P4, max_tokens=8, n=4, logprobs=2, extra_body=BEAMS)
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 4
    assert texts[0] == " 2022-01"
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    scores = [sum(choice.logprobs.token_logprobs) for choice in answer.choices]  # type: ignore[union-attr, arg-type, misc]
    assert scores == sorted(scores, reverse=True)
    assert all(len(top) in (2, 3) for choice in answer.choices for top in choice.logprobs.top_logprobs)  # type: ignore[union-attr]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 32)


async def test_openai_client_chat_plain_and_streamed(client: openai.AsyncOpenAI) -> None:
    body = {"use_beam_search": True, "length_penalty": 1.5, "early_stopping": True}
    asked: dict[str, Any] = {"model": MODEL, "messages": USER, "n": 3, "max_tokens": 12, "extra_body": body}
    answer = await client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    pieces: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.delta.content:
                pieces.setdefault(choice.index, []).append(choice.delta.content)
    assert [pieces[i] for i in range(3)] == [[text] for text in texts]  # each choice comes whole
    assert chunks[-1].usage is not None
    assert answer.usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


async def test_openai_client_refusals(client: openai.AsyncOpenAI) -> None:
    for field, fields in [
        ("temperature", {"temperature": 0.7, "extra_body": BEAMS}),
        ("length_penalty", {"extra_body": {"length_penalty": 2}}),
        ("n", {"n": 33, "extra_body": BEAMS}),
        ("best_of", {"best_of": 2, "stream": True}),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=MODEL, prompt=P1, max_tokens=4, **fields)  # type: ignore[call-overload]
        assert refused.value.param == field


async def test_logprobs_are_those_that_scoring_the_text_gives(api: Api) -> None:
    answer = await api.complete(P4, n=4, logprobs=0, return_token_ids=True, **BEAMS)
    for choice in answer.json["choices"]:
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        scored = (await api.complete(ids, echo=True, logprobs=0, max_tokens=0)).choice()["logprobs"]["token_logprobs"]
        assert scored[len(choice["prompt_token_ids"]) :] == choice["logprobs"]["token_logprobs"]


async def test_case_61_width_one_is_greedy(api: Api) -> None:
    assert (await api.complete(P1, max_tokens=12, n=1, use_beam_search=True)).text == P1_NEXT[:12]


async def test_case_61_a_stop_string_ends_a_beam_within_the_search(api: Api) -> None:
    """The others go on: the results differ, and each one's score is that of its own tokens."""
    answer = await api.complete(P1, n=4, max_tokens=12, stop=", 1", logprobs=0, **BEAMS)
    choices = answer.json["choices"]
    assert len(set(answer.texts)) == 4
    assert choices[0]["text"] == " 8, 9"
    assert (choices[0]["finish_reason"], choices[0]["stop_reason"]) == ("stop", ", 1")
    assert sums(choices) == sorted(sums(choices), reverse=True)
    assert all(", 1" not in text for text in answer.texts)
    included = await api.complete(P1, n=4, max_tokens=12, stop=", 1", include_stop_str_in_output=True, **BEAMS)
    assert included.texts[0] == " 8, 9, 1"


async def test_case_61_the_end_of_a_turn_ends_a_beam(api: Api) -> None:
    answer = await api.complete(P1, n=3, max_tokens=6, logit_bias={EOS: 100}, logprobs=0, **BEAMS)
    choices = answer.json["choices"]
    assert (choices[0]["text"], choices[0]["finish_reason"]) == ("", "stop")
    assert len(choices) == 3
    assert choices[0]["logprobs"]["token_logprobs"][0] < -1  # of the raw distribution
    until = await api.complete(
        P1, n=3, max_tokens=6, min_tokens=3, logit_bias={EOS: 100}, return_token_ids=True, **BEAMS
    )
    assert [len(choice["token_ids"]) for choice in until.json["choices"]] == [4, 4, 4]


async def test_same_bytes_alone_and_among_others(api: Api) -> None:
    jobs: list[dict[str, Any]] = [
        {"prompt": P4, "n": 4, "logprobs": 1, **BEAMS},
        {"prompt": P4, "n": 2, "best_of": 12, "logprobs": 1, **BEAMS},
        {"prompt": P4, "n": 4, "logprobs": 1, "temperature": 1.2, "seed": 5, "max_tokens": 12},
    ]
    alone = [(await api.complete(**job)).json["choices"] for job in jobs]
    others = [api.complete(counting(k + 9, k), max_tokens=12) for k in (1, 11, 31, 61)]
    together = await asyncio.gather(*(api.complete(**job) for job in jobs), *others)
    assert [answer.json["choices"] for answer in together[:3]] == alone
    lone = await api.complete(P4, logprobs=1, temperature=1.2, seed=5 + 3, max_tokens=12)
    assert lone.choice()["logprobs"] == alone[2][3]["logprobs"]  # choice 3 is drawn with the seed + 3


async def test_best_of(api: Api) -> None:
    drawn = {"temperature": 1.0, "seed": 4, "max_tokens": 8, "logprobs": 0}
    every = (await api.complete(P4, n=6, **drawn)).json
    best = (await api.complete(P4, n=2, best_of=6, **drawn)).json

    def mean(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    ranked = sorted(every["choices"], key=mean, reverse=True)
    assert [choice["logprobs"] for choice in best["choices"]] == [choice["logprobs"] for choice in ranked[:2]]
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]


async def test_a_prompt_with_eight_choices_is_computed_once(api: Api) -> None:
    before = await api.metrics()
    answer = await api.complete(fresh_ids(400), n=8, temperature=1, max_tokens=4, ignore_eos=True)
    after = await api.metrics()
    assert len(answer.texts) == 8
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 400
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 32


async def test_the_saving_shows_in_the_metrics(api: Api) -> None:
    before = await api.metrics()
    await api.complete(fresh_ids(160), n=4, max_tokens=17, ignore_eos=True, **BEAMS)
    after = await api.metrics()
    held, lone = (
        after[name] - before[name] for name in ("beam_search_page_steps_total", "beam_search_lone_page_steps_total")
    )
    assert 0 < held < 0.4 * lone


async def test_case_61_a_client_that_leaves_frees_every_page(api: Api) -> None:
    total = (await api.metrics())["kv_pages"]
    await api.drop(api.completion_body(P4, n=6, max_tokens=1500, ignore_eos=True, **BEAMS), 0.4)
    values = await api.until_idle()
    assert values["kv_pages_free"] + values["kv_pages_cached"] == total
    assert (await api.complete(P1)).text == P1_NEXT[:8]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_model_len=256, max_num_seqs=16, check_integrity=True) as llm:
        yield llm


def test_llm_gives_the_best_n_of_the_width(llm: LLM) -> None:
    (wide,) = llm.beam_search(P4, beam_width=6, max_tokens=10, use_tqdm=False)
    (best,) = llm.beam_search(P4, beam_width=6, n=2, max_tokens=10, use_tqdm=False)
    assert len(wide.outputs) == 6
    assert best.outputs == wide.outputs[:2]
    scores = [output.score for output in wide.outputs]
    assert scores == sorted(scores, reverse=True)


def test_llm_stops_and_logprobs(llm: LLM) -> None:
    results = llm.beam_search([P1, P4], beam_width=3, max_tokens=12, stop=(", 9",), logprobs=1, use_tqdm=False)
    best = next(output for output in results[0].outputs if output.text == " 8")
    assert (best.finish_reason, best.stop_reason) == (FinishReason.STOP, ", 9")
    assert llm.tokenizer.decode(best.token_ids) == " 8, 9"
    assert best.score == pytest.approx(sum(entry.logprob for entry in best.logprobs or []) / len(best.token_ids))


def test_llm_length_penalty(llm: LLM) -> None:
    """With a bias for the end of the turn, short and long hypotheses compete."""
    found = {}
    for penalty in (-4.0, 4.0):
        (result,) = llm.beam_search(
            P4, beam_width=4, max_tokens=12, length_penalty=penalty, logit_bias={int(EOS): 12.0}, use_tqdm=False
        )
        found[penalty] = [len(output.token_ids) for output in result.outputs]
    assert sum(found[4.0]) > sum(found[-4.0])


def test_llm_refuses_what_a_search_cannot_honour(llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match="top_p is not supported with use_beam_search"):
        llm.beam_search(P4, top_p=0.5, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="beam_width is 17, at most 16 sequences run at once"):
        llm.beam_search(P4, beam_width=17, n=1, max_tokens=4, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="beam_width must be at least 3"):
        llm.beam_search(P4, beam_width=2, n=3, max_tokens=4, use_tqdm=False)
