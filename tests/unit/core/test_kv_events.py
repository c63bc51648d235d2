"""The wire format of KV events, as the field's subscribers declare it, and the flag's settings."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from pinnate.core.config import EngineConfig
from pinnate.core.errors import ConfigError
from pinnate.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEventsConfig
from pinnate.engine.kv_event_publisher import to_event
from pinnate.kvcache.event_log import Cleared, RemovedPages
from pinnate.kvcache.page_hashes import StoredPages

BIG = 2**64 - 1
BATCH = EventBatch(
    12.5,
    [
        BlockStored([7, BIG], None, [1, 2, 3, 4], 2, None, None, None),
        BlockStored([9], 7, [5, 6], 2, None, None, "adapter", [["salt-hash"]]),
        BlockRemoved([BIG], None),
        AllBlocksCleared(),
    ],
)


def test_events_are_tagged_arrays() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(BATCH)) == [
        12.5,
        [
            ["BlockStored", [7, BIG], None, [1, 2, 3, 4], 2, None, None, None, None],
            ["BlockStored", [9], 7, [5, 6], 2, None, None, "adapter", [["salt-hash"]]],
            ["BlockRemoved", [BIG], None],
            ["AllBlocksCleared"],
        ],
        0,
    ]


class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]


class AllCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class OlderBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | AllCleared]


def test_a_subscriber_that_knows_the_first_form_of_the_format_reads_what_it_knows() -> None:
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(BATCH), type=OlderBatch)
    assert old.events[1:] == [Stored([9], 7, [5, 6], 2, None), Removed([BIG]), AllCleared()]


def test_changes_become_events_and_no_salt_leaves_the_engine() -> None:
    tokens = array("i", [1, 2, 3, 4])
    plain = to_event(StoredPages(("", ""), 5, [1, 2], tokens), 2)
    assert plain == BlockStored([1, 2], 5, [1, 2, 3, 4], 2, None, None, None)
    salted = to_event(StoredPages(("lora", "my secret"), None, [1, 2], tokens), 2)
    assert isinstance(salted, BlockStored)
    assert salted.lora_name == "lora"
    assert salted.extra_keys is not None
    assert salted.extra_keys[0] == salted.extra_keys[1]
    assert b"my secret" not in msgspec.msgpack.encode(salted)
    assert to_event(RemovedPages([3]), 2) == BlockRemoved([3], None)
    assert to_event(Cleared(), 2) == AllBlocksCleared()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"publisher": "nats"}, "publisher must be zmq or null"),
        ({"hwm": 0}, "hwm must be at least 1"),
        ({"buffer_steps": -1}, "buffer_steps must be at least 1"),
    ],
)
def test_settings_are_checked_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KVEventsConfig(**fields)


def test_events_are_off_unless_asked_for() -> None:
    assert not EngineConfig(model="m").publishes_events
    assert EngineConfig(model="m", kv_events=KVEventsConfig()).publishes_events
    for off in (KVEventsConfig(publisher="null"), KVEventsConfig(enable_kv_cache_events=False)):
        assert not EngineConfig(model="m", kv_events=off).publishes_events
    with pytest.raises(ConfigError, match="need prefix caching"):
        EngineConfig(model="m", kv_events=KVEventsConfig(), enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"eviction_policy": "fifo"}, "--eviction-policy must be one of"),
        ({"pin_quota": 0.95}, "--pin-quota is a share"),
        ({"pin_quota": -0.1}, "--pin-quota is a share"),
        ({"cache_report": "yes"}, "--cache-report must be one of"),
    ],
)
def test_settings_of_the_cache_are_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(model="m", **fields)
