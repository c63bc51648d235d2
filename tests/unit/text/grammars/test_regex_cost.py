"""What a pattern costs is known before it is compiled, and the scan never fails in another way than by a Fault."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pinnate.text.grammars.faults import Fault
from pinnate.text.grammars.limits import MAX_DEPTH, MAX_REGEX_BYTES, MAX_REGEX_SIZE
from pinnate.text.grammars.regex_cost import check_regex

GOOD = [
    "", "abc", "a|aa", "(a+)+$", "[0-9]{3}", "[]a]+", "[^]]*?", r"\{3}", r"[a\]{9999999}]", "(?i)abc", "(?P<n>a)*",
    "(?:a|b)*?", r"\p{L}{2}", "[[:alpha:]]+", r"\x{41}{2}", "a{,", "{", "(a{10}){10}", f"a{{{MAX_REGEX_SIZE}}}", "(" *
    (MAX_DEPTH - 1) + ")" * 70, "a{2}?b", ")", "[", "(",
]  # fmt: skip
COSTLY = [
    "a{1000000}", "(a{1000}){1000}", "((a{100}){100}){100}", "(a|b{30000})", "a{1,99999999999999999999}", "x" *
    (MAX_REGEX_SIZE + 1), "(" * 500 + "a" + ")" * 500, "x" * (MAX_REGEX_BYTES + 1), "foo**", "a{2}{3}", "*a", "a|*",
    "(+)", "^*", "a+++", "(?:*)",
]  # fmt: skip


@pytest.mark.parametrize("pattern", GOOD, ids=lambda p: p[:20])
def test_what_is_cheap_passes(pattern: str) -> None:
    check_regex(pattern)


@pytest.mark.parametrize("pattern", COSTLY, ids=lambda p: p[:20])
def test_what_is_dear_or_repeats_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(Fault, match="the pattern"):
        check_regex(pattern)


@given(st.text(alphabet="ab()[]{}|*+?^$\\,0123456789:P<>-p", max_size=40))
@example("(?")
@example("\\")
@example("[\\")
@example("(?P<")
def test_any_text_passes_or_is_a_fault(pattern: str) -> None:
    try:
        check_regex(pattern)
    except Fault:
        return
    # Where Python takes it too, what the scan calls an atom is one: nothing it lets through is long.
    try:
        longest = re._parser.parse(pattern).getwidth()[0]  # type: ignore[attr-defined]
    except (re.error, OverflowError, RecursionError):
        return
    assert longest <= MAX_REGEX_SIZE
