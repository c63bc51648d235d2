"""One real server for most tests, with the default model and settings but a smaller context."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.e2e.harness import Api, Server

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server"), "--max-model-len", "2048", "--max-num-seqs", "32")
    try:
        yield running.wait_until(200)
    finally:
        running.stop()


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    async with open_session() as session:
        yield Api(server, session, MODEL)


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=60)
    )
