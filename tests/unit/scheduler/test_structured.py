"""Structured outputs in the scheduler: what a matcher forces is appended, where it ends the sequence ends, each choice
has its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pinnate.core.errors import GrammarError
from pinnate.core.request import FinishReason
from pinnate.core.structured import StructuredOutput
from tests.unit.scheduler.helpers import EOS, Engine, make_request


@dataclass
class Script:
    """A Matcher of one text of tokens: those of `forced_at` (by position) are forced, the others are free."""

    length: int
    forced_at: dict[int, int] = field(default_factory=dict)
    fails_at: int = -1
    taken: list[int] = field(default_factory=list)

    @property
    def is_terminated(self) -> bool:
        return len(self.taken) == self.length

    def advance(self, token: int) -> None:
        if len(self.taken) == self.fails_at:
            raise GrammarError("cannot go on")
        assert self.forced_at.get(len(self.taken), token) == token
        self.taken.append(token)

    def forced(self) -> list[int]:
        found, at = [], len(self.taken)
        while at in self.forced_at:
            found.append(self.forced_at[at])
            at += 1
        return found

    def clone(self) -> Script:
        return Script(self.length, self.forced_at, self.fails_at, list(self.taken))

    def fill(self, mask: memoryview) -> None: ...


def drawn(engine: Engine) -> None:
    """Draws what is forced, else the position."""
    engine.token = lambda sample: (sample.matcher.forced() or [sample.position])[0]  # type: ignore[union-attr]


JSON = StructuredOutput(kind="json_object")
FORCED = {2: 70, 3: 71, 4: 72, 6: 73}


@pytest.mark.parametrize("logprobs", [None, 0])
def test_forced_tokens_are_computed_as_a_chunk_unless_logprobs_are_asked_for(logprobs: int | None) -> None:
    engine = Engine()
    drawn(engine)
    engine.scheduler.add(make_request("a", [1, 2, 3], max_tokens=20, logprobs=logprobs), Script(8, FORCED))
    sizes = []
    while engine.scheduler.has_work():
        engine.step()
        sizes += engine.sizes()
    assert engine.tokens["a", 0] == [3, 4, 70, 71, 72, 8, 73, 10]
    assert engine.ends["a", 0].finish_reason is FinishReason.STOP
    # Four tokens are computed together where three of them were forced; the last one is never computed.
    assert sizes == ([3, 1, 4, 2] if logprobs is None else [3, 1, 1, 1, 1, 1, 1, 1])
    stats = engine.scheduler.stats()
    assert (stats.generation_tokens, stats.forced_tokens) == (8, 4 if logprobs is None else 0)
    engine.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("most", "kept", "reason"), [(3, 3, "length"), (4, 4, "length"), (8, 8, "stop"), (7, 7, "length")]
)
def test_max_tokens_cuts_in_the_middle_of_what_is_forced(most: int, kept: int, reason: str) -> None:
    engine = Engine()
    drawn(engine)
    engine.scheduler.add(make_request("a", [1, 2, 3], max_tokens=most), Script(8, FORCED))
    engine.run()
    assert len(engine.tokens["a", 0]) == kept
    assert engine.ends["a", 0].finish_reason == reason


def test_a_stop_token_among_the_forced_ones_ends_it() -> None:
    engine = Engine()
    drawn(engine)
    engine.scheduler.add(make_request("a", [1, 2, 3], max_tokens=20, stop_token_ids=(71,)), Script(8, FORCED))
    engine.run()
    assert engine.tokens["a", 0] == [3, 4, 70, 71]
    assert engine.ends["a", 0].stop_token == 71


def test_a_language_that_cannot_go_on_ends_its_own_request_alone() -> None:
    engine = Engine()
    drawn(engine)
    engine.scheduler.add(make_request("a", [1, 2, 3], max_tokens=9), Script(9, fails_at=2))
    engine.scheduler.add(make_request("b", [4, 5, 6], max_tokens=9), Script(5))
    engine.run()
    assert engine.ends["a", 0].finish_reason is FinishReason.ERROR
    assert engine.ends["a", 0].error == "cannot go on"
    assert engine.ends["a", 0].is_refusal
    assert engine.ends["b", 0].finish_reason is FinishReason.STOP
    assert len(engine.tokens["b", 0]) == 5
    engine.scheduler.check_integrity()


def test_each_choice_follows_its_own_matcher() -> None:
    engine = Engine()
    seen: dict[int, set[int]] = {}

    def draw(sample):  # type: ignore[no-untyped-def]
        seen.setdefault(sample.position, set()).add(id(sample.matcher))
        return (sample.matcher.forced() or [100 + sample.index])[0]

    engine.token = draw
    engine.scheduler.add(make_request("a", [1, 2, 3], n=3, max_tokens=9), Script(4, {2: 70}))
    engine.run()
    assert [engine.tokens["a", i] for i in range(3)] == [[100 + i, 100 + i, 70, 100 + i] for i in range(3)]
    assert (len(seen[3]), len(seen[4])) == (1, 3)  # one until the prompt is computed


@pytest.mark.parametrize("num_pages", [6, 7, 9])
def test_a_preempted_sequence_keeps_its_place_in_the_language(num_pages: int) -> None:
    forced = {i: 200 + i for i in range(2, 24) if i % 3}
    alone = Engine(num_pages=64)
    drawn(alone)
    alone.scheduler.add(make_request("0", [1, 2, 3, 4], max_tokens=16), Script(30, forced))
    alone.run()
    engine = Engine(num_pages=num_pages)
    drawn(engine)
    for name in "0123":
        engine.scheduler.add(make_request(name, [int(name) + 1, 2, 3, 4], max_tokens=16), Script(30, forced))
    engine.run(400)
    assert engine.scheduler.stats().preemptions > 0
    for name in "0123":
        assert engine.tokens[name, 0] == alone.tokens["0", 0]
    engine.scheduler.check_integrity()


def test_ignore_eos_bans_the_end_and_min_tokens_too() -> None:
    engine = Engine()
    banned = []
    engine.token = lambda sample: banned.append(sample.banned) or sample.position  # type: ignore[func-returns-value]
    engine.scheduler.add(make_request("a", [1, 2, 3], max_tokens=3, ignore_eos=True, structured_output=JSON), Script(9))
    engine.run()
    engine.scheduler.add(make_request("b", [1, 2, 3], max_tokens=3, min_tokens=1), Script(9))
    engine.run()
    assert banned == [(EOS,)] * 3 + [(EOS,), (), ()]
