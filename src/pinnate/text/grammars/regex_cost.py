"""What a pattern costs before anything compiles it: its groups' depth, its size once every {n,m} is written out.

Knows: the syntax that regular expressions share (groups, classes, escapes, quantifiers). Must not know: what they
match. One pass, linear in the pattern. What is wrong in a way that this does not see, llguidance's own parser finds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pinnate.text.grammars.faults import Fault
from pinnate.text.grammars.limits import MAX_DEPTH, MAX_REGEX_BYTES, MAX_REGEX_SIZE

_BRACES = re.compile(r"\{(\d*)(,?)(\d*)\}")


@dataclass(slots=True)
class _Group:
    """Size of what is closed, and of the last atom, which a quantifier would repeat."""

    size: int = 0
    atom: int = 0

    def add(self, size: int) -> None:
        self.size += self.atom
        self.atom = size


def check_regex(pattern: str) -> None:
    """
    Raises:
        Fault: too long, too deep, too large once written out, or a quantifier that repeats a quantifier or nothing.
    """
    if len(pattern) > MAX_REGEX_BYTES:
        raise Fault(f"the pattern has {len(pattern)} characters, at most {MAX_REGEX_BYTES} are allowed")
    groups = [_Group()]
    repeatable = False  # whether a quantifier may follow
    at = 0
    while at < len(pattern):
        char = pattern[at]
        braces = _BRACES.match(pattern, at) if char == "{" else None
        if char in "*+?" or (braces is not None and (braces[1] or braces[3])):
            if not repeatable:
                raise Fault(f"the pattern has nothing to repeat at position {at}: {pattern[at : at + 8]!r}")
            at = _end_of_quantifier(pattern, at, braces)
            groups[-1].atom *= _times(braces)
            repeatable = False
        elif char == "(":
            groups.append(_Group())
            if len(groups) > MAX_DEPTH:
                raise Fault(f"the pattern nests groups more than {MAX_DEPTH} deep")
            at = _after_group_flags(pattern, at)
            repeatable = False
        elif char == ")" and len(groups) > 1:
            closed = groups.pop()
            groups[-1].add(closed.size + closed.atom)
            at, repeatable = at + 1, True
        else:
            repeatable = char not in "|^"
            at = _end_of_atom(pattern, at)
            groups[-1].add(1)
        if groups[-1].size + groups[-1].atom > MAX_REGEX_SIZE:
            raise Fault(f"the pattern is longer than {MAX_REGEX_SIZE} characters once its repetitions are written out")


def _times(braces: re.Match[str] | None) -> int:
    if braces is None:
        return 1
    numbers = [min(int(number), 10**9) if len(number) < 10 else 10**9 for number in (braces[1], braces[3]) if number]
    return max(1, *numbers)


def _end_of_quantifier(pattern: str, at: int, braces: re.Match[str] | None) -> int:
    end = at + 1 if braces is None else braces.end()
    return end + 1 if pattern[end : end + 1] == "?" else end  # lazy: the same language


def _after_group_flags(pattern: str, at: int) -> int:
    """Behind `(`, `(?:`, `(?P<name>`, `(?i)`: what follows is not a quantifier's question mark."""
    if pattern[at + 1 : at + 2] != "?":
        return at + 1
    at += 2
    while at < len(pattern) and pattern[at] not in ":>)(|=!":
        at += 1
    return at + 1 if pattern[at : at + 1] in (":", ">", "=", "!") else at


def _end_of_atom(pattern: str, at: int) -> int:
    if pattern[at] == "\\":
        named = re.compile(r"\\[pPxu]\{[^}]*\}").match(pattern, at)
        return named.end() if named else at + 2
    if pattern[at] != "[":
        return at + 1
    depth, at = 1, at + 1
    at += 1 if pattern[at : at + 1] == "^" else 0
    at += 1 if pattern[at : at + 1] == "]" else 0  # a ] that comes first is a character
    while at < len(pattern) and depth:
        char = pattern[at]
        depth += (char == "[") - (char == "]")
        at += 2 if char == "\\" else 1
    return at
