"""The sampling kernel against its NumPy definition, on logits that a native program is made to produce."""

import functools
from array import array

import numpy as np
import pytest

from pinnate.core.batch import Sample, ScheduledSequence, SchedulerOutput, StepResult
from pinnate.core.sampling import SamplingParams
from pinnate.executor.forward_batch import build_forward_batch, step_result
from pinnate.executor.sampling import sample_rows
from tests.unit.executor.native_helpers import ISAS
from tests.unit.executor.sampling_helpers import Draw, FixedMatcher, logits_executor, numpy_draws, step_of


def random_params(rng: np.random.Generator, **fixed) -> SamplingParams:
    def maybe(value, otherwise):
        return value if rng.random() < 0.4 else otherwise

    chosen = {
        "temperature": maybe(0.0, float(rng.uniform(0.2, 2.0))) if rng.random() < 0.5 else 1.0,
        "top_k": maybe(int(rng.integers(1, 60)), 0),
        "top_p": maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        "min_p": maybe(float(rng.uniform(0.0, 0.3)), 0.0),
        "presence_penalty": maybe(float(rng.uniform(-2, 2)), 0.0),
        "frequency_penalty": maybe(float(rng.uniform(-2, 2)), 0.0),
        "repetition_penalty": maybe(float(rng.uniform(0.5, 2)), 1.0),
        "logprobs": maybe(int(rng.integers(0, 21)), None),
    }
    if rng.random() < 0.3:
        chosen["logit_bias"] = {int(i): float(rng.uniform(-5, 5)) for i in rng.integers(0, 9, 4)}
    return SamplingParams(**(chosen | fixed))


def random_draws(rng, rows, vocab, count, **fixed) -> list[Draw]:
    return [
        Draw(
            row=int(rng.integers(rows)),
            params=random_params(rng, **fixed),
            seed=int(rng.integers(-(2**63), 2**63 - 1)),
            index=int(rng.integers(128)),
            position=int(rng.integers(2**31)),
            prompt=rng.integers(0, vocab, rng.integers(0, 6)).tolist(),
            output=rng.integers(0, vocab, rng.integers(0, 6)).tolist(),
            banned=tuple(rng.integers(0, vocab, rng.integers(0, 3)).tolist()),
        )
        for _ in range(count)
    ]


def random_mask(rng, vocab) -> list[int] | None:
    if rng.random() < 0.2:
        return None
    count = int(rng.integers(1, vocab + 1)) if rng.random() < 0.5 else int(rng.integers(1, 5))
    return rng.choice(vocab, count, replace=False).tolist()


def spread_logits(rng, rows, vocab) -> np.ndarray:
    """Rows from nearly flat to sharply peaked, some values equal."""
    logits = rng.standard_normal((rows, vocab)) * np.geomspace(0.05, 8, rows)[:, None]
    logits[::3] = np.round(logits[::3], 1)
    return logits.astype(np.float32)


@functools.cache
def defined_draws(vocab: int, count: int, *, masked: bool = False) -> tuple[np.ndarray, list[Draw], StepResult]:
    """(logits, draws, what the definition draws), for every instruction set the same."""
    rng = np.random.default_rng(vocab)
    logits = spread_logits(rng, 64, vocab)
    draws = random_draws(rng, 64, vocab, count)
    if masked:
        for draw in draws:
            draw.allowed = random_mask(rng, vocab)
    return logits, draws, numpy_draws(logits, draws)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [9, 333, 2050])
def test_the_same_tokens_as_the_definition(isa, vocab):
    logits, draws, expected = defined_draws(vocab, 1500)
    native = logits_executor(logits, isa=isa, threads=2).execute(step_of(draws))
    differ = [i for i in range(len(draws)) if native.token_ids[i] != expected.token_ids[i]]
    assert len(differ) <= len(draws) // 1000
    assert all(draws[i].params.temperature > 0 for i in differ)
    for i, (ours, theirs) in enumerate(zip(native.logprobs, expected.logprobs, strict=True)):
        if theirs is None or i in differ:
            assert (ours is None) == (theirs is None)
            continue
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-5)
        assert [v for _, v in ours.top] == pytest.approx([v for _, v in theirs.top], abs=2e-5)


def test_a_real_vocabulary_with_every_truncation():
    """Large enough for each way the kernel has to find candidates: block maxima, all ids, the weight floor."""
    rng = np.random.default_rng(5)
    logits = spread_logits(rng, 12, 49152)
    cases = [
        {"top_k": 40},
        {"top_k": 3000},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.02},
        {"top_k": 500, "top_p": 0.5},
    ]
    draws = [
        Draw(row=row, params=SamplingParams(temperature=t, **case), seed=row, position=int(t * 10))
        for case in cases
        for row in range(12)
        for t in (0.6, 1.3)
    ]
    native = logits_executor(logits).execute(step_of(draws)).token_ids
    expected = numpy_draws(logits, draws).token_ids
    assert sum(a != b for a, b in zip(native, expected, strict=True)) <= 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [9, 333, 2050])
