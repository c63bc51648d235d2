"""Same request, same bytes: native executor, default model, weights in bfloat16, 8 and 4 bits.

Tokens and log-probabilities of 16 requests are bitwise equal whatever else runs, however their prompts are cut,
wherever their prefix comes from, with any number of threads, and when each of them is preempted. A tiny checkpoint,
quantised as it is loaded, shows the same for the kernels of every instruction set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from pinnate._native import cpu_features
from pinnate.core.config import QUANTIZATIONS
from pinnate.core.request import Request
from pinnate.core.request import Sequence as RunningSequence
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox
from pinnate.executor.base import Executor, ExecutorSpec
from pinnate.executor.native import NativeExecutor
from pinnate.kvcache.manager import KVCacheManager
from pinnate.models.load import load_model
from pinnate.scheduler.scheduler import Scheduler
from pinnate.weights.resolve import default_model_path
from tests.checkpoints import TINY
from tests.fakes import make_request
from tests.oracle.drive import run_to_end

FACTS = json.loads((Path(__file__).parent.parent / "data/smollm2_greedy.json").read_text())["greedy"]
PAGE_SIZE = 16
NUM_PAGES = 400
OUTPUT = 16
FILLER_PROMPT = 6

Result = tuple[list[int], bytes]


@pytest.fixture(scope="module", params=QUANTIZATIONS)
def executors(request: pytest.FixtureRequest) -> Iterator[dict[int, Executor]]:
    """By number of threads."""
    graph = load_model(default_model_path()).graph
    spec = ExecutorSpec(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_num_batched_tokens=512, max_num_seqs=64, max_model_len=512
    )
    made = {threads: NativeExecutor(graph, spec, quantization=request.param, threads=threads) for threads in (1, 2)}
    yield made
    for executor in made.values():
        executor.close()


@pytest.fixture(scope="module")
def alone(executors: dict[int, Executor]) -> dict[str, Result]:
    """Each request by itself, its prompt in one piece, two threads, an empty cache."""
    return {request.request_id: run(executors[2], [request]).results[request.request_id] for request in requests()}


def requests() -> list[Request]:
    """Eight greedy ones and eight seeded ones, prompts of 5 to 47 tokens."""
    made = []
    for number in range(16):
        texts = [FACTS[number % 8], FACTS[(number * 3 + 1) % 8]]
        tokens = [token for fact in texts for token in fact["prompt_ids"] + fact["output_ids"]]
        prompt = [300 + number, *tokens[: 4 + number * 14 % 43]]  # no two share a prefix
        sampling = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
        made.append(make_request(f"r{number}", prompt, max_tokens=OUTPUT, logprobs=3, ignore_eos=True, **sampling))
    return made


def fillers(count: int, base: int = 100) -> list[Request]:
    return [
        make_request(f"filler{number}", range(base + number, base + number + FILLER_PROMPT), max_tokens=OUTPUT)
        for number in range(count)
    ]


class RecordingScheduler(Scheduler):
    """Counts preemptions of each request."""

    preempted: Counter[str]

    def _preempt(self, seq: RunningSequence) -> None:
        self.preempted[seq.request.request_id] += 1
        super()._preempt(seq)


@dataclass
class Run:
    results: dict[str, Result] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    preempted: Counter[str] = field(default_factory=Counter)


def run(
    executor: Executor,
    batch: Sequence[Request],
    *,
    first: Sequence[Request] = (),
    num_pages: int = NUM_PAGES,
    max_num_batched_tokens: int = 512,
) -> Run:
    """Runs `first` to its end, then `batch`, on an empty cache; the books of the KV memory are proved every step."""
    cache = KVCacheManager(num_pages=num_pages, page_size=PAGE_SIZE)
    scheduler = RecordingScheduler(
        cache, max_num_seqs=64, max_num_batched_tokens=max_num_batched_tokens, max_model_len=512
    )
    scheduler.preempted = Counter()
    mailbox = Mailbox()
    core = EngineCore(scheduler, executor, mailbox, check_integrity=True)
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[object]] = {}
    result = Run(preempted=scheduler.preempted)
    for part in (first, batch):
        for output in run_to_end(core, mailbox, part):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            logprobs.setdefault(output.request_id, []).extend(output.logprobs or [])
            result.cached[output.request_id] = output.num_cached_tokens
    result.results = {name: (tokens[name], msgspec.msgpack.encode(logprobs[name])) for name in tokens}
    return result


def check(result: Run, alone: dict[str, Result]) -> None:
    for name, expected in alone.items():
        assert result.results[name] == expected, name


def test_the_requests_are_worth_comparing(alone: dict[str, Result]) -> None:
    assert len(alone) == 16
    assert all(len(tokens) == OUTPUT for tokens, _ in alone.values())
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == 16
    for _, data in alone.values():
        entries = msgspec.msgpack.decode(data)
        assert len(entries) == OUTPUT
        assert len({entry[1] for entry in entries}) > OUTPUT // 2


def test_in_a_batch_of_64(executors: dict[int, Executor], alone: dict[str, Result]) -> None:
    check(run(executors[2], [*fillers(48), *requests()]), alone)


@pytest.mark.parametrize("max_num_batched_tokens", [7, 64, 512])
def test_with_prompts_in_pieces(
    executors: dict[int, Executor], alone: dict[str, Result], max_num_batched_tokens: int
) -> None:
    check(run(executors[2], requests(), max_num_batched_tokens=max_num_batched_tokens), alone)


def test_with_one_thread(executors: dict[int, Executor], alone: dict[str, Result]) -> None:
    check(run(executors[1], requests()), alone)


def test_on_a_cache_hit_that_ends_inside_a_page(executors: dict[int, Executor], alone: dict[str, Result]) -> None:
    batch = requests()
    prefixes = {}
    for request in batch:
        length = len(request.prompt_token_ids) - 1
        prefixes[request.request_id] = length - 1 if length % PAGE_SIZE == 0 else length
    first = [
        make_request(f"first-{r.request_id}", r.prompt_token_ids[: prefixes[r.request_id]], max_tokens=1) for r in batch
    ]
    result = run(executors[2], batch, first=first)
    check(result, alone)
    for name, length in prefixes.items():
        assert result.cached[name] == length
        assert length % PAGE_SIZE


def test_when_every_one_is_preempted(executors: dict[int, Executor], alone: dict[str, Result]) -> None:
    """The fillers come first and start with one page each. The pool holds what everybody is expected to take (half of
    the output). When the fillers enter their second page, only those of the 16 are left, who have to go."""
    batch = requests()
    expected = sum(-(-(len(r.prompt_token_ids) + OUTPUT // 2) // PAGE_SIZE) for r in batch)
    assert expected <= 48
    result = run(executors[2], [*fillers(48), *batch], num_pages=48 + expected)
    for request in batch:
        assert result.preempted[request.request_id] > 0
    check(result, alone)


def tiny_requests() -> list[Request]:
    """Six of 5 to 30 tokens, half of them seeded."""
    made = []
    for number in range(6):
        prompt = [(7 * number + 3 * place) % 89 for place in range(5 + 5 * number)]
        sampling = {"temperature": 0.8, "seed": number} if number % 2 else {}
        made.append(make_request(f"r{number}", prompt, max_tokens=OUTPUT, logprobs=3, ignore_eos=True, **sampling))
    return made


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("isa", cpu_features()["isas"])
@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_on_every_instruction_set(name: str, isa: str, quantization: str) -> None:
    graph = load_model(TINY / name).graph
    spec = ExecutorSpec(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_num_batched_tokens=512, max_num_seqs=64, max_model_len=64
    )
    one, two = (NativeExecutor(graph, spec, quantization=quantization, isa=isa, threads=threads) for threads in (1, 2))
    batch = tiny_requests()
    expected = {request.request_id: run(one, [request]).results[request.request_id] for request in batch}
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(batch)
    for result in (
        run(one, batch),
        run(two, [*fillers(20, base=20), *batch]),
        run(two, batch, max_num_batched_tokens=7),
        run(one, batch, first=[make_request("first", batch[5].prompt_token_ids[:18], max_tokens=1)]),
    ):
        check(result, expected)
