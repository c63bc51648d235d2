"""BeamSearch: which hypotheses live, which are complete, and when the search is over.

Knows: scores, tokens, how a hypothesis ends. Must not know: sequences, pages, other requests, text. Pure: the same
candidates give the same search.

The rules are those of transformers' `generate` (beam mode, no sampling), so that results are equal:
- A step ranks the continuations of all beams by their summed log-probability. The best `width` of those that do not end
  are the next beams. One that ends is kept if it ranks among the best `width` of all.
- A complete hypothesis scores sum / length ** length_penalty (length: its output tokens, the end token included; Wu et
  al. 2016 without the coverage term). The best `width` of them are kept.
- The search ends when nothing can be continued, or when `width` hypotheses are complete and the best beam, at its
  present length, scores no better than the worst of them. `early_stopping` True: as soon as `width` are complete;
  "never": the best beam is given the greatest length it could reach, where a longer one can still score better.
Equal scores rank by beam, then by the order of the beam's candidates.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pinnate.core.batch import TokenLogprobs

MATCHED = -1


class StopScanner(Protocol):
    """Looks for stop strings in the text of one hypothesis, whose state is an integer; 0 at the start."""

    def advance(self, state: int, token: int) -> int:
        """The state after one more token; MATCHED if it completes a stop string."""
        ...


class Candidate(NamedTuple):
    """One continuation of a beam. `logprob` counts for the score (bias included), `entry` is what a client sees."""

    token: int
    logprob: float
    entry: TokenLogprobs


class Trail(NamedTuple):
    """The outputs of a hypothesis, newest first: hypotheses share what they have in common."""

    before: Trail | None
    token: int
    entry: TokenLogprobs


class Beam(NamedTuple):
    """A hypothesis that goes on. `total` is the sum of its candidates' logprobs."""

    total: float
    trail: Trail | None
    stop_state: int


class Hypothesis(NamedTuple):
    """A complete one. `stopped`: by a stop token or a stop string, else by its length."""

    score: float
    trail: Trail
    stopped: bool
    stop_token: int | None

    def outputs(self) -> list[Trail]:
        """Its tokens with their entries, in order."""
        found: list[Trail] = []
        step: Trail | None = self.trail
        while step is not None:
            found.append(step)
            step = step.before
        return found[::-1]


class Branch(NamedTuple):
    """A new beam: `parent` counts the beams before the step."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What ends a hypothesis and the search. `min_tokens`: no stop string is looked for in the first ones."""

    width: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    stop_tokens: frozenset[int]
    min_tokens: int = 0


class BeamSearch:
    """One search. `advance` is called with the candidates of every beam until `is_done`."""

    def __init__(self, rules: BeamRules, scanner: StopScanner | None = None) -> None:
        self._rules = rules
        self._scanner = scanner
        self.length = 0  # output tokens of every beam
        self.beams: list[Beam] = [Beam(0.0, None, 0)]  # best first
        self.complete: list[Hypothesis] = []  # best first

    @property
    def is_done(self) -> bool:
        rules = self._rules
        if not self.beams or self.length == rules.max_tokens:
            return True
        if len(self.complete) < rules.width:
            return False
        if rules.early_stopping is True:
            return True
        reach = self.length
        if rules.early_stopping == "never" and rules.length_penalty > 0:
            reach = rules.max_tokens
        return _score(self.beams[0].total, reach, rules.length_penalty) <= self.complete[-1].score

    def advance(self, candidates: Sequence[Iterable[Candidate]]) -> list[Branch]:
        """One step. candidates[i] are the continuations of beams[i], best first, at least the best `width` that do not
        end. Returns the new `beams` as continuations of the old ones.
        """
        rules = self._rules
        old, self.beams = self.beams, []
        self.length += 1
        at_end = self.length == rules.max_tokens
        branches: list[Branch] = []
        for rank, (parent, candidate) in enumerate(_ranked(old, candidates)):
            if rank >= rules.width and (at_end or len(branches) == rules.width):
                break
            beam = old[parent]
            total = beam.total + candidate.logprob
            state, stopped = self._scan(beam, candidate.token)
            trail = Trail(beam.trail, candidate.token, candidate.entry)
            if stopped or at_end:
                if rank < rules.width:
                    self._complete(total, trail, stopped)
            elif len(branches) < rules.width:
                branches.append(Branch(parent, candidate.token))
                self.beams.append(Beam(total, trail, state))
        return branches

    def _scan(self, beam: Beam, token: int) -> tuple[int, bool]:
        """The state of the search for stop strings, and whether the hypothesis ends with this token."""
        if token in self._rules.stop_tokens and self.length > self._rules.min_tokens:
            return 0, True
        if self._scanner is None or self.length <= self._rules.min_tokens:
            return 0, False
        state = self._scanner.advance(beam.stop_state, token)
        return state, state == MATCHED

    def _complete(self, total: float, trail: Trail, stopped: bool) -> None:
        score = _score(total, self.length, self._rules.length_penalty)
        stop_token = trail.token if stopped and trail.token in self._rules.stop_tokens else None
        place = bisect_right(self.complete, -score, key=lambda known: -known.score)
        self.complete.insert(place, Hypothesis(score, trail, stopped, stop_token))
        del self.complete[self._rules.width :]


def _score(total: float, length: int, penalty: float) -> float:
    return total / math.pow(length, penalty)


def _ranked(beams: Sequence[Beam], candidates: Sequence[Iterable[Candidate]]) -> Iterator[tuple[int, Candidate]]:
    """(beam, candidate), best sum first. Merges sorted runs: only as many are looked at as are asked for."""

    def scored(number: int) -> Iterator[tuple[float, int, int, Candidate]]:
        total = beams[number].total
        for place, candidate in enumerate(candidates[number]):
            yield -(total + candidate.logprob), number, place, candidate

    for _, number, _, candidate in heapq.merge(*(scored(number) for number in range(len(beams)))):
        yield number, candidate