def test_masked_rows_draw_what_the_definition_draws_and_nothing_else(isa, vocab):
    logits, draws, expected = defined_draws(vocab, 800, masked=True)
    native = logits_executor(logits, isa=isa, threads=2).execute(step_of(draws))
    for draw, token in zip(draws, native.token_ids, strict=True):
        assert draw.allowed is None or token in draw.allowed
    differ = [i for i in range(len(draws)) if native.token_ids[i] != expected.token_ids[i]]
    assert len(differ) <= 1
    for i, (ours, theirs) in enumerate(zip(native.logprobs, expected.logprobs, strict=True)):
        if theirs is not None and i not in differ:  # of the raw distribution, whatever the mask allows
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
            assert (ours.rank, ours.logprob) == (theirs.rank, pytest.approx(theirs.logprob, abs=2e-5))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_bans_leave_nothing_of_the_mask_the_mask_wins(temperature):
    logits = np.arange(64, dtype=np.float32)[None]
    draw = Draw(params=SamplingParams(temperature=temperature), allowed=[3, 40], banned=(3, 40))
    assert logits_executor(logits).execute(step_of([draw])).token_ids == [40]
    assert numpy_draws(logits, [draw]).token_ids == [40]


def test_a_matcher_that_raises_fails_the_step_and_the_next_one_runs():
    class Broken(FixedMatcher):
        def fill(self, mask):  # noqa: ARG002
            raise RuntimeError("broken")

    executor = logits_executor(np.arange(64, dtype=np.float32)[None])
    sample = Sample(SamplingParams(temperature=0), 1, 0, 1, matcher=Broken([]))
    step = SchedulerOutput((ScheduledSequence(0, 0, array("i", [0]), array("i", [1]), (sample,)),))
    with pytest.raises(RuntimeError, match="broken"):
        executor.execute(step)
    assert executor.execute(step_of([Draw(params=SamplingParams(temperature=0), allowed=[7])])).token_ids == [7]
    executor.close()


@pytest.mark.parametrize("params", [{}, {"top_k": 50}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(params):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((1, 200)).astype(np.float32) * 2
    draws = [Draw(params=SamplingParams(**params), position=i) for i in range(4000)]
    seen = np.bincount(logits_executor(logits).execute(step_of(draws)).token_ids, minlength=200)
    p = np.exp(logits[0].astype(float))
    order = np.argsort(-p)
    p /= p.sum()
    keep = np.ones(200, bool)
    if "top_k" in params:
        keep[order[50:]] = False
    if "top_p" in params:
        keep[order[1:][np.cumsum(p[order])[:-1] >= 0.8]] = False
    if "min_p" in params:
        keep = p >= 0.1 * p.max()
    expected = np.where(keep, p, 0) / p[keep].sum() * 4000
    assert seen[~keep].sum() == 0
    common = expected >= 8
    statistic = ((seen[common] - expected[common]) ** 2 / expected[common]).sum()
    freedom = common.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 10


def test_a_draw_does_not_depend_on_batch_order_or_threads():
    rng = np.random.default_rng(3)
    logits = spread_logits(rng, 8, 1000)
    draws = random_draws(rng, 8, 1000, 200, logprobs=2)
    alone = logits_executor(logits)
    batched = logits_executor(logits, threads=2).execute(step_of(draws))
    order = rng.permutation(len(draws))
    shuffled = alone.execute(step_of([draws[i] for i in order]))
    assert [batched.token_ids[i] for i in order] == shuffled.token_ids
    assert [batched.logprobs[i] for i in order] == shuffled.logprobs
    for i in range(0, 200, 17):
        single = alone.execute(step_of([draws[i]]))
        assert (single.token_ids[0], single.logprobs[0]) == (batched.token_ids[i], batched.logprobs[i])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_logits_give_a_token_of_the_vocabulary(bad):
    logits = np.full((2, 300), bad, np.float32)
    logits[1, ::7] = 1.0
    rng = np.random.default_rng(0)
    result = logits_executor(logits).execute(step_of(random_draws(rng, 2, 300, 300)))
    assert all(0 <= token < 300 for token in result.token_ids)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_top", [1, 24, 300, 3000])
def test_reports_for_wide_beam_searches(isa, num_top):
    """More alternatives than a client may ask for, and more than there are tokens."""
    logits = spread_logits(np.random.default_rng(num_top), 6, 2050)
    params = SamplingParams(logit_bias={5: 3.0})
    rows = [
        (Sample(params, 0, 0, 1, target=9 * i, num_top=num_top), Sample(params, 0, 0, 1, target=3)) for i in range(6)
    ]
    step = SchedulerOutput(
        tuple(ScheduledSequence(i, 0, array("i", [i]), array("i", [1]), samples) for i, samples in enumerate(rows))
    )
    batch = build_forward_batch(step, 16)
    expected = step_result(step, batch, sample_rows(logits[batch.tokens], batch))
    native = logits_executor(logits, isa=isa, threads=2).execute(step)
    for ours, theirs in zip(native.logprobs[::2], expected.logprobs[::2], strict=True):
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert len(ours.top) == min(num_top, 2050)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert [v for _, v in ours.top] == pytest.approx([v for _, v in theirs.top], abs=2e-5)
    assert native.logprobs[1::2] == [None] * 6  # neither the sample nor its params ask
