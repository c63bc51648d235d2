"""Fault: why a structured output is refused, and where in it."""

from __future__ import annotations

from pinnate.core.errors import InvalidRequestError, RequestError, UnsupportedError

_SHOWN_PATH = 256


class Fault(Exception):
    """`path` is where in the client's text, as a JSON pointer ("#/properties/a"), empty for the whole. `unsupported`:
    it is sound and not offered."""

    def __init__(self, message: str, path: str = "", *, unsupported: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.unsupported = unsupported

    def at(self, path: str) -> Fault:
        """The same fault of a part that lies at `path`."""
        return Fault(self.message, path + self.path.removeprefix("#"), unsupported=self.unsupported)

    def error(self, param: str) -> RequestError:
        """What the client gets: the field, the path inside it, the reason."""
        kind = UnsupportedError if self.unsupported else InvalidRequestError
        path = self.path if len(self.path) <= _SHOWN_PATH else f"{self.path[:_SHOWN_PATH]}..."
        where = f" at {path}" if path else ""
        return kind(f"{param}{where}: {self.message}", param=param)
