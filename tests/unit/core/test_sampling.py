"""SamplingParams: every range, each refusal naming its field."""

from __future__ import annotations

import math

import msgspec
import pytest

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: math.nan}),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", ("",)),
        ("stop", tuple(str(i) for i in range(17))),
        ("logprobs", 1025),
        ("allowed_token_ids", ()),
        ("prompt_logprobs_start", -1),
        ("logprob_token_ids", (1,)),
        ("bad_words", ("",)),
        ("bad_words", ("x",) * 1025),
        ("prompt_logprobs", -1),
    ],
)
def test_out_of_range(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", -1), ("top_p", 1.0), ("seed", 2**63 - 1), ("seed", -(2**63)), ("logit_bias", {5: -100.0}), ("n", 128)],
)
def test_limits_are_allowed(field: str, value: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens \(5\) is larger than max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_derived() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams().is_greedy
    assert not SamplingParams().needs_history
    assert SamplingParams(presence_penalty=0.1).needs_history
    assert SamplingParams(repetition_penalty=1.1).needs_history


def test_round_trip() -> None:
    params = SamplingParams(n=2, stop=("a", "b"), logit_bias={7: 1.5}, seed=-3, stop_token_ids=(1,), logprobs=0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_a_decoded_message_is_checked_too() -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"temperature": -1.0}), type=SamplingParams)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("beam_width", {"beam_width": 4}),
        ("length_penalty", {"length_penalty": 0.0}),
        ("early_stopping", {"early_stopping": "never"}),
        ("beam_width", {"use_beam_search": True, "n": 3, "beam_width": 2}),
        ("beam_width", {"use_beam_search": True, "beam_width": 129}),
        ("length_penalty", {"use_beam_search": True, "length_penalty": math.inf}),
        ("length_penalty", {"use_beam_search": True, "length_penalty": -8.5}),
        ("early_stopping", {"use_beam_search": True, "early_stopping": "soon"}),
        ("early_stopping", {"use_beam_search": True, "early_stopping": 1}),
        ("max_tokens", {"use_beam_search": True, "max_tokens": 0}),
        ("logit_bias", {"use_beam_search": True, "logit_bias": dict.fromkeys(range(257), 1.0)}),
        ("stop_token_ids", {"use_beam_search": True, "stop_token_ids": tuple(range(257))}),
    ],
)
def test_what_a_beam_search_needs(param: str, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("top_k", 4),
        ("min_p", 0.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", 0.1),
        ("repetition_penalty", 1.1),
    ],
)
def test_a_beam_search_draws_nothing(field: str, value: float) -> None:
    with pytest.raises(UnsupportedError, match=f"{field} is not supported with use_beam_search"):
        SamplingParams(use_beam_search=True, **{field: value})  # type: ignore[arg-type]
    SamplingParams(use_beam_search=True, temperature=0.0, top_k=-1)


def test_how_many_sequences_run_at_once() -> None:
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=3, use_beam_search=True).num_sequences == 3
    assert SamplingParams(n=3, use_beam_search=True, beam_width=8).num_sequences == 8
