"""Which layers share a page, and how many pages a sequence takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.core.layer_groups import LayerSize, PageNeeds, choose_layer_groups, one_group, reach, slot_layers


def layers(*windows: int) -> list[LayerSize]:
    return [LayerSize(1, 256, window) for window in windows]


def test_gemma_has_six_groups_of_three() -> None:
    groups = choose_layer_groups(layers(*((512,) * 5 + (0,)) * 3))
    assert (groups.num_groups, groups.layers_per_page, groups.window) == (6, 3, 512)
    assert [groups.places[i] for i in (5, 11, 17)] == [(0, 0), (0, 1), (0, 2)]
    assert [groups.places[i] for i in (0, 1, 2, 3, 16)] == [(1, 0), (1, 1), (1, 2), (2, 0), (5, 2)]
    assert groups.reason == "6 groups of 3 layers: 3 see the whole context, 15 the last 512 tokens"


@given(st.lists(st.sampled_from([0, 0, 8, 16]), min_size=1, max_size=40))
def test_every_layer_has_a_place_of_its_own(windows: list[int]) -> None:
    groups = choose_layer_groups(layers(*windows))
    assert len(groups.places) == len(set(groups.places)) == len(windows)
    assert {group for group, _ in groups.places} == set(range(groups.num_groups))
    assert len(slot_layers(groups, windows)) == groups.layers_per_page
    full = [i for i, window in enumerate(windows) if not window]
    if groups.num_groups > 1:
        assert [i for i, (group, _) in enumerate(groups.places) if group == 0] == full
        assert groups.window == max(windows)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        (layers(0, 0), "all see the whole context"),
        (layers(8, 8), "no layer sees the whole context"),
        (layers(0, 0, 8), "most layers see the whole context"),
        ([LayerSize(1, 64, 0), LayerSize(2, 64, 8)], "different sizes"),
    ],
)
def test_one_group_where_windows_save_nothing(sizes: list[LayerSize], why: str) -> None:
    groups = choose_layer_groups(sizes)
    assert (groups.num_groups, groups.window) == (1, 0)
    assert groups.places == one_group(len(sizes)).places
    assert why in groups.reason
    assert groups.needs(16, 512) == PageNeeds(page_size=16)


def test_spare_places_are_named() -> None:
    assert "1 of 6 places in a page are spare" in choose_layer_groups(layers(0, 8, 0, 8, 8)).reason


@given(st.integers(1, 70), st.integers(1, 20), st.integers(0, 400))
def test_reach_is_how_far_a_window_goes(window: int, page_size: int, position: int) -> None:
    """The least reach that does for every position."""
    first_page = max(0, position - window + 1) // page_size
    assert position // page_size - first_page <= reach(window, page_size)
    begin = reach(window, page_size) * page_size
    assert (begin - window + 1) // page_size <= 0 or window == 1


def test_what_a_sequence_needs() -> None:
    needs = PageNeeds(page_size=16, window_groups=5, window_pages=33, step_pages=32)
    assert [needs.steady(tokens) for tokens in (0, 1, 16, 17, 528, 4096)] == [0, 6, 6, 12, 198, 256 + 5 * 33]
    assert needs.peak(4096) == 256 + 5 * 65
    assert needs.steady(48, shared=2) == 6
    plain = PageNeeds(page_size=16)
    assert plain.steady(4096) == plain.peak(4096) == 256


@given(st.integers(0, 3000), st.integers(0, 6), st.integers(1, 40))
def test_the_longest_sequence_that_fits(num_pages: int, groups: int, window_pages: int) -> None:
    needs = PageNeeds(page_size=4, window_groups=groups, window_pages=window_pages, step_pages=3)
    tokens = needs.fitting_tokens(num_pages)
    assert needs.peak(tokens) <= num_pages < needs.peak(tokens + 1)
