"""How log lines look: text for people, or one JSON object a line for machines.

Knows: logging's records. Must not know: who logs what. A record may carry `fields` (extra={"fields": {...}}), facts
that a JSON line holds as members of their own.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
from datetime import UTC, datetime
from types import TracebackType

import msgspec

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "logger": ..., "message": ..., ...fields, "exception": ...}`, without line ends.
    `process`, where it has a name, is a member too."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:  # half a surrogate pair, as in a file's name that is not UTF-8
            return json.dumps(line, default=str)


def log_fault(logger: logging.Logger, what: str, error: BaseException) -> None:
    """A fault that nobody foresaw: its type and place. Not its text, which may quote a request."""
    place = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s\n%s", what, type(error).__name__, place)


def setup_logging(level: str, log_format: str = "text", process: str = "") -> None:
    """Everything goes to stderr, warnings and, as JSON, exceptions that nobody caught too. No effect where the program
    has set up logging already. `process`: what its lines call this one."""
    if logging.getLogger().handlers:
        return
    shown = f" {process}" if process else ""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
        _log_uncaught()
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s{shown} %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)


def _log_uncaught() -> None:
    """In place of Python's own words on stderr, which are no JSON."""

    def log_uncaught(
        kind: type[BaseException], error: BaseException | None, place: TracebackType | None, where: str = "the program"
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        found = (kind, error, place) if error is not None else None
        logging.getLogger("pinnate").critical("%s: not caught in %s", kind.__name__, where, exc_info=found)

    def log_uncaught_in_thread(found: threading.ExceptHookArgs) -> None:
        name = "a thread" if found.thread is None else found.thread.name
        log_uncaught(found.exc_type, found.exc_value, found.exc_traceback, name)

    sys.excepthook = log_uncaught
    threading.excepthook = log_uncaught_in_thread
