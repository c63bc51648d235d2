"""What listens to the prefix tree exists when it is asked for, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.kvcache.helpers import compute

from pinnate.core.config import EngineConfig
from pinnate.core.errors import ConfigError, UnsupportedError
from pinnate.core.kv_events import KVEventsConfig
from pinnate.engine.build_cache import build_cache

TOKENS = list(range(20))


def test_by_default_nobody_listens() -> None:
    parts = build_cache(EngineConfig(model="m"), 8, 0)
    assert (parts.explainer, parts.events, parts.cache.tree.watch) == (None, None, None)
    for name, arguments in (
        ("describe_cache", {}),
        ("explain_match", {"token_ids": TOKENS}),
        ("resync_kv_events", {}),
        ("pin", {"token_ids": TOKENS}),
    ):
        with pytest.raises(UnsupportedError, match="started without --"):
            parts.commands[name](arguments)


def test_own_reports_explain_and_hide_the_rest() -> None:
    parts = build_cache(EngineConfig(model="m", cache_report="own"), 8, 0)
    assert parts.explainer is not None
    assert parts.events is None
    with pytest.raises(UnsupportedError):
        parts.commands["describe_cache"]({})


def test_all_reports_and_pins() -> None:
    parts = build_cache(EngineConfig(model="m", cache_report="all", eviction_policy="lfu"), 8, 2)
    compute(parts.cache, TOKENS)
    assert parts.commands["pin"]({"token_ids": TOKENS[:17]})["pin_id"] == "pin-1"
    view = parts.commands["describe_cache"]({})
    assert [pin["num_tokens"] for pin in view["pins"]] == [16]
    assert view["pages"]["pinnable"] == 2
    assert parts.commands["explain_match"]({"token_ids": TOKENS}) == {"report": [20, 19, "last_token", 0, 0]}
    assert parts.commands["explain_match"]({"token_ids": TOKENS, "cache_salt": "s"})["report"][2] == "other_salt"


def test_events_are_published_and_can_be_asked_for_whole(tmp_path: Path) -> None:
    events = KVEventsConfig(endpoint=f"ipc://{tmp_path}/e")
    parts = build_cache(EngineConfig(model="m", kv_events=events), 8, 0)
    assert parts.events is not None
    try:
        compute(parts.cache, TOKENS)
        parts.events.publish()
        assert parts.commands["resync_kv_events"]({}) == {"sequence_number": 2}
    finally:
        parts.events.close()
    with pytest.raises(ConfigError, match="--kv-events-config: 'tcp://nowhere' cannot be bound"):
        build_cache(EngineConfig(model="m", kv_events=KVEventsConfig(endpoint="tcp://nowhere")), 8, 0)
