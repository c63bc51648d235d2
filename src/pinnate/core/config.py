"""EngineConfig: what an operator sets. The only place that reads environment variables.

Knows: names, defaults, ranges. Must not know: how a model is built or a kernel works. Automatic choices that
need facts (memory, model shape) are pure functions in `core/autoconfig.py`; they return (value, reason).
"""

from __future__ import annotations

import os

import msgspec

from pinnate.core.errors import ConfigError
from pinnate.core.kv_events import KVEventsConfig
from pinnate.core.logs import LOG_FORMATS, LOG_LEVELS

DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = ("none", "int8", "int4")
KV_CACHE_DTYPES = ("auto", "int8")
EXECUTORS = ("native", "reference", "simulated")
ISAS = ("auto", "amx", "avx512", "avx2", "portable")
POLICIES = ("fcfs", "lpm")
EVICTION_POLICIES = ("lru", "lfu", "slru", "priority")
MAX_PIN_QUOTA = 0.9
MAX_SIMULATED_STEP_MS = 60_000.0
CACHE_REPORTS = ("off", "own", "all")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine. None or "auto" means: chosen at start, and the choice is logged with its reason.

    Sizes are in tokens, pages or bytes as named.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    model: str
    dtype: str = "auto"
    quantization: str = "none"  # of weights in memory, whatever the file holds
    kv_cache_dtype: str = "auto"  # "auto": the compute type
    executor: str = "native"
    simulated_step_ms: float = 0.0  # how long a step of the simulated executor takes
    isa: str = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    page_size: int = 16
    num_pages: int | None = None  # usable pages (the null page is extra)
    kv_cache_memory: int | None = None  # bytes
    schedule_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    eviction_policy: str = "lru"
    pin_quota: float = 0.0  # share of the KV pool that may be pinned
    kv_events: KVEventsConfig | None = None
    kv_disk: str | None = None  # folder for pages that the pool has no room for
    kv_disk_size: int = 8 << 30  # bytes
    cache_report: str = "off"  # "own": requests may ask; "all": also for other salts, and /debug/cache
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int | None = None  # prompt tokens of waiting requests
    seed: int | None = None  # draws the seeds of requests that give none; None: LLM always the same, a server never
    log_level: str = "info"  # this and the next: of the engine process's own lines, see core/logs.py
    log_format: str = "text"
    check_integrity: bool = False  # prove the KV memory's conservation after every step (tests, debugging)

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--quantization", self.quantization, QUANTIZATIONS)
        _one_of("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("--executor", self.executor, EXECUTORS)
        _one_of("PINNATE_ISA", self.isa, ISAS)
        _one_of("--schedule-policy", self.schedule_policy, POLICIES)
        _one_of("--eviction-policy", self.eviction_policy, EVICTION_POLICIES)
        _one_of("--cache-report", self.cache_report, CACHE_REPORTS)
        _one_of("--log-level", self.log_level, LOG_LEVELS)
        _one_of("--log-format", self.log_format, LOG_FORMATS)
        if not 0 <= self.pin_quota <= MAX_PIN_QUOTA:
            raise ConfigError(f"--pin-quota is a share from 0 to {MAX_PIN_QUOTA}, got {self.pin_quota}")
        if not self.enable_prefix_caching and (self.pin_quota or self.cache_report != "off" or self.publishes_events):
            raise ConfigError("--pin-quota, --cache-report and --kv-events-config need prefix caching")
        if self.kv_disk is not None and not self.enable_prefix_caching:
            raise ConfigError("--kv-disk needs prefix caching")
        if self.kv_disk is not None and self.executor == "simulated":
            raise ConfigError("--kv-disk: the simulated executor has no KV pages to keep")
        if self.kv_disk is not None and not self.kv_disk.strip():
            raise ConfigError("--kv-disk: the folder's name is empty")
        if not 0 <= self.simulated_step_ms <= MAX_SIMULATED_STEP_MS:
            raise ConfigError(
                f"--simulated-step-ms is from 0 to {MAX_SIMULATED_STEP_MS:g}, got {self.simulated_step_ms:g}"
            )
        for flag, value in (
            ("--threads", self.threads),
            ("--max-model-len", self.max_model_len),
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--page-size", self.page_size),
            ("--num-pages", self.num_pages),
            ("--kv-cache-memory", self.kv_cache_memory),
            ("--kv-disk-size", self.kv_disk_size),
            ("--max-num-queued-reqs", self.max_num_queued_reqs),
            ("--max-num-queued-tokens", self.max_num_queued_tokens),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")

    @property
    def publishes_events(self) -> bool:
        return self.kv_events is not None and self.kv_events.is_on


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The environment variables that pinnate honours."""

    isa: str = "auto"  # PINNATE_ISA
    log_level: str = "info"  # PINNATE_LOG_LEVEL
    api_key: str | None = None  # PINNATE_API_KEY; several between commas
    admin_api_key: str | None = None  # PINNATE_ADMIN_API_KEY


def read_environment() -> Environment:
    return Environment(
        isa=os.environ.get("PINNATE_ISA", "auto") or "auto",
        log_level=(os.environ.get("PINNATE_LOG_LEVEL") or "info").lower(),
        api_key=os.environ.get("PINNATE_API_KEY") or None,
        admin_api_key=os.environ.get("PINNATE_ADMIN_API_KEY") or None,
    )
