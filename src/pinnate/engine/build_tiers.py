"""The tier below the KV pool, wired as the settings ask.

Knows: what keys and values depend on besides tokens, which faults at the start are the operator's. Must not know: how a
tier keeps pages.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b, sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

import pinnate
from pinnate.core.config import EngineConfig
from pinnate.core.errors import ConfigError
from pinnate.core.layer_groups import PageNeeds
from pinnate.executor.base import Executor
from pinnate.graph import Graph
from pinnate.graph.fingerprint import fingerprint
from pinnate.kvcache.tiers.disk import DiskTier
from pinnate.kvcache.tiers.mover import PageIO
from pinnate.kvcache.tiers.tier import KEY_BYTES, Tier

log = logging.getLogger(__name__)

FORMAT = 1  # of what a page holds; pages of another one are foreign
COMPUTING_LAYERS = ("executor", "graph", "models", "weights")  # where code decides what a key or a value is


class LowerTier(NamedTuple):
    """A tier, and whose pages go there."""

    tier: Tier
    io: PageIO


def start_fingerprint(config: EngineConfig, graph: Graph, needs: PageNeeds) -> Callable[[], bytes] | None:
    """Begins to hash the model, beside the building of the executor; the result is waited for. None: nobody asks.

    Raises:
        ConfigError: the model has windowed layer groups.
    """
    if config.kv_disk is None:
        return None
    if needs.window_groups:  # a match needs their pages too, which no tier keeps
        raise ConfigError("--kv-disk is not offered for models with sliding windows beside full attention")
    worker = ThreadPoolExecutor(1, thread_name_prefix="pinnate-fingerprint")
    future: Future[bytes] = worker.submit(fingerprint, graph)
    worker.shutdown(wait=False)  # the thread ends by itself
    return future.result


def open_tier(config: EngineConfig, model: bytes, executor: Executor) -> LowerTier | None:
    """None: there is none to be used.

    Raises:
        ConfigError: another process uses the folder, or --kv-disk-size holds no page.
    """
    if config.kv_disk is None:
        return None
    folder = Path(config.kv_disk).expanduser()
    try:
        tier = DiskTier(
            folder,
            kv_namespace(config, model, executor),
            page_size=config.page_size,
            page_bytes=executor.page_bytes,
            max_bytes=config.kv_disk_size,
        )
    except OSError as error:
        log.warning("--kv-disk %s cannot be used (%s): serving goes on without it", folder, error.strerror or error)
        return None
    return LowerTier(tier, executor)


def kv_namespace(config: EngineConfig, model: bytes, executor: Executor) -> bytes:
    """Stands for everything that the bytes of a page depend on besides its tokens: the model's content, the executor
    with its instruction set and types, the page's shape, the byte order, and the code itself."""
    facts = executor.describe()
    parts = [
        FORMAT,
        model.hex(),
        config.executor,
        *(facts.get(name) for name in ("isa", "dtype", "quantization", "kv_cache_dtype")),
        config.page_size,
        executor.page_bytes,
        sys.byteorder,
        code_digest().hex(),
    ]
    return blake2b(msgspec.json.encode(parts), digest_size=KEY_BYTES).digest()


def code_digest() -> bytes:
    """Of the native module and the layers that decide what is computed: another build may round otherwise."""
    root = Path(pinnate.__file__).parent
    files = sorted(root.glob("_native*.so"))
    for layer in COMPUTING_LAYERS:
        files += sorted((root / layer).rglob("*.py"))
    digest = sha256()
    for file in files:
        digest.update(file.name.encode() + sha256(file.read_bytes()).digest())
    return digest.digest()
