"""An operator's command, answered: its handler's result, or what is wrong, as a Reply.

Knows: which errors are the caller's. Must not know: what any command does, or how it travels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pinnate.core.errors import RequestError
from pinnate.core.messages import Command, Reply

log = logging.getLogger(__name__)

CommandHandler = Callable[[dict[str, Any]], dict[str, Any]]  # of the command's arguments


def answer(command: Command, handlers: Mapping[str, CommandHandler]) -> Reply:
    """Never raises: a fault in a handler is logged and told, and is no reason for the loop to end."""
    handler = handlers.get(command.name)
    if handler is None:
        return Reply(command.command_id, {}, error=f"unknown command {command.name!r}")
    try:
        return Reply(command.command_id, handler(command.arguments))
    except RequestError as error:
        return Reply(command.command_id, {}, str(error), type(error).__name__, error.param, error.code)
    except Exception as error:
        log.exception("command %s failed", command.name)
        return Reply(command.command_id, {}, error=f"{type(error).__name__}: {error}")
