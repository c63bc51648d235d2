"""Automatic choices: pure functions from facts to (value, reason).

Knows: arithmetic on sizes. Must not know: how facts are read (core/machine.py) or what is done with a choice.
A reason is one readable sentence; it is logged at start and shown by `doctor`.
"""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

from pinnate.core.errors import ConfigError
from pinnate.core.layer_groups import PageNeeds
from pinnate.core.machine import Machine

T = TypeVar("T")

KV_MEMORY_SHARE = 0.25  # of the available memory, for an automatic pool
KV_MEMORY_CAP = 4 << 30  # bytes; more cached prefixes than this rarely pay on a CPU
KV_MEMORY_RESCUE = 0.8  # an automatic pool may take this share if one whole sequence needs it
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}
SCALE_BYTES = 4  # of an int8 key or value: one for each token and KV head


class Choice(NamedTuple, Generic[T]):
    value: T
    reason: str


class KVShape(NamedTuple):
    """What a page of the KV pool costs: `page_bytes` covers the layers that share it, keys and values."""

    needs: PageNeeds
    page_bytes: int

    @property
    def page_size(self) -> int:
        return self.needs.page_size


def choose_threads(requested: int | None, machine: Machine) -> Choice[int]:
    """One thread for each physical core this process may use, no more than its CPU quota lets run at once."""
    if requested is not None:
        return Choice(requested, f"{_count(requested, 'thread')}: set by --threads")
    cores = f"{_count(machine.cores, 'core')} allowed by the affinity"
    if machine.cpu_quota is not None and machine.cpu_quota < machine.cores:
        value = max(1, math.floor(machine.cpu_quota))
        return Choice(value, f"{_count(value, 'thread')}: a cgroup quota of {machine.cpu_quota:g} CPUs, {cores}")
    return Choice(machine.cores, f"{_count(machine.cores, 'thread')}: {cores}")


def choose_dtype(requested: str, executor: str) -> Choice[str]:
    """
    Raises:
        ConfigError: the reference executor was asked for something else than float32.
    """
    if executor == "reference":
        if requested == "bfloat16":
            raise ConfigError("--dtype bfloat16 is not offered by the reference executor, which computes in float32")
        return Choice("float32", "float32: the reference executor computes in nothing else")
    if requested != "auto":
        return Choice(requested, f"{requested}: set by --dtype")
    return Choice("bfloat16", "bfloat16: half the memory traffic of float32, residuals and sums stay in float32")


def choose_quantization(requested: str, executor: str, dtype: str) -> Choice[str]:
    """Of weights in memory; `dtype` is the one chosen. Never automatic: a default must not cost accuracy unasked.

    Raises:
        ConfigError: quantised weights where nothing multiplies them.
    """
    if requested == "none":
        return Choice(requested, f"none: weights are held in {dtype}, whatever the file holds")
    if executor == "reference":
        raise ConfigError(f"--quantization {requested} is not offered by the reference executor, which is exact")
    if dtype != "bfloat16":
        raise ConfigError(f"--quantization {requested} needs --dtype bfloat16; {dtype} is for exact weights")
    bits = "8 bits" if requested == "int8" else "4 bits, or 8 where the file holds more"
    return Choice(requested, f"{requested}: set by --quantization; weights of {bits}, products in 8-bit integers")


def choose_kv_cache_dtype(requested: str, dtype: str, executor: str) -> Choice[str]:
    """
    Raises:
        ConfigError: the reference executor was asked for int8.
    """
    if requested == "auto":
        return Choice(dtype, f"{dtype}: the compute type")
    if executor == "reference":
        raise ConfigError(f"--kv-cache-dtype {requested} is not offered by the reference executor")
    return Choice(requested, f"{requested}: set by --kv-cache-dtype, with a scale for each token and head")


def choose_max_model_len(requested: int | None, model_context: int) -> Choice[int]:
    """
    Raises:
        ConfigError: more than the model was made for.
    """
    if requested is None:
        return Choice(model_context, f"{model_context} tokens: the model's own context")
    if requested > model_context:
        raise ConfigError(f"--max-model-len {requested} is beyond the model's context of {model_context} tokens")
    return Choice(requested, f"{requested} tokens: set by --max-model-len")


