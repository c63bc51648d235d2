"""What each sampling parameter means, on the NumPy definition."""

from collections import Counter

import numpy as np
import pytest

from pinnate.core.sampling import SamplingParams
from pinnate.executor.sampling import philox_4x32, uniform
from tests.unit.executor.sampling_helpers import Draw, numpy_draws

LOGITS = np.array([[1.0, 3.0, 2.0, 0.5, -1.0, 2.5]], np.float32)


def tokens_drawn(params: SamplingParams, logits=LOGITS, count=400, **fields) -> Counter:
    draws = [Draw(params=params, position=i, **fields) for i in range(count)]
    return Counter(numpy_draws(logits, draws).token_ids)


def greedy(logits=LOGITS, **fields) -> int:
    params = fields.pop("params", SamplingParams(temperature=0.0))
    return numpy_draws(logits, [Draw(params=params, **fields)]).token_ids[0]


def test_philox_known_answers():
    """The first two known-answer vectors published with the generator (Random123, kat_vectors)."""
    assert philox_4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox_4x32((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_uniform_numbers_fill_the_unit_interval():
    numbers = [uniform(7, 0, i) for i in range(2000)]
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # 9 degrees of freedom, p = 0.001; the numbers are fixed


@pytest.mark.parametrize("change", [{"seed": 8}, {"seed": -7}, {"index": 1}, {"position": 4}])
def test_each_part_of_the_key_matters(change):
    key = {"seed": 7, "index": 0, "position": 3}
    assert uniform(**key) == uniform(**key)
    assert uniform(**(key | change)) != uniform(**key)


def test_the_draw_follows_the_softmax():
    seen = tokens_drawn(SamplingParams(temperature=0.7), count=4000)
    weights = np.exp(LOGITS[0].astype(float) / 0.7)
    expected = 4000 * weights / weights.sum()
    chi = sum((seen[i] - e) ** 2 / e for i, e in enumerate(expected))
    assert chi < 20.5  # 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-30, 1e-6])
def test_small_temperatures_are_greedy(temperature):
    assert tokens_drawn(SamplingParams(temperature=temperature), count=50) == {1: 50}


def test_greedy_takes_the_lowest_id_of_equals():
    assert greedy(np.array([[1.0, 2.0, 2.0, 0.0]])) == 1


def test_a_huge_temperature_is_uniform_and_still_honours_bans():
    seen = tokens_drawn(SamplingParams(temperature=1e300), banned=(0, 2))
    assert set(seen) == {1, 3, 4, 5}
    assert min(seen.values()) > 60


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(top_k=3), {1, 2, 5}),
        (SamplingParams(top_k=-1), {0, 1, 2, 3, 4, 5}),
        (SamplingParams(top_k=100), {0, 1, 2, 3, 4, 5}),
        (SamplingParams(top_p=0.4), {1}),
        (SamplingParams(top_p=0.5), {1, 5}),
        (SamplingParams(top_p=1e-9), {1}),
        (SamplingParams(min_p=1.0), {1}),
        (SamplingParams(min_p=0.3), {1, 2, 5}),
        (SamplingParams(temperature=2.0, min_p=0.5), {1, 2, 5}),
        (SamplingParams(top_k=3, top_p=0.52), {1, 5}),  # of the mass of three, not of all
        (SamplingParams(top_k=4, top_p=0.95, min_p=0.5), {1, 5}),
    ],
)
def test_truncations_keep(params, kept):
    assert set(tokens_drawn(params, count=3000)) == kept


def test_top_k_takes_the_lowest_ids_of_equals():
    assert set(tokens_drawn(SamplingParams(top_k=2), np.zeros((1, 9)))) == {0, 1}


def test_presence_counts_once_and_frequency_each_time_and_only_of_the_output():
    logits = np.array([[0.0, 1.0, 0.6, 0.0]])
    presence = SamplingParams(temperature=0.0, presence_penalty=0.5)
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.3)
    assert greedy(logits, params=presence, prompt=[1, 1], output=[3]) == 1
    assert greedy(logits, params=presence, output=[1]) == 2
    assert greedy(logits, params=frequency, output=[1]) == 1
    assert greedy(logits, params=frequency, output=[1, 1]) == 2
    assert greedy(logits, params=frequency, output=[2, 1, 1, 2, 2]) == 1


def test_repetition_scales_tokens_of_prompt_and_output_towards_less_likely():
    logits = np.array([[2.0, 1.5, -1.0, -1.1]])
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    assert greedy(logits, params=params, prompt=[0]) == 1
    assert greedy(logits, params=params, output=[0, 0]) == 1
    assert greedy(logits, params=params, prompt=[0, 1, 2], banned=(0, 1)) == 3


def test_bias_and_bans():
    assert greedy(params=SamplingParams(temperature=0.0, logit_bias={4: 5.0})) == 4
    assert greedy(banned=(1,)) == 5
    assert greedy(params=SamplingParams(temperature=0.0, logit_bias={1: 100.0}), banned=(1,)) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_when_all_is_banned_the_raw_argmax_is_taken(temperature):
    params = SamplingParams(temperature=temperature, logit_bias={0: 50.0})
    assert greedy(params=params, banned=tuple(range(6))) == 1


def test_logprobs_are_of_the_raw_distribution():
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={4: 100.0})
    entry = numpy_draws(LOGITS, [Draw(params=params)]).logprobs[0]
    expected = LOGITS[0] - np.log(np.exp(LOGITS[0]).sum())
    assert (entry.token_id, entry.rank) == (4, 6)
    assert entry.logprob == pytest.approx(expected[4], abs=1e-6)
    assert [token for token, _ in entry.top] == [1, 5, 2]
    assert [value for _, value in entry.top] == pytest.approx(expected[[1, 5, 2]], abs=1e-6)


def test_rank_counts_lower_ids_of_equals():
    params = SamplingParams(temperature=0.0, logprobs=0, logit_bias={2: 1.0})
    entry = numpy_draws(np.zeros((1, 4)), [Draw(params=params)]).logprobs[0]
    assert (entry.token_id, entry.rank, entry.top) == (2, 3, [])
