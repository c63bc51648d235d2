"""ProcessClient against a far end in this process: no frame is lost or late, whatever is sent or cancelled."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zmq

from pinnate.core.errors import EngineDeadError, ModelError
from pinnate.core.messages import Abort, EngineFailed, EngineReady, FromEngine, Reply
from pinnate.engine.client import ProcessClient


class FarEnd:
    """Stands in for EngineChild, and has the engine's end of its socket."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/engine"
        self.exited: Future[int] = Future()
        self.heartbeat, self._beats = os.pipe()
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.set_hwm(0)
        self.socket.bind(self.address)

    def say(self, message: FromEngine) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def die(self) -> None:
        self.exited.set_result(-9)

    def cause_of_death(self) -> str:
        return "the engine process was killed by SIGKILL"

    def last_words(self) -> str:
        return "no words"

    def remove_socket(self) -> None:
        self.removed = True

    def close(self) -> None:
        if not self.exited.done():
            self.die()

    def end(self) -> None:
        self._context.destroy(linger=0)
        os.close(self._beats)
        os.close(self.heartbeat)


@pytest_asyncio.fixture
async def ends(tmp_path: Path) -> AsyncIterator[tuple[ProcessClient, FarEnd]]:
    far = FarEnd(tmp_path)
    client = ProcessClient(far)  # type: ignore[arg-type]
    yield client, far
    await client.close()
    far.end()


def reply(number: int) -> Reply:
    return Reply(number, {})


async def received(client: ProcessClient) -> Any:
    return await asyncio.wait_for(client.receive(), 5)


Ends = tuple[ProcessClient, FarEnd]


async def test_ready_takes_the_hello_and_the_info(ends: Ends) -> None:
    client, far = ends
    far.socket.send(b"")
    far.say(EngineReady({"pid": 7}))
    assert await client.ready() == {"pid": 7}
    assert far.removed


async def test_a_refusal_is_the_engines_own_error(ends: Ends) -> None:
    client, far = ends
    far.socket.send(b"")
    far.say(EngineFailed("ModelError", "no such model"))
    with pytest.raises(ModelError, match="no such model"):
        await client.ready()


async def test_news_that_a_send_swallowed(ends: Ends) -> None:
    """ZeroMQ's news of frames is told once, and a send may take it: then nothing would wake the reader."""
    client, far = ends
    for number in range(5):
        far.say(reply(number))
        time.sleep(0.02)
        client.send(Abort([]))
        assert await received(client) == reply(number)


async def test_frames_in_both_directions_at_once(ends: Ends) -> None:
    client, far = ends
    got = []
    for number in range(300):
        far.say(reply(number))
        if number % 3 == 0:
            await asyncio.sleep(0)
        client.send(Abort([str(number)]))
        if number % 2:
            got.append((await received(client)).command_id)
    while len(got) < 300:
        got.append((await received(client)).command_id)
    assert got == list(range(300))
    sent = [msgspec.msgpack.decode(far.socket.recv(), type=Abort).request_ids for _ in range(300)]
    assert sent == [[str(number)] for number in range(300)]


async def test_order_is_kept(ends: Ends) -> None:
    client, far = ends
    for number in range(100):
        far.say(reply(number))
    assert [(await received(client)).command_id for _ in range(100)] == list(range(100))
    far.say(reply(100))  # and it waits again
    assert (await received(client)).command_id == 100


async def test_a_cancelled_wait_loses_nothing(ends: Ends) -> None:
    client, far = ends
    for number in range(20):
        waiting = asyncio.ensure_future(client.receive())
        await asyncio.sleep(0)
        far.say(reply(number))
        if number % 2:
            await asyncio.sleep(0.005)
        if waiting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await received(client)).command_id == number
        else:
            assert waiting.result() == reply(number)


async def test_what_a_dead_engine_had_sent_comes_before_the_news(ends: Ends) -> None:
    client, far = ends
    for number in range(3):
        far.say(reply(number))
    far.die()
    assert [(await received(client)).command_id for _ in range(3)] == [0, 1, 2]
    with pytest.raises(EngineDeadError, match=r"killed by SIGKILL; it wrote last: no words"):
        await received(client)


async def test_a_death_wakes_who_waits(ends: Ends) -> None:
    client, far = ends
    waiting = asyncio.ensure_future(client.receive())
    await asyncio.sleep(0.01)
    far.die()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(waiting, 5)


async def test_messages_to_a_closed_client_are_dropped(ends: Ends) -> None:
    client, _ = ends
    await client.close()
    client.send(Abort(["late"]))
