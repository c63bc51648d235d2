"""Reading a request's body: size limit, strict JSON, names and types of fields.

Knows: HTTP bodies, msgspec. Must not know: what the fields mean. Rules: the body is a JSON object in UTF-8; NaN and
Infinity are not JSON; numbers out of a double's range are refused; a key given twice counts with its last value; a
field that is null counts as absent; an integer may be written 1.0 (`whole_numbers.py`). No field is ignored in silence:

- what is known and not offered is refused by name, for leaving it out would change what the answer is about or what it
  must obey (an adapter, an image, a suffix, ...);
- what is not known at all is refused by name too where the server is strict, else left out with a warning in the answer
  and in the log (`FieldNotes`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.server.errors import HTTPStatusError
from pinnate.server.limits import MAX_JSON_DEPTH, MAX_JSON_PARTS, MAX_JSON_VALUES
from pinnate.server.whole_numbers import with_integers

T = TypeVar("T")

# "... - at `$.logit_bias[...]`": where msgspec found the fault
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)

_NUMBER = re.compile(r"\[\d+\]")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
EXACT_BYTES = 4 << 20  # bodies beyond are not looked at closely: a text of that size fits no context

Neutral = Callable[[Any], bool]

MAX_WARNINGS = 16  # of one request

_logger = logging.getLogger("pinnate.server")


class Disconnected(Exception):
    """The client left. Nobody is there to be answered."""


class FieldWarning(msgspec.Struct, frozen=True):
    """A field that had no effect. `param` is its path."""

    param: str
    message: str


class FieldNotes:
    """What becomes of the unknown fields of one request: `strict` refuses the first; else each becomes a warning. The
    same member of several items (`messages[0].x`, `messages[1].x`) is one warning, which names the first of them."""

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self.warnings: list[FieldWarning] = []
        self._alike: dict[str, tuple[int, int]] = {}  # path without numbers: place in `warnings`, how many more

    def unknown(self, path: str, effect: str = "it has no effect") -> None:
        """
        Raises:
            InvalidRequestError: strict, or the request has more than MAX_WARNINGS of them.
        """
        if self.strict:
            raise InvalidRequestError(f"unknown field: {path}", param=path)
        kind = _NUMBER.sub("[]", path)
        if kind in self._alike:
            place, more = self._alike[kind]
            self._alike[kind] = place, more + 1
            first = self.warnings[place].param
            message = f"unknown field: {first}, and {more + 1} more like it; {effect}"
            self.warnings[place] = FieldWarning(first, message)
            return
        if len(self.warnings) >= MAX_WARNINGS:
            raise InvalidRequestError(f"more than {MAX_WARNINGS} unknown fields, the last one: {path}", param=path)
        self._alike[kind] = len(self.warnings), 0
        self.warnings.append(FieldWarning(path, f"unknown field: {path}; {effect}"))

    def without_effect(self, path: str, why: str) -> None:
        """A known field that comes to nothing beside the others.

        Raises:
            InvalidRequestError: strict, or too many.
        """
        if self.strict:
            raise InvalidRequestError(f"{path} {why}", param=path)
        if len(self.warnings) >= MAX_WARNINGS:
            raise InvalidRequestError(f"more than {MAX_WARNINGS} fields without effect, the last: {path}", param=path)
        self.warnings.append(FieldWarning(path, f"{path} {why}; it has no effect"))

    def check(self, given: Mapping[str, Any], known: Container[str], at: str, effect: str = "it has no effect") -> None:
        """Notes the members of the object at `at` that are not among the `known`; null ones count as absent.

        Raises:
            InvalidRequestError: as `unknown`.
        """
        for name, value in given.items():
            if value is not None and name not in known:
                self.unknown(f"{at}.{shorten(name)}", effect)

    def members(self, about: str) -> dict[str, list[FieldWarning]]:
        """What an answer that is an object gets: `warnings`, or nothing. They are logged, as those of `about`."""
        log_warnings(about, self.warnings)
        return {"warnings": self.warnings} if self.warnings else {}


def log_warnings(about: str, warnings: Sequence[FieldWarning]) -> None:
    """One line, with names and without values; nothing where there are none."""
    if warnings:
        _logger.warning("%s: without effect: %r", about, [warning.param for warning in warnings])


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object of a request, its null members left out.

    At most `limit` bytes are ever held; a longer body is refused by its Content-Length, or as soon as it passes the
    limit, and the server drops the rest unread.

    Raises:
        HTTPStatusError: 413 or 415.
        InvalidRequestError: not a JSON object.
        Disconnected: the client left before the end of its body.
    """
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPStatusError(415, "Content-Type must be application/json", code="unsupported_media_type")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    return decode_object(await _read(request.receive, limit))


