"""The disk tier over real HTTP: kill -9, damaged files, a full disk, two servers on one folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tests.e2e.conftest import MODEL, open_session
from tests.e2e.harness import Api, Server, alive, fresh_ids

FLAGS = ("--max-model-len", "2200", "--num-pages", "300", "--cache-report", "all")
FIELDS = {"max_tokens": 24, "logprobs": 2, "seed": 7, "temperature": 0.7}


@contextlib.asynccontextmanager
async def serving(folder: Path, *flags: str, disk: Path | None = None) -> AsyncIterator[Api]:
    given = ("--kv-disk", str(disk)) if disk is not None else ()
    server = Server(folder, *FLAGS, *given, *flags)
    try:
        await asyncio.to_thread(server.wait_until, 200)
        async with open_session() as session:
            yield Api(server, session, MODEL)
    finally:
        server.stop()
    assert "Traceback" not in server.text()


async def stored(api: Api, pages: int) -> None:
    """Until so many pages are on disk."""
    end = time.monotonic() + 20
    while (await api.metrics())["kv_tier_pages"] < pages:
        assert time.monotonic() < end, await api.metrics()
        await asyncio.sleep(0.05)
        await api.post("/detokenize", {"tokens": [1]})
        await api.complete([5], max_tokens=1)  # stats come with steps


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_a_prompt_of_2000_tokens_is_a_hit_after_kill_9(tmp_path: Path) -> None:
    disk, prompt = tmp_path / "kv", fresh_ids(2000)
    async with serving(tmp_path, disk=disk) as api:
        first = await api.complete(prompt, **FIELDS)
        assert first.cached == 0
        await stored(api, 125)
        (engine,) = api.server.children()
        for pid in (api.server.process.pid, engine):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not alive(engine))
    async with serving(tmp_path, disk=disk) as api:
        again = await api.complete(prompt, cache_report=True, **FIELDS)
        assert again.cached == 1999
        (report,) = again.json["cache_report"]
        assert (report["num_tier_tokens"], report["reason"]) == (1999, "last_token")
        assert "(1999 of them on disk)" in report["explanation"]
        assert again.json["choices"] == first.json["choices"]
        metrics = await api.metrics()
        assert metrics["kv_tier_hit_tokens_total"] == 1999
        assert metrics["kv_tier_loaded_pages_total"] == 125
        (tier,) = (await api.get("/debug/cache")).json["tiers"]
        assert (tier["name"], tier["on"], tier["hit_tokens"], tier["rejected_pages"]) == ("disk", True, 1999, 0)
        assert tier["load_pages_per_second"] > 0
        # In memory now, so no longer from disk.
        assert (await api.complete(prompt, cache_report=True, **FIELDS)).json["cache_report"][0]["num_tier_tokens"] == 0
        await api.until_idle()
        await api.post("/flush_cache", b"")
        cold = await api.complete(prompt, **FIELDS)
        assert cold.cached == 0
        assert cold.json["choices"] == first.json["choices"]
    async with serving(tmp_path) as api:
        assert (await api.complete(prompt, **FIELDS)).json["choices"] == first.json["choices"]


async def test_an_engine_that_is_killed_comes_back_with_its_pages(tmp_path: Path) -> None:
    prompt = fresh_ids(400)
    async with serving(tmp_path, disk=tmp_path / "kv") as api:
        first = await api.complete(prompt, **FIELDS)
        await stored(api, 25)
        (engine,) = api.server.children()
        os.kill(engine, signal.SIGKILL)
        await asyncio.to_thread(api.server.wait_until, 503, 0)
        await asyncio.to_thread(api.server.wait_until, 200)
        again = await api.complete(prompt, **FIELDS)
        assert again.cached == 399
        assert again.json["choices"] == first.json["choices"]
        metrics = await api.metrics()
        assert metrics["kv_tier_stored_pages_total"] >= 25  # counters do not fall with the engine


async def test_damaged_and_foreign_files_are_skipped(tmp_path: Path) -> None:
    disk, prompt = tmp_path / "kv", fresh_ids(400)
    async with serving(tmp_path, disk=disk) as api:
        first = await api.complete(prompt, **FIELDS)
        await stored(api, 25)
    files = sorted(disk.glob("*/*.kv"))
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        if number % 3 == 0:
            content[len(content) // 2] ^= 4
        elif number % 3 == 1:
            del content[-1:]
        else:
            content = bytearray(files[number - 1].read_bytes())
        file.write_bytes(content)
    (disk / "notes.txt").write_text("not ours")
    async with serving(tmp_path, disk=disk) as api:
        again = await api.complete(prompt, **FIELDS)
        assert again.cached == 0
        assert again.json["choices"] == first.json["choices"]
        assert "is skipped, its tokens are computed again" in api.server.text()
        await stored(api, 25)
    assert (disk / "notes.txt").read_text() == "not ours"


async def test_a_disk_that_takes_no_page_does_not_stop_the_service(tmp_path: Path) -> None:
    """RLIMIT_FSIZE ends each page's file half-way, as a full disk does."""
    prompt = fresh_ids(400)
    server_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with serving(tmp_path, disk=tmp_path / "kv") as api:
        (engine,) = api.server.children()
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (200_000, server_limit[1]))
        first = await api.complete(prompt, **FIELDS)
        await until(lambda: "could not be written (File too large)" in api.server.text())
        again = await api.complete(prompt, **FIELDS)
        assert (first.status, again.cached) == (200, 399)
        assert again.json["choices"][0]["text"] == first.json["choices"][0]["text"]
        assert api.server.text().count("could not be written") == 1
        assert (await api.metrics())["kv_tier_pages"] == 0
    assert not list((tmp_path / "kv").glob("*/*.kv"))


async def test_a_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with serving(tmp_path, disk=tmp_path / "file" / "kv") as api:
        assert (await api.complete(fresh_ids(40))).status == 200
        assert api.server.text().count("cannot be used (Not a directory): serving goes on without it") == 1
        assert (await api.get("/debug/cache")).json["tiers"] == []


async def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    async with serving(tmp_path, disk=disk) as api:
        (engine,) = api.server.children()
        second = Server(tmp_path, *FLAGS, "--kv-disk", str(disk))
        try:
            assert await asyncio.to_thread(second.exit_code, 30.0) != 0
            assert (
                f"--kv-disk {disk} is in use by process {engine}; each server needs a folder of its own"
                in second.text()
            )
        finally:
            second.stop()
        assert (await api.complete(fresh_ids(40))).status == 200


async def test_sequences_that_are_swapped_out_and_resumed_give_the_same_bytes(tmp_path: Path) -> None:
    """A pool too small for all: some are preempted, and get their pages back from disk."""
    prompts = [fresh_ids(60) for _ in range(6)]
    fields = FIELDS | {"max_tokens": 250, "ignore_eos": True}
    async with serving(tmp_path) as api:
        with_room = await asyncio.gather(*(api.complete(prompt, **fields) for prompt in prompts))
        assert (await api.metrics())["num_preemptions_total"] == 0
    async with serving(tmp_path, "--num-pages", "64", disk=tmp_path / "kv") as api:
        answers = await asyncio.gather(*(api.complete(prompt, **fields) for prompt in prompts))
        for answer, expected in zip(answers, with_room, strict=True):
            assert answer.json["choices"] == expected.json["choices"]
        metrics = await api.metrics()
        assert metrics["num_preemptions_total"] > 0
        assert metrics["num_swaps_total"] > 0
        assert metrics["kv_tier_loaded_pages_total"] > 0
