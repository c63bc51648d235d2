"""The engine in a process of its own, with the default model: round trip, deaths of either side, start-up errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from pinnate.core.config import EngineConfig
from pinnate.core.errors import ConfigError, EngineDeadError, ModelError
from pinnate.core.messages import Abort
from pinnate.core.request import FinishReason
from pinnate.core.sampling import SamplingParams
from pinnate.engine.async_engine import AsyncEngine
from pinnate.engine.child import EngineChild, private_folder
from pinnate.engine.client import ProcessClient
from pinnate.weights.resolve import default_model_path
from tests.checkpoints import write_gguf

FACT = json.loads((Path(__file__).parent.parent / "data/smollm2_greedy.json").read_text())["greedy"][0]
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def config(**changes: object) -> EngineConfig:
    return EngineConfig(**({"model": str(default_model_path()), "max_model_len": 512} | changes))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(config())
    yield engine
    await engine.close()


def child_of(engine: AsyncEngine) -> int:
    return engine.info["pid"]


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def complete(engine: AsyncEngine) -> None:
    """One request, start to end, with the text that is known."""
    ids = await engine.tokenize(FACT["prompt"])
    assert ids == FACT["prompt_ids"]
    stream = await engine.submit(ids, SamplingParams(temperature=0.0, max_tokens=48), request_id="r")
    deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == FACT["text"]
    assert deltas[-1].finish_reason is FinishReason.LENGTH


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the engine's socket is made, in this test alone."""
    folder = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_round_trip(engine: AsyncEngine) -> None:
    await asyncio.gather(*(complete(engine) for _ in range(3)))
    assert engine.stats.generation_tokens >= 3 * 48
    assert 0 < engine.stats.execute_seconds < engine.stats.step_seconds
    assert engine.info["dtype"] == "bfloat16"
    assert set(engine.info["reasons"]) == {"dtype", "quantization", "threads", "KV type", "KV pool", "max_model_len"}
    assert (await engine.command("check_integrity")) == {"ok": True}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_to_the_group_are_the_parents_to_handle(engine: AsyncEngine, number: int) -> None:
    assert os.getpgid(child_of(engine)) != os.getpgid(0)
    os.kill(child_of(engine), number)
    await complete(engine)


async def test_abandoned_stream_stops_the_engine(engine: AsyncEngine) -> None:
    async for _ in await engine.submit([1, 2, 3], LONG, request_id="r"):
        break
    await until(lambda: engine.stats.num_running == 0)
    assert engine.stats.generation_tokens < 4 * 48 + 400


async def test_killed_engine_is_noticed_and_restarted(engine: AsyncEngine) -> None:
    before = child_of(engine)
    stream = await engine.submit([1, 2, 3], LONG, request_id="r")
    await anext(stream)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="died while it worked on this request"):
        async for _ in stream:
            pass
    assert engine.state != "ready"
    with pytest.raises(EngineDeadError):
        await engine.submit([1], LONG, request_id="r")
    await until(lambda: engine.state == "ready")
    assert child_of(engine) != before
    await complete(engine)


async def test_nothing_is_left_after_close(folder: Path) -> None:
    engine = await AsyncEngine.start(config())
    process = psutil.Process(child_of(engine))
    assert list(folder.iterdir()) == []  # both ends are connected: the socket's file is gone
    stream = await engine.submit([1, 2, 3], LONG, request_id="r")
    await engine.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        async for _ in stream:
            pass
    assert not process.is_running()
    assert list(folder.iterdir()) == []


async def test_the_socket_is_private_and_its_path_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = private_folder()
    assert (made.parent, made.stat().st_mode & 0o777) == (folder, 0o700)
    deep = folder / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    short = private_folder()
    assert len(str(short)) < 50
    assert list(deep.iterdir()) == []
    short.rmdir()


async def test_a_closed_client_drops_messages() -> None:
    client = ProcessClient(EngineChild(config(model="/no/such/model")))
    await client.close()
    client.send(Abort(["x"]))
    await client.close()


def watchers() -> int:
    return sum(thread.name == "pinnate-engine-watch" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"model": "/no/such/model.gguf"}, ModelError, "/no/such/model.gguf"),
        ({"max_model_len": 100000}, ConfigError, "--max-model-len 100000 is beyond the model's context of 8192"),
        ({"kv_cache_memory": 7}, ConfigError, "--kv-cache-memory 7 holds no page"),
    ],
)
async def test_refusals_to_start_arrive_as_their_class(
    changes: dict[str, object], error: type[Exception], text: str, folder: Path
) -> None:
    threads = watchers()
    with pytest.raises(error, match=text):
        await AsyncEngine.start(config(**changes))
    assert list(folder.iterdir()) == []
    assert watchers() == threads


async def test_the_engines_error_comes_before_the_tokenizers(tmp_path: Path) -> None:
    """Both parts find this file at fault: it has no tokenizer either."""
    path = write_gguf(tmp_path / "x.gguf", "foo", {}, {})
    with pytest.raises(ModelError, match=r"general\.architecture 'foo' is not supported"):
        await AsyncEngine.start(config(model=str(path)))


async def test_corrupt_model(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(default_model_path().read_bytes()[:1_000_000])
    child = EngineChild(config(model=str(broken)))
    client = ProcessClient(child)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        await client.ready()
    await client.close()
    assert child.exited.done()


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")])
async def test_death_without_a_word_while_starting(number: signal.Signals, words: str) -> None:
    written: list[str] = []
    child = EngineChild(config(), forward=written.append)
    client = ProcessClient(child)
    await client._receive_frame()  # the hello: it is loading the model now
    os.kill(child.pid, number)
    with pytest.raises(EngineDeadError, match=f"killed by {words}") as caught:
        await client.receive()
    if number is signal.SIGSEGV:
        assert "Segmentation fault" in "".join(written)
        assert "it wrote last" in str(caught.value)
    await client.close()


PARENT = """
import asyncio, sys, time
from pinnate.core.config import EngineConfig
from pinnate.engine.child import EngineChild
from pinnate.engine.client import ProcessClient

child = EngineChild(EngineConfig(model=sys.argv[1], max_model_len=512))
async def main():
    client = ProcessClient(child)
    if sys.argv[2] == "ready":
        await client.ready()
    print(child.pid, child.address, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["starting", "ready"])
async def test_the_child_dies_with_a_killed_parent(moment: str) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(default_model_path()), moment, stdout=subprocess.PIPE
    )
    pid, address = (await parent.stdout.readline()).decode().split()
    child = psutil.Process(int(pid))
    parent.kill()
    await parent.wait()
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert not Path(address.removeprefix("ipc://")).parent.exists()


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("pinnate.engine.async_engine", ("numpy", "pinnate.executor", "pinnate.scheduler", "pinnate._native")),
        ("pinnate.engine.child", ("numpy", "zmq", "asyncio", "pinnate.executor")),
        ("pinnate.engine.process", ("starlette", "uvicorn", "tokenizers", "jinja2", "pinnate.text", "pinnate.server")),
    ],
)
async def test_each_process_imports_its_own_part_only(module: str, unwanted: tuple[str, ...]) -> None:
    script = f"import {module}, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert module in loaded
    assert [name for name in loaded if any(name == u or name.startswith(f"{u}.") for u in unwanted)] == []
