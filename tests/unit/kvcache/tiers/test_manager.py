"""TierManager with a scheduler and an executor whose pages are the truth: what is fetched when, and what is told."""

from __future__ import annotations

import gc
import weakref

import pytest

from pinnate.core.config import EngineConfig
from pinnate.core.messages import Command, MatchEnd, Reply, StepOutputs, TokenOutput
from pinnate.core.request import Request
from pinnate.engine.build_cache import build_cache
from pinnate.engine.build_tiers import LowerTier
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox
from pinnate.scheduler.scheduler import Scheduler
from tests.fakes import FakeExecutor, expected_tokens, make_request
from tests.unit.kvcache.tiers.helpers import MemoryTier

PAGE_SIZE = 4


class Rig:
    """An engine over a tier in memory, with a real mover's thread."""

    def __init__(self, tier: MemoryTier, num_pages: int = 64, **settings: object) -> None:
        config = EngineConfig(model="m", page_size=PAGE_SIZE, cache_report="all", **settings)
        self.executor = FakeExecutor(PAGE_SIZE)
        parts = build_cache(config, num_pages, 0, lower=LowerTier(tier, self.executor))
        assert parts.tiers is not None
        self.tiers = parts.tiers
        self.cache = parts.cache
        self.scheduler = Scheduler(
            parts.cache,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=256,
            explainer=parts.explainer,
        )
        self.mailbox = Mailbox()
        self.core = EngineCore(
            self.scheduler,
            self.executor,
            self.mailbox,
            check_integrity=True,
            commands=parts.commands,
            tiers=parts.tiers,
        )

    def run(self, *requests: Request) -> dict[str, list[TokenOutput]]:
        self.mailbox.inbox += requests
        found: dict[str, list[TokenOutput]] = {}
        self.core.step()
        while not self.core.is_idle:
            self.core.step()
        for message in self.mailbox.collect():
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    found.setdefault(output.request_id, []).append(output)
        for request in requests:
            tokens = [token for output in found[request.request_id] for token in output.token_ids if output.index == 0]
            assert tokens == expected_tokens(request)
        return found

    def settle(self) -> None:
        """Until everything is stored."""
        while self.tiers._mover.num_unsaved:
            self.tiers._mover.wait(0.001)

    def view(self) -> dict[str, object]:
        self.mailbox.inbox.append(Command(1, "describe_cache"))
        self.core.step()
        (reply,) = [message for message in self.mailbox.collect() if isinstance(message, Reply)]
        (tier,) = reply.result["tiers"]
        return tier


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 250 for i in range(length)]


def asks(name: str, tokens: list[int], **fields: object) -> Request:
    request = make_request(name, tokens, **fields)
    return Request(
        request_id=name, prompt_token_ids=tokens, sampling=request.sampling, cache_report=True, cache_salt=""
    )


