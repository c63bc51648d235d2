"""Request ids: what a client may call its request, and what it is called otherwise.

Knows: the `X-Request-Id` header, the rule for ids. Must not know: routes, logs. An id goes into log lines, traces and
answers, so it is short and of harmless characters. A header that breaks the rule is ignored, for proxies add it where
the client cannot help it; a field of a body that breaks it is refused.
"""

from __future__ import annotations

import re
import uuid

from starlette.types import Scope

from pinnate.core.errors import InvalidRequestError

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"  # what answers of Anthropic's API call it
MAX_LENGTH = 128

_VALID = re.compile(rf"[A-Za-z0-9._:/+=@-]{{1,{MAX_LENGTH}}}", re.ASCII)


def new_request_id() -> str:
    """For a request whose client gave none."""
    return f"req-{uuid.uuid4().hex}"


def given_request_id(scope: Scope) -> str | None:
    """The id in the header, if there is one and it keeps to the rule."""
    values = [value for name, value in scope["headers"] if name == HEADER]
    if len(values) != 1 or len(values[0]) > MAX_LENGTH:
        return None
    text: str = values[0].decode("latin-1")
    return text if _VALID.fullmatch(text) else None


def check_request_id(value: str, param: str = "request_id") -> str:
    """The id in a field of a body.

    Raises:
        InvalidRequestError: it breaks the rule; names `param`.
    """
    if _VALID.fullmatch(value) is None:
        raise InvalidRequestError(
            f"{param} must be 1 to {MAX_LENGTH} ASCII letters, digits or . _ : / + = @ -, got {len(value)} characters",
            param=param,
        )
    return value
