"""The scheduler with windowed layer groups: as test_scheduler.py, on a model that sees its window only in those groups.

Chunked prompts, forks, copy-on-write, aborts, failed steps, flushes, eviction and preemption in pools down to the
least that one request needs. The integrity of the KV memory is proved after each step.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pinnate.core.batch import ScheduledSequence, SchedulerOutput, StepResult
from pinnate.core.layer_groups import PageNeeds, reach
from pinnate.core.request import Request
from pinnate.kvcache.manager import KVCacheManager
from tests.property.slot_memory import SlotMemory, prefix_hashes
from tests.property.test_scheduler import ModelExecutor, Plan, Session, plans
from tests.property.test_window_pages import group_hashes


@dataclass(frozen=True)
class HybridPlan:
    plan: Plan
    window: int
    groups: int

    @property
    def needs(self) -> PageNeeds:
        size = self.plan.page_size
        return PageNeeds(
            page_size=size,
            window_groups=self.groups,
            window_pages=reach(self.window, size) + 1,
            step_pages=-(-self.plan.budget // size),
        )


@st.composite
def hybrid_plans(draw_from: st.DrawFn) -> HybridPlan:
    plan = draw_from(plans())
    groups = draw_from(st.sampled_from([1, 2, 5]))
    pages = plan.num_pages * draw_from(st.integers(1, groups + 1))
    return HybridPlan(replace(plan, num_pages=pages), draw_from(st.sampled_from([1, 2, 7, 16, 20, 50])), groups)


class WindowMemory(SlotMemory):
    """Also the windowed groups' slots: read back what a step sees, write what it computes."""

    window = 0

    def check_windows(self, part: ScheduledSequence, hashes: list[int]) -> None:
        size, low = self.page_size, max(0, part.start - self.window + 1)
        for group, table in enumerate(part.window_tables, 1):
            expected = group_hashes(hashes, group)
            seen = [self.slots[table[p // size]][p % size] for p in range(low, part.start)]
            assert seen == expected[low + 1 : part.start + 1], f"group {group} reads back {seen}"

    def write_windows(self, part: ScheduledSequence, hashes: list[int] | None) -> None:
        for group, table in enumerate(part.window_tables, 1):
            for position in range(part.start, part.start + len(part.token_ids)):
                self.write(table, position, -1 if hashes is None else group_hashes(hashes, group)[position + 1])

    def scribble(self, output: SchedulerOutput) -> None:
        super().scribble(output)
        for part in output.sequences:
            self.write_windows(part, None)


class HybridExecutor(ModelExecutor):
    memory: WindowMemory

    def execute(self, output: SchedulerOutput, budget: int) -> StepResult:
        self._check_that_nobody_else_reads_what_is_written(output)
        return super().execute(output, budget)

    def _check_that_nobody_else_reads_what_is_written(self, output: SchedulerOutput) -> None:
        size = self.memory.page_size
        written: dict[int, int] = {}
        for part in output.sequences:
            pages = range(part.start // size, (part.start + len(part.token_ids) - 1) // size + 1)
            for table in (part.page_table, *part.window_tables):
                for page in {table[logical] for logical in pages}:
                    assert page not in written, "a page is written twice"
                    written[page] = part.seq_id
        for seq in self.scheduler._queues._running_ids.values():
            for table in (seq.page_table, *seq.window_tables):
                assert all(written.get(page, seq.seq_id) == seq.seq_id for page in table), "written while another reads"

    def _run(self, part: ScheduledSequence, known: array[int], request: Request, result: StepResult) -> None:
        hashes = prefix_hashes(known, request.cache_salt)
        self.memory.check_windows(part, hashes)
        self.memory.write_windows(part, hashes)
        super()._run(part, known, request, result)


class HybridSession(Session):
    def __init__(self, hybrid: HybridPlan) -> None:
        self.hybrid = hybrid
        super().__init__(hybrid.plan)

    def make_cache(self, plan: Plan) -> KVCacheManager:
        needs = self.hybrid.needs
        return KVCacheManager(plan.num_pages, plan.page_size, enable_prefix_caching=plan.caching, needs=needs)

    def make_executor(self, plan: Plan) -> HybridExecutor:
        memory = WindowMemory(plan.num_pages, plan.page_size)
        memory.window = self.hybrid.window
        return HybridExecutor(self.scheduler, memory)

    def num_pages_needed(self, prompt: int, output: int, n: int) -> int:
        needs, size = self.hybrid.needs, self.plan.page_size
        shared = prompt // size if n > 1 else 0
        return needs.peak(shared * size) + n * needs.peak(prompt + max(output, 1) - 1, shared)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(hybrid_plans())
def test_every_request_gets_what_it_would_get_alone(hybrid: HybridPlan) -> None:
    session = HybridSession(hybrid)
    session.run()
    session.check_outputs()
    session.check_memory()
