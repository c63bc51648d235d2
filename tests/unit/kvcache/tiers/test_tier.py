"""Keys: the same for the same past, different for any other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pinnate.kvcache.tiers.tier import KEY_BYTES, root_key
from tests.unit.kvcache.tiers.helpers import chain

texts = st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=3)


@given(texts, texts, st.sampled_from(["", "s"]), st.sampled_from(["", "s"]))
def test_equal_keys_mean_equal_pasts(a: list[list[int]], b: list[list[int]], salt_a: str, salt_b: str) -> None:
    same = (a, salt_a) == (b, salt_b)
    first, second = chain(*a, salt=salt_a)[-1], chain(*b, salt=salt_b)[-1]
    assert (first.key == second.key) == same
    assert len(first.key) == KEY_BYTES


def test_adapters_and_salts_are_not_mixed_up() -> None:
    roots = {root_key(namespace) for namespace in (("", ""), ("a", ""), ("", "a"), ("ab", ""), ("a", "b"), ("", "ab"))}
    assert len(roots) == 6
