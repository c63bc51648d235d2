"""Thousands of steps of an engine with a disk tier: loads, write-through, evictions, swaps, restarts, damaged files,
full disks, flushes, aborts, failed steps, in random order. After each step the books balance; every sequence reads
its own past from every slot (SlotMemory, the model of which tokens are in which slot) and ends with the tokens of a
lone run.

The mover has no thread here: its jobs are done one by one, in the middle of page copies too, at random moments.
"""

from __future__ import annotations

import errno
import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.tiers.cost import CostModel
from pinnate.kvcache.tiers.disk import DiskTier
from pinnate.kvcache.tiers.manager import FIRST_LOAD_ID, TierManager
from pinnate.kvcache.tiers.mover import PageMover
from pinnate.kvcache.tiers.page_file import header_bytes
from pinnate.kvcache.tiers.saved_pages import SavedPages
from pinnate.scheduler.scheduler import Scheduler
from tests.property.slot_memory import SlotMemory, prefix_hashes
from tests.property.test_scheduler import EOS, MAX_MODEL_LEN, VOCAB, Choice, ModelExecutor, Plan, Session

STEPS = 3_000  # for each of the four seeds
BUDGET, PAGES = 24, 26
DISK_PAGES = 40


class InterruptedMemory(SlotMemory):
    """The engine goes on in the middle of a page that the mover copies."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.interrupt = None  # called once, between the halves of the next page read

    def read_pages(self, pages: Sequence[int], out: bytearray) -> None:
        if self.interrupt is None:
            return super().read_pages(pages, out)
        action, self.interrupt = self.interrupt, None
        half = self.page_size // 2 * 8
        before = bytearray(len(out))
        super().read_pages(pages, before)
        action()
        super().read_pages(pages, out)
        memoryview(out).cast("B")[:half] = before[:half]
        return None


class FaultyDisk(DiskTier):
    """Its disk is full for a while, half-way through a page."""

    full = False

    def _write_file(self, header, data):  # type: ignore[no-untyped-def]
        if not self.full:
            return super()._write_file(header, data)
        super()._write_file(header, memoryview(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


class TieredSession(Session):
    """Work without end; what has ended is checked and forgotten."""

    def __init__(self, folder: Path, page_size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder, self.page_size = folder, page_size
        self.plan = Plan(page_size, PAGES, BUDGET, 6, "lpm", True, [], [], set(), set())
        self.got, self.prompt_logprobs, self.accepted = {}, {}, []
        self.texts = [[self.rng.randrange(VOCAB) for _ in range(48)] for _ in range(5)]
        self.count = 0
        self.seen: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        """An engine process: its memory is new, the folder is what it is."""
        size, rng = self.page_size, self.rng
        memory = InterruptedMemory(PAGES, size)
        memory.slots = [[rng.randrange(1000) for _ in range(size)] for _ in memory.slots]
        limit = DISK_PAGES * (header_bytes(size) + memory.page_bytes)
        self.tier = FaultyDisk(
            self.folder, b"n" * 16, page_size=size, page_bytes=memory.page_bytes, max_bytes=limit + 7
        )
        self.cost = CostModel()
        staging = 2 * memory.page_bytes
        self.mover = PageMover(memory, self.tier, self.cost, staging_bytes=staging, threaded=False)
        pages = SavedPages(size, self.mover, lambda: self.cost.goes_on(size, 1))
        self.cache = KVCacheManager(PAGES, size, watch=pages)
        self.tiers = TierManager(self.cache, pages, self.tier, self.mover, self.cost)
        self.scheduler = Scheduler(
            self.cache,
            policy="lpm",
            max_num_seqs=6,
            max_num_batched_tokens=BUDGET,
            max_model_len=MAX_MODEL_LEN,
        )
        self.executor = ModelExecutor(self.scheduler, memory)

    def step(self, step: int) -> None:  # noqa: ARG002
        rng = self.rng
        if len(self.scheduler._states) < 6 and rng.random() < 0.4:
            self.add(self.make_request())
        for chance, action in (
            (0.01, self.flush),
            (0.05, self.abort_one),
            (0.005, self.restart),
            (0.06, self.damage),
            (0.01, self.fill_or_free),
            (0.02, self.change_speeds),
        ):
            if rng.random() < chance:
                action()
        for _ in range(rng.randrange(4)):
            self.mover.work()
        if rng.random() < 0.1:
            self.executor.memory.interrupt = self.run_step
            self.mover.work()
            self.executor.memory.interrupt = None
        self.run_step()
        self.check_integrity()
        self.check_files()
        self.check_ended()

    def run_step(self) -> None:
        output = self.scheduler.schedule()
        if output is None:
            assert not self.scheduler._queues.running
            assert self.tiers._under_way or not self.scheduler.has_work(), "work is left undone"
        elif self.rng.random() < 0.03:
            self.executor.memory.scribble(output)
            self.take(self.scheduler.fail(output, "boom"))
        else:
            self.take(self.scheduler.update(output, self.executor.execute(output, BUDGET)))

    def make_request(self) -> Request:
        rng = self.rng
        self.count += 1
        tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(4))]
        scored = {"prompt_logprobs": 0} if rng.random() < 0.1 else {}
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 3)),
            max_tokens=rng.choice((1, 4, 14)),
            seed=rng.randrange(3),
            ignore_eos=True,
            **scored,
        )
        return Request(
            request_id=f"r{self.count}",
            prompt_token_ids=rng.choice(self.texts)[: rng.randrange(1, 44)] + tail,
            sampling=params,
            eos_token_ids=(EOS,),
            priority=rng.choice((0, 0, -1, 2)),
            cache_salt=rng.choice(("", "", "x")),
        )

    def flush(self) -> None:
        self.scheduler.flush_cache()
        assert self.tier.usage().num_pages == 0
        self.seen["flush"] = 1

    def abort_one(self) -> None:
        if self.scheduler._states:
            name = self.rng.choice(list(self.scheduler._states))
            self.take(self.scheduler.abort([name], self.rng.choice((None, 0, 1))))

    def restart(self) -> None:
        """As kill -9 does it: requests are lost, nothing is closed but by the kernel, a torn file is left."""
        self.keep_counts()
        self.tier.close()  # gives the lock back, no more
        (self.folder / "writing.tmp").write_bytes(b"PNKV")
        for request in self.accepted:
            for index in range(request.sampling.n):
                del self.got[request.request_id, index]
        self.accepted = []
        self.start()
        self.seen["restart"] = 1

    def damage(self) -> None:
        files = sorted(self.folder.glob("*/*.kv"))
        if not files:
            return
        file, other = self.rng.choice(files), self.rng.choice(files)
        content = bytearray(file.read_bytes()) or bytearray(b"?")
        match self.rng.randrange(4):
            case 0:
                content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
            case 1:
                del content[self.rng.randrange(len(content)) :]
            case 2:
                content = bytearray(other.read_bytes())
            case 3:
                file.unlink()
                return
        file.write_bytes(content)

    def fill_or_free(self) -> None:
        self.tier.full = self.rng.random() < 0.3
        self.tier._retry_at = 0.0
        self.seen["full"] = 1

    def change_speeds(self) -> None:
        self.cost.load.add(1.0, self.rng.choice((0.0001, 0.0001, 0.001, 10.0)))
        self.cost.prefill.add(10.0, self.rng.choice((0.1, 1.0)))

    def check_integrity(self) -> None:
        """The books, and the holders of loads: they read the prefix that they have matched."""
        self.cache.check_integrity()
        for fetch in self.tiers._under_way.values():
            holder = fetch.holder
            hashes = prefix_hashes(holder.token_ids, holder.request.cache_salt)
            self.executor.memory.check(holder.page_table, hashes, holder.num_computed_tokens)
        assert set(self.tiers._fetches) <= {seq.seq_id for seq in self.scheduler._queues.waiting}

    def check_files(self) -> None:
        """The limit holds; nothing is in use that nobody answers for."""
        usage = self.tier.usage()
        assert usage.num_bytes <= usage.max_bytes
        assert all(seq_id > FIRST_LOAD_ID for seq_id in self.scheduler._queues._running_ids)

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
            self.got.setdefault((output.request_id, output.index), Choice())
        super().take(outputs)

    def keep_counts(self) -> None:
        stats = self.scheduler.stats()
        for name in ("tier_hit_tokens", "tier_loaded_pages", "tier_stored_pages", "tier_rejected_pages", "swaps"):
            self.seen[name] = self.seen.get(name, 0) + getattr(stats, name)
        for name in ("recomputes", "declined"):
            self.seen[name] = self.seen.get(name, 0) + self.tiers.describe()[name]


@pytest.mark.parametrize(("seed", "page_size"), [(0, 4), (1, 2), (2, 4), (3, 3)])
def test_everything_at_once(tmp_path: Path, seed: int, page_size: int) -> None:
    session = TieredSession(tmp_path / "kv", page_size, seed)
    for step in range(STEPS):
        session.step(step)
    session.keep_counts()
    seen = session.seen
    assert min(seen[name] for name in ("tier_hit_tokens", "tier_loaded_pages", "tier_stored_pages")) > 40, seen
    assert min(seen[name] for name in ("tier_rejected_pages", "swaps", "declined", "restart", "full", "flush")) > 0, (
        seen
    )
    session.take(session.scheduler.abort(list(session.scheduler._states)))
    while session.tiers._under_way:
        session.mover.work()
        session.tiers.poll()
    session.scheduler.flush_cache()
    assert session.cache.num_free_pages == PAGES
    session.tiers.close()


def test_a_page_given_away_while_it_is_copied_is_not_stored(tmp_path: Path) -> None:
    """The copy is torn: half old, half new. It must not reach the disk under the old name."""
    session = TieredSession(tmp_path / "kv", 4, 9)
    request = Request(
        request_id="a", prompt_token_ids=[1, 2, 3, 4, 5], sampling=SamplingParams(max_tokens=1, seed=0, ignore_eos=True)
    )
    session.add(request)
    session.run_step()
    torn: list[int] = []

    def reuse() -> None:
        assert session.cache.tree.evict(PAGES) == 2
        for page in range(1, PAGES + 1):
            session.executor.memory.slots[page] = [-5] * 4
        torn.append(1)

    session.executor.memory.interrupt = reuse
    while session.mover.work():
        pass
    assert torn
    stored = [file.read_bytes() for file in (tmp_path / "kv").glob("*/*.kv")]
    hashes = prefix_hashes([1, 2, 3, 4])[1:]
    assert len(stored) == 1  # the copy that was made when the page went
    assert stored[0].endswith(array("q", hashes).tobytes())
    session.tiers.close()
