"""`pinnate bench`: which command runs, flags that are refused before anything is, flags handed to a server."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pinnate.bench.datasets import WordSource
from pinnate.cli import main as cli
from pinnate.cli import serve
from pinnate.cli.arguments import engine_settings
from pinnate.cli.bench.common import write_json
from pinnate.cli.bench.serve import make_conversations
from pinnate.cli.bench.serve_flags import add_arguments, check, parse_goodput, parse_metrics, parse_percentiles
from pinnate.cli.bench.startup import serve_flags
from pinnate.core.config import EngineConfig
from pinnate.core.errors import ConfigError
from pinnate.core.kv_events import KVEventsConfig


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for bench/command.py; `seen` is what it ran with."""
    module = SimpleNamespace(seen=[])

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model", nargs="?")
        parser.add_argument("--limits-only", action="store_true")

    module.add_arguments = add
    module.run = lambda args: module.seen.append((args.model, args.limits_only)) or 0
    monkeypatch.setitem(sys.modules, "pinnate.bench.command", module)
    return module


def test_without_a_sub_command_the_engine_is_measured(engine: SimpleNamespace) -> None:
    assert cli.main(["bench"]) == 0
    assert cli.main(["bench", "--limits-only"]) == 0
    assert cli.main(["bench", "a/model.gguf"]) == 0
    assert cli.main(["bench", "engine", "serve", "--limits-only"]) == 0  # a model called like a command
    assert engine.seen == [(None, False), (None, True), ("a/model.gguf", False), ("serve", True)]


