"""The memory plan adds up and says so."""

from __future__ import annotations

from pinnate.core.autoconfig import Choice
from pinnate.core.memory_plan import plan_memory

GIB = 1 << 30


def test_the_plan_in_words() -> None:
    plan = plan_memory(GIB, 16 * 2048, 16, Choice(65536, "65536 pages: set by --num-pages"), 6553, 8 * GIB)
    assert (plan.kv_bytes, plan.kv_tokens, plan.reserve) == (2 * GIB, 1 << 20, 5 * GIB)
    assert plan.lines() == [
        "1.0 GiB weights + 2.0 GiB KV pool of 8.0 GiB available: 5.0 GiB left in reserve",
        "2.0 KiB of KV per token: 1048576 tokens fit, 104848 of them may be pinned",
        "why: 65536 pages: set by --num-pages",
    ]


def test_more_than_there_is_is_said() -> None:
    plan = plan_memory(GIB, 16 * 2048, 16, Choice(65536, "asked"), 0, 2 * GIB)
    assert plan.reserve < 0
    assert plan.lines()[0].endswith("of 2.0 GiB available: more than there is")
    assert plan.lines()[1] == "2.0 KiB of KV per token: 1048576 tokens fit"
