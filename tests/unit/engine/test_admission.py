"""Checks at the door: what is refused, with which field and numbers, and what is filled in."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pinnate.core.errors import ContextLengthError, InvalidRequestError
from pinnate.core.sampling import SamplingParams
from pinnate.engine.admission import Admission, Limits


def limits(**changes: int) -> Limits:
    values = {
        "max_model_len": 100,
        "vocab_size": 50,
        "num_pages": 6,
        "page_size": 16,
        "max_num_seqs": 4,
        "max_num_queued_reqs": 8,
    }
    return Limits(**(values | changes))


def test_from_info_takes_what_it_needs() -> None:
    info = {name: getattr(limits(), name) for name in Limits.__struct_fields__} | {"dtype": "bfloat16"}
    assert Limits.from_info(info) == limits()


@pytest.mark.parametrize(
    ("prompt", "params", "param", "text"),
    [
        ([], {}, "prompt", "empty"),
        ([1, 50], {}, "prompt", "token id 50 is not in the vocabulary of 50"),
        ([1, -1], {}, "prompt", "token id -1"),
        ([1], {"logit_bias": {50: 1.0}}, "logit_bias", "token id 50"),
        ([1], {"stop_token_ids": (-2,)}, "stop_token_ids", "token id -2"),
        ([1], {"n": 5}, "n", "n is 5, at most 4"),
        ([1], {"allowed_token_ids": (1, 50)}, "allowed_token_ids", "token id 50"),
        ([1], {"logprobs": 0, "logprob_token_ids": (50,)}, "logprob_token_ids", "token id 50"),
        ([1], {"max_tokens": 0}, "max_tokens", "prompt_logprobs only"),
    ],
)
def test_invalid(prompt: list[int], params: dict[str, object], param: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text) as caught:
        limits().check(prompt, SamplingParams(**params))
    assert caught.value.param == param


def test_prompt_longer_than_the_context() -> None:
    with pytest.raises(
        ContextLengthError, match="the context is 100 tokens, output included; the prompt alone has 140"
    ) as caught:
        limits().check([1] * 140, SamplingParams())
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthError, match="the prompt alone has 100"):
        limits().check([1] * 100, SamplingParams(max_tokens=5))


def test_scoring_needs_no_room_for_output() -> None:
    limits(num_pages=7).check([1] * 100, SamplingParams(max_tokens=0, prompt_logprobs=0))
    with pytest.raises(ContextLengthError, match="the prompt alone has 101"):
        limits(num_pages=7).check([1] * 101, SamplingParams(max_tokens=0, prompt_logprobs=0))


def test_prompt_and_output_longer_than_the_context() -> None:
    with pytest.raises(ContextLengthError, match="90 in the prompt and max_tokens 11 are 101") as caught:
        limits(num_pages=100).check([1] * 90, SamplingParams(max_tokens=11))
    assert caught.value.param == "max_tokens"
    limits(num_pages=100).check([1] * 90, SamplingParams(max_tokens=10))


def test_worst_case_beyond_the_pool() -> None:
    # 96 slots; the last token keeps no KV, so 90 + 7 tokens take all of them.
    limits().check([1] * 90, SamplingParams(max_tokens=7))
    with pytest.raises(ContextLengthError, match=r"90 prompt tokens and 1 x 8 output tokens need 7 pages .* has 6"):
        limits().check([1] * 90, SamplingParams(max_tokens=8))
    # two choices share the two whole pages of the prompt, and have two pages each of their own
    limits().check([1] * 40, SamplingParams(max_tokens=25, n=2))
    with pytest.raises(ContextLengthError, match="need 8 pages"):
        limits().check([1] * 40, SamplingParams(max_tokens=26, n=2))
    with pytest.raises(ContextLengthError, match="need 7 pages") as caught:
        limits(max_model_len=500).check([1] * 97, SamplingParams())
    assert caught.value.param == "prompt"


def admission(**changes: int) -> Admission:
    return Admission(limits(**changes), (2,), random.Random(5))


def test_defaults_are_filled_in() -> None:
    request = admission(num_pages=100).make_request("r", (1, 2, 3), SamplingParams(min_tokens=3), priority=7)
    assert request.max_tokens == 97
    assert request.seed == random.Random(5).getrandbits(63)
    assert (request.prompt_token_ids, request.eos_token_ids, request.priority) == ([1, 2, 3], (2,), 7)


def test_what_was_asked_for_is_kept() -> None:
    request = admission().make_request("r", [1], SamplingParams(max_tokens=7, seed=-4), cache_salt="s")
    assert (request.max_tokens, request.seed, request.cache_salt) == (7, -4, "s")


@pytest.mark.parametrize(("prompt", "n"), [(1, 1), (40, 1), (40, 2), (15, 4), (96, 1)])
def test_default_max_tokens_is_the_most_that_passes(prompt: int, n: int) -> None:
    few = limits()
    most = few.default_max_tokens(prompt, n)
    few.check([1] * prompt, SamplingParams(max_tokens=most, n=n))
    with pytest.raises(ContextLengthError):
        few.check([1] * prompt, SamplingParams(max_tokens=most + 1, n=n))


def test_two_requests_get_two_seeds() -> None:
    door = admission()
    assert door.make_request("a", [1], SamplingParams()).seed != door.make_request("b", [1], SamplingParams()).seed


def test_min_tokens_beyond_what_fits_is_lowered() -> None:
    assert admission().make_request("r", [1] * 90, SamplingParams(min_tokens=50)).sampling.min_tokens == 7


@pytest.mark.parametrize(
    ("params", "bad", "refused"),
    [
        ({"allowed_token_ids": (5, 6)}, ((5,), (6,)), True),
        ({"allowed_token_ids": (5, 6)}, ((5,), (6, 6)), False),
        ({"allowed_token_ids": (2,), "min_tokens": 1}, (), True),
        ({"allowed_token_ids": (2,), "min_tokens": 1, "ignore_eos": True}, (), False),
        ({"allowed_token_ids": (7,), "min_tokens": 1, "stop_token_ids": (7,)}, (), True),
        ({"allowed_token_ids": (2,)}, (), False),
    ],
)
def test_what_is_allowed_must_not_all_be_banned(
    params: dict[str, Any], bad: tuple[tuple[int, ...], ...], refused: bool
) -> None:
    admission = Admission(limits(), (2,), random.Random(0))
    if not refused:
        assert admission.make_request("r", [1], SamplingParams(**params), bad_word_ids=bad).bad_word_ids == bad
        return
    with pytest.raises(InvalidRequestError, match="leaves no token") as caught:
        admission.make_request("r", [1], SamplingParams(**params), bad_word_ids=bad)
    assert caught.value.param == "allowed_token_ids"
