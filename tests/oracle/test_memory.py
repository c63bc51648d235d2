"""The KV memory under pressure: everything finishes, the books balance after every step, little is wasted.

The executor is the fake one, whose tokens depend on what the pages really hold: a lost copy or a page given away too
early shows as a wrong token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from pinnate.core.messages import StepOutputs
from pinnate.core.request import Request
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox
from pinnate.kvcache.manager import KVCacheManager
from pinnate.scheduler.scheduler import Scheduler
from tests.fakes import FakeExecutor, expected_tokens, make_request

PAGE_SIZE = 16


class Rig:
    def __init__(self, num_pages: int, policy: str = "fcfs") -> None:
        self.cache = KVCacheManager(num_pages=num_pages, page_size=PAGE_SIZE)
        self.scheduler = Scheduler(
            self.cache, policy=policy, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=2048
        )
        self.executor = FakeExecutor(PAGE_SIZE)
        self.mailbox = Mailbox()
        self.core = EngineCore(self.scheduler, self.executor, self.mailbox, check_integrity=True)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: set[str] = set()

    def step(self) -> None:
        """One step; the core proves the books' balance at its end, or raises."""
        self.core.step()
        for message in self.mailbox.collect():
            assert isinstance(message, StepOutputs)
            for output in message.outputs:
                assert output.error is None
                self.tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.finished.add(output.request_id)

    def run(self, batch: Sequence[Request]) -> None:
        self.mailbox.inbox += batch
        self.step()
        while not self.core.is_idle:
            self.step()


def check_tokens(rig: Rig, batch: Sequence[Request]) -> None:
    for request in batch:
        for index in range(request.sampling.n):
            assert rig.tokens[request.request_id, index] == expected_tokens(request, index)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("n", [1, 2])
def test_sixteen_long_requests_through_a_pool_for_two(policy: str, n: int) -> None:
    rng = random.Random(7)
    shared = [rng.randrange(256) for _ in range(45)]
    batch = []
    for number in range(16):
        prompt = shared * (number % 2) + [rng.randrange(256) for _ in range(200 + 10 * number)]
        fields = {"temperature": 1.0, "seed": number} if number % 3 else {}
        batch.append(make_request(f"r{number}", prompt, max_tokens=150, n=n, **fields))
    largest = max(len(r.prompt_token_ids) for r in batch) + n * 150
    num_pages = 2 * -(-largest // PAGE_SIZE)
    rig = Rig(num_pages, policy)
    rig.run(batch)
    check_tokens(rig, batch)
    stats = rig.core.stats()
    assert stats.preemptions > 0
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_cached_pages > 0
    assert stats.num_free_pages + stats.num_cached_pages == num_pages
    assert rig.scheduler.flush_cache() == stats.num_cached_pages
    rig.scheduler.check_integrity()
    assert rig.core.stats().num_free_pages == num_pages


def lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return int(min(high, max(low, round(math.exp(rng.gauss(math.log(median), sigma))))))


def slots(rig: Rig) -> tuple[int, int]:
    """(allocated, used) slots of the pages that running sequences hold; a shared page counts once."""
    used: dict[int, int] = {}
    for seq in rig.scheduler._queues.running:
        for logical, page in enumerate(seq.page_table):
            filled = min(PAGE_SIZE, max(0, seq.num_computed_tokens - logical * PAGE_SIZE))
            used[page] = max(used.get(page, 0), filled)
    return len(used) * PAGE_SIZE, sum(used.values())


def test_waste_in_a_mixed_workload() -> None:
    """64 requests, 16 at a time; prompts log-normal 20 to 600 tokens, outputs 16 to 200, as a server's mixed load."""
    rng = random.Random("mixed")
    waiting = []
    for number in range(64):
        length = lognormal(rng, 140, 0.8, 20, 600)
        prompt = [rng.randrange(256) for _ in range(length)]
        waiting.append(make_request(f"r{number}", prompt, max_tokens=lognormal(rng, 64, 0.7, 16, 200)))
    batch = list(waiting)
    rig = Rig(num_pages=16 * 50)
    allocated = used = sent = 0
    while len(rig.finished) < 64:
        while waiting and sent - len(rig.finished) < 16:
            rig.mailbox.inbox.append(waiting.pop(0))
            sent += 1
        rig.step()
        now = slots(rig)
        allocated, used = allocated + now[0], used + now[1]
    check_tokens(rig, batch)
    assert allocated > 0
    assert (allocated - used) / allocated < 0.04
    assert rig.core.stats().preemptions == 0
