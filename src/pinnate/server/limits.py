"""ServerLimits: what the server bears from its clients. All of it, in one place.

Knows: names, defaults, ranges. Must not know: who keeps them. The engine's own limits (context, KV pool, the queue's
length) are in engine/admission.py and core/sampling.py, those of grammars with their compiler.
"""

from __future__ import annotations

import math

import msgspec

from pinnate.core.errors import ConfigError

SPOOLED_PATHS = frozenset({"/v1/files"})  # their bodies go to disk as they arrive
MIN_CONNECTIONS = 16
OWN_DESCRIPTORS = 128  # open files that are not connections
MAX_JSON_VALUES = 2_000_000  # of a body: numbers of an array and so on; each may take 60 bytes and more
MAX_JSON_PARTS = 250_000  # arrays, objects and their members; 32 MiB of `[]` would hold 800 MB, and everybody for 8 s
MAX_JSON_DEPTH = 128  # of a body; deeper ones are no use to anybody, and code that walks them recurses


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, times in seconds; None is no limit.

    `max_arriving_bytes`: of all bodies together that are not complete yet. `max_connections`: None takes what the file
    descriptors allow. `head_timeout`: from the first byte of a request (or the connection) to the end of its headers.
    `body_timeout`: silence in the middle of a body. `write_timeout`: how long a client that leaves more than its buffer
    unread may take for the next 16 KiB. `idle_timeout`: between two requests on one connection. `keep_alive_interval`:
    a stream without output gets a comment this often. `queue_timeout`: until a request is computed for the first time.
    `request_timeout`: until its end.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    max_body_bytes: int = 32 * 2**20
    max_file_bytes: int = 200 * 2**20  # that is uploaded for batches
    max_arriving_bytes: int = 512 * 2**20
    max_head_bytes: int = 64 * 2**10
    max_connections: int | None = None
    head_timeout: float = 30.0
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    idle_timeout: float = 75.0
    keep_alive_interval: float = 15.0
    queue_timeout: float | None = None
    request_timeout: float | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ConfigError(f"{_flag(name)} must be at least {least:g}, got {value:g}")

    def connections_for(self, descriptors: int) -> int:
        """How many connections there may be where the process may open so many files."""
        if self.max_connections is not None:
            return self.max_connections
        return max(MIN_CONNECTIONS, descriptors - OWN_DESCRIPTORS)


_LEAST = {
    "max_body_bytes": 1024, "max_arriving_bytes": 1024, "max_head_bytes": 1024, "max_connections": 1,
    "head_timeout": 0.05, "body_timeout": 0.05, "write_timeout": 0.05, "idle_timeout": 0.05,
    "keep_alive_interval": 0.05, "queue_timeout": 0.001, "request_timeout": 0.001,
}  # fmt: skip


def parse_limits(assignments: list[str], **named: float | None) -> ServerLimits:
    """Limits from `name=value` texts; `named` are those that have a flag of their own, None where it was not given.

    Raises:
        ConfigError: no such limit, or no such value.
    """
    given: dict[str, object] = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        name = name.strip().replace("-", "_")
        if name not in ServerLimits.__struct_fields__:
            known = ", ".join(ServerLimits.__struct_fields__)
            raise ConfigError(f"--limit {assignment}: there is no such limit; there are {known}")
        given[name] = value.strip()
    given |= {name: value for name, value in named.items() if value is not None}
    try:
        return msgspec.convert(given, ServerLimits, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--limit: {error}") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name in ("queue_timeout", "request_timeout") else f"--limit {name}"
