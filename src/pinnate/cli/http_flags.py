"""Flags of `pinnate serve` about who may call it and what it tells: keys, TLS, web pages, logs, metrics, traces.

Knows: spellings, files of keys. Must not know: what the settings do (server/settings.py). Most of these flags are left
out of the short help; docs/security.md and docs/observability.md have them all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from pinnate.cli.arguments import add_flag
from pinnate.core.config import Environment
from pinnate.core.errors import ConfigError
from pinnate.core.logs import LOG_FORMATS, LOG_LEVELS
from pinnate.server.settings import METRICS_COMPAT

_PLAIN = (
    "ssl_certfile",
    "ssl_keyfile",
    "access_log",
    "log_level",
    "log_format",
    "metrics_compat",
    "otlp_traces_endpoint",
)
HIDDEN = argparse.SUPPRESS


def add_security_arguments(group: argparse._ActionsContainer) -> None:
    add_flag(
        group, "--api-key", action="append", metavar="KEY",
        help="required of clients (better: PINNATE_API_KEY, unseen by ps)",
    )  # fmt: skip
    add_flag(group, "--api-key-file", metavar="FILE", help=HIDDEN)
    add_flag(group, "--admin-api-key", action="append", metavar="KEY", help=HIDDEN)
    add_flag(group, "--ssl-certfile", metavar="FILE", help=HIDDEN)
    add_flag(group, "--ssl-keyfile", metavar="FILE", help=HIDDEN)
    add_flag(group, "--allowed-origins", action="append", metavar="ORIGIN", help=HIDDEN)


def add_log_arguments(group: argparse._ActionsContainer) -> None:
    add_flag(
        group,
        "--access-log",
        action="store_const",
        const=True,
        help="log every HTTP request; --log-format json for machines",
    )
    for spelling in ("--no-access-log", "--disable-uvicorn-access-log"):
        group.add_argument(
            spelling, action="store_const", const=False, dest="access_log", default=argparse.SUPPRESS, help=HIDDEN
        )
    add_flag(group, "--log-level", choices=LOG_LEVELS, metavar="LEVEL", help=", ".join(LOG_LEVELS))
    add_flag(group, "--metrics-compat", choices=METRICS_COMPAT, help=HIDDEN)
    add_flag(group, "--otlp-traces-endpoint", aliases=["--otlp-endpoint"], metavar="URL", help=HIDDEN)
    add_flag(group, "--log-format", choices=LOG_FORMATS, help=HIDDEN)


def http_settings(args: argparse.Namespace, environment: Environment) -> dict[str, Any]:
    """Fields of ServerSettings that these flags or the environment set.

    Raises:
        ConfigError: a file of keys cannot be read.
    """
    settings = {name: getattr(args, name) for name in _PLAIN if hasattr(args, name)}
    settings.setdefault("log_level", environment.log_level)
    settings.setdefault("access_log", settings.get("log_format") == "json")
    keys = _split(getattr(args, "api_key", ()))
    if hasattr(args, "api_key_file"):
        keys += read_keys(Path(args.api_key_file))
    settings["api_keys"] = _unique(keys or _split([environment.api_key or ""]))
    admin = _split(getattr(args, "admin_api_key", ()))
    settings["admin_api_keys"] = _unique(admin or _split([environment.admin_api_key or ""]))
    settings["allowed_origins"] = _unique(_origins(getattr(args, "allowed_origins", ())))
    return settings


def read_keys(path: Path) -> list[str]:
    """The keys in a file, one a line; blank lines and lines that begin with # are left out.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--api-key-file {path}: {reason}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path}: it holds no key")
    return keys


def _split(values: Iterable[str]) -> list[str]:
    """A flag may be given several times, each time with several keys between commas."""
    return [part.strip() for value in values for part in value.split(",") if value]


def _origins(values: Iterable[str]) -> list[str]:
    """As keys are; a JSON list, vLLM's way, is accepted too."""
    found: list[str] = []
    for value in values:
        if not value.lstrip().startswith("["):
            found += _split([value])
            continue
        try:
            found += msgspec.json.decode(value, type=list[str])
        except msgspec.MsgspecError:
            raise ConfigError(f"--allowed-origins: {value!r} is not a JSON list of strings") from None
    return found


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
