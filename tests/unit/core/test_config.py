"""EngineConfig's ranges, and the environment."""

from __future__ import annotations

import msgspec
import pytest

from pinnate.core.config import EngineConfig, read_environment
from pinnate.core.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("dtype", "float16", "--dtype"),
        ("quantization", "int3", "--quantization"),
        ("kv_cache_dtype", "fp8", "--kv-cache-dtype"),
        ("executor", "torch", "--executor"),
        ("isa", "sse2", "PINNATE_ISA"),
        ("schedule_policy", "random", "--schedule-policy"),
        ("threads", 0, "--threads"),
        ("max_model_len", -1, "--max-model-len"),
        ("max_num_seqs", 0, "--max-num-seqs"),
        ("max_num_batched_tokens", 0, "--max-num-batched-tokens"),
        ("page_size", 0, "--page-size"),
        ("num_pages", 0, "--num-pages"),
        ("kv_cache_memory", 0, "--kv-cache-memory"),
        ("max_num_queued_reqs", 0, "--max-num-queued-reqs"),
        ("log_level", "loud", "--log-level"),
        ("log_format", "xml", "--log-format"),
    ],
)
def test_out_of_range_names_the_flag(field: str, value: object, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} must be .* {value!r}"):
        EngineConfig(model="m", **{field: value})


def test_config_is_frozen_and_crosses_the_wire() -> None:
    config = EngineConfig(model="m", threads=3, kv_cache_memory=1 << 40)
    with pytest.raises(AttributeError):
        config.threads = 4
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PINNATE_ISA", "PINNATE_LOG_LEVEL", "PINNATE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert read_environment().isa == "auto"
    assert read_environment().api_key is None
    monkeypatch.setenv("PINNATE_ISA", "avx2")
    monkeypatch.setenv("PINNATE_API_KEY", "")
    assert read_environment().isa == "avx2"
    assert read_environment().api_key is None