def kv_shape(kv_columns: int, kv_heads: int, dtype: str, needs: PageNeeds | int) -> KVShape:
    """`kv_columns`: key columns of one token summed over the layers of a page (layers * kv heads * head_dim); values
    double it. `kv_heads`: layers * kv heads. `dtype`: of the cache. `needs`: the page size alone where all layers share
    a page."""
    if isinstance(needs, int):
        needs = PageNeeds(page_size=needs)
    key = kv_columns * ELEMENT_BYTES[dtype] + (kv_heads * SCALE_BYTES if dtype == "int8" else 0)
    return KVShape(needs, 2 * key * needs.page_size)


def choose_num_pages(
    shape: KVShape,
    *,
    num_pages: int | None,
    kv_cache_memory: int | None,
    max_num_seqs: int,
    max_model_len: int,
    available: int,
) -> Choice[int]:
    """Usable pages of the KV pool. `available` is the memory in bytes that is free once the weights are loaded.

    Raises:
        ConfigError: the memory granted does not hold a single page.
    """
    if num_pages is not None:
        return Choice(num_pages, f"{_pool(num_pages, shape)}: set by --num-pages")
    if kv_cache_memory is not None:
        pages = kv_cache_memory // shape.page_bytes
        if pages < 1:
            raise ConfigError(
                f"--kv-cache-memory {kv_cache_memory} holds no page: one page of {shape.page_size} tokens takes "
                f"{shape.page_bytes} bytes"
            )
        return Choice(pages, f"{_pool(pages, shape)}: set by --kv-cache-memory")
    return _automatic_pages(shape, max_num_seqs, max_model_len, available)


def _automatic_pages(shape: KVShape, max_num_seqs: int, max_model_len: int, available: int) -> Choice[int]:
    per_sequence = shape.needs.peak(max_model_len)
    wanted = max_num_seqs * per_sequence
    share = int(available * KV_MEMORY_SHARE)
    budget = min(share, KV_MEMORY_CAP)
    what = f"{max_num_seqs} sequences of {max_model_len} tokens"
    if wanted * shape.page_bytes <= budget:
        return Choice(wanted, f"{_pool(wanted, shape)}: room for {what}")
    pages = budget // shape.page_bytes
    if pages >= per_sequence:
        capped = budget == KV_MEMORY_CAP
        why = f"the cap of {size_text(KV_MEMORY_CAP)}" if capped else f"a quarter of {size_text(available)}"
        return Choice(pages, f"{_pool(pages, shape)}: {why}; {what} would take {size_text(wanted * shape.page_bytes)}")
    if per_sequence * shape.page_bytes <= available * KV_MEMORY_RESCUE:
        return Choice(per_sequence, f"{_pool(per_sequence, shape)}: one sequence of {max_model_len} tokens")
    pages = int(available * KV_MEMORY_RESCUE) // shape.page_bytes
    if pages < 1:
        raise ConfigError(f"no memory for the KV pool: {size_text(available)} are available; see --kv-cache-memory")
    return Choice(pages, f"{_pool(pages, shape)}: all that {size_text(available)} of available memory allow")


def fit_max_model_len(
    chosen: Choice[int], requested: int | None, num_pages: int, needs: PageNeeds | int
) -> Choice[int]:
    """Lowers an automatic context to what the pool holds. One that was asked for stays: admission refuses the requests
    that the pool cannot hold, one by one."""
    needs = PageNeeds(page_size=needs) if isinstance(needs, int) else needs
    tokens = needs.fitting_tokens(num_pages)
    if chosen.value <= tokens:
        return chosen
    if requested is not None:
        return Choice(chosen.value, f"{chosen.reason}; the KV pool limits a request to {tokens} tokens")
    return Choice(tokens, f"{tokens} tokens: all that the KV pool holds, of the model's {chosen.value}")


def _pool(pages: int, shape: KVShape) -> str:
    tokens = f"{shape.needs.fitting_tokens(pages)} tokens"
    held = f"one sequence of {tokens}" if shape.needs.window_groups else tokens
    return f"{_count(pages, 'page')} ({held}, {size_text(pages * shape.page_bytes)})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_text(count: float) -> str:
    """`1.5 GiB`"""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
