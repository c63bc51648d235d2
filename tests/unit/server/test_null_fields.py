"""null is the same as leaving a field out, for every field that a generation request takes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pinnate.server.protocol.chat import UNSUPPORTED_CHAT, ChatRequest
from pinnate.server.protocol.completions import UNSUPPORTED_COMPLETION, CompletionRequest
from tests.unit.server.conftest import FakeEngine, Submitted, make_client


async def submitted(route: str, **fields: Any) -> tuple[Submitted, Any]:
    client = make_client(FakeEngine(), strict=True)
    answer = await getattr(client, route)(**fields)
    assert answer.status == 200, answer.body
    body = answer.json
    body["id"] = body["created"] = None
    return client.engine.submitted[0], body


def optional(kind: Any) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind) if not field.required]


FIELDS = [
    *(("chat", name) for name in (*optional(ChatRequest), *UNSUPPORTED_CHAT)),
    *(("complete", name) for name in (*optional(CompletionRequest), *UNSUPPORTED_COMPLETION)),
]


@pytest.mark.parametrize(("route", "name"), FIELDS)
async def test_null_means_the_default(route: str, name: str) -> None:
    assert await submitted(route, **{name: None}) == await submitted(route)


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_all_at_once(route: str) -> None:
    assert await submitted(route, **{name: None for of, name in FIELDS if of == route}) == await submitted(route)
