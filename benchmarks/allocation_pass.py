"""One pass of the engine over a trace under one allocation scheme: who gets memory, and how fast it goes.

Part of allocation.py. Knows: the schemes, how to look into the scheduler's memory, how to run a step or to skip it.
Must not know: where the windows are, what becomes of the figures.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chat_trace import Users
from contiguous import RESERVATIONS, ContiguousAdmission, ContiguousCache

from pinnate.core.batch import SchedulerOutput, StepResult
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox
from pinnate.executor.base import Executor
from pinnate.kvcache.manager import KVCacheManager
from pinnate.scheduler.admission import Limits
from pinnate.scheduler.scheduler import Scheduler

PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN = 16, 768, 2048
MAX_NUM_SEQS, BATCHED_TOKENS, USERS = 64, 512, 64
WINDOW_SECONDS = 0.45


class UntimedScheduler(Scheduler):
    """Steps that are skipped take no time, so what they take must not decide what is in the next."""

    def note_seconds(self, output: SchedulerOutput, seconds: float) -> None: ...


@dataclass(frozen=True)
class Scheme:
    title: str
    contiguous: str | None = None  # which reservation
    sharing: bool = False
    policy: str = "fcfs"

    def scheduler(self, num_pages: int = NUM_PAGES) -> Scheduler:
        def over(cache: Any) -> Scheduler:
            return UntimedScheduler(
                cache,
                policy=self.policy,
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=BATCHED_TOKENS,
                max_model_len=MAX_MODEL_LEN,
            )

        if self.contiguous is None:
            return over(KVCacheManager(num_pages, PAGE_SIZE, enable_prefix_caching=self.sharing))
        cache = ContiguousCache(num_pages, PAGE_SIZE, RESERVATIONS[self.contiguous], MAX_MODEL_LEN)
        scheduler = over(cache)
        limits = Limits(MAX_NUM_SEQS, BATCHED_TOKENS, MAX_MODEL_LEN, USERS)
        scheduler._admission = scheduler._starter._admission = ContiguousAdmission(cache, limits)
        return scheduler


SCHEMES = {
    "max": Scheme("contiguous, maximum length", contiguous="max"),
    "pow2": Scheme("contiguous, next power of two", contiguous="pow2"),
    "oracle": Scheme("contiguous, true length (oracle)", contiguous="oracle"),
    "paged": Scheme("paged"),
    "shared": Scheme("paged, prefixes shared", sharing=True),
    "shared_lpm": Scheme("paged, prefixes shared, longest match first", sharing=True, policy="lpm"),
}


@dataclass
class Occupancy:
    """Slots of the pool, added up over steps: each is stored (has a token's keys and values, counted once however many
    sequences share it), later (reserved, will be written), never (reserved for nothing), cached (what ended sequences
    left, evictable) or free."""

    pool: int
    steps: int = 0
    batch: int = 0
    max_batch: int = 0
    slots: Counter[str] = field(default_factory=Counter)

    def sample(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """As the step will leave the memory."""
        running = scheduler._queues.running
        computed = {part.seq_id: part.start + len(part.token_ids) for part in output.sequences}
        pages: set[int] = set()
        whole: set[int] = set()
        partial: dict[int, int] = {}
        never = 0
        for seq in running:
            tokens = computed.get(seq.seq_id, seq.num_computed_tokens)
            table = seq.page_table
            pages.update(table)
            full, rest = divmod(tokens, PAGE_SIZE)
            whole.update(table[:full])
            if rest:
                partial[table[full]] = max(rest, partial.get(table[full], 0))
            at_end = seq.num_prompt_tokens + seq.request.max_tokens - 1
            never += max(0, len(table) * PAGE_SIZE - at_end)
        stored = len(whole) * PAGE_SIZE + sum(filled for page, filled in partial.items() if page not in whole)
        reserved = len(pages) * PAGE_SIZE
        cached = scheduler._cache.num_cached_pages * PAGE_SIZE
        free = self.pool - reserved - cached
        parts = {"stored": stored, "later": reserved - stored - never, "never": never, "cached": cached, "free": free}
        self.slots.update(parts)
        self.steps += 1
        self.batch += len(running)
        self.max_batch = max(self.max_batch, len(running))

    def shares(self) -> dict[str, float]:
        slots = {name: count / self.steps / self.pool for name, count in self.slots.items()}
        reserved = slots["stored"] + slots["later"] + slots["never"]
        return {
            "stored_of_pool": slots["stored"],
            "stored_of_reserved": slots["stored"] / reserved,
            "reserved_for_later": slots["later"],
            "reserved_for_nothing": slots["never"],
            "cached": slots["cached"],
            "free": slots["free"],
            "mean_batch": self.batch / self.steps,
            "max_batch": self.max_batch,
            "steps": self.steps,
        }


class MeteredExecutor:
    """Samples the memory before each step, and runs the step or skips it: then every token drawn is 100."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self.occupancy = Occupancy(scheduler._cache.num_pages * PAGE_SIZE)
        self.runs = False
        self.counts = False  # whether a request waited in the last step
        self.aside = 0.0  # seconds that sampling took in the last step
        self.prompt_tokens = 0  # computed in the last step

    def execute(self, output: SchedulerOutput) -> StepResult:
        begin = time.perf_counter()
        self.counts = bool(self._scheduler._queues.waiting)
        if self.counts:
            self.occupancy.sample(self._scheduler, output)
        samples = sum(len(part.samples) for part in output.sequences)
        self.prompt_tokens = output.num_tokens - samples
        self.aside = time.perf_counter() - begin
        if self.runs:
            return self._executor.execute(output)
        return StepResult([100] * samples, [None] * samples, {})

    @property
    def kv_committed_bytes(self) -> int:
        return self._executor.kv_committed_bytes

    def describe(self) -> dict[str, object]:
        return self._executor.describe()

    def close(self) -> None:
        """The executor is not its own."""


