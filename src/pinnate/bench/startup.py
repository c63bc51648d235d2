"""From start to ready: of the engine process alone, or of the whole server up to its first token.

Knows: processes, clocks. Must not know: flags. Each run starts a process anew and ends it.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import msgspec

from pinnate.bench.client import Target, send
from pinnate.bench.connection import Origin, open_response
from pinnate.core.config import EngineConfig
from pinnate.core.errors import EngineDeadError, EngineError
from pinnate.engine.child import EngineChild
from pinnate.engine.client import ProcessClient

LIMIT_SECONDS = 600.0
_POLL_SECONDS = 0.005
_NAME = "bench"  # the served model's
_TAIL_CHARACTERS = 600

Steps = dict[str, float]  # name -> seconds, in order


async def start_engine(config: EngineConfig) -> Steps:
    """
    Raises:
        ModelError, ConfigError, EngineDeadError: it did not start.
    """
    begin = perf_counter()
    client = ProcessClient(EngineChild(config))
    try:
        info = await client.ready()
        return {"ready": perf_counter() - begin, **info["startup"]}
    finally:
        await client.close()


async def start_server(flags: Sequence[str], model: str, port: int, api_key: str | None = None) -> Steps:
    """`pinnate serve` with `flags`, up to the first token of a first request.

    Raises:
        EngineError: it ended, is not ready in LIMIT_SECONDS, or the first request failed.
    """
    command = [sys.executable, "-m", "pinnate.cli.main", "serve", model, "--port", str(port)]
    command += ["--served-model-name", _NAME, *flags]
    target = Target(Origin("127.0.0.1", port, None, ""), _NAME, chat=False, api_key=api_key)
    with tempfile.TemporaryFile() as log:
        begin = perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            steps = await _until_ready(process, target.origin, begin)
            first = await send(target, "Hello", 1, 1)
            if first.error is not None:
                raise EngineError(f"the first request failed: {first.error}")
            steps["first token"] = first.start + first.ttft - begin
            return steps | {f"engine: {name}": value for name, value in (await _engine_steps(target)).items()}
        except EngineDeadError as error:
            log.seek(0)
            words = " | ".join(log.read().decode("utf-8", "replace").split("\n"))
            raise EngineError(f"{error}; it wrote last: {words[-_TAIL_CHARACTERS:]}") from None
        finally:
            _end(process)


async def _until_ready(process: subprocess.Popen[bytes], origin: Origin, begin: float) -> Steps:
    steps: Steps = {}
    while perf_counter() - begin < LIMIT_SECONDS:
        if process.poll() is not None:
            raise EngineDeadError(f"the server ended with exit code {process.returncode}")
        try:
            async with open_response(origin, "GET", "/health", headers={}) as response:
                steps.setdefault("HTTP answers", perf_counter() - begin)
                if response.status == 200:
                    steps["ready"] = perf_counter() - begin
                    return steps
        except OSError:
            pass
        await asyncio.sleep(_POLL_SECONDS)
    raise EngineDeadError(f"the server was not ready in {LIMIT_SECONDS:g} s")


async def _engine_steps(target: Target) -> Steps:
    async with open_response(target.origin, "GET", "/server_info", headers=target.headers()) as response:
        info: dict[str, Any] = msgspec.json.decode(await response.read_all())
    steps: Steps = info["engine"]["startup"]
    return steps


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def medians(runs: Sequence[Steps]) -> Steps:
    """Of each step, over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: statistics.median(run[name] for run in runs if name in run) for name in names}