@pytest.mark.parametrize("name", list(cli.BENCH))
def test_help_of_the_sub_commands_is_short(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: pinnate bench {name}")
    assert len(out.splitlines()) < 60


def test_the_help_of_bench_names_its_sub_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: " in out for name in cli.BENCH)
    assert "--limits-only" in out


def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--frob"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("pinnate bench serve: error: ")
    assert err.count("\n") == 1


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--random-input-len", "-4"], "--random-input-len must be at least 1"),
        (["--num-warmups", "-1"], "--num-warmups must be at least 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
        (["--burstiness", "-1"], "--burstiness must be above 0"),
        (["--api-key", "a\nb"], "--api-key must be printable"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-name", "multi-turn", "--backend", "openai"], "needs --backend openai-chat"),
        (["--dataset-name", "multi-turn", "--num-prompts", "3"], "--num-prompts: a multi-turn"),
        (["--dataset-name", "multi-turn", "--prompt-format", "ids"], "--prompt-format ids"),
        (["--backend", "openai-chat", "--prompt-format", "ids"], "--prompt-format ids"),
        (["--chart", "x.png"], "needs --concurrency"),
        (["--concurrency", "1,0"], "--concurrency '1,0'"),
        (["--concurrency", "1,2", "--max-concurrency", "2"], "do not go together"),
    ],
)
def test_flags_that_cannot_be_honoured_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(parse(*arguments))


def test_the_defaults_pass() -> None:
    check(parse())
    check(parse("--seed", "0", "--num-warmups", "0", "--concurrency", "1,2", "--chart", "x.png"))


def test_goodput() -> None:
    assert parse_goodput(None) == {}
    assert parse_goodput(["ttft:500", "tpot:50.5", "e2el:5e3"]) == {"ttft": 500.0, "tpot": 50.5, "e2el": 5000.0}
    for wrong in ("ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "itl:5", ":5", "ttft:nan"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_goodput([wrong])


def test_percentiles_and_metrics() -> None:
    assert parse_percentiles("50,99.9") == [50.0, 99.9]
    for wrong in ("", "x", "101", "-1", "50,,60", "nan"):
        with pytest.raises(ConfigError, match="--metric-percentiles"):
            parse_percentiles(wrong)
    assert parse_metrics(parse("--percentile-metrics", "itl,ttft")) == ["itl", "ttft"]
    with pytest.raises(ConfigError, match="no metric 'ttl'"):
        parse_metrics(parse("--percentile-metrics", "ttl"))


@pytest.mark.parametrize(
    ("arguments", "turns", "shape"),
    [
        (["--random-input-len", "4", "--random-output-len", "5"], [1, 1, 1], (4, 5)),
        (
            ["--dataset-name", "prefix-repetition", "--prefix-repetition-prefix-len", "6",
             "--prefix-repetition-suffix-len", "3", "--prefix-repetition-output-len", "2"],
            [1, 1, 1], (9, 2),
        ),
        (
            ["--dataset-name", "multi-turn", "--multi-turn-users", "2", "--multi-turn-turns", "4",
             "--multi-turn-input-len", "7", "--multi-turn-output-len", "8"],
            [4, 4], (7, 8),
        ),
    ],
)  # fmt: skip
def test_flags_reach_their_dataset(arguments: list[str], turns: list[int], shape: tuple[int, int]) -> None:
    made = make_conversations(parse(*arguments), WordSource(), 3, 0)
    assert [len(talk) for talk in made] == turns
    assert {(turn.prompt_len, turn.output_len) for talk in made for turn in talk} == {shape}


def test_sharegpt_flags_reach_it(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    said = [{"from": "human", "value": "a b c d e"}, {"from": "gpt", "value": "f g h i"}]
    path.write_text(json.dumps([{"conversations": said}]))
    arguments = ["--dataset-name", "sharegpt", "--dataset-path", str(path)]
    ((turn,),) = make_conversations(parse(*arguments), WordSource(), 1, 0)
    assert (turn.prompt, turn.output_len) == ("a b c d e", 4)
    ((turn,),) = make_conversations(parse(*arguments, "--sharegpt-output-len", "33"), WordSource(), 1, 0)
    assert turn.output_len == 33


def test_a_chart_without_matplotlib_is_refused_before_the_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    arguments = ["--concurrency", "1", "--chart", "x.png", "--base-url", "http://127.0.0.1:1"]
    assert cli.main(["bench", "serve", *arguments]) == 2
    assert "pinnate[chart]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dtype": "float32", "threads": 1, "max_model_len": 99, "seed": 4, "executor": "reference"},
        {"max_num_seqs": 3, "max_num_batched_tokens": 64, "page_size": 8, "num_pages": 77},
        {
            "kv_cache_memory": 1 << 30,
            "schedule_policy": "lpm",
            "max_num_queued_reqs": 5,
            "enable_prefix_caching": False,
        },
        {"kv_events": KVEventsConfig(endpoint="tcp://127.0.0.1:1", topic="kv"), "kv_disk": "d", "pin_quota": 0.5},
    ],
)
def test_a_server_is_started_with_the_same_settings(config: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_arguments(parser)
    args = parser.parse_args(serve_flags(EngineConfig(model="m", **config)))
    assert EngineConfig(model="m", **engine_settings(args) | {"isa": "auto"}) == EngineConfig(model="m", **config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["throughput", "--output-len", "0"], "--output-len must be at least 1, got 0"),
        (["throughput", "--dataset", "sharegpt"], "--dataset sharegpt needs --dataset-path FILE"),
        (["throughput", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["latency", "--num-iters", "0"], "--num-iters must be at least 1, got 0"),
        (["latency", "--batch-size", "-1"], "--batch-size must be at least 1, got -1"),
        (["startup", "--num-iters", "0"], "--num-iters must be at least 1, got 0"),
        (["startup", "/no/such/model"], "model '/no/such/model': no such file or folder"),
    ],
)
def test_offline_flags_are_checked(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert capsys.readouterr().err == f"pinnate: error: {message}\n"


def test_json_files(tmp_path: Path) -> None:
    write_json(None, {"a": 1})
    write_json(tmp_path / "x.json", {"a": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    with pytest.raises(ConfigError, match=r"--json .*No such file"):
        write_json(tmp_path / "no" / "x.json", {})
