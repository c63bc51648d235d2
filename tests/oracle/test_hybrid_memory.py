"""What layer groups save: waste, memory of long sequences, and prefix hits, for the layers of Gemma 3 270M.

A pool of P pages of all 18 layers has the bytes of 6 P pages of 3 layers. The executor is the fake one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pinnate.core.layer_groups import LayerSize, PageNeeds, choose_layer_groups
from pinnate.core.messages import EngineStats
from pinnate.core.request import Request
from pinnate.engine.engine_core import EngineCore
from pinnate.kvcache.manager import KVCacheManager
from pinnate.scheduler.scheduler import Scheduler
from tests.fakes import FakeExecutor, expected_tokens, make_request
from tests.oracle.test_memory import PAGE_SIZE, Rig, check_tokens, lognormal

WINDOW = 512
GROUPS = 6
BUDGET = 512
NEEDS = choose_layer_groups([LayerSize(1, 256, 0 if (i + 1) % 6 == 0 else WINDOW) for i in range(18)]).needs(
    PAGE_SIZE, BUDGET
)
PLAIN = PageNeeds(page_size=PAGE_SIZE)


class HybridRig(Rig):
    def __init__(self, num_pages: int, needs: PageNeeds = NEEDS, *, proves_every_step: bool = True) -> None:
        super().__init__(num_pages)
        self.cache = KVCacheManager(num_pages=num_pages, page_size=PAGE_SIZE, needs=needs)
        self.scheduler = Scheduler(self.cache, max_num_seqs=16, max_num_batched_tokens=BUDGET, max_model_len=8192)
        self.executor = FakeExecutor(PAGE_SIZE)
        self.core = EngineCore(self.scheduler, self.executor, self.mailbox, check_integrity=proves_every_step)


def slots(rig: Rig) -> tuple[int, int]:
    """(allocated, used) slots of the pages that running sequences hold; a shared page counts once. A slot of a windowed
    group is used if the next token sees it."""
    used: dict[int, int] = {}
    for seq in rig.scheduler._queues.running:
        end = seq.num_computed_tokens
        for group, table in enumerate((seq.page_table, *seq.window_tables)):
            low = 0 if group == 0 else max(0, end - WINDOW + 1)
            for logical, page in enumerate(table):
                if page:
                    first, last = max(low, logical * PAGE_SIZE), min(end, (logical + 1) * PAGE_SIZE)
                    used[page] = max(used.get(page, 0), last - first)
    return len(used) * PAGE_SIZE, sum(used.values())


def test_groups_of_gemma() -> None:
    assert (NEEDS.window_groups, NEEDS.window_pages, NEEDS.step_pages) == (5, 33, 32)


@pytest.mark.timeout(300)
def test_waste_in_a_mixed_workload() -> None:
    """64 requests, 16 at a time: prompts log-normal 20 to 2,000 tokens, outputs 16 to 400: below and beyond 512."""
    rng = random.Random("mixed")
    waiting = []
    for number in range(64):
        length = lognormal(rng, 250, 1.0, 20, 2000)
        prompt = [rng.randrange(256) for _ in range(length)]
        waiting.append(make_request(f"r{number}", prompt, max_tokens=lognormal(rng, 64, 0.7, 16, 400)))
    batch = list(waiting)
    rig = HybridRig(num_pages=6 * 16 * 60)
    allocated = used = sent = 0
    while len(rig.finished) < 64:
        while waiting and sent - len(rig.finished) < 16:
            rig.mailbox.inbox.append(waiting.pop(0))
            sent += 1
        rig.step()
        now = slots(rig)
        allocated, used = allocated + now[0], used + now[1]
    check_tokens(rig, batch)
    waste = (allocated - used) / allocated
    print(f"waste {waste:.2%}")
    assert waste < 0.04
    assert rig.core.stats().preemptions == 0


def test_memory_of_a_sequence_of_4k_tokens() -> None:
    rng = random.Random(4)
    rig = HybridRig(num_pages=6 * 300)
    request = make_request("long", [rng.randrange(256) for _ in range(4000)], max_tokens=96)
    rig.mailbox.inbox.append(request)
    shares = {}
    while not rig.finished:
        rig.step()
        for seq in rig.scheduler._queues.running:
            uniform = GROUPS * -(-seq.num_computed_tokens // PAGE_SIZE)
            shares[seq.num_computed_tokens] = rig.cache.pages_held(seq) / uniform
    check_tokens(rig, [request])
    at_4k = [share for tokens, share in shares.items() if tokens >= 4000]
    print(f"after the prompt {at_4k[0]:.1%}, while decoding {at_4k[-1]:.1%}")
    assert len(at_4k) > 90
    assert max(at_4k) < 0.45
    assert at_4k[-1] < 0.29


def system_prompts(rng: random.Random) -> list[Request]:
    """Six system prompts of 600 to 1,100 tokens before 48 questions, in turn; ends anywhere in a page."""
    systems = [[rng.randrange(256) for _ in range(600 + 101 * i)] for i in range(6)]
    return [
        make_request(f"q{i}", systems[i % 6] + [rng.randrange(256) for _ in range(40 + i)], max_tokens=24)
        for i in range(48)
    ]


def chats(rng: random.Random) -> list[Request]:
    """Eight chats of six turns, 150 tokens and 40 of answer each; the longest has 1,180 tokens."""
    histories = [[chat, *(rng.randrange(256) for _ in range(99))] for chat in range(8)]
    made = []
    for turn in range(6):
        for chat, history in enumerate(histories):
            history += [rng.randrange(256) for _ in range(150)]
            request = make_request(f"c{chat}.{turn}", history, max_tokens=40)
            made.append(request)
            history += expected_tokens(request, 0)
    return made


def repeats(rng: random.Random) -> list[Request]:
    """Prompts that come back whole, or up to a point in their middle."""
    texts = [[rng.randrange(256) for _ in range(1500)] for _ in range(4)]
    made = []
    for i in range(32):
        cut = rng.choice([1500, 1500, 400, 777, 1203])
        made.append(make_request(f"p{i}", texts[i % 4][:cut] + [i] * 20, max_tokens=8))
    return made


def serve(requests: Sequence[Request], num_pages: int, needs: PageNeeds, at_once: int) -> EngineStats:
    rig = HybridRig(num_pages, needs, proves_every_step=False)
    for at in range(0, len(requests), at_once):
        rig.run(requests[at : at + at_once])
        rig.scheduler.check_integrity()
    check_tokens(rig, requests)
    return rig.core.stats()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("trace", [system_prompts, chats, repeats])
def test_prefix_hits_are_those_of_a_plain_model(trace) -> None:
    """With room for all, every hit of a plain model is one here. In memory that does not do for all, in equal
    bytes, there are more or as many (a branch point is learnt from the first prompt that misses it: a percent of
    the worst trace)."""
    requests = trace(random.Random(trace.__name__))
    ample = 3000
    plain, hybrid = (serve(requests, ample * factor, needs, 4) for factor, needs in ((1, PLAIN), (GROUPS, NEEDS)))
    assert plain.prefix_cache_hits > 0.4 * plain.prefix_cache_queries
    assert hybrid.prefix_cache_hits == plain.prefix_cache_hits
    tight = {system_prompts: 420, chats: 260, repeats: 300}[trace]
    plain, hybrid = (serve(requests, tight * factor, needs, 2) for factor, needs in ((1, PLAIN), (GROUPS, NEEDS)))
    print(f"{trace.__name__}: {plain.prefix_cache_hits} hits, with groups {hybrid.prefix_cache_hits}")
    assert plain.evicted_pages > 0
    assert hybrid.prefix_cache_hits >= 0.99 * plain.prefix_cache_hits
    assert trace is repeats or hybrid.prefix_cache_hits >= plain.prefix_cache_hits
