"""Errors in the client's own words: an API that is translated into chat fields names its own fields at fault.

Knows: messages and `param` of refusals. Must not know: any API's fields; each gives its table.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from pinnate.core.errors import RequestError

Renames = Sequence[tuple[str, str]]
_MESSAGE = re.compile(r"\bmessages\[(\d+)\](?:\.content\[\d+\])?")


@contextlib.contextmanager
def renamed(table: Renames, origins: Sequence[str] = ()) -> Iterator[None]:
    """Rewrites what a RequestError inside says. `table` has (regular expression of a chat field, the client's field) in
    the order of their use; `origins[i]` is where in the client's body the chat's message i came from."""
    try:
        yield
    except RequestError as error:
        error.message = _rename(error.message, table, origins)
        error.args = (error.message,)
        if error.param is not None:
            error.param = _rename(error.param, table, origins)
        raise


def _rename(text: str, table: Renames, origins: Sequence[str]) -> str:
    def origin(match: re.Match[str]) -> str:
        number = int(match[1])
        return origins[number] if number < len(origins) else match[0]

    text = _MESSAGE.sub(origin, text)
    for pattern, name in table:
        text = re.sub(pattern, name, text)
    return text
