"""Layer groups in the native executor: what its step check lets through, and where keys and values go."""

from __future__ import annotations

import dataclasses
from array import array

import numpy as np
import pytest

from pinnate import _native
from pinnate.core.layer_groups import LayerGroups
from pinnate.executor.forward_batch import build_forward_batch
from pinnate.executor.native import NativeExecutor
from pinnate.executor.reference import ReferenceExecutor
from tests.unit.executor.native_helpers import SPEC, llama_graph, sequence, step

GROUPS = LayerGroups(((1, 0), (0, 0), (2, 0), (0, 1)), 3, 16, "")  # slot 1 of groups 1 and 2 is spare


def build(kind: type = NativeExecutor) -> NativeExecutor | ReferenceExecutor:
    return kind(llama_graph(layers=4), dataclasses.replace(SPEC, groups=GROUPS))


def windowed(tables: tuple[tuple[int, ...], tuple[int, ...]], tokens: list[int], pages: tuple[int, ...], **fields):
    return sequence(0, tokens, pages, window_tables=tuple(array("i", table) for table in tables), **fields)


@pytest.mark.parametrize("kind", [NativeExecutor, ReferenceExecutor])
def test_as_with_one_group(kind: type) -> None:
    """Pages of three groups from one pool, any pages in any order."""
    tokens = [(7 * i) % 101 for i in range(40)]
    uniform = kind(llama_graph(layers=4), SPEC)
    grouped = build(kind)
    expected = uniform.logits(step(sequence(0, tokens, (3, 9, 4))))
    found = grouped.logits(step(windowed(((5, 1, 8), (2, 11, 6)), tokens, (3, 9, 4))))
    np.testing.assert_array_equal(found, expected)
    expected = uniform.logits(step(sequence(0, [17], (3, 9, 4), start=40)))
    found = grouped.logits(step(windowed(((5, 1, 8), (2, 11, 6)), [17], (3, 9, 4), start=40)))
    np.testing.assert_array_equal(found, expected)


def test_a_copy_takes_all_layers_of_a_page() -> None:
    tokens = [(7 * i) % 101 for i in range(20)]
    grouped = build()
    grouped.execute(step(windowed(((5, 1), (2, 11)), tokens, (3, 9))))
    expected = grouped.logits(step(windowed(((5, 1), (2, 11)), [17], (3, 9), start=20)))
    copies = ((9, 20), (1, 21), (11, 22))
    found = grouped.logits(step(windowed(((5, 21), (2, 22)), [17], (3, 20), start=20), copies=copies))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("tables", "error", "match"),
    [
        (((5, 41), (2, 11)), IndexError, "page 41"),
        (((5, -1), (2, 11)), IndexError, "page -1"),
        (((5, 1), (2, 0)), ValueError, "null page"),
    ],
)
def test_bad_window_pages_are_refused(tables, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        build().execute(step(windowed(tables, [1] * 4, (3, 9), start=16)))


def test_a_page_below_the_window_may_be_null_only_in_windowed_groups() -> None:
    assert build().execute(step(windowed(((0, 1), (0, 11)), [1] * 4, (3, 9), start=16))).token_ids
    with pytest.raises(IndexError, match="page 0"):
        build().execute(step(windowed(((5, 1), (2, 11)), [1] * 4, (0, 9), start=16)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"slots": np.array([16], np.int32)}, "positions or slots"),
        ({"page_indices": np.array([1, 2], np.int32)}, "as many for each group"),
        ({"page_indices": np.array([1, 2, 4], np.int32)}, "slots disagree"),
    ],
)
def test_inconsistent_arrays_never_reach_a_kernel(change: dict, match: str) -> None:
    batch = build_forward_batch(step(windowed(((2,), (3,)), [1], (1,))), 16)
    with pytest.raises(ValueError, match=match):
        build()._run(dataclasses.replace(batch, **change), None)  # type: ignore[union-attr]


@pytest.mark.parametrize("places", [[(0, 0), (0, 0)], [(0, 1)], [(-1, 0)], [(5, 0)]])
def test_places_that_do_not_exist_or_are_taken_are_refused(places: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="place"):
        _native.Program(
            isa="portable",
            act="float32",
            threads=1,
            page_size=16,
            num_pages=4,
            kv_layers=[(2, 4)],
            max_tokens=8,
            block_rows=8,
            kv_places=places,
        )
