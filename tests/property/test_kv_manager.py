"""KVCacheManager under any order of starts, steps, forks, releases and flushes, against a memory model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pinnate.core.request import Request, Sequence
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.manager import KVCacheManager
from tests.property.slot_memory import SlotMemory, prefix_hashes

PARAMS = SamplingParams(max_tokens=1, seed=0)
tokens = st.integers(0, 2)


class KVManagerMachine(RuleBasedStateMachine):
    """Each rule is one step of an engine: what is allocated is copied and written before anything else happens."""

    sequences = Bundle("sequences")

    @initialize(page_size=st.sampled_from([1, 4, 16]), num_tokens=st.sampled_from([32, 64, 128]), caching=st.booleans())
    def start_engine(self, page_size: int, num_tokens: int, caching: bool) -> None:
        self.page_size = page_size
        self.cache = KVCacheManager(num_tokens // page_size, page_size, enable_prefix_caching=caching)
        self.memory = SlotMemory(num_tokens // page_size, page_size)
        self.live: dict[int, Sequence] = {}
        self.num_sequences = 0
        self.known: list[list[int]] = [[]]  # what was ever computed, without a namespace

    def new_sequence(self, known: list[int], salt: str = "") -> Sequence:
        self.num_sequences += 1
        request = Request(request_id="r", prompt_token_ids=known, sampling=PARAMS, cache_salt=salt)
        seq = Sequence(self.num_sequences, request, 0)
        seq.token_ids.extend(known)
        self.live[seq.seq_id] = seq
        return seq

    @rule(
        target=sequences,
        which=st.integers(0),
        cut=st.integers(0, 40),
        tail=st.lists(tokens, max_size=20),
        salted=st.booleans(),
    )
    def start(self, which: int, cut: int, tail: list[int], salted: bool) -> Sequence:
        prompt = self.known[which % len(self.known)][:cut] + tail or [1]
        seq = self.new_sequence(prompt, "x" if salted and cut % 3 == 0 else "")
        match = self.cache.match(seq, seq.num_tokens - 1)
        idle, before = self.cache.num_idle_pages(match), self.cache.num_available_pages
        seq.num_computed_tokens = self.cache.adopt(seq, match)
        copies = self.cache.take_copies()
        assert before - self.cache.num_available_pages == idle + len(copies) + self.newly_held(copies)
        assert seq.num_computed_tokens in (match.num_tokens, len(match.pages) * self.page_size)
        assert seq.num_computed_tokens < seq.num_tokens
        self.memory.copy(copies)
        self.cache.end_step()
        return seq

    def newly_held(self, copies: tuple[tuple[int, int], ...]) -> int:
        return sum(1 for source, _ in copies if all(source not in seq.page_table for seq in self.live.values()))

    @rule(seq=sequences, count=st.integers(1, 20), new=st.lists(tokens, max_size=20))
    def compute(self, seq: Sequence, count: int, new: list[int]) -> None:
        if seq.seq_id not in self.live:
            return
        seq.token_ids.extend(new)
        count = min(count, seq.num_tokens - seq.num_computed_tokens)
        if count == 0:
            return
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + count
        first = start // self.page_size
        shared = first < len(seq.page_table) and self.num_tables(seq.page_table[first]) > 1
        needed = self.cache.pages_for(end) - len(seq.page_table) + shared
        table, available = seq.page_table[:], self.cache.num_available_pages
        granted = self.cache.allocate(seq, count)
        assert granted == (needed <= available)
        if not granted:
            assert (seq.page_table, self.cache.num_available_pages) == (table, available)
            return
        self.memory.copy(self.cache.take_copies())
        hashes = prefix_hashes(seq.token_ids, seq.request.cache_salt)
        for position in range(start, end):
            assert self.num_tables(seq.page_table[position // self.page_size]) == 1
            self.memory.write(seq.page_table, position, hashes[position + 1])
        seq.num_computed_tokens = end
        self.cache.end_step()
        if seq.request.cache_salt == "":
            self.known.append(seq.token_ids[:end].tolist())

    def num_tables(self, page: int) -> int:
        return sum(page in seq.page_table for seq in self.live.values())

    @rule(seq=sequences)
    def commit(self, seq: Sequence) -> None:
        if seq.seq_id not in self.live:
            return
        self.cache.commit(seq)
        end = seq.num_computed_tokens
        if self.cache.enable_prefix_caching:
            assert self.cache.match(seq, end).num_tokens == end

    @rule(target=sequences, parent=sequences, count=st.integers(1, 3))
    def fork(self, parent: Sequence, count: int):  # type: ignore[no-untyped-def]
        if parent.seq_id not in self.live:
            return multiple()
        children = [self.new_sequence(parent.token_ids.tolist(), parent.request.cache_salt) for _ in range(count)]
        available = self.cache.num_available_pages
        for child in children:
            child.num_computed_tokens = parent.num_computed_tokens
            self.cache.fork(parent, child)
        assert self.cache.num_available_pages == available
        return multiple(*children)

    @rule(seq=consumes(sequences), keep=st.booleans())
    def release(self, seq: Sequence, keep: bool) -> None:
        if self.live.pop(seq.seq_id, None) is None:
            return
        self.cache.release(seq, keep=keep)
        assert len(seq.page_table) == 0
        if keep and self.cache.enable_prefix_caching:
            end = seq.num_computed_tokens
            assert self.cache.match(seq, end).num_tokens == end

    @rule()
    def flush(self) -> None:
        cached, free = self.cache.num_cached_pages, self.cache.num_free_pages
        assert self.cache.flush() == cached
        assert (self.cache.num_cached_pages, self.cache.num_free_pages) == (0, free + cached)

    @invariant()
    def books_balance_and_everyone_reads_their_own_past(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        for seq in self.live.values():
            hashes = prefix_hashes(seq.token_ids, seq.request.cache_salt)
            self.memory.check(seq.page_table, hashes, seq.num_computed_tokens)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for seq in self.live.values():
            self.cache.release(seq)
        self.live.clear()
        self.cache.check_integrity()
        assert self.cache.num_available_pages == self.cache.num_pages
        self.cache.flush()
        assert self.cache.num_free_pages == self.cache.num_pages
        self.cache.check_integrity()


KVManagerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestKVCacheManager = KVManagerMachine.TestCase
