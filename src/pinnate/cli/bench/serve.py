"""`pinnate bench serve`: loads a server that is already running, ours or any other with OpenAI's API.

Knows: which dataset and load the flags describe. Must not know: how requests are sent or figures computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pinnate.cli.bench.serve_flags import (
    DEFAULT_PROMPTS,
    add_arguments,
    check,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
)
from pinnate.core.config import read_environment
from pinnate.core.errors import ConfigError, EngineError, ModelError

if TYPE_CHECKING:
    from pinnate.bench.client import Target
    from pinnate.bench.datasets import Conversation, TextSource
    from pinnate.bench.load import LoadResult, Pace
    from pinnate.bench.metrics import Summary
    from pinnate.bench.report import About
    from pinnate.bench.sweep import Point

__all__ = ["add_arguments", "run"]

WARMUP_TOKENS = (32, 8)  # prompt, output


class Wanted(NamedTuple):
    """What is to be computed and kept of each load."""

    percentiles: list[float]
    goodput: dict[str, float]
    metrics: list[str]


def run(args: argparse.Namespace) -> int:
    check(args)
    wanted = Wanted(parse_percentiles(args.metric_percentiles), parse_goodput(args.goodput), parse_metrics(args))
    if args.chart:
        from pinnate.bench.chart import require_matplotlib

        require_matplotlib()
    target = asyncio.run(_target(args))
    source, tokenizer = _text_source(args, target.model)
    from pinnate.bench.report import About

    about = About(
        date=datetime.now().strftime("%Y%m%d-%H%M%S"),
        backend="openai-chat" if target.chat else "openai",
        model=target.model, tokenizer=tokenizer, label=args.label,
    )  # fmt: skip
    bench = _Bench(args, target, source, about, wanted)
    return bench.sweep() if args.concurrency else bench.single()


class _Bench:
    """One invocation: its loads, their output."""

    def __init__(
        self, args: argparse.Namespace, target: Target, source: TextSource, about: About, wanted: Wanted
    ) -> None:
        self._args, self._target, self._source, self._about, self._wanted = args, target, source, about, wanted

    def single(self) -> int:
        from pinnate.bench.report import as_text

        self._warm_up()
        count = self._args.num_prompts or DEFAULT_PROMPTS
        summary = self._load(self._conversations(count, self._args.seed), self._args.max_concurrency)
        print(as_text(summary, self._wanted.metrics))
        return 0 if summary.completed else 1

    def sweep(self) -> int:
        from pinnate.bench.report import error_lines
        from pinnate.bench.sweep import Point, as_table, parse_concurrency, requests_at

        args, points = self._args, list[Point]()
        self._warm_up()
        for number, concurrency in enumerate(parse_concurrency(args.concurrency)):
            # Fresh prompts for each point: the server's prefix cache must not help the later ones.
            prompts = self._conversations(requests_at(concurrency, args.num_prompts), args.seed + number)
            points.append(Point(concurrency, self._load(prompts, concurrency)))
            for line in error_lines(points[-1].summary):
                print(f"at {concurrency}: {line}", file=sys.stderr)
        print(as_table(points, max(self._wanted.percentiles)))
        if args.chart:
            self._draw(points)
        return 0 if all(point.summary.completed for point in points) else 1

    def _draw(self, points: Sequence[Point]) -> None:
        from pinnate.bench.chart import draw

        title = f"{self._about.model}: {self._args.label or self._args.dataset_name}"
        draw(points, max(self._wanted.percentiles), title, self._args.chart)
        print(f"chart: {self._args.chart}")

    def _warm_up(self) -> None:
        """
        Raises:
            EngineError: the server does not answer as it should; there is no point in a load.
        """
        from pinnate.bench.client import send

        rng, (prompt, output) = random.Random(f"warm-up {self._args.seed}"), WARMUP_TOKENS
        for _ in range(self._args.num_warmups):
            text = self._source.text(rng, prompt)
            asked = [{"role": "user", "content": text}] if self._target.chat else text
            outcome = asyncio.run(send(self._target, asked, prompt, output))
            if outcome.error is not None:
                raise EngineError(f"{self._args.base_url}: the first request failed: {outcome.error}")

    def _load(self, conversations: Sequence[Conversation], max_concurrency: int | None) -> Summary:
        from tqdm import tqdm

        from pinnate.bench.datasets import total_turns
        from pinnate.bench.load import Pace, run_load
        from pinnate.bench.metrics import summarise

        args = self._args
        pace = Pace(args.request_rate, args.burstiness, max_concurrency, args.seed)
        with tqdm(total=total_turns(conversations), unit="request", disable=not sys.stderr.isatty()) as bar:
            load = asyncio.run(run_load(self._target, conversations, pace, on_done=lambda _: bar.update()))
        summary = summarise(load, self._wanted.percentiles, self._wanted.goodput)
        if args.save_result or args.save_detailed or args.result_filename:
            self._save(load, pace, summary)
        return summary

    def _save(self, load: LoadResult, pace: Pace, summary: Summary) -> None:
        from pinnate.bench.report import as_json, default_filename, details

        args = self._args
        name = Path(args.result_filename or default_filename(self._about, pace))
        if args.result_filename and args.concurrency:
            name = name.with_stem(f"{name.stem}-concurrency{pace.max_concurrency}")
        path = args.result_dir / name
        document = as_json(self._about, pace, summary, self._wanted.metrics)
        if args.save_detailed:
            document |= details(load)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document, allow_nan=False) + "\n")
        except OSError as error:
            raise ConfigError(f"--result-filename {path}: {error.strerror}") from None
        print(f"result: {path}")

    def _conversations(self, count: int, seed: int) -> list[Conversation]:
        return make_conversations(self._args, self._source, count, seed)


def make_conversations(args: argparse.Namespace, source: TextSource, count: int, seed: int) -> list[Conversation]:
    """
    Raises:
        ConfigError: the dataset cannot be had with these flags.
    """
    from pinnate.bench import datasets

    rng, as_ids = random.Random(seed), args.prompt_format == "ids"
    if args.dataset_name == "sharegpt":
        return datasets.sharegpt(source, rng, count, path=args.dataset_path, output_len=args.sharegpt_output_len)
    if args.dataset_name == "prefix-repetition":
        return datasets.prefix_repetition(
            source, rng, count, as_ids=as_ids,
            prefix_len=args.prefix_repetition_prefix_len, suffix_len=args.prefix_repetition_suffix_len,
            num_prefixes=args.prefix_repetition_num_prefixes, output_len=args.prefix_repetition_output_len,
        )  # fmt: skip
    if args.dataset_name == "multi-turn":
        return datasets.multi_turn(
            source, rng, users=args.multi_turn_users, turns=args.multi_turn_turns,
            input_len=args.multi_turn_input_len, output_len=args.multi_turn_output_len,
        )  # fmt: skip
    return datasets.random_prompts(
        source, rng, count, as_ids=as_ids, input_len=args.random_input_len,
        output_len=args.random_output_len, range_ratio=args.random_range_ratio,
    )  # fmt: skip


async def _target(args: argparse.Namespace) -> Target:
    from pinnate.bench.client import Target, first_model
    from pinnate.bench.connection import parse_base_url

    origin = parse_base_url(args.base_url)
    key = args.api_key or read_environment().api_key
    return Target(
        origin=origin,
        model=args.model or await first_model(origin, key),
        chat=args.backend == "openai-chat" or args.dataset_name == "multi-turn",
        api_key=key, temperature=args.temperature, ignore_eos=args.ignore_eos, timeout=args.timeout,
    )  # fmt: skip


def _text_source(args: argparse.Namespace, model: str) -> tuple[TextSource, str | None]:
    """The tokenizer that is named; else that of the model, where its name is a path here or that of the default
    model; else none."""
    from pinnate.bench.datasets import TokenizerSource, WordSource
    from pinnate.engine.model_text import load_model_text
    from pinnate.weights.resolve import resolve_model

    if args.tokenizer is not None:
        return TokenizerSource(load_model_text(resolve_model(args.tokenizer)).tokenizer), args.tokenizer
    path = Path(model).expanduser() if Path(model).expanduser().exists() else _default_model(model)
    if path is not None:
        return TokenizerSource(load_model_text(path).tokenizer), model
    print("no tokenizer here: lengths of prompts are in words (name the model's path with --tokenizer)")
    return WordSource(), None


def _default_model(name: str) -> Path | None:
    from pinnate.server.settings import model_names
    from pinnate.weights.resolve import default_model_path

    try:
        path = default_model_path()
    except ModelError:
        return None
    return path if name in model_names(str(path), ()) else None
