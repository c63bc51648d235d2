"""What the offline measurements share: ranges of their flags, the JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pinnate.core.errors import ConfigError


def add_json_argument(group: argparse._ActionsContainer) -> None:
    group.add_argument("--json", "--output-json", dest="json", metavar="FILE", type=Path, help="write the result there")


def check_at_least(args: argparse.Namespace, **least: int) -> None:
    """
    Raises:
        ConfigError: a flag is below its least value.
    """
    for name, value in least.items():
        if getattr(args, name) < value:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {value}, got {getattr(args, name)}")


def write_json(path: Path | None, document: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    try:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None
