"""`pinnate bench startup`: how long a start takes, and what takes the time."""

from __future__ import annotations

import argparse
import asyncio
import socket
from pathlib import Path

import msgspec

from pinnate.cli.arguments import add_engine_arguments, add_model_arguments, engine_config
from pinnate.cli.bench.common import add_json_argument, check_at_least, write_json
from pinnate.core.config import EngineConfig, read_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("work")
    group.add_argument("--num-iters", type=int, default=5, metavar="N", help="starts (default: %(default)s)")
    group.add_argument(
        "--what", choices=("server", "engine"), default="server",
        help="pinnate serve up to its first token, or the engine process alone",
    )  # fmt: skip
    add_json_argument(group)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_at_least(args, num_iters=1)
    config = engine_config(args)
    from pinnate.bench.startup import Steps, medians, start_engine, start_server

    key = read_environment().api_key
    runs: list[Steps] = []
    for _ in range(args.num_iters):
        if args.what == "engine":
            runs.append(asyncio.run(start_engine(config)))
        else:
            runs.append(asyncio.run(start_server(serve_flags(config), config.model, _free_port(), key)))
    middle = medians(runs)
    print(f"{args.what}, median of {args.num_iters} starts, seconds")
    for name, seconds in middle.items():
        print(f"  {name:<40}{seconds:8.3f}")
    write_json(args.json, {"what": args.what, "model": Path(config.model).name, "medians": middle, "runs": runs})
    return 0


def serve_flags(config: EngineConfig) -> list[str]:
    """What `pinnate serve` must be told to run with `config`; its model and `isa` (from the environment) apart."""
    flags: list[str] = []
    for name in EngineConfig.__struct_fields__:
        value, default = getattr(config, name), getattr(_DEFAULTS, name)
        if name in ("model", "isa", "check_integrity") or value == default:
            continue
        if name == "enable_prefix_caching":
            flags.append("--no-prefix-caching")
        elif name == "kv_events":
            flags += ["--kv-events-config", msgspec.json.encode(value).decode()]
        else:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


_DEFAULTS = EngineConfig(model="")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
