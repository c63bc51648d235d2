"""How much of a prompt goes beside decoding: it follows what steps cost, in bounds, and no single step decides it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.scheduler.pace import LEAST_PROMPT_TOKENS, LONGEST_STEP, MOST_PROMPT_TOKENS, ROUNDED_TO, Pace
from tests.unit.scheduler.helpers import Engine


def machine(decode: float, each: float, noise: float = 0.0) -> Callable[[int], float]:
    """Seconds of a step with so many prompt tokens."""
    rng = random.Random(0)
    return lambda tokens: (decode + each * tokens) * (1 + noise * rng.random())


def drive(pace: Pace, seconds: Callable[[int], float], steps: int = 200) -> None:
    """Prompts and plain decoding in turns, as a server sees them."""
    for _ in range(steps):
        pace.note(32, 0, seconds(0))
        pace.note(31, pace.prompt_tokens, seconds(pace.prompt_tokens))


@pytest.mark.parametrize(
    ("decode", "each", "expected"),
    [
        (0.026, 0.8e-3, 64),  # two cores with AVX-512: fewer would be affordable, and starve the products
        (0.021, 0.17e-3, 144),  # with tile registers
        (0.020, 0.05e-3, 496),
        (0.020, 0.01e-3, 512),
        (0.020, 0.0, 512),
    ],
)
def test_a_step_stays_within_its_multiple_of_a_plain_one(decode: float, each: float, expected: int) -> None:
    pace = Pace()
    seconds = machine(decode, each)
    drive(pace, seconds)
    assert pace.prompt_tokens == expected
    if LEAST_PROMPT_TOKENS < expected < MOST_PROMPT_TOKENS:
        assert seconds(expected) <= LONGEST_STEP * decode < seconds(expected + 2 * ROUNDED_TO)


def test_noise_moves_it_little() -> None:
    pace = Pace()
    drive(pace, machine(0.021, 0.17e-3, noise=0.3))
    assert 112 <= pace.prompt_tokens <= 192


def test_it_follows_a_change() -> None:
    """Longer contexts, a busy neighbour, more streams: what a step costs is not constant."""
    pace = Pace()
    drive(pace, machine(0.021, 0.17e-3))
    drive(pace, machine(0.042, 0.17e-3))
    assert pace.prompt_tokens == 304
    drive(pace, machine(0.021, 0.34e-3))
    assert pace.prompt_tokens == 64


@pytest.mark.parametrize("tokens", [0, 144])
def test_one_slow_step_is_not_the_rule(tokens: int) -> None:
    pace = Pace()
    drive(pace, machine(0.021, 0.17e-3))
    pace.note(32, tokens, 10.0)
    pace.note(32, 144, 0.021 + 0.17e-3 * 144)
    assert 112 <= pace.prompt_tokens <= 176


def test_until_both_kinds_of_step_were_seen_it_is_careful() -> None:
    pace = Pace()
    for _ in range(5):
        pace.note(0, 512, 0.1)  # nobody waits for its next token
        pace.note(32, 64, 0.03)  # against what?
        assert pace.prompt_tokens == LEAST_PROMPT_TOKENS
    pace.note(32, 0, 0.02)
    pace.note(32, 8, 0.02)  # too few to tell
    assert pace.prompt_tokens == LEAST_PROMPT_TOKENS
    pace.note(32, 64, 0.022)
    assert pace.prompt_tokens == MOST_PROMPT_TOKENS


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 8192), st.floats(0, 100, allow_subnormal=True)), max_size=50)
)
def test_whatever_is_noted_it_stays_in_its_bounds(steps: list[tuple[int, int, float]]) -> None:
    pace = Pace()
    for step in steps:
        pace.note(*step)
        assert LEAST_PROMPT_TOKENS <= pace.prompt_tokens <= MOST_PROMPT_TOKENS
        assert pace.prompt_tokens % ROUNDED_TO == 0


def test_the_scheduler_heeds_it() -> None:
    engine = Engine(num_pages=400, budget=512, max_model_len=1000)

    def step() -> list[int]:
        engine.step()
        assert engine.output is not None
        prompt_tokens = sum(size for size in engine.sizes() if size > 1)
        engine.scheduler.note_seconds(engine.output, 0.020 + 0.1e-3 * prompt_tokens)
        return engine.sizes()

    engine.add("a", [1] * 10, max_tokens=40)
    assert [step() for _ in range(3)] == [[10], [1], [1]]
    engine.add("b", [2] * 900)
    assert [step() for _ in range(3)] == [[1, 64], [1, 240], [1, 240]]  # 1.25 steps' time buys 250
    engine.add("c", [3] * 900)
    engine.run()
    assert engine.ends.keys() == {("a", 0), ("b", 0), ("c", 0)}