@dataclass
class Pass:
    """`kinds` and `seconds` tell steps with prompt tokens (True) from those without: how many there are in the whole
    trace, how long those in the windows took. They and the tokens are of steps in which a request waited."""

    memory: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    steps: int = 0
    outputs: int = 0
    prompts: int = 0
    kinds: Counter[bool] = field(default_factory=Counter)
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    @property
    def estimated_seconds(self) -> float:
        """Of the whole trace. Steps with prompt tokens take longer and are not equally frequent in all windows, so the
        mean of each kind is weighted by the number of such steps in the trace (post-stratification)."""
        every = [seconds for kind in self.seconds.values() for seconds in kind]
        return sum(count * statistics.fmean(self.seconds[kind] or every) for kind, count in self.kinds.items())


def run_trace(
    scheme: Scheme,
    executor: Executor,
    trace: list[list[tuple[int, int]]],
    *,
    windows: Callable[[int], bool] = lambda _: False,
    num_pages: int = NUM_PAGES,
    users: int = USERS,
) -> Pass:
    """The whole trace once. Where `windows` is true of a step's number, steps are run for WINDOW_SECONDS; the first of
    them, which finds the processor's caches cold, is not timed."""
    scheduler = scheme.scheduler(num_pages)
    meter = MeteredExecutor(executor, scheduler)
    mailbox = Mailbox()
    core = EngineCore(scheduler, meter, mailbox)
    people = Users(trace, users)
    mailbox.inbox.extend(people.first())
    result = Pass()
    until = 0.0
    while not people.is_done:
        warm = meter.runs
        if windows(result.steps):
            until = time.perf_counter() + WINDOW_SECONDS
        meter.runs = time.perf_counter() < until
        begin = time.perf_counter()
        core.step()
        seconds = time.perf_counter() - begin - meter.aside
        outputs = [output for message in mailbox.collect() for output in message.outputs]  # type: ignore[union-attr]
        result.steps += 1
        if meter.counts:
            kind = meter.prompt_tokens > 0
            result.kinds[kind] += 1
            result.outputs += sum(len(output.token_ids) for output in outputs)
            result.prompts += meter.prompt_tokens
            if meter.runs and warm:
                result.seconds[kind].append(seconds)
        sent = [people.hear(output) for output in outputs]
        mailbox.inbox.extend(request for request in sent if request is not None)
    scheduler.check_integrity()
    stats = core.stats()
    result.memory = meter.occupancy.shares()
    names = ("preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_hits", "evicted_pages")
    result.counters = {name: getattr(stats, name) for name in names}
    result.requests = len(people.requests)
    return result
