"""Window pages in single scenes; tests/property/test_window_pages.py has the rest."""

from __future__ import annotations

from array import array

import pytest

from pinnate.core.errors import InvalidRequestError
from pinnate.core.layer_groups import PageNeeds
from pinnate.core.messages import MatchEnd
from pinnate.core.request import Request, Sequence
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.explain import EvictedPaths, MatchExplainer
from pinnate.kvcache.integrity import IntegrityError
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_hashes import PageHashes
from pinnate.kvcache.pins import Pins

PAGE, REACH, GROUPS = 4, 2, 2  # a window of up to 9 tokens
NEEDS = PageNeeds(page_size=PAGE, window_groups=GROUPS, window_pages=REACH + 1, step_pages=4)


class Scene:
    def __init__(self, num_pages: int = 60) -> None:
        self.cache = KVCacheManager(num_pages, PAGE, needs=NEEDS)
        self.made = 0

    def start(self, tokens: list[int]) -> Sequence:
        self.made += 1
        params = SamplingParams(max_tokens=1, seed=0)
        seq = Sequence(self.made, Request(request_id=str(self.made), prompt_token_ids=tokens, sampling=params), 0)
        seq.token_ids.extend(tokens)
        seq.num_computed_tokens = self.cache.adopt(seq, self.cache.match(seq, len(tokens) - 1))
        return seq

    def compute(self, seq: Sequence, end: int | None = None, step: int = PAGE) -> Sequence:
        end = seq.num_tokens if end is None else end
        while seq.num_computed_tokens < end:
            count = min(step, end - seq.num_computed_tokens)
            assert self.cache.allocate(seq, count)
            seq.num_computed_tokens += count
            self.cache.take_copies()
            self.cache.end_step()
            self.cache.commit(seq)
            self.cache.check_integrity()
        return seq

    def run(self, tokens: list[int]) -> int:
        """Computes and releases; returns how many tokens were cached."""
        seq = self.start(tokens)
        cached = seq.num_computed_tokens
        self.compute(seq)
        self.cache.release(seq)
        self.cache.check_integrity()
        return cached


def holes(seq: Sequence) -> list[list[bool]]:
    return [[page == 0 for page in table] for table in seq.window_tables]


def test_pages_fall_out_when_a_page_is_begun() -> None:
    scene = Scene()
    seq = scene.compute(scene.start(list(range(21))), end=16)
    assert holes(seq) == [[True, False, False, False]] * GROUPS
    assert scene.cache.pages_held(seq) == 4 + GROUPS * 3
    scene.compute(seq)
    assert holes(seq) == [[True, True, True, False, False, False]] * GROUPS
    assert all(seq.page_table)


def test_without_prefix_caching_they_are_free_at_once() -> None:
    scene = Scene()
    scene.cache = KVCacheManager(60, PAGE, enable_prefix_caching=False, needs=NEEDS)
    seq = scene.compute(scene.start(list(range(40))))
    assert scene.cache.num_free_pages == 60 - 10 - GROUPS * 3
    scene.cache.release(seq)
    assert scene.cache.num_free_pages == 60


def test_a_match_goes_on_inside_a_page() -> None:
    scene = Scene()
    text = list(range(30))
    assert scene.run(text) == 0
    assert scene.run([*text[:22], 90, 91]) == 22
    assert scene.run([*text, 92]) == 30


def test_a_match_is_cut_where_the_window_is_lost_and_heals() -> None:
    scene = Scene()
    text = list(range(30))
    scene.run(text)
    branch = [*text[:20], 90, 91]
    assert scene.cache._windows.evict_passed(100) == GROUPS * 5  # type: ignore[union-attr]
    seq = scene.start(branch)
    match = scene.cache.match(seq, len(branch) - 1)
    assert (match.num_tokens, match.lost_to_window, len(match.lost_pages)) == (0, 20, REACH)
    scene.compute(seq)
    scene.cache.release(seq)
    assert scene.run([*text[:20], 80, 81]) == 20, "computed again, it is back in the cache"
    assert scene.run([*text, 92]) == 30, "the end kept its window all the time"


