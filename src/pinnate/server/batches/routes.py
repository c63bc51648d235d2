"""/v1/files and /v1/batches.

Knows: paths, parameters, who asks. Must not know: what a batch goes through. Every key has files and batches of its
own: another key's are not found.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.server.auth import caller_of
from pinnate.server.batches.batches import Batches, new_id
from pinnate.server.batches.storage import remove, write_whole
from pinnate.server.batches.upload import Form, receive
from pinnate.server.body import Disconnected, convert, read_json
from pinnate.server.protocol.batches import (
    Batch,
    BatchCreate,
    BatchList,
    FileDeleted,
    FileList,
    FileObject,
    Order,
)
from pinnate.server.state import ServerState

PURPOSES = ("batch",)  # that a client may give; batch_output is the server's own
MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512  # characters
MAX_WINDOW_SECONDS = 30 * 86_400
SHORTEST_LIFE, LONGEST_LIFE = 3600, 30 * 86_400  # of a file that expires, in seconds
FILES_PAGE, BATCHES_PAGE = (10_000, 10_000), (20, 100)  # default, most
_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class BatchRoutes:
    """The handlers."""

    def __init__(self, state: ServerState, batches: Batches) -> None:
        self._state = state
        self._batches = batches

    # ------------------------------------------------------------------ files

    async def upload(self, request: Request) -> Response:
        storage = self._batches.storage
        await storage.call(lambda _: None)  # the database is open, or says why not
        form = Form(request.headers.get("content-type", ""))
        file_id = new_id("file-")
        part, path = storage.unfinished(file_id), storage.content(file_id)
        declared = request.headers.get("content-length", "")
        limit = self._state.settings.limits.max_file_bytes
        try:
            size = await receive(
                form, request.stream(), int(declared) if declared.isdecimal() else None, storage, part, limit
            )
        except ClientDisconnect:
            raise Disconnected from None
        try:
            file = _file_object(file_id, form, size)
            await storage.run(write_whole, path, part)
            await storage.call(lambda tables: tables.add_file(_owner(request), file))
        except BaseException:
            remove(part, path)
            raise
        return _json(file)

    async def list_files(self, request: Request) -> Response:
        query = _query(request, ("purpose", "after", "limit", "order"))
        limit = _limit(query, *FILES_PAGE)
        order: Order = query.get("order", "desc")  # type: ignore[assignment]
        if order not in get_args(Order):
            raise InvalidRequestError("order must be asc or desc", param="order")
        files, more = await self._batches.storage.call(
            lambda tables: tables.list_files(
                _owner(request), purpose=query.get("purpose"), after=query.get("after"), limit=limit, order=order
            )
        )
        return _json(FileList(data=files, has_more=more, **_ends(files)))

    async def get_file(self, request: Request) -> Response:
        return _json(await self._file(request))

    async def content(self, request: Request) -> Response:
        file = await self._file(request)
        path = self._batches.storage.content(file.id)
        return FileResponse(path, media_type="application/octet-stream", filename=file.filename)

    async def delete_file(self, request: Request) -> Response:
        file = await self._file(request)
        await self._batches.delete_file(_owner(request), file.id)
        return _json(FileDeleted(id=file.id))

    # ------------------------------------------------------------------ batches

    async def create(self, request: Request) -> Response:
        batches = self._batches
        notes = self._state.field_notes()
        asked = convert(await read_json(request, self._state.settings.max_body_bytes), BatchCreate, notes=notes)
        if asked.endpoint not in batches.endpoints:
            raise InvalidRequestError(f"endpoint must be one of {', '.join(batches.endpoints)}", param="endpoint")
        window = _window(asked.completion_window)
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + window,
            metadata=_metadata(asked.metadata),
        )
        seconds = None if asked.output_expires_after is None else _life(asked.output_expires_after.seconds)
        created = await batches.create(_owner(request), batch, seconds)
        return _json(msgspec.to_builtins(created) | notes.members(batch.id))

    async def list_batches(self, request: Request) -> Response:
        query = _query(request, ("after", "limit"))
        limit = _limit(query, *BATCHES_PAGE)
        found, more = await self._batches.storage.call(
            lambda tables: tables.list_batches(_owner(request), after=query.get("after"), limit=limit)
        )
        return _json(BatchList(data=found, has_more=more, **_ends(found)))

    async def get_batch(self, request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        return _json(await self._batches.storage.call(lambda tables: tables.get_batch(_owner(request), batch_id)))

    async def cancel(self, request: Request) -> Response:
        return _json(await self._batches.cancel(_owner(request), request.path_params["batch_id"]))

    # ------------------------------------------------------------------ help

    async def _file(self, request: Request) -> FileObject:
        file_id = request.path_params["file_id"]
        return await self._batches.storage.call(lambda tables: tables.get_file(_owner(request), file_id))


def _owner(request: Request) -> str:
    """Whose files and batches these are."""
    return caller_of(request.scope).namespace


def _file_object(file_id: str, form: Form, size: int) -> FileObject:
    fields = dict(form.fields)
    purpose = fields.pop("purpose", None)
    if purpose is None:
        raise InvalidRequestError("purpose is required", param="purpose")
    if purpose not in PURPOSES:
        raise UnsupportedError(f"purpose must be {' or '.join(PURPOSES)} here", param="purpose")
    if not size:
        raise InvalidRequestError("the file is empty", param="file")
    now = int(time.time())
    expires_at = None
    anchor, seconds = fields.pop("expires_after[anchor]", None), fields.pop("expires_after[seconds]", None)
    if anchor is not None or seconds is not None:
        if anchor != "created_at":
            raise InvalidRequestError("expires_after.anchor must be created_at", param="expires_after.anchor")
        expires_at = now + _life(int(seconds) if seconds is not None and seconds.isdecimal() else -1)
    for name in fields:
        raise InvalidRequestError(f"unknown field: {name[:64]}", param=name[:64])
    assert form.filename is not None
    return FileObject(
        id=file_id, bytes=size, created_at=now, expires_at=expires_at, filename=form.filename, purpose=purpose
    )


def _life(seconds: int) -> int:
    if not SHORTEST_LIFE <= seconds <= LONGEST_LIFE:
        raise InvalidRequestError(
            f"expires_after.seconds must be from {SHORTEST_LIFE} to {LONGEST_LIFE}", param="expires_after.seconds"
        )
    return seconds


def _window(text: str) -> int:
    """Seconds of a completion_window: OpenAI's "24h", and other lengths in s, m, h or d."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_SECONDS:
        raise InvalidRequestError(
            'completion_window must be such as "24h", in s, m, h or d, at most 30d', param="completion_window"
        )
    return seconds


def _metadata(given: dict[str, Any] | None) -> dict[str, str] | None:
    if given is None:
        return None
    if len(given) > MAX_METADATA:
        raise InvalidRequestError(
            f"metadata has {len(given)} keys, at most {MAX_METADATA} are allowed", param="metadata"
        )
    for key, value in given.items():
        if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE or len(key) > MAX_METADATA_KEY:
            raise InvalidRequestError(
                f"metadata: keys are strings of at most {MAX_METADATA_KEY} characters, values of at most "
                f"{MAX_METADATA_VALUE}",
                param="metadata",
            )
    return given


def _query(request: Request, known: tuple[str, ...]) -> Mapping[str, str]:
    for name in request.query_params:
        if name not in known:
            raise InvalidRequestError(f"unknown parameter: {name[:64]}", param=name[:64])
    return request.query_params


def _limit(query: Mapping[str, str], default: int, most: int) -> int:
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not 1 <= limit <= most:
        raise InvalidRequestError(f"limit must be from 1 to {most}", param="limit")
    return limit


def _ends(found: Sequence[FileObject] | Sequence[Batch]) -> dict[str, str]:
    return {"first_id": found[0].id, "last_id": found[-1].id} if found else {}
