"""BeamSearch by itself: brute force over tiny vocabularies, and each of its rules."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinnate.core.batch import TokenLogprobs
from pinnate.scheduler.beam_search import MATCHED, BeamRules, BeamSearch, Candidate

Model = Callable[[tuple[int, ...]], list[float]]  # log-probabilities of the tokens after an output


def rules(width: int = 2, **fields: object) -> BeamRules:
    defaults = {"max_tokens": 4, "length_penalty": 1.0, "early_stopping": False, "stop_tokens": frozenset()}
    return BeamRules(width=width, **{**defaults, **fields})  # type: ignore[arg-type]


def outputs(search: BeamSearch) -> list[list[int]]:
    return [[step.token for step in found.outputs()] for found in search.complete]


def run(search: BeamSearch, model: Model) -> list[tuple[int, ...]]:
    """Runs the search to its end; returns the outputs of its last beams."""
    beams: list[tuple[int, ...]] = [()]
    while not search.is_done:
        candidates = []
        for beam in beams:
            logprobs = model(beam)
            order = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])
            candidates.append([Candidate(t, logprobs[t], TokenLogprobs(t, logprobs[t], 1)) for t in order])
        beams = [(*beams[branch.parent], branch.token) for branch in search.advance(candidates)]
    return beams


def random_model(seed: int, vocab_size: int) -> Model:
    def model(output: tuple[int, ...]) -> list[float]:
        rng = random.Random(repr((seed, output)))
        weights = [rng.expovariate(1.0) + 1e-3 for _ in range(vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return model


def table(**logprobs: list[float]) -> Model:
    """By the output's tokens as a word ("" as `start`); anything else is even."""
    return lambda output: logprobs.get("".join(map(str, output)).translate(WORD) or "start", [-1.0, -1.0, -1.0])


WORD = str.maketrans("012", "abc")


def every_hypothesis(
    model: Model, vocab_size: int, max_tokens: int, stops: frozenset[int]
) -> dict[tuple[int, ...], float]:
    """Every complete output with its summed log-probability."""
    found = {}
    for length in range(1, max_tokens + 1):
        for output in itertools.product(range(vocab_size), repeat=length):
            ends = [place for place, token in enumerate(output) if token in stops]
            if ends[:1] == [length - 1] or (not ends and length == max_tokens):
                found[output] = sum(model(output[:i])[token] for i, token in enumerate(output))
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(2, 4),
    max_tokens=st.integers(1, 4),
    stops=st.sampled_from([frozenset(), frozenset({0}), frozenset({0, 1})]),
    penalty=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]),
    early=st.sampled_from([False, "never"]),
)
def test_a_search_wide_enough_is_exhaustive(
    seed: int, vocab_size: int, max_tokens: int, stops: frozenset[int], penalty: float, early: bool
) -> None:
    model = random_model(seed, vocab_size)
    everything = every_hypothesis(model, vocab_size, max_tokens, stops)
    width = vocab_size**max_tokens
    search = BeamSearch(
        rules(width, max_tokens=max_tokens, length_penalty=penalty, early_stopping=early, stop_tokens=stops)
    )
    run(search, model)
    assert sorted(map(tuple, outputs(search))) == sorted(everything)
    best = sorted((total / len(output) ** penalty for output, total in everything.items()), reverse=True)
    assert [found.score for found in search.complete] == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 5), stops=st.sampled_from([frozenset(), frozenset({0})]))
def test_results_are_distinct_sorted_and_scored_by_their_tokens(seed: int, width: int, stops: frozenset[int]) -> None:
    model = random_model(seed, 6)
    search = BeamSearch(rules(width, max_tokens=6, stop_tokens=stops, length_penalty=0.0))
    run(search, model)
    found = outputs(search)
    assert len(found) == width == len(set(map(tuple, found)))
    scores = [hypothesis.score for hypothesis in search.complete]
    assert scores == sorted(scores, reverse=True)
    for output, score in zip(found, scores, strict=True):
        assert score == pytest.approx(sum(model(tuple(output[:i]))[token] for i, token in enumerate(output)))


@given(seed=st.integers(0, 10**6), stops=st.sampled_from([frozenset(), frozenset({0})]))
def test_width_one_is_greedy(seed: int, stops: frozenset[int]) -> None:
    model = random_model(seed, 5)
    search = BeamSearch(rules(1, max_tokens=5, stop_tokens=stops))
    run(search, model)
    greedy: list[int] = []
    while len(greedy) < 5 and not (greedy and greedy[-1] in stops):
        logprobs = model(tuple(greedy))
        greedy.append(logprobs.index(max(logprobs)))
    assert outputs(search) == [greedy]


