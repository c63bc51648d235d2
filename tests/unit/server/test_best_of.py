"""best_of, and the fields of a beam search, between the body and the engine."""

from __future__ import annotations

from typing import Any

import pytest

from pinnate.core.request import FinishReason
from pinnate.core.sampling import SamplingParams
from pinnate.engine.output_processor import OutputDelta
from tests.unit.server.conftest import Client, FakeEngine, make_client, score


def candidate(index: int, text: str, logprob: float) -> OutputDelta:
    """Every token has this log-probability."""
    ids = list(text.encode())
    logprobs = [score(token, logprob) for token in ids]
    return OutputDelta(index, text, ids, logprobs, finish_reason=FinishReason.LENGTH)


# by candidate; the longest has the least sum, and the best mean
CANDIDATES = [("a", -0.9), ("bbbbb", -0.3), ("cc", -0.5), ("d", -0.6)]


def script(number: int, params: SamplingParams) -> list[Any]:
    shift = 0.0 if number == 0 else 0.1
    return [
        candidate(i, text, logprob - shift * (text == "bbbbb") * 9)
        for i, (text, logprob) in enumerate(CANDIDATES[: params.n])
    ]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(script=script)


@pytest.fixture
async def client(engine: FakeEngine) -> Client:
    return make_client(engine)


async def test_the_most_likely_per_token_are_shown_best_first(client: Client, engine: FakeEngine) -> None:
    answer = (await client.complete(best_of=4, n=2, max_tokens=5)).json
    assert [choice["text"] for choice in answer["choices"]] == ["bbbbb", "cc"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]  # not asked for
    assert answer["usage"]["completion_tokens"] == 9  # all that were generated
    (submitted,) = engine.submitted
    assert (submitted.params.n, submitted.params.logprobs) == (4, 0)


async def test_each_prompt_has_its_own_best(client: Client) -> None:
    answer = (await client.complete(prompt=["x", "y"], best_of=4, max_tokens=5)).json
    assert [choice["text"] for choice in answer["choices"]] == ["bbbbb", "cc"]


async def test_logprobs_echo_and_ids_stay_with_their_candidate(client: Client, engine: FakeEngine) -> None:
    answer = (await client.complete(best_of=3, logprobs=0, return_token_ids=True, max_tokens=5)).json
    (choice,) = answer["choices"]
    assert choice["text"] == "bbbbb"
    assert choice["token_ids"] == [ord("b")] * 5
    assert choice["logprobs"]["token_logprobs"] == [-0.3] * 5
    assert engine.submitted[0].params.logprobs == 0


async def test_a_best_of_that_asks_for_nothing(client: Client, engine: FakeEngine) -> None:
    answer = (await client.complete(best_of=2, n=2, stream=False, max_tokens=5)).json
    assert [choice["text"] for choice in answer["choices"]] == ["a", "bbbbb"]
    assert engine.submitted[0].params.logprobs is None
    assert (await client.complete(best_of=1, stream=True, max_tokens=5)).status == 200


async def test_a_beam_search_is_as_wide_as_best_of(client: Client, engine: FakeEngine) -> None:
    beams = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never", "max_tokens": 5}
    assert (await client.complete(best_of=3, n=2, **beams)).status == 200
    assert (await client.complete(n=2, stream=True, best_of=4, **beams)).status == 200  # it comes whole at the end
    assert (await client.chat(n=2, **beams)).status == 200
    params = [submitted.params for submitted in engine.submitted]
    assert [(p.n, p.beam_width, p.num_sequences) for p in params] == [(2, 3, 3), (2, 4, 4), (2, None, 2)]
    assert {(p.use_beam_search, p.length_penalty, p.early_stopping) for p in params} == {(True, 0.5, "never")}


async def test_chat_has_no_best_of(client: Client) -> None:
    answer = await client.chat(best_of=2)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "best_of", "unsupported")
