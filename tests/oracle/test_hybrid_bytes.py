"""Same request, same bytes, on hybrid models: tokens and log-probabilities are bitwise equal in a batch, with
prompts in pieces, on a cache hit, after preemption, with n choices, and as with one page table for all layers.

A tiny Gemma with a window of 24 shows it for every instruction set and KV type, Gemma 3 270M for the real thing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from pinnate._native import cpu_features
from pinnate.core.batch import SchedulerOutput
from pinnate.core.layer_groups import LayerGroups, LayerSize, choose_layer_groups, one_group
from pinnate.core.request import Request
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox
from pinnate.executor.base import Executor, ExecutorSpec
from pinnate.executor.native import NativeExecutor
from pinnate.graph import Graph
from pinnate.kvcache.manager import KVCacheManager
from pinnate.models.load import load_model
from tests.fakes import make_request
from tests.gemma import GREEDY, gemma_path
from tests.oracle.drive import run_to_end
from tests.oracle.test_same_bytes import RecordingScheduler, Run
from tests.tiny_gemma import write_tiny_gemma

PAGE_SIZE = 16
BUDGET = 512
OUTPUT = 24
MAX_MODEL_LEN = 2560


def groups_of(graph: Graph) -> LayerGroups:
    return choose_layer_groups([LayerSize(k.num_kv_heads, k.head_dim, k.window) for k in graph.kv_layers])


def make_executor(graph: Graph, groups: LayerGroups, num_pages: int, **options: object) -> Executor:
    spec = ExecutorSpec(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=64,
        max_model_len=MAX_MODEL_LEN,
        groups=groups,
    )
    return NativeExecutor(graph, spec, **options)  # type: ignore[arg-type]


class PreemptingScheduler(RecordingScheduler):
    """Preempts all that runs at some steps; with `forgets`, what they computed is dropped from the cache too."""

    preempt_at: frozenset[int] = frozenset()
    forgets = False
    steps = 0

    def schedule(self) -> SchedulerOutput | None:
        self.steps += 1
        if self.steps in self.preempt_at:
            for seq in list(self._queues.running):
                self._preempt(seq)
            if self.forgets:
                self.flush_cache()
        return super().schedule()


def run(
    executor: Executor,
    groups: LayerGroups,
    batch: Sequence[Request],
    *,
    num_pages: int,
    first: Sequence[Request] = (),
    budget: int = BUDGET,
    preempt_at: Sequence[int] = (),
    forgets: bool = False,
) -> Run:
    """Runs `first` to its end, then `batch`, on an empty cache; the books of the KV memory are proved every step."""
    cache = KVCacheManager(num_pages=num_pages, page_size=PAGE_SIZE, needs=groups.needs(PAGE_SIZE, budget))
    scheduler = PreemptingScheduler(cache, max_num_seqs=64, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN)
    scheduler.preempted, scheduler.preempt_at, scheduler.forgets = Counter(), frozenset(preempt_at), forgets
    mailbox = Mailbox()
    core = EngineCore(scheduler, executor, mailbox, check_integrity=True)
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[object]] = {}
    result = Run(preempted=scheduler.preempted)
    for part in (first, batch):
        for output in run_to_end(core, mailbox, part):
            name = f"{output.request_id}.{output.index}"
            tokens.setdefault(name, []).extend(output.token_ids)
            logprobs.setdefault(name, []).extend(output.logprobs or [])
            if output.index == 0:
                result.cached[output.request_id] = output.num_cached_tokens
    result.results = {name: (tokens[name], msgspec.msgpack.encode(logprobs[name])) for name in tokens}
    return result


def check(result: Run, expected: Run) -> None:
    for name, value in expected.results.items():
        assert result.results[name] == value, name


def alone(executor: Executor, groups: LayerGroups, batch: Sequence[Request], num_pages: int) -> Run:
    made = Run()
    for request in batch:
        made.results |= run(executor, groups, [request], num_pages=num_pages).results
    return made


# ---------------------------------------------------------------------- the tiny model

PAGES = 400


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return load_model(write_tiny_gemma(tmp_path_factory.mktemp("gemma") / "tiny")).graph


def tiny_requests() -> list[Request]:
    """Prompts of 5 to 130 tokens, half of the requests seeded, one with three choices."""
    made = []
    for number in range(6):
        prompt = [number + 3, *((7 * number + 3 * place) % 89 for place in range(4 + 25 * number))]
        sampling = {"temperature": 0.8, "seed": number, "n": 1 + 2 * (number == 5)} if number % 2 else {}
        made.append(make_request(f"r{number}", prompt, max_tokens=OUTPUT, logprobs=3, ignore_eos=True, **sampling))
    return made


def test_groups_of_the_tiny_model(tiny: Graph) -> None:
    groups = groups_of(tiny)
    assert (groups.num_groups, groups.layers_per_page, groups.window) == (4, 2, 24)


@pytest.mark.parametrize("kv", ["act", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("isa", cpu_features()["isas"])
def test_tiny_on_every_instruction_set(tiny: Graph, isa: str, dtype: str, kv: str) -> None:
    groups, options = groups_of(tiny), {"isa": isa, "dtype": dtype, "kv_int8": kv == "int8"}
    uniform = one_group(len(tiny.kv_layers))
    one, two = (make_executor(tiny, groups, PAGES, threads=threads, **options) for threads in (1, 2))
    batch = tiny_requests()
    expected = alone(make_executor(tiny, uniform, PAGES, threads=1, **options), uniform, batch, PAGES)
    assert len({tuple(tokens) for tokens, _ in expected.results.values()}) == len(batch) + 2
    prefix = make_request("first", batch[5].prompt_token_ids[:101], max_tokens=1)
    fillers = [make_request(f"f{i}", range(i, i + 6), max_tokens=OUTPUT) for i in range(20)]
    hit = run(one, groups, batch, num_pages=PAGES, first=[prefix])
    assert hit.cached["r5"] == 101
    for result in (
        hit,
        run(one, groups, batch, num_pages=PAGES),
        run(two, groups, [*fillers, *batch], num_pages=PAGES),
        run(two, groups, batch, num_pages=PAGES, budget=7),
    ):
        check(result, expected)


@pytest.mark.parametrize("forgets", [False, True])
def test_tiny_when_preempted(tiny: Graph, forgets: bool) -> None:
    groups = groups_of(tiny)
    executor = make_executor(tiny, groups, PAGES)
    expected = alone(executor, groups, tiny_requests(), PAGES)
    result = run(executor, groups, tiny_requests(), num_pages=PAGES, preempt_at=(3, 9, 10, 17), forgets=forgets)
    assert all(result.preempted[f"r{i}"] for i in range(6))
    check(result, expected)


# ---------------------------------------------------------------------- Gemma 3 270M

GEMMA_PAGES = 1800
LONG = next(item for item in GREEDY if item["name"] == "long")


@pytest.fixture(scope="module")
def gemma() -> Iterator[tuple[Executor, LayerGroups]]:
    graph = load_model(gemma_path()).graph
    groups = groups_of(graph)
    executor = make_executor(graph, groups, GEMMA_PAGES, threads=2)
    yield executor, groups
    executor.close()


def gemma_requests() -> list[Request]:
    """Two whose prompts end beyond the window, one that grows over it, two short ones."""
    text = LONG["prompt_token_ids"] + LONG["output_token_ids"]
    made = []
    for number, (start, length) in enumerate([(0, 560), (40, 640), (100, 500), (0, 9), (50, 70)]):
        prompt = [300 + number, *text[start : start + length]]
        sampling = {"temperature": 0.8, "seed": number} if number % 2 else {}
        made.append(make_request(f"r{number}", prompt, max_tokens=16, logprobs=3, ignore_eos=True, **sampling))
    return made


@pytest.fixture(scope="module")
def gemma_alone(gemma: tuple[Executor, LayerGroups]) -> Run:
    return alone(*gemma, gemma_requests(), GEMMA_PAGES)


@pytest.mark.timeout(600)
def test_gemma_in_a_batch_and_in_pieces(gemma: tuple[Executor, LayerGroups], gemma_alone: Run) -> None:
    fillers = [make_request(f"f{i}", range(i + 10, i + 16), max_tokens=16) for i in range(8)]
    check(run(*gemma, [*fillers, *gemma_requests()], num_pages=GEMMA_PAGES), gemma_alone)
    check(run(*gemma, gemma_requests(), num_pages=GEMMA_PAGES, budget=100), gemma_alone)


@pytest.mark.timeout(600)
def test_gemma_on_a_cache_hit_inside_a_page(gemma: tuple[Executor, LayerGroups], gemma_alone: Run) -> None:
    batch = gemma_requests()
    first = [make_request(f"first-{r.request_id}", r.prompt_token_ids[:-2], max_tokens=1) for r in batch]
    result = run(*gemma, batch, num_pages=GEMMA_PAGES, first=first)
    check(result, gemma_alone)
    for request in batch:
        assert result.cached[request.request_id] == len(request.prompt_token_ids) - 2


@pytest.mark.timeout(600)
def test_gemma_when_preempted(gemma: tuple[Executor, LayerGroups], gemma_alone: Run) -> None:
    result = run(*gemma, gemma_requests(), num_pages=GEMMA_PAGES, budget=256, preempt_at=(3, 12), forgets=True)
    assert sum(result.preempted[r.request_id] for r in gemma_requests()) >= 3
    check(result, gemma_alone)


@pytest.mark.timeout(600)
def test_gemma_beyond_four_windows_as_with_one_page_table(gemma: tuple[Executor, LayerGroups]) -> None:
    """2,300 tokens: whole, in other pieces, and continued from the cache, whose middle windows are evicted."""
    executor, groups = gemma
    text = (LONG["prompt_token_ids"] * 4)[:2300]
    request = make_request("r0", text, max_tokens=8, logprobs=3, ignore_eos=True)
    graph = load_model(gemma_path()).graph
    uniform = one_group(len(graph.kv_layers))
    plain = make_executor(graph, uniform, 150, threads=2)
    expected = alone(plain, uniform, [request], 150)
    plain.close()
    num_pages = groups.needs(PAGE_SIZE, BUDGET).peak(2308) + groups.num_groups * 2  # and the copy of a tail
    check(run(executor, groups, [request], num_pages=num_pages, budget=200), expected)
    result = run(executor, groups, [request], num_pages=num_pages, first=[make_request("f", text[:-5], max_tokens=1)])
    check(result, expected)
    assert result.cached["r0"] == 2295
