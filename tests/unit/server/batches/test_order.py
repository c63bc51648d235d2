"""Requests run depth first over the tree of their prompts."""

from __future__ import annotations

import itertools
import sqlite3

from hypothesis import given
from hypothesis import strategies as st

from pinnate.server.batches.order import MAX_KEY_TOKENS, order_key

# Few tokens and some large ones: many shared prefixes, and every byte of an id counts.
TOKENS = st.sampled_from([0, 1, 2, 255, 256, 65_536, 49_151, 2**32 - 1])
PROMPTS = st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.lists(TOKENS, max_size=5)), max_size=24)


def run_order(prompts: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    return sorted(prompts, key=lambda prompt: order_key(prompt[1], prompt[0]))


@given(PROMPTS)
def test_every_subtree_is_visited_once(prompts: list[tuple[str, list[int]]]) -> None:
    order = run_order(prompts)
    assert sorted(order) == sorted(prompts)
    prefixes = {(salt, tuple(tokens[:k])) for salt, tokens in prompts for k in range(len(tokens) + 1)}
    for salt, prefix in prefixes:
        inside = [its == salt and tuple(tokens[: len(prefix)]) == prefix for its, tokens in order]
        assert [key for key, _ in itertools.groupby(inside)].count(True) == 1  # entered, and never again


@given(PROMPTS)
def test_no_other_order_shares_more_with_neighbours(prompts: list[tuple[str, list[int]]]) -> None:
    """What consecutive requests share is the whole prompts less the tree, which is the least that must be computed."""
    order = run_order(prompts)
    shared = sum(common(a, b) for a, b in itertools.pairwise(order))
    tree = {(salt, tuple(tokens[: k + 1])) for salt, tokens in prompts for k in range(len(tokens))}
    assert sum(len(tokens) for _, tokens in prompts) - shared == len(tree)


@given(PROMPTS)
def test_the_database_sorts_alike(prompts: list[tuple[str, list[int]]]) -> None:
    keys = [order_key(tokens, salt) for salt, tokens in prompts]
    db = sqlite3.connect(":memory:")
    db.execute("CREATE TABLE t (k BLOB)")
    db.executemany("INSERT INTO t VALUES (?)", ((key,) for key in keys))
    assert [row[0] for row in db.execute("SELECT k FROM t ORDER BY k")] == sorted(keys)
    db.close()


def test_a_key_is_bounded() -> None:
    assert order_key([7] * 10**6) == order_key([7] * MAX_KEY_TOKENS)


def common(a: tuple[str, list[int]], b: tuple[str, list[int]]) -> int:
    if a[0] != b[0]:
        return 0
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a[1], b[1], strict=False))))