async def read_nothing(request: Request, limit: int, notes: FieldNotes) -> None:
    """The body of a route that takes none: it may be left out or be an object, whose members are all unknown.

    Raises:
        as `read_json`, and as `FieldNotes.unknown`.
    """
    body = await _read(request.receive, limit)
    for name in decode_object(body) if body.strip() else ():
        notes.unknown(shorten(name))


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> HTTPStatusError:
    return HTTPStatusError(413, f"the body is larger than the limit of {limit} bytes", code="body_too_large")


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, without its null members.

    Raises:
        InvalidRequestError: empty, not JSON, too deep, of too many parts, or not an object.
    """
    if not body.strip():
        raise InvalidRequestError("the body is empty, a JSON object is needed", code="invalid_json")
    _check_parts(body)
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequestError("the body is not valid JSON: nested too deep", code="invalid_json") from None
    if not isinstance(decoded, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    # Counting brackets is quick, and hardly a body has so many.
    if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH and _is_deep(decoded):
        raise InvalidRequestError(f"the body is nested deeper than {MAX_JSON_DEPTH}", code="invalid_json")
    return without_nulls(decoded)


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The members that are given: null is the same as absent."""
    return {name: value for name, value in fields.items() if value is not None}


def _check_parts(body: bytes) -> None:
    """Before anything is built of it: many small parts take many times their bytes, and the event loop for seconds.
    Counting is quick; strings are looked into only where that makes the difference and the body is not huge."""
    if body.count(b",") >= MAX_JSON_VALUES:
        raise InvalidRequestError(f"the body has more than {MAX_JSON_VALUES} values", code="invalid_json")
    if _num_parts(body) <= MAX_JSON_PARTS:
        return
    if len(body) > EXACT_BYTES or _num_parts(_STRING.sub(b"", body)) > MAX_JSON_PARTS:
        what = f"more than {MAX_JSON_PARTS} arrays, objects and members of objects"
        raise InvalidRequestError(f"the body has {what}", code="invalid_json")


def _num_parts(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")


def _is_deep(value: dict[str, Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner = (part.values() if type(part) is dict else part for part in level)
        level = [member for members in inner for member in members if type(member) in (dict, list)]
    return bool(level)


def convert(
    fields: dict[str, Any],
    to: type[T],
    *,
    at: str = "",
    unsupported: Mapping[str, Neutral] | None = None,
    notes: FieldNotes | None = None,
) -> T:
    """`fields` as the struct `to`: every name known, every type right, no coercion but of 1.0 to the integer 1.

    `unsupported` names what this server knows of and does not offer, with a predicate for the values that ask for
    nothing (`suffix: ""`); those are dropped. `at` is the path of `fields` in the body, for the message. `notes` takes
    the unknown fields; without it they are refused.

    Raises:
        UnsupportedError, InvalidRequestError: `param` is the field's path.
    """
    prefix = f"{at}." if at else ""
    kept = {}
    known = to.__struct_fields__  # type: ignore[attr-defined]
    for name, value in fields.items():
        if value is None:  # the same as leaving it out
            continue
        if name in known:
            kept[name] = value
        elif unsupported is None or name not in unsupported:
            (notes or FieldNotes()).unknown(prefix + shorten(name))
        elif not unsupported[name](value):
            raise UnsupportedError(f"{prefix}{name} is not supported by this server", param=f"{prefix}{name}")
    try:
        return msgspec.convert(kept, to)
    except msgspec.ValidationError:
        pass
    try:
        return msgspec.convert(with_integers(kept, to), to)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), prefix) from None


def _type_error(message: str, prefix: str) -> InvalidRequestError:
    match = _PATH.match(message)
    assert match is not None
    what, path = match["what"].replace("`", "").replace(" | null", ""), match["path"]
    if path:
        return InvalidRequestError(f"{prefix}{path}: {_lower(what)}", param=prefix + path.partition("[")[0])
    missing = re.search(r"missing required field (\w+)", what)
    if missing:
        return InvalidRequestError(f"{prefix}{missing[1]} is required", param=prefix + missing[1])
    return InvalidRequestError(_lower(what), param=prefix.rstrip(".") or None)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def shorten(name: str) -> str:
    return name if len(name) <= 64 else name[:64] + "..."
