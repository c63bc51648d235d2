"""The memory plan: where in the one arena each buffer lies, so that buffers alive at the same time never overlap.

Knows: sizes and lifetimes. Must not know: what an instruction computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pinnate.executor.native.instructions import Buffer, Gather, LoweredProgram, PagedAttention, buffers_of

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `size` bytes that is needed from instruction `first` to instruction `last`, both included."""

    size: int
    first: int
    last: int

    def meets(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


def place(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """An offset for each buffer, and the size of the whole: bytes, multiples of ALIGNMENT.

    Largest first, each in the lowest gap among those it meets ("greedy by size": Pisarchyk and Lee, "Efficient memory
    management for deep neural net inference", 2020).
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].size, lifetimes[i].first)):
        size = _aligned(lifetimes[i].size)
        offset = 0
        for j in sorted((j for j in placed if lifetimes[i].meets(lifetimes[j])), key=lambda j: offsets[j]):
            if offset + size <= offsets[j]:
                break
            offset = max(offset, offsets[j] + _aligned(lifetimes[j].size))
        offsets[i] = offset
        placed.append(i)
        total = max(total, offset + size)
    return offsets, total


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    offsets: dict[Buffer, int]
    size: int


def lifetimes_of(program: LoweredProgram, rows: dict[str, int], act_bytes: int) -> dict[Buffer, Lifetime]:
    """`rows`: how many a "tokens" and a "logits" buffer has. A buffer lives from its first mention to its last, and
    through the whole stretches between two attentions that these lie in: one band of rows may be at the end of a
    stretch while another begins it. What a Gather reads lives to the end, because the part after it runs once for each
    block of logits rows."""
    spans: dict[Buffer, tuple[int, int]] = {}
    end = len(program.instructions)
    stretches = _stretches(program)
    for instruction, (begin, stop) in zip(program.instructions, stretches, strict=True):
        for buffer in buffers_of(instruction):
            first, last = spans.get(buffer, (begin, stop))
            kept = isinstance(instruction, Gather) and buffer == instruction.x
            spans[buffer] = (first, end if kept else max(last, stop))
    spans[program.logits] = (spans[program.logits][0], end)
    return {
        b: Lifetime(rows[b.rows] * b.cols * (4 if b.f32 else act_bytes), first, last)
        for b, (first, last) in spans.items()
    }


def _stretches(program: LoweredProgram) -> list[tuple[int, int]]:
    """For each instruction, the first and the last of its stretch; an attention or a Gather is one of its own."""
    numbered = enumerate(program.instructions)
    found: list[tuple[int, int]] = []
    for alone, group in groupby(numbered, lambda pair: isinstance(pair[1], PagedAttention | Gather)):
        places = [place for place, _ in group]
        found += [(i, i) for i in places] if alone else [(places[0], places[-1])] * len(places)
    return found


def plan_arena(program: LoweredProgram, rows: dict[str, int], act_bytes: int) -> ArenaPlan:
    lifetimes = lifetimes_of(program, rows, act_bytes)
    offsets, size = place(list(lifetimes.values()))
    return ArenaPlan(dict(zip(lifetimes, offsets, strict=True)), size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
