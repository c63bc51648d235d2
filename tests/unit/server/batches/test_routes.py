"""/v1/files and /v1/batches: objects, pages, refusals, who owns what."""

from __future__ import annotations

from typing import Any

import openai.types
import pytest
from openai.pagination import SyncCursorPage

from pinnate.server.auth import Caller
from tests.unit.server.batches.conftest import BatchServer, line
from tests.unit.server.conftest import make_client


def contract(kind: Any, value: dict[str, Any]) -> Any:
    """The object as OpenAI's type: every field known to it, every type right, none that it requires missing."""
    assert set(value) <= set(kind.model_fields), set(value) - set(kind.model_fields)
    return kind.model_validate(value, strict=True)


async def test_the_life_of_a_file(server: BatchServer) -> None:
    answer = await server.upload([line("a")], filename="in put.jsonl")
    file = contract(openai.types.FileObject, answer.json)
    assert (file.purpose, file.filename, file.expires_at) == ("batch", "in put.jsonl", None)
    assert (await server.get(f"/v1/files/{file.id}")).json == answer.json
    content = await server.get(f"/v1/files/{file.id}/content")
    assert len(content.body) == file.bytes
    assert content.headers["content-type"] == "application/octet-stream"
    deleted = await server.client.call("DELETE", f"/v1/files/{file.id}")
    assert contract(openai.types.FileDeleted, deleted.json).deleted
    for path in (f"/v1/files/{file.id}", f"/v1/files/{file.id}/content"):
        assert (await server.get(path)).status == 404
    assert list((server.storage.folder / "files").iterdir()) == []


async def test_the_life_of_a_batch(server: BatchServer) -> None:
    file_id = (await server.upload([line("a"), line("b", temperature=-1)])).json["id"]
    expiry = {"anchor": "created_at", "seconds": 3600}
    made = await server.create(file_id, metadata={"k": "v"}, output_expires_after=expiry)
    batch = contract(openai.types.Batch, made.json)
    assert (batch.status, batch.metadata, batch.expires_at) == ("validating", {"k": "v"}, batch.created_at + 86_400)
    done = contract(openai.types.Batch, await server.until(batch.id))
    assert (done.status, done.request_counts.model_dump()) == ("completed", {"total": 2, "completed": 1, "failed": 1})
    assert done.usage.model_dump(include={"input_tokens", "output_tokens", "total_tokens"}) == {
        "input_tokens": 2, "output_tokens": 3, "total_tokens": 5,
    }  # fmt: skip
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    output = contract(openai.types.FileObject, (await server.get(f"/v1/files/{done.output_file_id}")).json)
    assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 3600)
    (answered,) = await server.lines_of(done.output_file_id)
    assert set(answered) == {"id", "custom_id", "response", "error"}
    assert (answered["custom_id"], answered["error"], answered["response"]["status_code"]) == ("a", None, 200)
    assert openai.types.Completion.model_validate(answered["response"]["body"]).choices[0].text == "ok"
    (failed,) = await server.lines_of(done.error_file_id)
    assert (failed["custom_id"], failed["error"], failed["response"]["status_code"]) == ("b", None, 400)
    assert failed["response"]["body"]["error"]["param"] == "temperature"