@pytest.mark.parametrize("length", [3, 4, 5, 40, 41, 43])
def test_a_new_engine_finds_what_an_old_one_computed(tier: MemoryTier, length: int) -> None:
    old = Rig(tier)
    old.run(asks("a", prompt(length), max_tokens=1))
    old.core.close()
    new = Rig(tier)
    first = new.run(asks("a", prompt(length), max_tokens=1))["a"][0]
    whole = min(length // PAGE_SIZE * PAGE_SIZE, length - 1)
    assert first.num_cached_tokens == whole
    assert first.cache_report is not None
    assert first.cache_report.num_tier_tokens == whole
    assert new.core.stats().tier_hit_tokens == whole
    assert new.core.stats().prefix_cache_hits == whole
    new.core.close()


def test_only_what_is_missing_is_loaded(tier: MemoryTier) -> None:
    rig = Rig(tier)
    rig.run(make_request("a", prompt(42), max_tokens=1))
    rig.settle()
    rig.core.close()
    rig = Rig(tier)
    rig.run(make_request("b", prompt(18), max_tokens=1))
    before = rig.core.stats().tier_loaded_pages
    again = rig.run(asks("a", prompt(42), max_tokens=1))["a"][0]
    assert before == 4
    assert rig.core.stats().tier_loaded_pages == 10
    # Two of the tokens of the fifth page were in memory.
    assert (again.num_cached_tokens, again.cache_report.num_tier_tokens) == (40, 22)
    assert again.cache_report.reason is MatchEnd.NEW_TEXT
    rig.core.close()


def test_requests_with_the_same_prefix_share_one_load(tier: MemoryTier) -> None:
    rig = Rig(tier)
    rig.run(make_request("a", prompt(40), max_tokens=1))
    rig.settle()
    rig.core.close()
    rig = Rig(tier)
    found = rig.run(*(make_request(f"r{i}", [*prompt(40), i, i], max_tokens=3) for i in range(4)))
    assert [outputs[0].num_cached_tokens for outputs in found.values()] == [40] * 4
    assert rig.core.stats().tier_loaded_pages == 10
    rig.core.close()


def test_salts_do_not_find_each_others_pages(tier: MemoryTier) -> None:
    rig = Rig(tier)
    rig.run(make_request("a", prompt(40), max_tokens=1))
    rig.settle()
    rig.core.close()
    rig = Rig(tier)
    plain = make_request("b", prompt(40), max_tokens=1)
    salted = Request(request_id="b", prompt_token_ids=prompt(40), sampling=plain.sampling, cache_salt="s")
    assert rig.run(salted)["b"][0].num_cached_tokens == 0
    rig.core.close()


def test_loading_is_declined_where_computing_is_faster(tier: MemoryTier) -> None:
    rig = Rig(tier)
    rig.run(make_request("a", prompt(40), max_tokens=1))
    rig.settle()
    rig.core.close()
    rig = Rig(tier)
    rig.tiers._cost.load.add(1, 1.0)
    rig.tiers._cost.prefill.add(10_000, 1.0)
    assert rig.run(make_request("a", prompt(40), max_tokens=1))["a"][0].num_cached_tokens == 0
    assert rig.core.stats().tier_loaded_pages == 0
    view = rig.view()
    assert (view["declined"], view["prefers_load"], view["load_pages_per_second"]) == (1, False, 1.0)
    rig.run(make_request("b", prompt(40, first=3), max_tokens=1))
    rig.settle()
    assert rig.core.stats().tier_stored_pages == 0  # nobody would load it
    rig.core.close()


def test_evicted_pages_come_back_and_flushed_ones_do_not(tier: MemoryTier) -> None:
    rig = Rig(tier, num_pages=12)
    rig.run(make_request("a", prompt(40), max_tokens=1))
    rig.run(make_request("b", prompt(40, first=101), max_tokens=1))  # pushes it out
    rig.settle()
    again = rig.run(asks("a", prompt(40), max_tokens=1))["a"][0]
    assert again.num_cached_tokens == 39
    assert again.cache_report.num_tier_tokens > 0
    assert rig.view()["hit_tokens"] == again.cache_report.num_tier_tokens
    rig.scheduler.flush_cache()
    assert tier.pages == {}
    last = rig.run(asks("a", prompt(40), max_tokens=1))["a"][0]
    assert (last.num_cached_tokens, last.cache_report.reason) == (0, MatchEnd.EVICTED)
    rig.core.close()


@pytest.mark.parametrize(("load_speed", "swaps"), [(1e6, True), (0.1, False)])
def test_preempted_sequences_swap_or_recompute(tier: MemoryTier, load_speed: float, swaps: bool) -> None:
    rig = Rig(tier, num_pages=20)
    rig.scheduler._admission.new_token_ratio = 0.0
    rig.tiers._cost.load.add(load_speed, 1.0)
    rig.tiers._cost.prefill.add(100, 1.0)
    rig.run(*(make_request(f"r{i}", prompt(12, first=i), max_tokens=30) for i in range(4)))
    stats, view = rig.core.stats(), rig.view()
    assert stats.preemptions > 0
    assert stats.swaps + view["recomputes"] == stats.preemptions
    assert stats.swaps > 1 if swaps else stats.swaps == 0  # one that has no whole page has nothing to swap
    assert (stats.tier_loaded_pages > 0) == swaps
    rig.core.close()


def test_loads_do_not_take_the_pages_that_others_need(tier: MemoryTier) -> None:
    """Five requests on disk, a pool for two: they are loaded as there is room, and nobody is preempted for a load."""
    rig = Rig(tier)
    crowd = [make_request(f"r{i}", prompt(40, first=i), max_tokens=2) for i in range(5)]
    rig.run(*crowd)
    rig.settle()
    rig.core.close()
    rig = Rig(tier, num_pages=24)
    found = rig.run(*crowd)
    assert [outputs[0].num_cached_tokens for outputs in found.values()] == [39] * 5
    stats = rig.core.stats()
    assert (stats.preemptions, stats.tier_loaded_pages) == (0, 50)
    rig.core.close()


def test_an_aborted_request_leaves_its_load_behind(tier: MemoryTier) -> None:
    rig = Rig(tier)
    rig.run(make_request("a", prompt(40), max_tokens=1))
    rig.settle()
    rig.core.close()
    rig = Rig(tier)
    rig.scheduler.add(make_request("a", prompt(40), max_tokens=1))
    assert rig.scheduler.schedule() is None
    rig.scheduler.abort(["a"])
    assert not rig.tiers._fetches
    rig.core.step()
    while not rig.core.is_idle:
        rig.core.step()
    rig.scheduler.check_integrity()
    assert rig.cache.num_free_pages + rig.cache.num_cached_pages == 64
    assert rig.run(make_request("b", prompt(40), max_tokens=1))["b"][0].num_cached_tokens == 39
    rig.core.close()


def test_a_tier_that_breaks_leaves_the_engine_running(tier: MemoryTier) -> None:
    rig = Rig(tier)
    rig.run(make_request("a", prompt(40), max_tokens=1))
    rig.settle()
    rig.core.close()
    rig = Rig(tier)
    tier.broken = True
    assert rig.run(make_request("a", prompt(40), max_tokens=1))["a"][0].num_cached_tokens == 0
    assert rig.run(make_request("b", prompt(40), max_tokens=9))["b"][0].num_cached_tokens == 39
    assert rig.view()["on"] is False
    rig.core.close()


def test_an_engine_that_nobody_closes_ends_its_thread(tier: MemoryTier) -> None:
    rig = Rig(tier)
    rig.run(make_request("a", prompt(40), max_tokens=1))
    thread, gone = rig.tiers._mover._thread, weakref.ref(rig.tiers)
    del rig
    gc.collect()
    assert gone() is None
    thread.join(10)
    assert not thread.is_alive()
    assert tier.closed
    assert len(tier.pages) == 10
