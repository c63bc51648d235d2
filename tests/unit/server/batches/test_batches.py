"""What a batch goes through: every status, crashes, a full disk, an engine that dies."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pinnate.core.errors import ConfigError, EngineDeadError, EngineError
from pinnate.core.request import BACKGROUND_PRIORITY
from pinnate.core.sampling import SamplingParams
from pinnate.server.batches import batches as module
from pinnate.server.batches import runner
from pinnate.server.batches.request import refusal
from pinnate.server.batches.runner import MAX_ATTEMPTS, num_places
from pinnate.server.batches.storage import Storage
from pinnate.server.batches.tables import SCHEMA, Result, Tables
from pinnate.server.database import open_database
from pinnate.server.errors import StorageError
from tests.unit.server.batches.conftest import BatchServer, line
from tests.unit.server.conftest import FakeEngine, spell


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((runner, "RETRY_SECONDS"), (runner, "FULL_DISK_SECONDS"), (module, "RETRY_SECONDS")):
        monkeypatch.setattr(owner, name, 0.01)


def held(event: asyncio.Event) -> FakeEngine:
    """Answers when the event is set."""
    return FakeEngine(script=lambda _number, _params: [event, *spell("ok")])


async def test_every_line_is_answered_once_in_the_order_of_the_file(server: BatchServer) -> None:
    prompts = ["b2", "a", "b1", "ab", "b", "aa"]
    batch = await server.until(await server.batch_of([line(f"c{i}", prompt) for i, prompt in enumerate(prompts)]))
    assert batch["status"] == "completed"
    assert [each["custom_id"] for each in await server.lines_of(batch["output_file_id"])] == [f"c{i}" for i in range(6)]
    assert batch["error_file_id"] is None
    assert [bytes(each.prompt).decode() for each in server.engine.submitted] == sorted(prompts)  # depth first
    assert {each.priority for each in server.engine.submitted} == {BACKGROUND_PRIORITY}
    metrics = (await server.get("/metrics")).body.decode()
    assert 'pinnate:batch_requests_total{result="completed"} 6.0' in metrics
    assert "pinnate:batch_requests_in_flight 0.0" in metrics


async def test_a_line_has_what_its_route_would_have_answered(server: BatchServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "priority": 7, "user": None}
    chat = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body}
    batch = await server.until(await server.batch_of([chat], endpoint="/v1/chat/completions"))
    (answered,) = await server.lines_of(batch["output_file_id"])
    over_http = (await server.client.post("/v1/chat/completions", {**body, "logprobs": True})).json
    for each in (answered["response"]["body"], over_http):
        each["id"] = each["created"] = None
    assert answered["response"]["body"] == over_http
    assert [each.priority for each in server.engine.submitted] == [7 + BACKGROUND_PRIORITY, 7]


async def test_a_bad_file_fails_with_lines_and_runs_nothing(server: BatchServer) -> None:
    batch = await server.until(await server.batch_of([line("a"), b"{\n", line("a")]))
    assert (batch["status"], batch["output_file_id"], batch["request_counts"]["total"]) == ("failed", None, 0)
    assert batch["failed_at"] is not None
    assert batch["errors"]["object"] == "list"
    assert [(each["code"], each["line"]) for each in batch["errors"]["data"]] == [
        ("invalid_json_line", 2),
        ("duplicate_custom_id", 3),
    ]
    assert server.engine.submitted == []


async def test_refused_requests_are_lines_of_the_error_file(server: BatchServer) -> None:
    lines = [
        line("good"),
        line("bad", n=0),
        line("long", "x" * 101),
        line("streamed", stream=True),
        line("model", model="x"),
    ]
    batch = await server.until(await server.batch_of(lines))
    assert batch["request_counts"] == {"total": 5, "completed": 1, "failed": 4}
    failed = {each["custom_id"]: each["response"] for each in await server.lines_of(batch["error_file_id"])}
    assert {key: (each["status_code"], each["body"]["error"]["param"]) for key, each in failed.items()} == {
        "bad": (400, "n"), "long": (400, "prompt"), "streamed": (400, "stream"), "model": (404, "model"),
    }  # fmt: skip


async def test_no_more_in_flight_than_the_engine_has_places(tmp_path: Path) -> None:
    gate = asyncio.Event()
    engine = held(gate)
    engine.info["max_num_seqs"] = 4
    server = BatchServer(tmp_path, engine)
    server.batches.start()
    lines = [line(str(i), [f"{i}a", f"{i}b"] if i % 2 else str(i), n=1 + i % 3) for i in range(20)]
    batch_id = await server.batch_of(lines)
    await server.until(batch_id, "in_progress")
    for _ in range(20):
        await asyncio.sleep(0.005)
    in_flight = sum(each.params.n for each in engine.submitted)
    assert num_places(4) - 6 < in_flight <= num_places(4)
    gate.set()
    assert (await server.until(batch_id))["request_counts"]["completed"] == 20
    await server.stop()


@pytest.mark.parametrize("when", ["validating", "in_progress", "waiting"])
async def test_cancelled(tmp_path: Path, when: str) -> None:
    gate = asyncio.Event()
    served = iter([[*spell("ok")], *([[gate, *spell("ok")]] * 100)])
    server = BatchServer(tmp_path, FakeEngine(script=lambda _number, _params: next(served)))
    if when != "validating":
        server.batches.start()
    first = await server.batch_of([line(str(i), f"{i:02}") for i in range(30)])
    batch_id = await server.batch_of([line("x")]) if when == "waiting" else first
    if when == "in_progress":
        while (await server.look(batch_id))["request_counts"]["completed"] < 1:
            await asyncio.sleep(0.002)
    elif when == "waiting":
        await server.until(batch_id, "in_progress")
    answer = await server.client.post(f"/v1/batches/{batch_id}/cancel", b"")
    assert (answer.status, answer.json["status"]) == (200, "cancelling")
    if when == "validating":
        server.batches.start()
    batch = await server.until(batch_id)
    assert batch["status"] == "cancelled"
    if when == "waiting":  # at once, whatever runs
        assert (await server.look(first))["status"] == "in_progress"
    assert batch["cancelling_at"] <= batch["cancelled_at"]
    if when == "in_progress":
        assert [each["custom_id"] for each in await server.lines_of(batch["output_file_id"])] == ["0"]
        left = await server.lines_of(batch["error_file_id"])
        assert [each["custom_id"] for each in left] == [str(i) for i in range(1, 30)]
        assert {each["error"]["code"] for each in left} == {"batch_cancelled"}
        assert all(stream.aborted for stream in server.engine.streams[1:])
    again = await server.client.post(f"/v1/batches/{batch_id}/cancel", b"")
    assert (again.status, again.error["code"]) == (409, "batch_finished")
    await server.stop()


async def test_cancelled_while_it_is_being_taken_up(server: BatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look for what is to run and the run."""
    attend = server.batches._attend
    cancelled = []

    async def cancel_first(batch_id: str, work: Any) -> None:
        if (await server.look(batch_id))["status"] == "in_progress":
            cancelled.append((await server.client.post(f"/v1/batches/{batch_id}/cancel", b"")).json["status"])
        await attend(batch_id, work)

    monkeypatch.setattr(server.batches, "_attend", cancel_first)
    batch = await server.until(await server.batch_of([line("a")]))
    assert (cancelled, batch["status"]) == (["cancelling"], "cancelled")
    assert server.engine.submitted == []


