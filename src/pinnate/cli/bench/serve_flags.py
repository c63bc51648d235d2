"""The flags of `pinnate bench serve`: spellings, ranges, what goes together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pinnate.core.errors import ConfigError

DATASETS = ("random", "sharegpt", "prefix-repetition", "multi-turn")
METRIC_NAMES = ("ttft", "tpot", "itl", "e2el")
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
DEFAULT_PROMPTS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000", help="default: %(default)s")
    group.add_argument("--model", metavar="NAME", help="as the server calls it (default: the first it lists)")
    group.add_argument(
        "--backend", choices=("openai", "openai-chat"),
        help="/v1/completions, or chat (default: completions; chat for multi-turn)",
    )  # fmt: skip
    group.add_argument("--tokenizer", metavar="MODEL", help="path of the served model, for exact lengths of prompts")
    group.add_argument("--api-key", metavar="KEY", help="better: PINNATE_API_KEY, unseen by ps")
    group.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="for one request, seconds")
    _add_datasets(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--num-prompts", type=int, metavar="N", help=f"default: {DEFAULT_PROMPTS}")
    group.add_argument("--request-rate", type=float, default=float("inf"), metavar="R", help="a second; inf: all now")
    group.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less: burstier (gamma)")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests under way at most")
    group.add_argument("--concurrency", metavar="1,2,4", help="a sweep: the load once at each --max-concurrency")
    group.add_argument("--num-warmups", type=int, default=1, metavar="N", help="uncounted requests before the load")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T")
    group.add_argument("--ignore-eos", action="store_true", help="outputs of exactly the length asked for")
    group = parser.add_argument_group("result")
    group.add_argument("--goodput", nargs="+", metavar="M:MS", help="limits: ttft:500 tpot:50 e2el:5000")
    group.add_argument("--percentile-metrics", default=",".join(METRIC_NAMES), metavar="M,..", help="shown and saved")
    group.add_argument("--metric-percentiles", default="99", metavar="P,..", help="default: 99")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with every request in it")
    group.add_argument("--result-dir", type=Path, default=Path(), metavar="DIR")
    group.add_argument("--result-filename", metavar="FILE")
    group.add_argument("--label", help="of the result")
    group.add_argument("--chart", type=Path, metavar="PNG", help="of a sweep; needs pinnate[chart]")


def _add_datasets(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=DATASETS, default="random")
    group.add_argument("--prompt-format", choices=("text", "ids"), default="text", help="ids: token ids, not in chat")
    group.add_argument("--random-input-len", type=int, default=256, metavar="N")
    group.add_argument("--random-output-len", type=int, default=128, metavar="N")
    group.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths vary by len * R")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="sharegpt: JSON in the ShareGPT format")
    group.add_argument("--sharegpt-output-len", type=int, metavar="N", help="default: that of the recorded answer")
    group.add_argument("--prefix-repetition-prefix-len", type=int, default=256, metavar="N")
    group.add_argument("--prefix-repetition-suffix-len", type=int, default=256, metavar="N")
    group.add_argument("--prefix-repetition-num-prefixes", type=int, default=10, metavar="N")
    group.add_argument("--prefix-repetition-output-len", type=int, default=128, metavar="N")
    group.add_argument("--multi-turn-users", type=int, default=8, metavar="N")
    group.add_argument("--multi-turn-turns", type=int, default=6, metavar="N")
    group.add_argument("--multi-turn-input-len", type=int, default=60, metavar="N", help="new tokens a turn")
    group.add_argument("--multi-turn-output-len", type=int, default=64, metavar="N")


def check(args: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: a flag is out of range, or two do not go together.
    """
    from pinnate.bench.sweep import parse_concurrency

    for name, value in vars(args).items():
        least = 0 if name in ("seed", "num_warmups") else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    for name in ("request_rate", "burstiness", "timeout"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name):g}")
    if args.api_key is not None and not (args.api_key.isascii() and args.api_key.isprintable()):
        raise ConfigError("--api-key must be printable ASCII")
    multi_turn = args.dataset_name == "multi-turn"
    if args.dataset_name == "sharegpt" and args.dataset_path is None:
        raise ConfigError("--dataset-name sharegpt needs --dataset-path FILE")
    if multi_turn and args.backend == "openai":
        raise ConfigError("--dataset-name multi-turn is a chat: it needs --backend openai-chat")
    if multi_turn and args.num_prompts is not None:
        raise ConfigError("--num-prompts: a multi-turn load has --multi-turn-users times --multi-turn-turns requests")
    if args.prompt_format == "ids" and (multi_turn or args.dataset_name == "sharegpt" or args.backend == "openai-chat"):
        raise ConfigError("--prompt-format ids: chats and sharegpt are text")
    if args.concurrency is None and args.chart is not None:
        raise ConfigError("--chart shows a sweep: it needs --concurrency 1,2,4,...")
    if args.concurrency is not None:
        parse_concurrency(args.concurrency)
        if args.max_concurrency is not None:
            raise ConfigError("--max-concurrency and --concurrency do not go together")


def parse_goodput(given: Sequence[str] | None) -> dict[str, float]:
    """`ttft:500 tpot:50` -> limits in milliseconds.

    Raises:
        ConfigError: a part is not such a limit.
    """
    limits: dict[str, float] = {}
    for part in given or ():
        name, _, text = part.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if name not in GOODPUT_NAMES or not value > 0:
            raise ConfigError(f"--goodput {part!r}: expected a limit in ms such as ttft:500 (also tpot, e2el)")
        limits[name] = value
    return limits


def parse_percentiles(text: str) -> list[float]:
    """
    Raises:
        ConfigError: a part is not between 0 and 100.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0.0 <= value <= 100.0 for value in values):
        raise ConfigError(f"--metric-percentiles {text!r}: expected numbers from 0 to 100 such as 50,90,99")
    return values


def parse_metrics(args: argparse.Namespace) -> list[str]:
    """
    Raises:
        ConfigError: there is no such metric.
    """
    names: list[str] = args.percentile_metrics.split(",")
    for name in names:
        if name not in METRIC_NAMES:
            raise ConfigError(f"--percentile-metrics: no metric {name!r} (there are {', '.join(METRIC_NAMES)})")
    return names
