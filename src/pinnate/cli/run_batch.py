"""`pinnate run-batch`: answers a file of requests, offline."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from pinnate.cli.arguments import (
    add_engine_arguments,
    add_flag,
    add_model_arguments,
    engine_config,
    is_hub_name,
    model_of,
)
from pinnate.core.config import read_environment
from pinnate.core.errors import ConfigError

if TYPE_CHECKING:
    from pinnate.server.protocol.batches import RequestCounts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="INPUT", nargs="?", help="a request a line, as for OpenAI's batches (JSONL)")
    parser.add_argument("output", metavar="OUTPUT", nargs="?", help="where the answers go, in the same order")
    for flags, dest in ((("-i", "--input-file"), "input_file"), (("-o", "--output-file"), "output_file")):
        parser.add_argument(*flags, dest=dest, default=None, help=argparse.SUPPRESS)  # vLLM's spelling
    add_flag(
        parser, "--served-model-name", aliases=["--alias"], nargs="+", metavar="NAME",
        help="what requests call the model; several are allowed",
    )  # fmt: skip
    add_model_arguments(parser, positional=False)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    source, target = _path(args, "input"), _path(args, "output")
    model = model_of(args)
    names = tuple(getattr(args, "served_model_name", ()))
    if not names and model is not None and is_hub_name(model):
        names = (model,)
    if not source.is_file():
        raise ConfigError(f"{source}: no such file")
    if target.is_dir():
        raise ConfigError(f"{target} is a folder, not a file for the answers")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent}: no such folder")
    log_level = "warning" if sys.stderr.isatty() else read_environment().log_level
    config = engine_config(args, log_level=log_level)
    from pinnate.core.logs import setup_logging
    from pinnate.server.app import BATCH_ROUTES
    from pinnate.server.batches.offline import run_batch
    from pinnate.server.settings import ServerSettings

    setup_logging(log_level)
    settings = ServerSettings(served_model_name=names)
    with tqdm(unit="request", disable=not sys.stderr.isatty()) as bar:

        def report(counts: RequestCounts) -> None:
            bar.total = counts.total or None
            bar.update(counts.completed + counts.failed - bar.n)

        counts = asyncio.run(run_batch(config, settings, BATCH_ROUTES, (source, target), report))
    print(f"{counts.completed} of {counts.total} requests answered, {counts.failed} failed: {target}")
    return 0


def _path(args: argparse.Namespace, name: str) -> Path:
    given = {path for path in (getattr(args, name), getattr(args, f"{name}_file")) if path is not None}
    if len(given) != 1:
        raise ConfigError(f"one {name} file is needed: pinnate run-batch INPUT OUTPUT")
    return Path(given.pop())