async def test_expired_while_another_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    server = BatchServer(tmp_path, held(asyncio.Event()))
    server.batches.start()
    first = await server.batch_of([line("a")])
    await server.until(first, "in_progress")
    batch = await server.until(await server.batch_of([line("b")], completion_window="1s"))
    assert (batch["status"], batch["output_file_id"]) == ("expired", None)
    assert (await server.look(first))["status"] == "in_progress"
    await server.stop()


async def test_expired(tmp_path: Path) -> None:
    gate = asyncio.Event()
    served = iter([[*spell("ok")], *([[gate, *spell("ok")]] * 100)])
    server = BatchServer(tmp_path, FakeEngine(script=lambda _number, _params: next(served)))
    server.batches.start()
    batch = await server.until(await server.batch_of([line("a"), line("b", "z")], completion_window="1s"))
    assert (batch["status"], batch["expired_at"] >= batch["expires_at"]) == ("expired", True)
    assert [each["custom_id"] for each in await server.lines_of(batch["output_file_id"])] == ["a"]
    (left,) = await server.lines_of(batch["error_file_id"])
    assert (left["custom_id"], left["response"], left["error"]["code"]) == ("b", None, "batch_expired")
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 0}
    await server.stop()


async def test_stopped_and_started_again_nothing_runs_twice(tmp_path: Path) -> None:
    """Stopped after each number of answers there can be; the next server runs exactly the others."""
    total = 6
    for stop_after in range(total):
        folder = tmp_path / str(stop_after)
        gate = asyncio.Event()
        served = iter([*([[*spell("ok")]] * stop_after), *([[gate]] * total)])
        first = BatchServer(folder, FakeEngine(script=lambda _number, _params, served=served: next(served)))  # type: ignore[misc]
        first.batches.start()
        batch_id = await first.batch_of([line(str(i), str(i)) for i in range(total)])
        while (await first.look(batch_id))["request_counts"]["completed"] < stop_after:
            await asyncio.sleep(0.001)
        await first.stop()
        second = BatchServer(folder)
        second.batches.start()
        batch = await second.until(batch_id)
        assert batch["request_counts"] == {"total": total, "completed": total, "failed": 0}
        assert [bytes(each.prompt).decode() for each in second.engine.submitted] == [
            str(i) for i in range(stop_after, total)
        ]
        answered = [each["custom_id"] for each in await second.lines_of(batch["output_file_id"])]
        assert answered == [str(i) for i in range(total)]
        await second.stop()


