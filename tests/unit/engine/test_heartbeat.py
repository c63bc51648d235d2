"""Beats of a loop that works, sleeps or is stuck; and who reads them."""

from __future__ import annotations

import asyncio
import os

import pytest

from pinnate.engine import heartbeat
from pinnate.engine.heartbeat import STUCK_SECONDS, Heart
from pinnate.engine.heartbeat_reader import HeartbeatReader


def test_a_stuck_loop_stops_the_beats_a_sleeping_one_does_not() -> None:
    now = 0.0
    heart = Heart(lambda: now)
    heart.work()
    now = STUCK_SECONDS - 1  # the longest step there is
    assert heart.is_beating
    now = STUCK_SECONDS + 1
    assert not heart.is_beating
    heart.work()
    assert heart.is_beating
    heart.rest()
    now = 1e9
    assert heart.is_beating


async def test_beats_are_read_until_they_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.005)
    ours, theirs = os.pipe()
    reader = HeartbeatReader(ours)
    try:
        await asyncio.sleep(0.05)
        assert reader.age >= 0.05
        stuck = [False]
        heart = Heart(lambda: STUCK_SECONDS + 1 if stuck[0] else 0.0)
        heart.start(theirs)
        while reader.age >= 0.05:
            await asyncio.sleep(0.005)
        stuck[0] = True
        await asyncio.sleep(0.02)  # what was under way
        before = reader.age
        await asyncio.sleep(0.05)
        assert reader.age >= before + 0.05
    finally:
        reader.close()
        os.close(ours)  # ends the thread: nobody reads any more
        stuck[0] = False


async def test_the_end_of_the_process_is_no_beat() -> None:
    ours, theirs = os.pipe()
    reader = HeartbeatReader(ours)
    os.close(theirs)
    await asyncio.sleep(0.02)
    assert reader.age >= 0.02
    reader.close()
    os.close(ours)
