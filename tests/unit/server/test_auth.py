"""Keys: every route of the app, in every spelling, is closed without one; who called; what is the operator's."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route

from pinnate.core.errors import ConfigError
from pinnate.server.auth import OPEN_PATHS, AdminOnly, Caller, KeyCheck, namespace
from pinnate.server.settings import ServerSettings
from tests.unit.server.conftest import Client, FakeEngine, make_client

KEY, OTHER, ADMIN = "k-3f9a-secret-key", "k-other", "admin-77"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get")
# The operator's routes. A new route belongs here if it changes the server or tells of others' requests.
ADMIN_ROUTES = {
    "/server_info", "/get_server_info", "/flush_cache", "/pin_prefix", "/unpin_prefix", "/resync_kv_events",
    "/debug/cache", "/debug/match", "/debug/check_integrity",
}  # fmt: skip


def app_routes(client: Client) -> list[Route]:
    return [route for route in client.app.routes if isinstance(route, Route)]


PATHS = [re.sub(r"\{[^}]*\}", "x", route.path) for route in app_routes(make_client(FakeEngine()))]


def spellings(path: str) -> list[str]:
    """The same path as careless or hostile clients write it."""
    return [
        path, path + "/", "/" + path, path.upper(), path.replace("/", "//"), "/v1/.." + path, "/." + path, path + "/x",
        path + ";", path + "\x00", path + "?a",
        "/health/.." + path, "/health" + path, path[1:], path + " ",
    ]  # fmt: skip


@given(
    path=st.one_of(st.sampled_from(PATHS).flatmap(lambda path: st.sampled_from(spellings(path))), st.text(max_size=20)),
    method=st.sampled_from(METHODS),
    headers=st.lists(
        st.tuples(
            st.sampled_from(["authorization", "x-api-key", "cookie", "proxy-authorization"]),
            st.sampled_from(
                ["", "Bearer", "Bearer ", "Bearer nope", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY,
                 f"Bearer {KEY.upper()}", f"key={KEY}", "Bearer kéy", f"Bearer {OTHER}"]  # OTHER is not a key here
            ),
        ),
        max_size=3,
    ),
)  # fmt: skip
def test_case_75_no_route_passes_without_the_key(path: str, method: str, headers: list[tuple[str, str]]) -> None:
    engine = FakeEngine()
    if path.startswith("/v1/messages"):  # there x-api-key is the key
        headers = [(name, value) for name, value in headers if name != "x-api-key"]
    answer = asyncio.run(raw_call(make_client(engine, api_keys=(KEY,)), method, path, headers))
    if path in OPEN_PATHS and method in ("GET", "HEAD"):
        assert answer["status"] in (200, 503)
    else:
        assert answer["status"] == 401
        assert (b"www-authenticate", b"Bearer") in answer["headers"]
        assert KEY.encode() not in answer["body"]
    assert not engine.submitted
    assert not engine.commands


async def raw_call(client: Client, method: str, path: str, headers: list[tuple[str, str]]) -> dict[str, Any]:
    """A call whose headers may repeat, with a body that asks for something."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"prompt": "hi"}', "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": f"api_key={KEY}".encode(), "root_path": "",
        "headers": [(b"content-type", b"application/json"), *raw], "client": ("127.0.0.1", 1), "server": ("x", 80),
    }  # fmt: skip
    await client.app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return {"status": sent[0]["status"], "headers": [(k.lower(), v) for k, v in sent[0]["headers"]], "body": body}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_each_of_several_keys_opens(engine: FakeEngine) -> None:
    client = make_client(engine, api_keys=(KEY, OTHER))
    for key in (KEY, OTHER):
        assert (await client.call("GET", "/v1/models", headers=bearer(key))).status == 200
    assert (await client.call("GET", "/v1/models", headers=bearer(f"{KEY},{OTHER}"))).status == 401


