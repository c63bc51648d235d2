"""BadWords against its definition; what a step bans."""

from __future__ import annotations

from array import array

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pinnate.scheduler.bad_words import BadWords
from tests.unit.scheduler.helpers import Engine, make_request

TOKEN = st.integers(1, 4)
RUNS = st.lists(st.lists(TOKEN, min_size=1, max_size=4).map(tuple), max_size=6)


@given(RUNS, st.lists(TOKEN, min_size=1, max_size=12), st.data())
def test_bans_what_would_complete_a_run_of_output(
    runs: list[tuple[int, ...]], tokens: list[int], data: st.DataObject
) -> None:
    num_prompt = data.draw(st.integers(1, len(tokens)))
    output = tokens[num_prompt:]
    expected = set()
    for token in range(1, 5):
        grown = (*output, token)
        if any(grown[-len(run) :] == run for run in runs):
            expected.add(token)
    assert set(BadWords(runs).banned_next(array("i", tokens), num_prompt)) == expected


def test_a_step_bans_the_end_of_a_run_that_has_begun() -> None:
    engine = Engine()
    seen: list[tuple[int, ...]] = []

    def token(sample: object) -> int:
        seen.append(sample.banned)  # type: ignore[attr-defined]
        return 7

    engine.token = token  # type: ignore[assignment]
    request = make_request("a", [7, 7], max_tokens=4, min_tokens=2)
    engine.scheduler.add(msgspec.structs.replace(request, bad_word_ids=((5,), (7, 7, 8))))
    while engine.scheduler.has_work():
        engine.step()
    # EOS until two tokens are there, 5 always, 8 only after two sevens of the output
    assert seen == [(0, 5), (0, 5), (5, 8), (5, 8)]