def test_a_beam_that_starts_badly_can_win() -> None:
    model = table(start=[-0.1, -2.4, -9], a=[-3, -3, -3], b=[-0.1, -9, -9])
    search = BeamSearch(rules(2, max_tokens=2, length_penalty=0.0))
    run(search, model)
    assert outputs(search)[0] == [1, 0]
    assert search.complete[0].score == pytest.approx(-2.5)


def test_an_end_beyond_the_best_width_is_neither_kept_nor_continued() -> None:
    search = BeamSearch(rules(2, stop_tokens=frozenset({0})))
    entries = [TokenLogprobs(token, 0.0, 1) for token in range(4)]
    ranked = [
        Candidate(token, logprob, entries[token]) for token, logprob in ((1, -1.0), (2, -2.0), (0, -3.0), (3, -4.0))
    ]
    branches = search.advance([ranked])
    assert [branch.token for branch in branches] == [1, 2]
    assert search.complete == []


def test_an_end_among_the_best_makes_room_for_the_next_beam() -> None:
    search = BeamSearch(rules(2, stop_tokens=frozenset({0})))
    entries = [TokenLogprobs(token, 0.0, 1) for token in range(4)]
    ranked = [
        Candidate(token, logprob, entries[token]) for token, logprob in ((1, -1.0), (0, -2.0), (2, -3.0), (3, -4.0))
    ]
    assert [branch.token for branch in search.advance([ranked])] == [1, 2]
    (found,) = search.complete
    assert (found.score, found.stopped, found.stop_token) == (-2.0, True, 0)


@pytest.mark.parametrize(("early", "length"), [(True, 2), (False, 3), ("never", 3)])
def test_early_stopping_ends_with_the_last_missing_hypothesis(early: bool, length: int) -> None:
    """After two steps two are complete, -2 and -2.5, and the best beam has -1.1: it might still beat them."""
    model = table(start=[-2.0, -1.0, -3.0], b=[-1.5, -0.1, -9.0], bb=[-9.0, -5.0, -9.0])
    search = BeamSearch(rules(2, max_tokens=8, length_penalty=0.0, early_stopping=early, stop_tokens=frozenset({0})))
    run(search, model)
    assert search.length == length
    assert outputs(search) == [[0], [1, 0]]


@pytest.mark.parametrize(
    ("early", "penalty", "length", "best"),
    [
        (False, 1.0, 1, [0]),  # -1.5 / 1 is no better than -1 / 1
        ("never", 1.0, 4, [1, 1, 1, 1]),  # but -1.5 / 4 would be, and -1.65 / 4 is
        ("never", 0.0, 1, [0]),  # a sum only falls
    ],
)
def test_never_asks_what_the_greatest_length_could_score(
    early: bool, penalty: float, length: int, best: list[int]
) -> None:
    model: Model = lambda output: [-9.0, -0.05, -9.0] if output else [-1.0, -1.5, -9.0]  # noqa: E731
    search = BeamSearch(
        rules(1, max_tokens=4, length_penalty=penalty, early_stopping=early, stop_tokens=frozenset({0}))
    )
    run(search, model)
    assert search.length == length
    assert outputs(search) == [best]


def test_a_bad_end_does_not_end_the_search() -> None:
    model = table(start=[-0.5, -0.4, -9], b=[-9, -0.1, -8], bb=[-0.1, -3, -9])
    search = BeamSearch(rules(1, max_tokens=4, length_penalty=2.0, stop_tokens=frozenset({0})))
    run(search, model)
    assert outputs(search) == [[1, 1, 0]]


def test_min_tokens_counts_for_stop_tokens_and_stop_strings() -> None:
    class Scanner:
        def advance(self, state: int, token: int) -> int:
            return MATCHED if token == 2 else state + 1

    model: Model = lambda _output: [-0.5, -9.0, -0.4]  # noqa: E731
    search = BeamSearch(rules(1, max_tokens=5, stop_tokens=frozenset({0}), min_tokens=2), Scanner())
    run(search, model)
    assert outputs(search) == [[2, 2, 2]]
    assert (search.complete[0].stopped, search.complete[0].stop_token) == (True, None)


def test_equal_scores_rank_by_beam_then_by_candidate() -> None:
    search = BeamSearch(rules(3, max_tokens=2, length_penalty=0.0))
    run(search, lambda _output: [-1.0] * 4)
    assert outputs(search) == [[0, 0], [0, 1], [0, 2]]


def test_fewer_hypotheses_than_beams() -> None:
    search = BeamSearch(rules(8, max_tokens=2, stop_tokens=frozenset({0})))
    run(search, lambda _output: [-1.0, -2.0])
    assert sorted(outputs(search)) == [[0], [1, 0], [1, 1]]
