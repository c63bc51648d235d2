"""Scoring a long prompt takes no memory for its logits: never a matrix of prompt by vocabulary."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MODEL, open_session
from tests.e2e.harness import Api, Server

NUM_TOKENS = 2000
VOCAB = 49152
MATRIX = NUM_TOKENS * VOCAB * 4  # bytes of float32 logits: 393 MB


@pytest.fixture
def small_pool(tmp_path: Path) -> Iterator[Server]:
    """A pool of a bit more than one such prompt, so that the second one has touched all of it."""
    running = Server(tmp_path, "--max-model-len", "2304", "--max-num-seqs", "4", "--kv-cache-memory", "80M")
    try:
        yield running.wait_until(200)
    finally:
        running.stop()


def resident(server: Server) -> int:
    """Bytes of the server's largest child, the engine."""
    sizes = []
    for pid in server.children():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        sizes += [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return max(sizes)


async def test_memory_of_a_scored_prompt(small_pool: Server) -> None:
    def ids() -> list[int]:
        return [random.randrange(3000, 48000) for _ in range(NUM_TOKENS)]

    async with open_session() as session:
        api = Api(small_pool, session, MODEL)
        for _ in range(2):
            assert (await api.complete(ids(), max_tokens=1)).status == 200
        before = resident(small_pool)
        asked: tuple[dict[str, Any], ...] = ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20})
        for fields in asked:
            choice = (await api.complete(ids(), max_tokens=1, **fields)).choice()
            scored = choice.get("prompt_logprobs") or choice["logprobs"]["top_logprobs"]
            assert len(scored) >= NUM_TOKENS
            assert len(scored[-1]) >= 20
        assert resident(small_pool) - before < MATRIX / 4