async def test_pages(server: BatchServer) -> None:
    ids = [(await server.upload([line("a")], filename=f"{i}.jsonl")).json["id"] for i in range(5)]
    page = (await server.get("/v1/files?limit=2")).json
    SyncCursorPage.model_validate({key: page[key] for key in ("data", "has_more")})
    assert ([file["id"] for file in page["data"]], page["has_more"]) == (ids[:2:-1], True)
    assert (page["first_id"], page["last_id"]) == (ids[4], ids[3])
    rest = (await server.get(f"/v1/files?after={page['last_id']}")).json
    assert ([file["id"] for file in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
    up = (await server.get(f"/v1/files?order=asc&after={ids[0]}&limit=4")).json
    assert ([file["id"] for file in up["data"]], up["has_more"]) == (ids[1:], False)
    assert (await server.get("/v1/files?purpose=batch_output")).json["data"] == []
    batches = [(await server.create(ids[0])).json["id"] for _ in range(3)]
    page = (await server.get("/v1/batches?limit=1")).json
    assert ([batch["id"] for batch in page["data"]], page["has_more"]) == (batches[2:], True)
    rest = (await server.get(f"/v1/batches?after={batches[2]}")).json
    assert [batch["id"] for batch in rest["data"]] == batches[1::-1]


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/files?limit=0", 400, "limit"),
        ("/v1/files?limit=x", 400, "limit"),
        ("/v1/files?limit=99999999999", 400, "limit"),
        ("/v1/files?order=up", 400, "order"),
        ("/v1/files?colour=red", 400, "colour"),
        ("/v1/files?after=file-0", 404, "after"),
        ("/v1/files/file-0", 404, "file_id"),
        ("/v1/files/file-0/content", 404, "file_id"),
        ("/v1/files/../lock/content", 404, None),
        ("/v1/batches?limit=101", 400, "limit"),
        ("/v1/batches?after=batch_0", 404, "after"),
        ("/v1/batches/batch_0", 404, "batch_id"),
    ],
)
async def test_refused_gets(server: BatchServer, path: str, status: int, param: str | None) -> None:
    answer = await server.get(path)
    assert (answer.status, answer.error["param"]) == (status, param)


async def test_refused_batches(server: BatchServer) -> None:
    file_id = (await server.upload([line("a")])).json["id"]
    bad: list[tuple[int, str | None, dict[str, Any]]] = [
        (404, "file_id", {"input_file_id": "file-0"}),
        (400, "endpoint", {"endpoint": "/v1/embeddings"}),
        (400, "completion_window", {"completion_window": "soon"}),
        (400, "completion_window", {"completion_window": "31d"}),
        (400, "metadata", {"metadata": {"k": 1}}),
        (400, "metadata", {"metadata": {str(i): "" for i in range(17)}}),
        (400, "metadata", {"metadata": {"k" * 65: ""}}),
        (400, "expires_after.seconds", {"output_expires_after": {"anchor": "created_at", "seconds": 1}}),
        (400, "output_expires_after.anchor", {"output_expires_after": {"anchor": "x", "seconds": 3600}}),
        (400, "input_file_id", {"input_file_id": 7}),
    ]
    for status, param, fields in bad:
        answer = await server.create(file_id, **fields)
        assert (answer.status, answer.error["param"]) == (status, param), fields
    assert (await server.client.post("/v1/batches/batch_0/cancel", b"")).status == 404
    assert (await server.get("/v1/batches")).json["data"] == []


async def test_the_output_of_a_batch_is_no_input(server: BatchServer) -> None:
    batch = await server.until(await server.batch_of([line("a")]))
    answer = await server.create(batch["output_file_id"])
    assert (answer.status, "purpose" in answer.error["message"]) == (400, True)


async def test_a_key_sees_its_own_files_and_batches_alone(server: BatchServer) -> None:
    theirs = server.client.app

    async def as_owner(scope: Any, receive: Any, send: Any) -> None:
        await theirs({**scope, "state": {"caller": Caller(namespace=owner)}}, receive, send)

    server.client.app = as_owner  # type: ignore[assignment]
    owner = "one"
    batch = await server.until(await server.batch_of([line("a")]))
    owner = "two"
    assert (await server.get("/v1/files")).json["data"] == (await server.get("/v1/batches")).json["data"] == []
    assert (await server.get(f"/v1/batches/{batch['id']}")).status == 404
    for file_id in (batch["input_file_id"], batch["output_file_id"]):
        assert (await server.get(f"/v1/files/{file_id}")).status == 404
    assert (await server.create(batch["input_file_id"])).status == 404
    assert (await server.client.post(f"/v1/batches/{batch['id']}/cancel", b"")).status == 404
    assert (await server.client.call("DELETE", f"/v1/files/{batch['input_file_id']}")).status == 404
    owner = "one"
    assert (await server.get(f"/v1/files/{batch['output_file_id']}/content")).status == 200


@pytest.mark.parametrize(
    "route", ["GET /v1/files", "POST /v1/batches", "GET /v1/files/file-0/content", "POST /v1/batches/b/cancel"]
)
async def test_without_a_data_directory_the_flag_is_named(route: str) -> None:
    method, path = route.split()
    answer = await make_client(None).call(method, path)
    assert (answer.status, answer.error["code"]) == (400, "no_data_dir")
    assert "--data-dir" in answer.error["message"]
