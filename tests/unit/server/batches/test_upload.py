"""Multipart forms, in pieces of any size, good and bad."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.core.errors import RequestError
from pinnate.server.batches.storage import Storage
from pinnate.server.batches.upload import MAX_FIELD_BYTES, MAX_FIELDS, Form, receive
from tests.unit.server.batches.conftest import BatchServer, form

TYPE = "multipart/form-data; boundary=B"


@given(st.binary(max_size=60), st.integers(1, 40))
def test_the_file_comes_out_whatever_the_pieces(content: bytes, size: int) -> None:
    data, got = form(content, filename="a/b c.jsonl", other="1"), Form(TYPE)
    if b"\r\n--B" in b"\r\n" + content:
        return  # the boundary itself: no client sends that
    for start in range(0, len(data), size):
        got.feed(data[start : start + size])
    got.finish()
    assert (bytes(got.pending), got.filename) == (content, "b c.jsonl")
    assert got.fields == {"purpose": "batch", "other": "1"}


@pytest.mark.parametrize(
    ("content_type", "data", "what"),
    [
        ("application/json", b"{}", "multipart"),
        ("", b"", "multipart"),
        ("multipart/form-data", b"", "boundary"),
        ("multipart/form-data; boundary=", b"", "boundary"),
        (f"multipart/form-data; boundary={'x' * 1000}", b"", "form"),
        (TYPE, b"", "ends before"),
        (TYPE, b"nonsense", "form"),
        (TYPE, form(b"x")[:-8], "ends before"),
        (TYPE, b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--B--\r\n', "file is required"),
        (TYPE, b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\nbatch\r\n--B--\r\n', "filename"),
        (TYPE, form(b"x")[:-6] + form(b"y"), "one file"),
        (TYPE, form(b"x", extra="y" * (MAX_FIELD_BYTES + 1)), "extra"),
        (TYPE, form(b"x", **{f"f{i}": "" for i in range(MAX_FIELDS)}), "fields"),
    ],
)
def test_what_is_no_form_is_refused(content_type: str, data: bytes, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        read(content_type, data)


def read(content_type: str, data: bytes) -> None:
    got = Form(content_type)
    got.feed(data)
    got.finish()


@pytest.mark.parametrize(
    ("name", "kept"), [("../../etc/passwd", "passwd"), ("C:\\x\\y.jsonl", "y.jsonl"), ("..", "..")]
)
def test_a_file_name_is_no_path(name: str, kept: str) -> None:
    got = Form(TYPE)
    got.feed(form(b"x", filename=name.replace("\\", "\\\\")))
    assert got.filename == kept


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]
        await asyncio.sleep(0)


@pytest.mark.parametrize("excess", ["declared", "file", "epilogue"])
async def test_the_limit_holds_and_nothing_is_left(tmp_path: Path, excess: str) -> None:
    storage, part = Storage(tmp_path), tmp_path / "x.part"
    data = form(b"x" * (5000 if excess == "file" else 10)) + (b"y" * 200_000 if excess == "epilogue" else b"")
    declared = 10**9 if excess == "declared" else None
    with pytest.raises(RequestError, match="larger than the limit of 4999 bytes"):
        await receive(Form(TYPE), pieces(data), declared, storage, part, 4999)
    assert not part.exists()
    assert await receive(Form(TYPE), pieces(form(b"x" * 4999)), None, storage, part, 4999) == 4999
    assert part.read_bytes() == b"x" * 4999
    await storage.close()


async def test_bad_uploads_leave_no_file(server: BatchServer) -> None:
    answers = [
        (await server.upload(b"x", purpose=None), "purpose"),
        (await server.upload(b"x", purpose="fine-tune"), "purpose"),
        (await server.upload(b""), "file"),
        (await server.upload(b"x", colour="red"), "colour"),
        (await server.upload(b"x", **{"expires_after[anchor]": "now"}), "expires_after.anchor"),
        (
            await server.upload(b"x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "7"}),
            "expires_after.seconds",
        ),
    ]
    assert [(answer.status, answer.error["param"]) for answer, _ in answers] == [(400, param) for _, param in answers]
    assert (await server.get("/v1/files")).json["data"] == []
    assert list((server.storage.folder / "files").iterdir()) == []
