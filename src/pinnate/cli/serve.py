"""`pinnate serve`: from flags to a running server.

Knows: the flags of the HTTP side. Must not know: how a server runs (server/lifecycle.py).
"""

from __future__ import annotations

import argparse

from pinnate.cli.arguments import (
    add_engine_arguments,
    add_flag,
    add_model_arguments,
    engine_config,
    is_hub_name,
    model_of,
)
from pinnate.cli.http_flags import add_log_arguments, add_security_arguments, http_settings
from pinnate.core.config import read_environment
from pinnate.server.limits import parse_limits
from pinnate.server.settings import ServerSettings

_SETTINGS = (
    "host", "port", "chat_template", "tool_call_parser", "reasoning_parser", "shutdown_timeout", "strict",
    "max_logprobs", "data_dir",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("server")
    add_flag(group, "--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    add_flag(group, "--port", type=int, metavar="N", help="default: 8000; 0 takes a free one")
    add_flag(
        group, "--served-model-name", aliases=["--alias"], nargs="+", metavar="NAME",
        help="what requests call the model; several are allowed",
    )  # fmt: skip
    add_security_arguments(group)
    add_flag(group, "--chat-template", metavar="FILE", help="Jinja file instead of the model's own template")
    add_flag(
        group, "--shutdown-timeout", type=float, metavar="SECONDS",
        help="how long running requests may go on after SIGTERM",
    )  # fmt: skip
    # Rare ones, in docs/tools.md: the chat template tells which parser is right.
    add_flag(group, "--tool-call-parser", metavar="NAME", help=argparse.SUPPRESS)
    add_flag(group, "--reasoning-parser", metavar="NAME", help=argparse.SUPPRESS)
    add_flag(group, "--enable-auto-tool-choice", action="store_true", help=argparse.SUPPRESS)  # always on
    add_flag(group, "--max-logprobs", type=int, metavar="N", help=argparse.SUPPRESS)
    add_flag(group, "--strict", action="store_const", const=True, help=argparse.SUPPRESS)  # docs/http-api.md
    _add_limit_arguments(group)
    add_log_arguments(group)
    add_flag(
        group, "--data-dir", metavar="DIR",
        help="keep files, batches and stored responses here: turns /v1/files and /v1/batches on",
    )  # fmt: skip
    add_engine_arguments(parser)


def _add_limit_arguments(group: argparse._ActionsContainer) -> None:
    """Out of the short help, for they are off or seldom touched; docs/faults.md has them all."""
    add_flag(group, "--queue-timeout", type=float, metavar="SECONDS", help=argparse.SUPPRESS)
    add_flag(group, "--request-timeout", type=float, metavar="SECONDS", help=argparse.SUPPRESS)
    add_flag(group, "--limit", action="append", metavar="NAME=VALUE", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    settings = server_settings(args)
    config = engine_config(args)
    from pinnate.server.lifecycle import serve

    return serve(config, settings, args.launched)


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """
    Raises:
        ConfigError: a value is out of range, a file of keys cannot be read, or two models are named.
    """
    settings = http_settings(args, read_environment())
    settings |= {name: getattr(args, name) for name in _SETTINGS if hasattr(args, name)}
    settings["limits"] = parse_limits(
        getattr(args, "limit", []),
        queue_timeout=getattr(args, "queue_timeout", None),
        request_timeout=getattr(args, "request_timeout", None),
    )
    names = tuple(getattr(args, "served_model_name", ()))
    model = model_of(args)
    if not names and model is not None and is_hub_name(model):
        names = (model,)  # the folder in the hub's cache is named after a commit
    return ServerSettings(served_model_name=names, **settings)