@pytest.mark.parametrize("status", ["validating", "finalizing"])
async def test_taken_up_in_every_status(tmp_path: Path, status: str) -> None:
    server = BatchServer(tmp_path)
    batch_id = await server.batch_of([line("a"), line("b")])
    if status == "finalizing":
        rows = [Result(number, True, b"{}\n") for number in (1, 2)]

        def prepare(tables: Tables) -> None:
            tables.add_results(batch_id, rows)
            tables.change_batch(batch_id, status=status)

        await server.storage.call(prepare)
        (tmp_path / "files" / "file-orphan").write_bytes(b"of a finalizing that was cut off")
    await server.stop()
    server = BatchServer(tmp_path)
    server.batches.start()
    assert (await server.until(batch_id))["status"] == "completed"
    assert not (tmp_path / "files" / "file-orphan").exists()
    await server.stop()


async def test_a_result_counts_once(server: BatchServer) -> None:
    batch_id = await server.batch_of([line("a")])
    await server.until(batch_id)
    row = Result(9, True, b"x", 1, 1, 1)
    for _ in range(2):
        await server.storage.call(lambda tables: tables.add_results(batch_id, [row, row]))
    assert (await server.look(batch_id))["request_counts"]["completed"] == 2


async def test_an_engine_that_dies_loses_nothing(tmp_path: Path) -> None:
    deaths = iter([EngineDeadError("gone")] * 3)

    def script(_number: int, _params: SamplingParams) -> list[Any]:
        death = next(deaths, None)
        return [death] if death is not None else list(spell("ok"))

    server = BatchServer(tmp_path, FakeEngine(script=script))
    server.engine.state = "restarting"
    server.batches.start()
    batch_id = await server.batch_of([line(str(i)) for i in range(5)])
    await asyncio.sleep(0.05)
    assert server.engine.submitted == []
    server.engine.state = "ready"
    assert (await server.until(batch_id))["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    assert len(server.engine.submitted) == 5 + 3
    await server.stop()


async def test_a_request_that_kills_the_engine_fails_alone(tmp_path: Path) -> None:
    poison = ord("P")

    async def submit(prompt: list[int], params: SamplingParams, **fields: Any) -> Any:
        stream = await honest(prompt, params, **fields)
        if poison in prompt:
            for other in engine.streams:
                if not other.ended:
                    other.steps[:] = [EngineDeadError("died of P")]
        return stream

    engine = FakeEngine()
    honest = engine.submit
    engine.submit = submit  # type: ignore[method-assign]
    server = BatchServer(tmp_path, engine)
    server.batches.start()
    batch = await server.until(await server.batch_of([line("P", "P"), *(line(str(i), "A") for i in range(5))]))
    assert batch["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
    (failed,) = await server.lines_of(batch["error_file_id"])
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("P", 503)
    assert sum(each.prompt == [poison] for each in engine.submitted) == MAX_ATTEMPTS
    await server.stop()


async def test_an_error_inside_the_engine_is_an_answer_after_some_attempts(tmp_path: Path) -> None:
    server = BatchServer(tmp_path, FakeEngine(script=lambda _number, _params: [EngineError("NaN")]))
    server.batches.start()
    batch = await server.until(await server.batch_of([line("a")]))
    (failed,) = await server.lines_of(batch["error_file_id"])
    assert failed["response"]["status_code"] == 500
    assert len(server.engine.submitted) == MAX_ATTEMPTS
    await server.stop()


async def test_a_full_disk_is_waited_for(server: BatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    full = iter([StorageError("no room", code="storage_full")] * 3)
    honest = Tables.add_results

    def add_results(self: Tables, batch_id: str, results: Any) -> None:
        error = next(full, None)
        if error is not None:
            raise error
        honest(self, batch_id, results)

    monkeypatch.setattr(Tables, "add_results", add_results)
    batch = await server.until(await server.batch_of([line(str(i)) for i in range(200)]))
    assert batch["request_counts"]["completed"] == 200
    assert len(server.engine.submitted) == 200


async def test_an_input_that_is_gone_fails_its_batch_alone(server: BatchServer) -> None:
    file_id = (await server.upload([line("a")])).json["id"]
    server.storage.content(file_id).unlink()
    batch = await server.until((await server.create(file_id)).json["id"])
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "storage_error")
    assert (await server.until(await server.batch_of([line("a")])))["status"] == "completed"


async def test_a_damaged_database_is_told_and_left_alone(tmp_path: Path) -> None:
    server = BatchServer(tmp_path)
    batch_id = await server.batch_of([line(str(i)) for i in range(300)])
    await server.stop()
    database = tmp_path / "batches.sqlite"
    data = bytearray(database.read_bytes())
    data[4096:12288] = b"\xa5" * 8192
    database.write_bytes(data)
    server = BatchServer(tmp_path)
    server.batches.start()
    for answer in (
        await server.get("/v1/files"),
        await server.get(f"/v1/batches/{batch_id}"),
        await server.upload(b"x"),
    ):
        assert (answer.status, answer.error["code"]) == (500, "storage_damaged")
        assert str(database) in answer.error["message"]
    assert (await server.client.complete()).status == 200  # live requests do not care
    await server.stop()
    assert database.read_bytes() == bytes(data)


async def test_a_file_in_use_stays(tmp_path: Path) -> None:
    server = BatchServer(tmp_path)
    file_id = (await server.upload([line("a")])).json["id"]
    batch_id = (await server.create(file_id)).json["id"]
    answer = await server.client.call("DELETE", f"/v1/files/{file_id}")
    assert (answer.status, answer.error["code"], batch_id in answer.error["message"]) == (409, "file_in_use", True)
    server.batches.start()
    await server.until(batch_id)
    assert (await server.client.call("DELETE", f"/v1/files/{file_id}")).status == 200
    await server.stop()


async def test_expired_files_go(server: BatchServer) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = (await server.upload([line("a")], **fields)).json
    assert file["expires_at"] == file["created_at"] + 3600
    await server.storage.call(lambda tables: tables._db.execute("UPDATE files SET expires_at = 1"))
    await server.until(await server.batch_of([line("b")]))
    assert (await server.get(f"/v1/files/{file['id']}")).status == 404
    assert not server.storage.content(file["id"]).exists()


async def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    with pytest.raises(ConfigError, match="another process"):
        Storage(tmp_path)
    await storage.close()
    with pytest.raises(ConfigError, match="--data-dir"):
        Storage(Path("/proc/nowhere"))


def test_a_fault_of_ours_tells_nothing_private() -> None:
    output = json.loads(refusal(1, "a", ValueError("/home/secret")).output)
    assert output["response"]["status_code"] == 500
    assert "secret" not in str(output)


@pytest.mark.parametrize("limit", [4_000, 18_000, 30_000])
def test_no_room_to_open_the_database_is_a_full_disk_not_a_damaged_one(tmp_path: Path, limit: int) -> None:
    """SQLite has several codes for it: the database, its log and its shared memory all need room."""
    program = (
        "import resource, sys; from pathlib import Path; from pinnate.server.database import open_database\n"
        "from pinnate.server.batches.tables import SCHEMA\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)\n"
        "try: open_database(Path(sys.argv[1]), SCHEMA)\n"
        "except Exception as error: print(type(error).__name__, error.code)"
    )
    path = tmp_path / "batches.sqlite"
    done = subprocess.run([sys.executable, "-c", program, path, str(limit)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("StorageError storage_full\n", "")
    open_database(path, SCHEMA).close()
