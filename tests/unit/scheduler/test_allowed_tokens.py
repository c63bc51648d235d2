"""AllowedTokens against sets; alone and on top of another matcher."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.core.batch import Sample, ScheduledSequence, StepResult, TokenLogprobs
from pinnate.core.errors import GrammarError
from pinnate.core.sampling import SamplingParams
from pinnate.scheduler.allowed_tokens import AllowedTokens, only_allowed
from pinnate.scheduler.output import drawn_tokens
from tests.unit.scheduler.helpers import Engine, make_request

WORDS = 4
TOKENS = st.sets(st.integers(0, 32 * WORDS - 1), min_size=1)


class Language:
    """A matcher that allows `tokens` and remembers what it was told."""

    def __init__(self, tokens: set[int], told: tuple[int, ...] = ()) -> None:
        self.tokens, self.told = tokens, list(told)

    @property
    def is_terminated(self) -> bool:
        return len(self.told) == 2

    def advance(self, token: int) -> None:
        self.told.append(token)

    def forced(self) -> list[int]:
        return [1]

    def clone(self) -> Language:
        return Language(self.tokens, tuple(self.told))

    def fill(self, mask: memoryview) -> None:
        for token in self.tokens:
            mask[token // 32] |= 1 << token % 32


def allowed_by(matcher: object) -> set[int]:
    mask = array("I", [0] * WORDS)
    matcher.fill(memoryview(mask))  # type: ignore[attr-defined]
    return {token for token in range(32 * WORDS) if mask[token // 32] >> token % 32 & 1}


@given(TOKENS, TOKENS)
def test_fill_is_the_intersection(tokens: set[int], others: set[int]) -> None:
    assert allowed_by(only_allowed(None, tokens)) == tokens
    assert allowed_by(only_allowed(Language(others), tokens)) == tokens & others


def test_without_a_set_the_matcher_stays_what_it_was() -> None:
    language = Language({1})
    assert only_allowed(language, None) is language
    assert only_allowed(None, None) is None


def test_the_inner_matcher_is_led_along() -> None:
    matcher = only_allowed(Language({1, 2}), (1, 2))
    assert isinstance(matcher, AllowedTokens)
    matcher.advance(1)
    twin = matcher.clone()
    matcher.advance(2)
    assert (matcher.is_terminated, twin.is_terminated, matcher.forced()) == (True, False, [])


def test_what_is_not_allowed_cannot_follow() -> None:
    matcher = only_allowed(None, (1, 40))
    assert matcher is not None
    matcher.advance(40)
    assert not matcher.is_terminated
    for token in (0, 2, 41, 10_000):
        with pytest.raises(GrammarError, match="allowed_token_ids"):
            matcher.advance(token)


def test_a_request_that_bans_what_it_allows_ends_with_the_reason() -> None:
    engine = Engine()
    engine.token = lambda _sample: 9  # what a sampler falls back to
    engine.scheduler.add(make_request("a", [1, 2], allowed_token_ids=(5,)))
    engine.step()
    (end,) = engine.ends.values()
    assert "allowed_token_ids" in (end.error or "")
    assert not engine.scheduler.has_work()


def test_reports_of_chosen_tokens_go_to_every_draw_of_their_row() -> None:
    params = SamplingParams(logprobs=0, logprob_token_ids=(7, 8))
    draws = [Sample(params, 0, index, 3) for index in range(2)]
    reports = [Sample(params, 0, 0, 3, target=token, num_top=0) for token in (7, 8)]
    part = ScheduledSequence(1, 0, array("i", [1]), array("i", [1]), (*draws, *reports))
    entries = [TokenLogprobs(token, -float(token), 1) for token in (99, 5, 6, 7, 8)]
    result = StepResult([99, 5, 6, 7, 8], list(entries), {})
    drawn = list(drawn_tokens(part, result, 1))
    assert [(index, token) for index, token, _ in drawn] == [(0, 5), (1, 6)]
    assert [entry.chosen for _, _, entry in drawn if entry is not None] == [[(7, -7.0), (8, -8.0)]] * 2
