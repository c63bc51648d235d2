"""Ten thousand steps of everything at once: shared prompts, salts, choices, chunks, preemption, aborts, failed steps,
flushes, pins, each eviction policy, reports, events. After each step the books balance and a router's index is right.
"""

from __future__ import annotations

import random

import pytest

from pinnate.core.config import EVICTION_POLICIES
from pinnate.core.errors import InvalidRequestError
from pinnate.core.messages import MatchEnd
from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams
from pinnate.engine.kv_event_publisher import to_event
from pinnate.kvcache.event_log import EventLog
from pinnate.kvcache.explain import EvictedPaths, MatchExplainer
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_hashes import PageHashes
from pinnate.kvcache.pins import Pins
from pinnate.scheduler.scheduler import Scheduler
from tests.property.kv_index import KVIndex, prefixes_in_tree
from tests.property.slot_memory import SlotMemory, prefix_hashes
from tests.property.test_scheduler import EOS, MAX_MODEL_LEN, VOCAB, Choice, ModelExecutor, Plan, Session

STEPS = 2_600  # for each of the four policies
BUDGET, PAGES, QUOTA = 24, 30, 6


class BusySession(Session):
    """Work without end; what has ended is checked and forgotten."""

    def __init__(self, policy: str, page_size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        evicted, self.log = EvictedPaths(page_size), EventLog()
        self.hashes = PageHashes(page_size, [evicted, self.log])
        self.cache = KVCacheManager(PAGES, page_size, eviction_policy=policy, pinnable_pages=QUOTA, watch=self.hashes)
        self.pins = Pins(self.cache)
        self.index = KVIndex()
        explainer = MatchExplainer(self.cache.tree, self.hashes, evicted, page_size, see_others=True)
        self.scheduler = Scheduler(
            self.cache,
            policy="lpm",
            max_num_seqs=6,
            max_num_batched_tokens=BUDGET,
            max_model_len=MAX_MODEL_LEN,
            explainer=explainer,
        )
        self.executor = ModelExecutor(self.scheduler, SlotMemory(PAGES, page_size))
        self.plan = Plan(page_size, PAGES - QUOTA, BUDGET, 6, "lpm", True, [], [], set(), set())
        self.got, self.prompt_logprobs, self.accepted = {}, {}, []
        self.texts = [[self.rng.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
        self.count = 0
        self.seen: dict[str, int] = {}

    def step(self, step: int) -> None:  # noqa: ARG002
        rng = self.rng
        if len(self.scheduler._states) < 6 and rng.random() < 0.4:
            self.add(self.make_request())
        if rng.random() < 0.1:
            self.pin_or_unpin()
        if rng.random() < 0.02:
            self.scheduler.flush_cache()
        if rng.random() < 0.05 and self.scheduler._states:
            name = rng.choice(list(self.scheduler._states))
            self.take(self.scheduler.abort([name], rng.choice((None, 0, 1))))
        self.run_step()
        self.cache.check_integrity()
        self.check_events()
        self.check_pins()
        self.check_ended()

    def run_step(self) -> None:
        output = self.scheduler.schedule()
        if output is None:
            assert not self.scheduler.has_work()
        elif self.rng.random() < 0.03:
            self.executor.memory.scribble(output)
            self.take(self.scheduler.fail(output, "boom"))
        else:
            self.take(self.scheduler.update(output, self.executor.execute(output, BUDGET)))

    def make_request(self) -> Request:
        rng = self.rng
        self.count += 1
        prompt = rng.choice(self.texts)[: rng.randrange(1, 36)] + [
            rng.randrange(VOCAB) for _ in range(rng.randrange(4))
        ]
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 3)), max_tokens=rng.choice((1, 4, 14)), seed=rng.randrange(3), ignore_eos=True
        )
        return Request(
            request_id=f"r{self.count}",
            prompt_token_ids=prompt,
            sampling=params,
            eos_token_ids=(EOS,),
            priority=rng.choice((0, 0, -1, 2)),
            cache_salt=rng.choice(("", "", "x")),
            cache_report=True,
        )

    def pin_or_unpin(self) -> None:
        pins = self.pins.all()
        if pins and self.rng.random() < 0.5:
            self.pins.unpin(self.rng.choice(pins).pin_id)
            return
        try:
            pinned = self.pins.pin(self.rng.choice(self.texts)[: self.rng.randrange(self.plan.page_size, 36)])
        except InvalidRequestError as error:
            self.seen[error.code] = 1
        else:
            self.seen["pinned" if pinned else "not cached"] = 1
        assert self.pins.num_pages <= QUOTA

    def check_events(self) -> None:
        self.index.apply(to_event(change, self.plan.page_size) for change in self.log.take(self.hashes))
        assert self.index.prefixes() == prefixes_in_tree(self.cache)

    def check_pins(self) -> None:
        for pin in self.pins.all():
            self.executor.memory.check(pin.seq.page_table, prefix_hashes(pin.seq.token_ids), pin.num_tokens)

    def check_ended(self) -> None:
        ended = [request for request in self.accepted if request.request_id not in self.scheduler._states]
        self.accepted = ended
        self.check_outputs()
        for request in ended:
            for index in range(request.sampling.n):
                del self.got[request.request_id, index]
        self.accepted = [state.request for state in self.scheduler._states.values()]

    def take(self, outputs: list) -> None:  # type: ignore[type-arg]
        for output in outputs:
            if output.cache_report is not None:
                self.seen[output.cache_report.reason] = 1
                assert output.cache_report.num_cached_tokens == output.num_cached_tokens
            self.got.setdefault((output.request_id, output.index), Choice())
        super().take(outputs)


@pytest.mark.parametrize("number", range(len(EVICTION_POLICIES)))
def test_everything_at_once(number: int) -> None:
    policy = EVICTION_POLICIES[number]
    session = BusySession(policy, page_size=(4, 2, 4, 3)[number], seed=number)
    for step in range(STEPS):
        session.step(step)
    expected = {"pinned", "not cached", "pin_quota_exceeded", MatchEnd.NEW_TEXT, MatchEnd.EVICTED, MatchEnd.OTHER_SALT}
    assert expected | {MatchEnd.LAST_TOKEN} <= session.seen.keys()
    stats = session.scheduler.stats()
    assert min(stats.preemptions, stats.evicted_pages, stats.prefix_cache_hits) > 20
    for pin in session.pins.all():
        session.pins.unpin(pin.pin_id)
    session.take(session.scheduler.abort(list(session.scheduler._states)))
    session.scheduler.flush_cache()
    assert session.cache.num_free_pages == PAGES
