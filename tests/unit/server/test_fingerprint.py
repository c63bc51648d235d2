"""system_fingerprint: there in every answer and chunk, and another one where the bits may be others."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pinnate.server.fingerprint import fingerprint
from tests.unit.server.conftest import Client, FakeEngine, make_client

INFO: dict[str, Any] = {"dtype": "bfloat16", "quantization": "none", "device": {"isa": "avx2", "threads": 2}}


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_every_answer_and_chunk_has_it(client: Client, route: str) -> None:
    plain = (await getattr(client, route)()).json["system_fingerprint"]
    assert re.fullmatch(r"fp_[0-9a-f]{12}", plain)
    events = (await getattr(client, route)(stream=True, stream_options={"include_usage": True})).events()
    assert {event["system_fingerprint"] for event in events[:-1]} == {plain}


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float32"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"device": {"isa": "avx512"}}],
)
def test_what_changes_bits_changes_it(change: dict[str, Any]) -> None:
    assert fingerprint("/m/A", INFO | change) != fingerprint("/m/A", INFO)


def test_what_changes_none_does_not() -> None:
    first = fingerprint("/m/A", INFO)
    assert fingerprint("/elsewhere/A", INFO | {"threads": 8, "num_pages": 5}) == first
    assert fingerprint("/m/A", INFO | {"device": {"isa": "avx2", "threads": 16}}) == first
    assert fingerprint("/m/B", INFO) != first


async def test_a_restarted_engine_may_have_another() -> None:
    client = make_client(FakeEngine())
    before = (await client.complete()).json["system_fingerprint"]
    assert (await client.complete()).json["system_fingerprint"] == before
    client.engine.info = {**client.engine.info, "dtype": "bfloat16"}
    assert (await client.complete()).json["system_fingerprint"] != before
