"""Automatic choices: values, reasons, refusals."""

from __future__ import annotations

import pytest

from pinnate.core.autoconfig import (
    KV_MEMORY_CAP,
    Choice,
    choose_dtype,
    choose_kv_cache_dtype,
    choose_max_model_len,
    choose_num_pages,
    choose_quantization,
    choose_threads,
    fit_max_model_len,
    kv_shape,
)
from pinnate.core.errors import ConfigError
from pinnate.core.machine import Machine

SHAPE = kv_shape(30 * 3 * 64, 30 * 3, "bfloat16", 16)  # the default model
GIB = 1 << 30


def machine(cores: int = 4, quota: float | None = None) -> Machine:
    return Machine(cpus=2 * cores, cores=cores, cpu_quota=quota, memory_available=16 * GIB, memory_limit=None)


@pytest.mark.parametrize(
    ("requested", "quota", "expected"), [(None, None, 4), (3, None, 3), (None, 2.7, 2), (None, 0.5, 1), (None, 8.0, 4)]
)
def test_threads(requested: int | None, quota: float | None, expected: int) -> None:
    assert choose_threads(requested, machine(quota=quota)).value == expected


def test_threads_reason_names_what_decided() -> None:
    assert "--threads" in choose_threads(3, machine()).reason
    assert "quota of 1.5 CPUs" in choose_threads(None, machine(quota=1.5)).reason
    assert choose_threads(None, machine(cores=1)).reason == "1 thread: 1 core allowed by the affinity"


def test_dtype() -> None:
    assert choose_dtype("auto", "native").value == "bfloat16"
    assert choose_dtype("float32", "native").value == "float32"
    assert choose_dtype("auto", "reference").value == "float32"
    with pytest.raises(ConfigError, match="--dtype bfloat16 is not offered by the reference executor"):
        choose_dtype("bfloat16", "reference")


def test_quantization() -> None:
    assert choose_quantization("none", "reference", "float32").value == "none"
    assert "held in bfloat16" in choose_quantization("none", "native", "bfloat16").reason
    for asked in ("int8", "int4"):
        chosen = choose_quantization(asked, "native", "bfloat16")
        assert (chosen.value, "--quantization" in chosen.reason) == (asked, True)
        with pytest.raises(ConfigError, match=f"--quantization {asked} is not offered by the reference executor"):
            choose_quantization(asked, "reference", "float32")
        with pytest.raises(ConfigError, match=f"--quantization {asked} needs --dtype bfloat16"):
            choose_quantization(asked, "native", "float32")


def test_kv_cache_dtype() -> None:
    assert choose_kv_cache_dtype("auto", "bfloat16", "native").value == "bfloat16"
    assert choose_kv_cache_dtype("auto", "float32", "reference").value == "float32"
    choice = choose_kv_cache_dtype("int8", "bfloat16", "native")
    assert choice.value == "int8"
    assert "--kv-cache-dtype" in choice.reason
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 is not offered by the reference executor"):
        choose_kv_cache_dtype("int8", "float32", "reference")


def test_max_model_len() -> None:
    assert choose_max_model_len(None, 8192).value == 8192
    assert choose_max_model_len(100, 8192).value == 100
    with pytest.raises(ConfigError, match=r"--max-model-len 8193 .* 8192 tokens"):
        choose_max_model_len(8193, 8192)


def test_page_bytes() -> None:
    assert SHAPE.page_bytes == 30 * 2 * 3 * 64 * 16 * 2
    assert kv_shape(10, 2, "float32", 1).page_bytes == 80
    assert kv_shape(30 * 3 * 64, 30 * 3, "int8", 16).page_bytes == 30 * 2 * 3 * (64 + 4) * 16


def pages(available: int = 16 * GIB, **changes: int | None) -> Choice[int]:
    args = {"num_pages": None, "kv_cache_memory": None, "max_num_seqs": 64, "max_model_len": 8192} | changes
    return choose_num_pages(SHAPE, available=available, **args)


def test_pool_set_by_hand() -> None:
    assert pages(num_pages=7, kv_cache_memory=1).value == 7
    assert pages(kv_cache_memory=3 * SHAPE.page_bytes + 5).value == 3
    with pytest.raises(ConfigError, match=f"--kv-cache-memory 1000 holds no page.*{SHAPE.page_bytes} bytes"):
        pages(kv_cache_memory=1000)


def test_automatic_pool_holds_all_sequences_where_that_is_little() -> None:
    choice = pages(max_num_seqs=2, max_model_len=1001)
    assert choice.value == 2 * 63
    assert "room for 2 sequences of 1001 tokens" in choice.reason


def test_automatic_pool_is_capped() -> None:
    assert pages(available=100 * GIB).value == KV_MEMORY_CAP // SHAPE.page_bytes
    assert "cap of 4.0 GiB" in pages(available=100 * GIB).reason
    quarter = pages(available=8 * GIB)
    assert quarter.value == 2 * GIB // SHAPE.page_bytes
    assert "a quarter of 8.0 GiB" in quarter.reason


def test_automatic_pool_goes_beyond_its_share_for_one_whole_sequence() -> None:
    one = 512 * SHAPE.page_bytes
    assert pages(available=2 * one).value == 512
    assert pages(available=one).value == int(one * 0.8) // SHAPE.page_bytes
    with pytest.raises(ConfigError, match="no memory for the KV pool"):
        pages(available=1000)


def test_context_is_lowered_to_the_pool_only_when_automatic() -> None:
    own = choose_max_model_len(None, 8192)
    assert fit_max_model_len(own, None, 512, 16) is own
    lowered = fit_max_model_len(own, None, 100, 16)
    assert lowered.value == 1600
    assert "8192" in lowered.reason
    asked = choose_max_model_len(4000, 8192)
    kept = fit_max_model_len(asked, 4000, 100, 16)
    assert kept.value == 4000
    assert "1600 tokens" in kept.reason
