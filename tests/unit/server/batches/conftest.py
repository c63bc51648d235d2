"""A server with a data directory and a fake engine, and a client for its files and batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pinnate.server.app import BATCH_ROUTES, create_app
from pinnate.server.batches.batches import Batches
from pinnate.server.batches.storage import Storage
from pinnate.server.settings import ServerSettings
from pinnate.server.state import Phase, ServerState
from tests.unit.server.conftest import Answer, Client, FakeEngine

FINISHED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, prompt: Any = "hi", url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": prompt, **body}}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(raw if isinstance(raw, bytes) else json.dumps(raw).encode() + b"\n" for raw in lines)


def form(content: bytes, *, purpose: str | None = "batch", filename: str = "in.jsonl", **fields: str) -> bytes:
    named = ({} if purpose is None else {"purpose": purpose}) | fields
    parts = [f'--B\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in named.items()]
    head = f'--B\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'.encode()
    return b"".join([*parts, head, content, b"\r\n--B--\r\n"])


class BatchServer:
    """One life of a server on a data directory. `crash` ends it without a word, as kill -9 does: nothing is finished,
    stored or closed but what the operating system closes."""

    def __init__(self, folder: Path, engine: FakeEngine | None = None, **settings: Any) -> None:
        self.engine = engine or FakeEngine()
        self.state = ServerState("/models/Tiny.gguf", ServerSettings(data_dir=str(folder), **settings))
        self.state.engine = self.engine  # type: ignore[assignment]
        self.state.phase = Phase.SERVING
        self.storage = Storage(folder)
        self.state.batches = self.batches = Batches(self.state, self.storage, BATCH_ROUTES)
        self.client = Client(create_app(self.state), self.engine, self.state)

    async def stop(self) -> None:
        await self.batches.stop()
        await self.storage.close()

    async def get(self, path: str) -> Answer:
        route, _, query = path.partition("?")
        return await self.client.call("GET", route, query=query)

    async def upload(self, content: bytes | Sequence[Any], **fields: Any) -> Answer:
        data = content if isinstance(content, bytes) else jsonl(content)
        headers = {"content-type": "multipart/form-data; boundary=B"}
        return await self.client.call("POST", "/v1/files", form(data, **fields), headers)

    async def create(self, file_id: str, endpoint: str = "/v1/completions", **fields: Any) -> Answer:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **fields}
        return await self.client.post("/v1/batches", body)

    async def batch_of(self, content: bytes | Sequence[Any], **fields: Any) -> str:
        """Uploads, creates; returns the batch's id."""
        file_id = (await self.upload(content)).json["id"]
        return str((await self.create(file_id, **fields)).json["id"])

    async def look(self, batch_id: str) -> dict[str, Any]:
        return dict((await self.get(f"/v1/batches/{batch_id}")).json)

    async def until(self, batch_id: str, *statuses: str) -> dict[str, Any]:
        while (batch := await self.look(batch_id))["status"] not in (statuses or FINISHED):
            await asyncio.sleep(0.002)
        return batch

    async def lines_of(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        content = (await self.get(f"/v1/files/{file_id}/content")).body
        return [json.loads(each) for each in content.splitlines()]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BatchServer]:
    running = BatchServer(tmp_path / "data")
    running.batches.start()
    yield running
    await running.stop()
