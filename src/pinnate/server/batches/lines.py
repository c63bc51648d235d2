"""Lines of an input file: where each begins, and what each must be.

Knows: JSONL, OpenAI's rules for it and their error codes. Must not know: what a body means, where results go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from pinnate.core.errors import RequestError
from pinnate.server.body import convert, decode_object, shorten, without_nulls
from pinnate.server.protocol.batches import BatchError, BatchLine

MAX_REQUESTS = 50_000
MAX_CUSTOM_ID = 512  # characters
MAX_ERRORS = 100  # that are shown; a file with a fault in every line has one reason, not 50,000
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Place:
    """`number` counts from 1, blank lines too; `offset` and `size` are in bytes, the line's end not counted."""

    number: int
    offset: int
    size: int


def split(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[Place, bytes | None]]:
    """Lines that are not blank. One that is longer than the limit comes as None; it is never held whole."""
    number = offset = 0
    while chunk := file.readline(max_line_bytes + 2):
        number += 1
        begin, size, ends = offset, len(chunk), chunk.endswith(b"\n")
        while not ends and size >= max_line_bytes + 2 and (rest := file.readline(1 << 20)):
            size += len(rest)
            ends = rest.endswith(b"\n")
        offset += size
        line = chunk.rstrip(b"\r\n")
        if size > len(chunk) or len(line) > max_line_bytes:
            yield Place(number, begin, size), None
            continue
        if number == 1 and line.startswith(_BOM):
            begin, line = begin + len(_BOM), line[len(_BOM) :]
        if line.strip():
            yield Place(number, begin, len(line)), line


class LineChecker:
    """Checks the lines of one file, in order. `errors` are the first faults found, `num_errors` counts all."""

    def __init__(self, endpoints: Collection[str], max_line_bytes: int) -> None:
        """`endpoints`: what a line may ask for; of a batch it is one."""
        self._endpoints = endpoints
        self._max_line_bytes = max_line_bytes
        self._seen: set[str] = set()
        self.num_lines = 0
        self.num_errors = 0
        self.errors: list[BatchError] = []

    def check(self, place: Place, raw: bytes | None) -> BatchLine | None:
        """The line, or None if something is wrong with it."""
        self.num_lines += 1
        if self.num_lines > MAX_REQUESTS:
            if self.num_lines == MAX_REQUESTS + 1:
                self._fault("too_many_tasks", f"the file has more than {MAX_REQUESTS} requests", place.number)
            return None
        if raw is None:
            limit = self._max_line_bytes
            self._fault("line_too_long", f"the line has {place.size} bytes, the limit is {limit}", place.number)
            return None
        try:
            line = parse(raw)
        except RequestError as error:
            code = "invalid_json_line" if error.code == "invalid_json" else "invalid_request"
            self._fault(code, error.message.replace("the body", "the line"), place.number, error.param)
            return None
        return line if self._is_good(line, place.number) else None

    def finish(self) -> None:
        if not self.num_lines:
            self._fault("empty_file", "the file has no requests", None)

    def _is_good(self, line: BatchLine, number: int) -> bool:
        before = self.num_errors
        if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
            message = f"custom_id must have 1 to {MAX_CUSTOM_ID} characters, not {len(line.custom_id)}"
            self._fault("invalid_custom_id", message, number, "custom_id")
        elif line.custom_id in self._seen:
            message = f"custom_id {_quoted(line.custom_id)} is that of an earlier line; each must be unique"
            self._fault("duplicate_custom_id", message, number, "custom_id")
        self._seen.add(line.custom_id)
        if line.method != "POST":
            self._fault("invalid_method", f"method must be POST, not {_quoted(line.method)}", number, "method")
        if line.url not in self._endpoints:
            one_of = "" if len(self._endpoints) == 1 else "one of "
            allowed = ", ".join(self._endpoints)
            self._fault("invalid_url", f"url must be {one_of}{allowed}, not {_quoted(line.url)}", number, "url")
        return self.num_errors == before

    def _fault(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        self.num_errors += 1
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(BatchError(code=code, message=message, line=line, param=param))


def parse(raw: bytes) -> BatchLine:
    """One line, the null members of its body left out as in a body over HTTP.

    Raises:
        InvalidRequestError: not a JSON object, an unknown or missing field, a wrong type.
    """
    line = convert(decode_object(raw), BatchLine)
    line.body = without_nulls(line.body)
    return line


def _quoted(text: str) -> str:
    return msgspec.json.encode(shorten(text)).decode()
