"""POST /v1/files: a multipart form, its file written to the disk as it comes.

Knows: multipart/form-data. Must not know: what the file is for. At most a few chunks are in memory at any time,
whatever the size of the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from pinnate.core.errors import InvalidRequestError
from pinnate.server.batches.storage import Storage
from pinnate.server.errors import HTTPStatusError

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
WRITE_BYTES = 1 << 20  # written at once: fewer changes of thread
_OVERHEAD_BYTES = 64 * 1024  # of a form around its file


class Form:
    """What has come of a form: its short fields, the name of its file, and bytes of that to be written."""

    def __init__(self, content_type: str) -> None:
        """
        Raises:
            HTTPStatusError: 415, not a form.
            InvalidRequestError: no boundary.
        """
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data":
            raise HTTPStatusError(415, "Content-Type must be multipart/form-data", code="unsupported_media_type")
        if not options.get(b"boundary"):
            raise InvalidRequestError("the form cannot be read: Content-Type has no boundary", code="invalid_form")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.complete = False
        self.pending = bytearray()  # of the file
        self._headers: list[tuple[bytes, bytes]] = []
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._field: str | None = None  # the name of the part under way; None in the file
        self._value = bytearray()
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._headers.clear,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_part,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequestError(f"the form cannot be read: {error}", code="invalid_form") from None

    def feed(self, data: bytes) -> None:
        """
        Raises:
            InvalidRequestError: not a form, or one with other parts than short fields and one file.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequestError(f"the form cannot be read: {error}", code="invalid_form") from None

    def finish(self) -> None:
        """
        Raises:
            InvalidRequestError: it is cut off, or without a file.
        """
        if not self.complete:
            raise InvalidRequestError("the form ends before its last boundary", code="invalid_form")
        if self.filename is None:
            raise InvalidRequestError("file is required", param="file")

    def _end_header(self) -> None:
        name, value = self._header
        self._headers.append((bytes(name).lower(), bytes(value)))
        self._header = (bytearray(), bytearray())

    def _begin_part(self) -> None:
        disposition = next((value for name, value in self._headers if name == b"content-disposition"), b"")
        _, options = parse_options_header(disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" in options:
            if name != "file" or self.filename is not None:
                raise InvalidRequestError(f"one file is expected, named file; not also {name!r}", param="file")
            self.filename = _file_name(options[b"filename"])
            self._field = None
            return
        if name == "file":
            raise InvalidRequestError("file must be a file, with a filename", param="file")
        if len(self.fields) >= MAX_FIELDS:
            raise InvalidRequestError(f"the form has more than {MAX_FIELDS} fields", code="invalid_form")
        self._field = name
        self._value = bytearray()

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.pending += memoryview(data)[start:end]
            return
        if len(self._value) + end - start > MAX_FIELD_BYTES:
            raise InvalidRequestError(f"{self._field} is longer than {MAX_FIELD_BYTES} bytes", param=self._field)
        self._value += memoryview(data)[start:end]

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.complete = True


def _file_name(given: bytes) -> str:
    """The last part of a path, without what a terminal or a header could take for its own."""
    name = given.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in name if char.isprintable())[:255] or "file"


async def receive(
    form: Form, chunks: AsyncIterator[bytes], declared: int | None, storage: Storage, part: Path, limit: int
) -> int:
    """Reads a form to its end and writes its file to `part`; returns the file's bytes.

    Raises:
        HTTPStatusError: 413, the file is larger than `limit`, by what the client declares or by what comes.
        InvalidRequestError: as Form.
        StorageError: the disk is full; `part` is gone.
    """
    if declared is not None and declared > limit + _OVERHEAD_BYTES:
        raise _too_large(limit)
    size = received = 0
    file = await storage.run(part.open, "wb")
    try:
        async for chunk in chunks:
            form.feed(chunk)
            received += len(chunk)
            if size + len(form.pending) > limit or received > limit + _OVERHEAD_BYTES:
                raise _too_large(limit)
            if len(form.pending) >= WRITE_BYTES:
                size += await _write(form, storage, file)
        form.finish()
        size += await _write(form, storage, file)
        await storage.run(file.close)
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        part.unlink(missing_ok=True)
        raise
    return size


async def _write(form: Form, storage: Storage, file: IO[bytes]) -> int:
    data, form.pending = form.pending, bytearray()
    await storage.run(file.write, data)
    return len(data)


def _too_large(limit: int) -> HTTPStatusError:
    return HTTPStatusError(413, f"the file is larger than the limit of {limit} bytes", code="file_too_large")