async def test_anthropics_header_opens_anthropics_routes_alone() -> None:
    seen: list[Caller] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        seen.append(scope["state"]["caller"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    check = KeyCheck(app, (KEY,))
    for path, key, status in (
        ("/v1/messages", KEY, 200), ("/v1/messages/count_tokens", KEY, 200), ("/v1/messages", "nope", 401),
        ("/v1/messages", "", 401), ("/v1/messagesx", KEY, 401), ("/v1/models", KEY, 401), ("/health", KEY, 401),
    ):  # fmt: skip
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        scope = {"type": "http", "path": path, "method": "POST", "headers": [(b"x-api-key", key.encode())]}
        await check(scope, None, send)  # type: ignore[arg-type]
        assert sent[0]["status"] == status, path
    assert seen == [Caller(namespace(KEY))] * 2


async def test_the_operators_routes_need_the_admin_key(engine: FakeEngine) -> None:
    client = make_client(engine, api_keys=(KEY,), admin_api_keys=(ADMIN,))
    for route in app_routes(client):
        path, method = re.sub(r"\{[^}]*\}", "x", route.path), min(route.methods or ())
        answers = [await client.call(method, path, b"{}", headers=bearer(key)) for key in (KEY, ADMIN)]
        is_admins = answers[0].status == 403 and answers[0].error["code"] == "admin_key_required"
        assert is_admins == (route.path in ADMIN_ROUTES), route.path
        assert answers[1].status not in (401, 403), route.path
        assert (await client.call(method, path, b"{}")).status == (401 if path != "/health" else 200)
    marked = {
        route.path for route in app_routes(client) if isinstance(route.app._app, AdminOnly)
    }  # in the check of its query
    assert marked == ADMIN_ROUTES


async def test_without_an_admin_key_an_api_key_is_enough_and_without_keys_none(engine: FakeEngine) -> None:
    keyed = make_client(engine, api_keys=(KEY,))
    assert (await keyed.call("POST", "/flush_cache", headers=bearer(KEY))).status == 200
    assert (await make_client(engine).call("POST", "/flush_cache")).status == 200


async def test_with_an_admin_key_alone_the_other_routes_are_open(engine: FakeEngine) -> None:
    client = make_client(engine, admin_api_keys=(ADMIN,))
    assert (await client.complete()).status == 200
    assert (await client.call("POST", "/flush_cache")).status == 401
    assert (await client.call("POST", "/flush_cache", headers=bearer("nope"))).status == 401
    assert (await client.call("POST", "/flush_cache", headers=bearer(ADMIN))).status == 200


def test_a_namespace_is_stable_short_and_one_for_each_key() -> None:
    names = {namespace(f"key-{number}") for number in range(100)}
    assert len(names) == 100
    assert namespace("key-1") == "f3a1e5b092b9d9a2"  # stored objects are found again by it: it must not change
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in names)


@pytest.mark.parametrize(
    "bad",
    [
        {"api_keys": ("",)}, {"api_keys": ("a b",)}, {"api_keys": ("kéy",)}, {"api_keys": ("a\n",)},
        {"api_keys": ("k" * 513,)}, {"admin_api_keys": (" ",)}, {"api_keys": ("k",), "admin_api_keys": ("k",)},
        {"ssl_certfile": "x"}, {"ssl_keyfile": "x"}, {"allowed_origins": ("example.com",)},
        {"allowed_origins": ("https://x.com/path",)}, {"allowed_origins": ("https://*.x.com",)}, {"log_format": "xml"},
    ],
)  # fmt: skip
def test_settings_are_checked_and_keys_not_shown(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--") as caught:
        ServerSettings(**bad)
    assert "kkk" not in str(caught.value)


async def test_anthropics_clients_on_the_paths_of_openai() -> None:
    """They send their own header for the key, and read their own form of an error."""
    client = make_client(FakeEngine(), api_keys=(KEY,))
    theirs = {"anthropic-version": "2023-06-01"}
    for path in ("/v1/models", "/v1/models/Tiny"):
        answer = await client.call("GET", path, headers={**theirs, "x-api-key": KEY})
        assert (answer.status, answer.headers["request-id"]) == (200, answer.headers["x-request-id"])
        refused = await client.call("GET", path, headers={**theirs, "x-api-key": "nope"})
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
        assert (await client.call("GET", path, headers={"x-api-key": KEY})).error["code"] == "invalid_api_key"
    absent = await client.call("GET", "/v1/models/none", headers={**theirs, "x-api-key": KEY})
    assert (absent.status, absent.json["type"], absent.json["error"]["type"]) == (404, "error", "not_found_error")
