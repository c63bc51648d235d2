"""Every API's streams add up to its plain answers, many at once: a short run of benchmarks/api_streams.py."""

from __future__ import annotations

import api_streams

from tests.e2e.harness import Server


async def test_streams_equal_plain_answers(server: Server) -> None:
    compared = await api_streams.run(server.url, prompts=4, clients=12)
    assert compared.faults == []
    assert compared.compared["chat tools"] == compared.compared["completions logprobs"] == 4
    assert sum(compared.compared.values()) == 4 * (6 + 6 + 5 + 4 + 1)
