"""KVCacheManager with windowed layer groups, under any order of starts, steps, forks, releases, evictions and flushes.

The model is SlotMemory over the one pool of pages: what was computed for each group into each slot. After every
rule each sequence must read its whole past in the full group's pages, and in each windowed group all that its next
token sees.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pinnate.core.layer_groups import PageNeeds, reach
from pinnate.core.request import Request, Sequence
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_pool import NULL_PAGE
from tests.property.slot_memory import SlotMemory, extend, prefix_hashes

PARAMS = SamplingParams(max_tokens=1, seed=0)
MAX_STEP = 20
tokens = st.integers(0, 2)


def group_hashes(hashes: list[int], group: int) -> list[int]:
    """What a group keeps for the same tokens."""
    return hashes if group == 0 else [extend(h, 1000 + group) for h in hashes]


class WindowMachine(RuleBasedStateMachine):
    """Each rule is one step of an engine: what is allocated is copied and written before anything else happens."""

    sequences = Bundle("sequences")

    @initialize(
        page_size=st.sampled_from([1, 4, 8]),
        num_tokens=st.sampled_from([96, 160, 400]),
        groups=st.sampled_from([1, 2, 5]),
        window=st.sampled_from([1, 2, 5, 8, 13, 40]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start_engine(self, page_size: int, num_tokens: int, groups: int, window: int, caching: bool) -> None:
        self.page_size, self.window, self.groups = page_size, window, groups
        self.reach = reach(window, page_size)
        self.needs = PageNeeds(
            page_size=page_size, window_groups=groups, window_pages=self.reach + 1, step_pages=-(-MAX_STEP // page_size)
        )
        num_pages = num_tokens // page_size
        self.cache = KVCacheManager(num_pages, page_size, enable_prefix_caching=caching, needs=self.needs)
        self.memory = SlotMemory(num_pages, page_size)
        self.live: dict[int, Sequence] = {}
        self.num_sequences = 0
        self.known: list[list[int]] = [[]]

    def new_sequence(self, known: list[int]) -> Sequence:
        self.num_sequences += 1
        seq = Sequence(self.num_sequences, Request(request_id="r", prompt_token_ids=known, sampling=PARAMS), 0)
        seq.token_ids.extend(known)
        self.live[seq.seq_id] = seq
        return seq

    @rule(target=sequences, which=st.integers(0), cut=st.integers(0, 80), tail=st.lists(tokens, max_size=20))
    def start(self, which: int, cut: int, tail: list[int]) -> Sequence:
        seq = self.new_sequence(self.known[which % len(self.known)][:cut] + tail or [1])
        match = self.cache.match(seq, seq.num_tokens - 1)
        self.check_match(seq, match.num_tokens, match.lost_to_window)
        idle, before = self.cache.num_idle_pages(match), self.cache.num_available_pages
        matched = self.cache.pages_matched(match)
        seq.num_computed_tokens = self.cache.adopt(seq, match)
        copies = self.cache.take_copies()
        in_tables = {page for other in self.live.values() for page in self.pages_of(other)}
        held = sum(1 for source, _ in copies if source not in in_tables)
        assert before - self.cache.num_available_pages == idle + len(copies) + held
        assert self.cache.pages_held(seq) == matched + len(copies) == len(self.pages_of(seq))
        assert seq.num_computed_tokens in (match.num_tokens, len(match.pages) * self.page_size)
        self.memory.copy(copies)
        self.cache.end_step()
        return seq

    def check_match(self, seq: Sequence, matched: int, lost: int) -> None:
        """Brute force: of all ends of what the tree has, the longest whose window lies beside the tree's pages."""
        if not self.cache.enable_prefix_caching or seq.num_tokens == 1:
            assert matched == 0
            return
        whole = self.cache._tree.match_prefix(seq.token_ids, seq.request.namespace, seq.num_tokens - 1)
        hashes = prefix_hashes(seq.token_ids)
        path = [*whole.pages, *([whole.tail_page] if whole.tail_page != NULL_PAGE else [])]
        ends = [0]
        for end in range(1, whole.num_tokens + 1):
            logical, slots = divmod(end, self.page_size)
            seen = range(max(0, logical - self.reach), logical + bool(slots))
            if all(self.window_is_beside(path[i], i, min(end, (i + 1) * self.page_size), hashes) for i in seen):
                ends.append(end)
        assert matched == ends[-1]
        assert lost == whole.num_tokens - matched

    def window_is_beside(self, page: int, logical: int, end: int, hashes: list[int]) -> bool:
        attached = self.cache._windows.attached.get(page)
        if attached is None:
            return False
        for group, window_page in enumerate(attached, 1):
            expected = group_hashes(hashes, group)
            for position in range(logical * self.page_size, end):
                found = self.memory.slots[window_page][position % self.page_size]
                assert found == expected[position + 1], "a window page of other tokens beside a page of the tree"
        return True

    @rule(seq=sequences, count=st.integers(1, MAX_STEP), new=st.lists(tokens, max_size=MAX_STEP))
    def compute(self, seq: Sequence, count: int, new: list[int]) -> None:
        if seq.seq_id not in self.live:
            return
        seq.token_ids.extend(new)
        count = min(count, seq.num_tokens - seq.num_computed_tokens)
        if count == 0:
            return
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + count
        first, held = start // self.page_size, len(seq.page_table)
        shared = first < held and self.num_tables(seq.page_table[first]) > 1
        before = self.cache.num_available_pages
        granted = self.cache.allocate(seq, count)
        needed = (self.cache.pages_for(end) - held + shared) * (1 + self.groups)
        if not granted:
            assert needed > self.cache.num_available_pages >= before
            assert len(seq.page_table) == held
            self.memory.copy(self.cache.take_copies())
            return
        assert self.cache.pages_held(seq) <= self.needs.peak(end)
        self.memory.copy(self.cache.take_copies())
        hashes = prefix_hashes(seq.token_ids)
        for group, table in enumerate((seq.page_table, *seq.window_tables)):
            expected = group_hashes(hashes, group)
            for position in range(start, end):
                assert self.num_tables(table[position // self.page_size]) == 1
                self.memory.write(table, position, expected[position + 1])
        seq.num_computed_tokens = end
        self.cache.end_step()
        self.known.append(seq.token_ids[:end].tolist())

    def pages_of(self, seq: Sequence) -> list[int]:
        return [page for table in (seq.page_table, *seq.window_tables) for page in table if page != NULL_PAGE]

    def num_tables(self, page: int) -> int:
        return sum(self.pages_of(seq).count(page) for seq in self.live.values())

    @rule(seq=sequences)
    def commit(self, seq: Sequence) -> None:
        if seq.seq_id not in self.live:
            return
        self.cache.commit(seq)
        self.check_found_again(seq)

    def check_found_again(self, seq: Sequence) -> None:
        """What was just committed can be matched to its last whole page at least, as its window is still there."""
        if self.cache.enable_prefix_caching:
            found = self.cache.match(seq, seq.num_computed_tokens).num_tokens
            assert seq.num_computed_tokens - self.page_size < found <= seq.num_computed_tokens

    @rule(target=sequences, parent=sequences, count=st.integers(1, 3))
    def fork(self, parent: Sequence, count: int):  # type: ignore[no-untyped-def]
        if parent.seq_id not in self.live:
            return multiple()
        children = [self.new_sequence(parent.token_ids.tolist()) for _ in range(count)]
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
        assert (len(seq.page_table), seq.window_tables) == (0, ())
        if keep:
            self.check_found_again(seq)

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        cached, free = self.cache.num_cached_pages, self.cache.num_free_pages
        freed = self.cache._evict(count)
        assert freed >= min(count, cached), "pages counted as available could not be had"
        assert self.cache.num_free_pages == free + freed

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
            hashes, end = prefix_hashes(seq.token_ids), seq.num_computed_tokens
            self.memory.check(seq.page_table, hashes, end)
            low = max(0, end - self.window + 1)
            for group, table in enumerate(seq.window_tables, 1):
                expected = group_hashes(hashes, group)
                seen = [self.memory.slots[table[p // self.page_size]][p % self.page_size] for p in range(low, end)]
                assert seen == expected[low + 1 : end + 1], f"group {group} reads back {seen}"

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


WindowMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
TestWindowPages = WindowMachine.TestCase
