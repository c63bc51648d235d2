"""/v1/responses of a server with a data directory: its responses are there after any end of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pinnate.server.app import create_app
from pinnate.server.responses.disk_store import FILE, DiskStore
from pinnate.server.settings import ServerSettings
from pinnate.server.state import Phase, ServerState
from tests.unit.server.conftest import Answer, Client, FakeEngine, make_client, spell
from tests.unit.server.responses.helpers import events, item_list, response
from tests.unit.server.responses.test_disk_store import crash, tables_of


class Life:
    """One life of a server on a data directory."""

    def __init__(self, folder: Path, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine()
        state = ServerState("/models/Tiny.gguf", ServerSettings(data_dir=str(folder)))
        state.engine = self.engine  # type: ignore[assignment]
        state.phase = Phase.SERVING
        state.responses = self.store = DiskStore(folder)
        self.client = Client(create_app(state), self.engine, state)

    async def create(self, given: Any = "hi", **fields: Any) -> Answer:
        return await self.client.post("/v1/responses", {"input": given, **fields})

    async def get(self, path: str, query: str = "", method: str = "GET") -> Answer:
        return await self.client.call(method, f"/v1/responses/{path}", query=query)

    async def until(self, response_id: str, status: str) -> None:
        async with asyncio.timeout(10):
            while (await self.get(response_id)).json["status"] != status:
                await asyncio.sleep(0.001)


async def test_a_conversation_goes_on_in_another_life(tmp_path: Path) -> None:
    life = Life(tmp_path)
    first = (await life.create("one", metadata={"a": "b"}, seed=3, x=1)).json
    streamed = events(await life.create("two", previous_response_id=first["id"], stream=True))[-1].response
    kept_out = (await life.create("no", store=False)).json["id"]
    await crash(life.store)
    life = Life(tmp_path)
    assert (await life.get(first["id"])).json == first
    assert response((await life.get(streamed.id)).json) == streamed
    assert (await life.get(kept_out)).status == 404
    listed = item_list((await life.get(f"{streamed.id}/input_items", "order=asc")).json)
    assert [item.content[0].text for item in listed.data] == ["one", "ok", "two"]
    assert (await life.create([{"type": "item_reference", "id": first["output"][0]["id"]}])).status == 200
    third = await life.create("three", previous_response_id=streamed.id)
    assert bytes(life.engine.submitted[-1].prompt).decode() == (
        "[user]one[assistant]ok[user]two[assistant]ok[user]three[assistant]"
    )
    assert (await life.get(first["id"], method="DELETE")).json["deleted"] is True
    assert (await life.get(first["id"])).status == 404
    assert (await life.create("four", previous_response_id=third.json["id"])).status == 200
    gone = await life.create("x", previous_response_id=first["id"])
    assert (gone.status, gone.error["param"]) == (400, "previous_response_id")
    await life.store.close()


async def test_background_responses(tmp_path: Path) -> None:
    go = asyncio.Event()
    life = Life(tmp_path, FakeEngine(script=lambda number, _: spell("ok") if number == 0 else [go, *spell("no")]))
    whole = (await life.create(background=True, stream=True)).body
    done = events(Answer(200, {"content-type": "text/event-stream"}, whole, []))[-1].response
    cut = (await life.create(background=True)).json
    watched = asyncio.create_task(life.create(background=True, stream=True))
    async with asyncio.timeout(10):
        while len(life.store._records) < 2:
            await asyncio.sleep(0.001)
    streamed_cut = next(record.id for record in life.store._records.values() if record.events is not None)
    await crash(life.store)
    watched.cancel()
    life = Life(tmp_path)
    assert (await life.get(done.id, "stream=true")).body == whole
    assert events(await life.get(done.id, "stream=true&starting_after=3"))[0].sequence_number == 4
    for response_id in (cut["id"], streamed_cut):
        shown = response((await life.get(response_id)).json)
        assert (shown.status, shown.error is not None and shown.error.code) == ("failed", "server_error")
        assert (await life.get(f"{response_id}/cancel", method="POST")).json["status"] == "failed"
    seen = events(await life.get(streamed_cut, "stream=true&starting_after=7"))
    assert [(event.type, event.sequence_number) for event in seen] == [("response.failed", 8)]
    assert (await life.get(f"{done.id}/cancel", method="POST")).json["status"] == "completed"
    await life.store.close()


async def test_cancel_and_delete_while_it_is_made(tmp_path: Path) -> None:
    life = Life(tmp_path, FakeEngine(script=lambda *_: [*spell("ok")[:1], asyncio.Event()]))
    for method, path in (("POST", "/cancel"), ("DELETE", "")):
        made = (await life.create(background=True)).json["id"]
        await life.until(made, "in_progress")
        assert (await life.get(made + path, method=method)).status == 200
    async with asyncio.timeout(10):
        while life.client.state.ongoing:
            await asyncio.sleep(0.001)
    assert tables_of(life.store).totals()[0] == 1
    assert life.store._records == {}
    await life.store.close()


async def test_what_is_not_answered_is_not_stored(tmp_path: Path) -> None:
    life = Life(tmp_path, FakeEngine(max_model_len=60))
    for fields in ({}, {"stream": True}, {"background": True}):
        assert (await life.create("x" * 100, **fields)).status == 400
    life.engine.full = True
    assert (await life.create()).status == 429
    life.engine.full = False
    assert (await life.create()).status == 200
    assert tables_of(life.store).totals()[0] == 1
    await life.store.close()


async def test_a_client_that_leaves(tmp_path: Path) -> None:
    life = Life(tmp_path, FakeEngine(script=lambda *_: [*spell("ok")[:1], asyncio.Event()]))
    for fields, stored in (({}, 0), ({"stream": True}, 1)):
        call = asyncio.create_task(life.create(**fields))
        async with asyncio.timeout(10):
            while not (life.store._records and life.engine.streams and not life.engine.streams[-1].is_waiting):
                await asyncio.sleep(0.001)
            life.client.gone.set()
            await call
        life.client.gone.clear()
        assert life.store._records == {}
        assert tables_of(life.store).totals()[0] == stored
        life.engine.streams.clear()
    await life.store.close()


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}])
async def test_a_full_disk_is_told_before_anything_is_computed(tmp_path: Path, fields: dict[str, Any]) -> None:
    life = Life(tmp_path)
    before = (await life.create()).json
    database = tables_of(life.store)._db
    database.execute("PRAGMA max_page_count = 1")  # no page more than there are
    answer = await life.create("x" * 20, metadata={str(number): "v" * 512 for number in range(16)}, **fields)
    assert (answer.status, answer.error["code"]) == (507, "storage_full")
    assert len(life.engine.submitted) == 1
    assert (await life.get(before["id"])).json == before
    assert (await life.create(store=False)).status == 200
    await life.store.close()


async def test_a_damaged_database(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database " * 1000)
    life = Life(tmp_path)
    for answer in (await life.create(), await life.get("resp_1"), await life.create(previous_response_id="resp_1")):
        assert (answer.status, answer.error["code"]) == (500, "storage_damaged")
    assert life.engine.submitted == []
    assert (await life.create(store=False)).status == 200
    await life.store.close()


async def test_counting_needs_no_row(tmp_path: Path) -> None:
    life = Life(tmp_path)
    assert (await life.client.post("/v1/responses/input_tokens", {"input": "hi"})).status == 200
    await life.store.open()
    assert tables_of(life.store).totals() == (0, 0)
    await life.store.close()


async def test_without_a_data_directory_nothing_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    client = make_client(FakeEngine())
    assert (await client.post("/v1/responses", {"input": "hi"})).status == 200
    assert list(tmp_path.iterdir()) == []
