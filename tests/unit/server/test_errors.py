"""Errors take the form that the clients of a path read."""

from __future__ import annotations

import json

import pytest

from pinnate.core.errors import EngineDeadError, InvalidRequestError, NotFoundError, QueueFullError
from pinnate.server.errors import (
    MAX_RETRY_AFTER,
    HTTPStatusError,
    anthropic_error_bytes,
    describe,
    error_response,
    headers_of,
    speaks_anthropic,
)
from tests.unit.server.conftest import FakeEngine, make_client

CASES = [
    (InvalidRequestError("bad", param="x"), 400, "invalid_request_error"),
    (HTTPStatusError(401, "no key", code="invalid_api_key"), 401, "authentication_error"),
    (NotFoundError("absent"), 404, "not_found_error"),
    (HTTPStatusError(413, "large", code="body_too_large"), 413, "request_too_large"),
    (HTTPStatusError(429, "slow", code="rate"), 429, "rate_limit_error"),
    (QueueFullError("full"), 529, "overloaded_error"),
    (EngineDeadError("gone"), 503, "api_error"),
    (ValueError("private"), 500, "api_error"),
]


@pytest.mark.parametrize(("error", "status", "kind"), CASES)
def test_anthropic_form(error: Exception, status: int, kind: str) -> None:
    answer = error_response(*describe(error), scope={"path": "/v1/messages/count_tokens"})
    body = json.loads(answer.body)
    assert answer.status_code == status
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert "private" not in body["error"]["message"]
    assert "request_id" in body
    assert ("retry-after" in answer.headers) == (status in (503, 529))


@pytest.mark.parametrize("path", ["/v1/messagesx", "/v1/chat/completions", "/V1/messages", ""])
def test_other_paths_keep_openais_form(path: str) -> None:
    assert not speaks_anthropic(path)
    answer = error_response(*describe(QueueFullError("full")), scope={"path": path})
    assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}
    assert answer.status_code == 429


@pytest.mark.parametrize(("error", "_", "kind"), [case for case in CASES if case[1] in (400, 529, 500)])
def test_anthropic_form_in_a_stream(error: Exception, _: int, kind: str) -> None:
    assert json.loads(anthropic_error_bytes(describe(error)[1]))["error"]["type"] == kind


async def test_the_router_and_the_key_check_use_it_too() -> None:
    client = make_client(FakeEngine(), api_keys=("secret",))
    answer = await client.call("GET", "/v1/messages/nothing")
    assert (answer.status, answer.json["error"]["type"]) == (401, "authentication_error")
    assert answer.json["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    answer = await client.call("GET", "/v1/messages/nothing", headers={"authorization": "Bearer secret"})
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
    assert answer.json["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (QueueFullError("full", retry_after=3.2), "4"),
        (QueueFullError("full", retry_after=0.01), "1"),
        (QueueFullError("full", retry_after=1e9), str(MAX_RETRY_AFTER)),
        (EngineDeadError("gone"), "1"),
        (InvalidRequestError("bad"), None),
    ],
)
def test_retry_after_is_what_the_error_knows(error: Exception, seconds: str | None) -> None:
    assert headers_of(error).get("Retry-After") == seconds
