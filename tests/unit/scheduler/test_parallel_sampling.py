"""n choices of one prompt: what is computed once, shared, copied, admitted and aborted together."""

from __future__ import annotations

import pytest

from pinnate.core.request import FinishReason
from tests.unit.scheduler.helpers import Engine


def run(n: int, prompt: int, *, page_size: int = 16) -> tuple[int, int, int]:
    """(prompt tokens computed, pages for the prompt, copies), with a page's worth of output."""
    engine = Engine(num_pages=200, page_size=page_size, caching=False, budget=128, max_model_len=1024)
    engine.add("a", list(range(1000, 1000 + prompt)), n=n, max_tokens=page_size, ignore_eos=True)
    computed = 0
    while not engine.tokens:
        engine.step()
        computed += sum(engine.sizes())
    engine.step()
    assert engine.output is not None
    assert engine.sizes() == [1] * n
    last = -(-prompt // page_size)
    pages = {page for part in engine.output.sequences for page in part.page_table[:last]}
    return computed, len(pages), len(engine.output.copies)


@pytest.mark.parametrize("prompt", [400, 401, 407, 415])
def test_eight_choices_compute_and_hold_the_prompt_once(prompt: int) -> None:
    lone, eight = run(1, prompt), run(8, prompt)
    assert lone[0] == eight[0] == prompt
    assert eight[1] <= 1.3 * lone[1]
    assert lone[2] == 0
    assert eight[2] == (7 if prompt % 16 else 0)  # the last partial page, by all who write it but one


def test_the_prompt_is_counted_once() -> None:
    engine = Engine(num_pages=200, page_size=16, budget=512, max_model_len=1024)
    engine.add("a", list(range(1000, 1400)), n=8)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (400, 8 * 4)


def test_all_choices_are_admitted_or_none() -> None:
    engine = Engine(max_num_seqs=4)
    engine.add("a", [1, 2], n=2, max_tokens=3)
    engine.add("b", [3, 4], n=3, max_tokens=3)
    engine.step()
    assert engine.sizes() == [2]
    engine.step()
    assert engine.sizes() == [1, 1]  # two places are free, b needs three
    engine.run()
    assert [len(engine.tokens["b", i]) for i in range(3)] == [3] * 3


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_aborting_one_or_all(steps: int) -> None:
    """Before the prompt, while one sequence stands for all, and after the fork."""
    engine = Engine(budget=4, caching=False)
    engine.add("a", [1, 2, 3, 4, 5, 6], n=3, max_tokens=4)
    for _ in range(steps):
        engine.step()
    (one,) = engine.scheduler.abort(["a"], 0)
    assert (one.index, one.finish_reason) == (0, FinishReason.ABORT)
    engine.scheduler.check_integrity()
    engine.step()
    others = engine.scheduler.abort(["a"])
    assert [output.index for output in others] == [1, 2]
    assert engine.scheduler.stats().num_free_pages == 64
    engine.scheduler.check_integrity()
    assert not engine.scheduler.has_work()
