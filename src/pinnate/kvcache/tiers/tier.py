"""The contract of a tier, and how pages are named in it.

Knows: names. Must not know: what a page holds, threads, the prefix tree. DiskTier keeps pages in files; where KV memory
lies on an accelerator, a tier in host memory has the same contract.

A page's key is a hash of everything that its keys and values depend on within one engine: the namespace and all tokens
from the first to its last. Equal keys, equal bytes (executor.base). 16 bytes, so that nobody can make two prompts meet.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import NamedTuple, Protocol

from pinnate.core.request import Namespace

KEY_BYTES = 16


class PageName(NamedTuple):
    """A whole page: its key, the key of the page before it (of no tokens at the beginning), and its own tokens."""

    key: bytes
    parent: bytes
    tokens: array[int]


class TierUsage(NamedTuple):
    num_pages: int  # of this engine
    num_bytes: int  # others' included
    max_bytes: int
    num_rejected: int  # pages that could not be read or trusted, since the start


class Tier(Protocol):
    """Pages by name. `has`, `usage` and `clear` are called in the engine's thread and are quick; `read`, `write` and
    `tidy` in the mover's, one at a time, and may take their time. No method raises for a fault of the medium: a page
    that cannot be kept is not kept, one that cannot be trusted is not there, and the tier says so in the log."""

    name: str

    def has(self, key: bytes) -> bool: ...

    def read(self, name: PageName) -> memoryview | None:
        """The page's bytes, valid until the next call, exactly as they were written; None: not there (any more)."""
        ...

    def write(self, name: PageName, data: bytes | bytearray | memoryview) -> bool:
        """Keeps a page, at the cost of those used longest ago. False: it could not."""
        ...

    def clear(self) -> None:
        """Forgets every page of this engine."""
        ...

    def tidy(self) -> None:
        """Deletes what `clear` took out of use, and what an earlier process left."""
        ...

    def usage(self) -> TierUsage: ...

    def close(self) -> None: ...


def root_key(namespace: Namespace) -> bytes:
    """The key of no tokens. A salt cannot be told from it other than by guessing."""
    adapter, salt = (part.encode() for part in namespace)
    return _digest(len(adapter).to_bytes(8, "big") + adapter + salt)


def page_key(parent: bytes, tokens: array[int]) -> bytes:
    return _digest(parent + tokens.tobytes())


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES).digest()
