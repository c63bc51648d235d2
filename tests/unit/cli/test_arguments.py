import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from pinnate.cli.arguments import (
    add_engine_arguments,
    add_model_arguments,
    add_sampling_arguments,
    byte_size,
    engine_config,
    engine_settings,
    is_hub_name,
    model_of,
    sampling_params,
)
from pinnate.core.config import EngineConfig
from pinnate.core.errors import ConfigError, InvalidRequestError, ModelError

Parse = Callable[..., argparse.Namespace]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    monkeypatch.delenv("PINNATE_ISA", raising=False)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    return lambda *arguments: parser.parse_args(arguments)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "m.gguf"
    path.touch()
    return str(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1048576", 1 << 20),
        ("512M", 512 << 20),
        ("2G", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("64kb", 1 << 16),
        ("1t", 1 << 40),
    ],
)
def test_byte_sizes(text: str, value: int) -> None:
    assert byte_size(text) == value


@pytest.mark.parametrize("text", ["", "M", "2X", "-1G", "1 G", "nan", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        byte_size(text)


def test_no_flags_leave_every_default(parse: Parse, model: str) -> None:
    assert engine_config(parse(model)) == EngineConfig(model=model)
    assert engine_settings(parse()) == {"isa": "auto"}


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--max-model-len", "--context-length", "--ctx-size"], "max_model_len", 77),
        (["--max-num-seqs", "--max-running-requests", "--parallel"], "max_num_seqs", 3),
        (["--max-num-batched-tokens", "--chunked-prefill-size"], "max_num_batched_tokens", 99),
        (["--page-size", "--block-size"], "page_size", 32),
        (["--num-pages", "--num-gpu-blocks-override"], "num_pages", 12),
        (["--kv-cache-memory", "--kv-cache-memory-bytes"], "kv_cache_memory", 4096),
        (["--threads", "-t"], "threads", 1),
        (["--max-num-queued-reqs", "--max-queued-requests"], "max_num_queued_reqs", 5),
        (["--seed", "--random-seed"], "seed", 11),
        (["--schedule-policy", "--scheduling-policy"], "schedule_policy", "lpm"),
        (["--eviction-policy", "--radix-eviction-policy"], "eviction_policy", "slru"),
        (["--cache-report"], "cache_report", "own"),
        (["--executor"], "executor", "reference"),
        (["--dtype"], "dtype", "float32"),
        (["--quantization", "-q"], "quantization", "int4"),
        (["--kv-cache-dtype"], "kv_cache_dtype", "int8"),
    ],
)
def test_each_spelling_sets_its_field(flags: list[str], field: str, value: object, parse: Parse, model: str) -> None:
    for flag in flags:
        assert engine_config(parse(model, flag, str(value))) == EngineConfig(model=model, **{field: value})


@pytest.mark.parametrize("flag", ["--no-prefix-caching", "--no-enable-prefix-caching", "--disable-radix-cache"])
def test_prefix_caching_off_and_on(flag: str, parse: Parse, model: str) -> None:
    assert not engine_config(parse(model, flag)).enable_prefix_caching
    assert engine_config(parse(model, flag, "--enable-prefix-caching")).enable_prefix_caching


@pytest.mark.parametrize(("alias", "dtype"), [("bf16", "bfloat16"), ("fp32", "float32"), ("auto", "auto")])
def test_dtype_aliases(alias: str, dtype: str, parse: Parse) -> None:
    assert engine_settings(parse("--dtype", alias))["dtype"] == dtype


def test_isa_comes_from_the_environment(parse: Parse, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PINNATE_ISA", "avx2")
    assert engine_config(parse(model)).isa == "avx2"
    monkeypatch.setenv("PINNATE_ISA", "mmx")
    with pytest.raises(ConfigError, match="PINNATE_ISA"):
        engine_config(parse(model))


def test_a_commands_own_default_is_below_the_flag(parse: Parse, model: str) -> None:
    assert engine_config(parse(model), max_num_seqs=1).max_num_seqs == 1
    assert engine_config(parse(model, "--max-num-seqs", "9"), max_num_seqs=1).max_num_seqs == 9


def test_a_wrong_flag_is_reported_before_the_model_is_looked_for(parse: Parse) -> None:
    with pytest.raises(ConfigError, match="--threads"):
        engine_config(parse("/no/such/model", "--threads", "0"))
    with pytest.raises(ModelError, match="no such"):
        engine_config(parse("/no/such/model"))


def test_the_model_by_position_or_flag(parse: Parse) -> None:
    assert model_of(parse()) is None
    assert model_of(parse("x")) == model_of(parse("--model", "x")) == model_of(parse("-m", "x")) == "x"
    assert model_of(parse("x", "--model-path", "x")) == "x"
    with pytest.raises(ConfigError, match="two models are named: x and y"):
        model_of(parse("x", "--model", "y"))


def test_an_empty_model_is_not_the_default_one(parse: Parse) -> None:
    with pytest.raises(ModelError, match="empty"):
        engine_config(parse("--model", ""))


def test_hub_names(model: str) -> None:
    assert is_hub_name("org/name")
    assert not is_hub_name(model)
    assert not is_hub_name(None)


def test_sampling_flags(parse: Parse) -> None:
    args = parse(
        "--max-tokens", "5", "--temperature", "0", "--top-p", "0.5", "--top-k", "3", "--stop", "a", "--stop", "b"
    )
    params = sampling_params(args, max_tokens=9)
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 0.0, 0.5, 3)
    assert params.stop == ("a", "b")
    assert sampling_params(parse(), max_tokens=9).max_tokens == 9
    with pytest.raises(InvalidRequestError, match="temperature"):
        sampling_params(parse("--temperature", "nan"))
