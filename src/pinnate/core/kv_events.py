"""KV events as they go over the wire: the msgpack format that routers read from vLLM's and SGLang's event streams.

Knows: shapes. Must not know: sockets, the tree. Structs are arrays whose first element is the event's name. A block is
what we call a page.
"""

from __future__ import annotations

import msgspec

from pinnate.core.errors import ConfigError


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--kv-events-config`, with the field's names. Addresses are ZeroMQ's and are bound. The default one is for this
    machine only: events carry the token ids of prompts.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"  # "null": none
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000  # batches that can be asked for again
    hwm: int = 100_000  # batches that wait for one slow subscriber
    max_queue_size: int = 100_000  # batches that wait for the publisher's thread

    def __post_init__(self) -> None:
        if self.publisher not in ("zmq", "null"):
            raise ConfigError(f"--kv-events-config: publisher must be zmq or null, got {self.publisher!r}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--kv-events-config: {name} must be at least 1, got {getattr(self, name)}")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive pages entered the prefix tree. Hashes are unsigned 64-bit integers over all tokens from the
    sequence's first to the page's last, and the namespace. `extra_keys`: for each page a hash of the salt, if any."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str]] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The tree is empty: whatever was stored before counts no more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one step changed, in order. `ts` is Unix time in seconds."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int = 0
