"""How log lines look: text for people, or one JSON object a line for machines.

Knows: logging's records. Must not know: who logs what. A record may carry `fields` (extra={"fields": {...}}), facts
that a JSON line holds as members of their own.
"""

from __future__ import annotations

import logging
import traceback
from datetime import UTC, datetime

import msgspec

LOG_FORMATS = ("text", "json")


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "logger": ..., "message": ..., ...fields, "exception": ...}`, without line ends."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def log_fault(logger: logging.Logger, what: str, error: BaseException) -> None:
    """A fault that nobody foresaw: its type and place. Its text, which may quote a request, comes at level debug."""
    place = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s\n%s", what, type(error).__name__, place)
    logger.debug("%s: %s", what, error)


def setup_logging(level: str, log_format: str = "text", process: str = "") -> None:
    """Everything goes to stderr. No effect where the program has set up logging already. `process` names it in text."""
    shown = f" {process}" if process else ""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s{shown} %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