def test_what_was_slid_past_goes_first_and_branch_points_stay() -> None:
    scene = Scene(num_pages=100)
    text = list(range(48))
    scene.run(text)
    scene.run([*text[:24], 90])
    windows = scene.cache._windows
    assert windows is not None
    again = scene.start([*text, 1])
    full = scene.cache._tree.match_prefix(again.token_ids, again.request.namespace, 48).pages
    windows.evict_passed(100)
    kept = [logical for logical, page in enumerate(full) if page in windows.attached]
    assert kept == [4, 5, 9, 10, 11]  # before token 24, where a prompt branched off, and the end


def test_eviction_frees_all_that_counts_as_available() -> None:
    scene = Scene(num_pages=48)
    scene.run(list(range(40)))
    seq = scene.compute(scene.start([*range(36), 99]))
    available = scene.cache.num_available_pages
    assert available == 48 - scene.cache.pages_held(seq)
    free = scene.cache.num_free_pages
    assert scene.cache._evict(available) == available - free > 0
    assert scene.cache.num_free_pages == available
    scene.cache.check_integrity()


def test_a_fork_copies_the_window_pages_too() -> None:
    scene = Scene()
    seq = scene.compute(scene.start(list(range(10))))
    scene.made += 1
    child = Sequence(scene.made, seq.request, 1)
    child.token_ids.extend([*seq.token_ids, 50])
    child.num_computed_tokens = 10
    scene.cache.fork(seq, child)
    assert child.window_tables == seq.window_tables
    assert scene.cache.allocate(child, 1)
    copies = scene.cache.take_copies()
    assert len(copies) == 1 + GROUPS
    assert {source for source, _ in copies} == {seq.page_table[2], *(table[2] for table in seq.window_tables)}
    assert {target for _, target in copies} == {child.page_table[2], *(table[2] for table in child.window_tables)}
    scene.cache.end_step()
    scene.cache.check_integrity()


@pytest.mark.parametrize("damage", ["attached", "table", "first"])
def test_the_integrity_check_sees_damage(damage: str) -> None:
    scene = Scene()
    seq = scene.compute(scene.start(list(range(20))))
    windows = scene.cache._windows
    assert windows is not None
    if damage == "attached":
        windows.attached.popitem()
    elif damage == "table":
        seq.window_tables[0][-1] = 0
    else:
        windows.first[seq.seq_id] += 1
    with pytest.raises(IntegrityError):
        scene.cache.check_integrity()


def test_a_lost_window_is_named_as_the_reason() -> None:
    evicted = EvictedPaths(PAGE)
    hashes = PageHashes(PAGE, [evicted])
    scene = Scene()
    scene.cache = KVCacheManager(60, PAGE, needs=NEEDS, watch=hashes)
    text = list(range(30))
    scene.run(text)
    scene.cache._windows.evict_passed(100)  # type: ignore[union-attr]
    explainer = MatchExplainer(scene.cache.tree, hashes, evicted, PAGE, see_others=False)
    tokens = array("i", [*text[:20], 90, 91])
    request = Request(request_id="9", prompt_token_ids=list(tokens), sampling=SamplingParams())
    seq = Sequence(9, request, 0, token_ids=tokens)
    report = explainer.explain(tokens, seq.request.namespace, scene.cache.match(seq, 21), 21)
    assert (report.reason, report.num_cached_tokens, report.num_lost_tokens) == (MatchEnd.WINDOW_LOST, 0, 20)


def test_a_pin_keeps_the_window_at_its_end_and_pays_for_it() -> None:
    scene = Scene()
    scene.cache = KVCacheManager(60, PAGE, needs=NEEDS, pinnable_pages=11)
    text = list(range(32))
    scene.run(text)
    pins = Pins(scene.cache)
    with pytest.raises(InvalidRequestError, match="12 more pages"):
        pins.pin(text)
    scene.cache.pinnable_pages = 12
    assert pins.pin(text) is not None
    assert pins.num_pages == 8 + GROUPS * REACH
    scene.cache._evict(60)
    assert scene.run([*text, 50]) == 32
