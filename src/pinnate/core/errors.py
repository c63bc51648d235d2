"""The one exception tree.

Knows: what can go wrong, and the facts a client needs to mend it. Must not know: HTTP, exit codes or
log formats; the server and the CLI each map this tree in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class PinnateError(Exception):
    """Base of every error that pinnate raises on purpose. `str(error)` is one readable line."""


class ConfigError(PinnateError):
    """A flag or setting that cannot be honoured. Names the setting."""


class ModelError(PinnateError):
    """A model that cannot be found, read, or is not supported. Names the file and the tensor or key."""


class RequestError(PinnateError):
    """A request that is refused. `param` names the field at fault, `code` is machine-readable."""

    code: str = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(RequestError):
    """A field is malformed, out of range or in conflict with another one."""


class UnsupportedError(RequestError):
    """A field or feature that this server knows of and does not offer."""

    code = "unsupported"


class NotFoundError(RequestError):
    """A model or resource that is not served here."""

    code = "not_found"


class ContextLengthError(RequestError):
    """The prompt, or the prompt and its output, can never fit the context or the KV pool."""

    code = "context_length_exceeded"


REFUSALS: Mapping[str, type[RequestError]] = MappingProxyType(
    {kind.__name__: kind for kind in (InvalidRequestError, UnsupportedError, NotFoundError)}
)  # what a refused command can be, by the name that crosses the process boundary


class QueueFullError(RequestError):
    """The waiting queue is at its limit; the same request may succeed later, after about `retry_after` seconds."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class EngineError(PinnateError):
    """The engine failed while it worked on a request, or is not running."""


class GrammarError(EngineError):
    """The language of a structured output cannot be followed further: a limit, or a token that it does not allow."""


class EngineDeadError(EngineError):
    """The engine process ended; requests in flight are lost, a restart may be under way."""
