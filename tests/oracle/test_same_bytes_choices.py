"""Same request, same bytes, for several choices: n = 4 draws and beam searches, on the native executor in bfloat16."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from pinnate.core.batch import SchedulerOutput
from pinnate.core.request import Request
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox
from pinnate.executor.base import Executor, ExecutorSpec
from pinnate.executor.native import NativeExecutor
from pinnate.kvcache.manager import KVCacheManager
from pinnate.models.load import load_model
from pinnate.scheduler.scheduler import Scheduler
from pinnate.weights.resolve import default_model_path
from tests.fakes import make_request
from tests.oracle.drive import run_to_end

PAGE_SIZE = 16
NUM_PAGES = 400
OUTPUT = 12
PROMPT = [504, 2365, 1834, 314, 28, 216, 33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216, 38, 28]

Results = dict[tuple[str, int], bytes]


@pytest.fixture(scope="module")
def executors() -> Iterator[dict[int, Executor]]:
    """By number of threads."""
    graph = load_model(default_model_path()).graph
    spec = ExecutorSpec(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_num_batched_tokens=512, max_num_seqs=64, max_model_len=512
    )
    made = {threads: NativeExecutor(graph, spec, threads=threads) for threads in (1, 2)}
    yield made
    for executor in made.values():
        executor.close()


def requests() -> list[Request]:
    common = {"max_tokens": OUTPUT, "logprobs": 3, "ignore_eos": True}
    beams = {**common, "use_beam_search": True}
    return [
        make_request("draws", PROMPT, n=4, temperature=1.4, seed=11, **common),
        make_request("draws of a full page", [7, *PROMPT[:15]], n=4, temperature=1.4, seed=5, **common),
        make_request("beams", PROMPT[:9], n=4, **beams),
        make_request("wide beams", [9, *PROMPT[5:20]], n=2, beam_width=7, length_penalty=0.0, **beams),
        make_request("biased beams", [11, *PROMPT], n=3, logit_bias={284: 4.0, 28: -1.0}, **beams),
    ]


class SqueezedScheduler(Scheduler):
    """Before each second step: preempts one of the running sequences; before each eighth: drops what is cached."""

    def __init__(self, cache: KVCacheManager, **limits: int) -> None:
        super().__init__(cache, **limits)  # type: ignore[arg-type]
        self.steps = 0
        self.squeezed: Counter[str] = Counter()

    def schedule(self) -> SchedulerOutput | None:
        self.steps += 1
        if self.steps % 2 == 0 and self._queues.running:
            victim = random.Random(self.steps).choice(self._queues.running)
            self.squeezed[victim.request.request_id] += 1
            self._preempt(victim)
        if self.steps % 8 == 0:
            self.flush_cache()
        return super().schedule()


def run(
    executor: Executor,
    batch: Sequence[Request],
    *,
    first: Sequence[Request] = (),
    budget: int = 512,
    scheduler_class: type[Scheduler] = Scheduler,
    num_pages: int = NUM_PAGES,
) -> tuple[Results, Scheduler]:
    """Runs `first` to its end, then `batch`. The bytes of each choice: all its outputs, joined."""
    cache = KVCacheManager(num_pages, PAGE_SIZE)
    scheduler = scheduler_class(cache, max_num_seqs=64, max_num_batched_tokens=budget, max_model_len=512)
    mailbox = Mailbox()
    core = EngineCore(scheduler, executor, mailbox, check_integrity=True)
    parts: dict[tuple[str, int], list[object]] = {}
    for part in (first, batch):
        for output in run_to_end(core, mailbox, part):
            key = output.request_id, output.index
            parts.setdefault(key, []).extend([*output.token_ids, *(output.logprobs or []), output.score])
    # The score comes once, with the end; that of a draw is always None.
    return {key: msgspec.msgpack.encode([x for x in items if x is not None]) for key, items in parts.items()}, scheduler


@pytest.fixture(scope="module")
def alone(executors: dict[int, Executor]) -> Results:
    results: Results = {}
    for request in requests():
        results |= run(executors[2], [request])[0]
    return results


def by_choice(results: Results, like: Results) -> Results:
    return {key: results[key] for key in like}


def test_the_choices_are_worth_comparing(alone: Results) -> None:
    assert len(alone) == 4 + 4 + 4 + 2 + 3
    assert len(set(alone.values())) == len(alone)


def fillers(count: int) -> list[Request]:
    return [make_request(f"filler{i}", range(100 + i, 106 + i), max_tokens=OUTPUT) for i in range(count)]


def test_in_company(executors: dict[int, Executor], alone: Results) -> None:
    assert by_choice(run(executors[2], [*fillers(30), *requests()])[0], alone) == alone


@pytest.mark.parametrize("budget", [5, 33])
def test_in_pieces(executors: dict[int, Executor], alone: Results, budget: int) -> None:
    """With a budget of 5 tokens a step, seven beams need two."""
    assert run(executors[2], requests(), budget=budget)[0] == alone


def test_with_one_thread(executors: dict[int, Executor], alone: Results) -> None:
    assert run(executors[1], requests())[0] == alone


def test_on_a_cache_hit_that_ends_inside_a_page(executors: dict[int, Executor], alone: Results) -> None:
    first = [make_request(f"first{i}", r.prompt_token_ids[:-2], max_tokens=1) for i, r in enumerate(requests())]
    results, scheduler = run(executors[2], requests(), first=first)
    assert scheduler.stats().prefix_cache_hits > 30
    assert by_choice(results, alone) == alone


def test_preempted_and_parked(executors: dict[int, Executor], alone: Results) -> None:
    squeezed: Counter[str] = Counter()
    for budget in (6, 512):
        for part in (requests(), requests()[:3], requests()[1:4]):
            results, scheduler = run(executors[2], part, budget=budget, scheduler_class=SqueezedScheduler)
            assert isinstance(scheduler, SqueezedScheduler)
            squeezed += scheduler.squeezed
            assert results == by_choice(alone, results)
    assert all(squeezed[request.request_id] > 1 for request in requests())


def test_where_memory_holds_little_more_than_one_of_them(executors: dict[int, Executor], alone: Results) -> None:
    results, _ = run(executors[2], requests(), num_pages=16)
    assert results == alone


def test_choice_i_draws_what_a_lone_request_with_the_seed_plus_i_draws(
    executors: dict[int, Executor], alone: Results
) -> None:
    for index in range(4):
        lone = make_request(
            "lone", PROMPT, temperature=1.4, seed=11 + index, max_tokens=OUTPUT, logprobs=3, ignore_eos=True
        )
        assert run(executors[2], [lone])[0]["lone", 0] == alone["draws", index]
