"""Each request is seen once, with its id in and out, and ends in one line that shows no prompt and no key."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinnate.core.errors import InvalidRequestError
from pinnate.core.logs import JsonFormatter
from pinnate.server.auth import namespace
from pinnate.server.observer import AnswerCutOffError, Observer
from pinnate.server.request_ids import MAX_LENGTH, check_request_id
from tests.unit.server.conftest import Client, FakeEngine, make_client, spell

KEY = "k-3f9a-secret-key"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """JSON lines of the access log, filled while the test runs."""
    found: list[dict[str, Any]] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(JsonFormatter().format(record)))

    caplog.set_level(logging.DEBUG)
    logging.getLogger("pinnate.access").addHandler(handler := Reader())
    yield found  # type: ignore[misc]
    logging.getLogger("pinnate.access").removeHandler(handler)


def logged(engine: FakeEngine, **settings: Any) -> Client:
    return make_client(engine, access_log=True, log_format="json", **settings)


async def test_a_request_is_one_line(engine: FakeEngine, lines: list[dict[str, Any]]) -> None:
    client = logged(engine, api_keys=(KEY,))
    engine.script = lambda *_: list(spell("ok", cached=1))
    for stream in (False, True):
        answer = await client.post(
            "/v1/completions", {"prompt": "secret prompt", "stream": stream}, headers={"authorization": f"Bearer {KEY}"}
        )
        assert answer.status == 200
        (line,) = lines
        assert line["request_id"] == answer.headers["x-request-id"] == line["id"]
        shown = {name: line[name] for name in ("method", "route", "status", "model", "stream", "key", "finish_reason")}
        assert shown == {
            "method": "POST", "route": "/v1/completions", "status": 200, "model": "Tiny", "stream": stream,
            "key": namespace(KEY), "finish_reason": "stop",
        }  # fmt: skip
        assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (13, 1, 3)
        assert 0 <= line["first_token_seconds"] <= line["seconds"] < 60
        assert (line["level"], line["message"], line["client"]) == ("info", "request", "127.0.0.1")
        assert "secret" not in json.dumps(line)
        lines.clear()


async def test_refusals_and_unknown_routes_are_lines_too(engine: FakeEngine, lines: list[dict[str, Any]]) -> None:
    client = logged(engine)
    await client.complete(temperature=-1)
    await client.call("GET", "/no\n/such?x=1", headers={"x-request-id": "mine"})
    await client.call("PUT", "/v1/completions")
    await client.call("GET", "/health")
    assert [(line["route"], line["status"], line["error"]) for line in lines] == [
        ("/v1/completions", 400, "invalid_request"),
        ("/no%0A/such%3Fx%3D1", 404, "not_found"),
        ("/v1/completions", 405, "method_not_allowed"),
    ]
    assert lines[1]["request_id"] == "mine"


async def test_a_probe_is_shown_where_it_fails(lines: list[dict[str, Any]]) -> None:
    client = logged(FakeEngine(state="dead"))
    assert (await client.call("GET", "/health")).status == 503
    assert [(line["route"], line["status"]) for line in lines] == [("/health", 503)]


async def test_text_lines_hold_the_same(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logging.getLogger().setLevel(logging.ERROR)  # the access log comes at every level
    answer = await make_client(engine, access_log=True).complete(n=2)
    (record,) = [record for record in caplog.records if record.name == "pinnate.access"]
    assert record.getMessage().startswith("POST /v1/completions 200 0.")
    assert f" request_id={answer.headers['x-request-id']} " in record.getMessage()
    assert " prompt_tokens=2 cached_tokens=0 output_tokens=" in record.getMessage()


async def test_a_client_that_left_is_499_and_aborted(engine: FakeEngine, lines: list[dict[str, Any]]) -> None:
    client = logged(engine)
    engine.script = lambda *_: [asyncio.Event()]
    call = asyncio.create_task(client.complete())
    while not engine.streams:
        await asyncio.sleep(0)
    client.gone.set()
    await call
    assert [(line["status"], line["finish_reason"], line["output_tokens"]) for line in lines] == [(499, "abort", 0)]
    assert "first_token_seconds" not in lines[0]
    assert client.state.metrics.http_requests == {("/v1/completions", "POST", "499"): 1}


async def test_no_log_unless_asked(engine: FakeEngine, lines: list[dict[str, Any]]) -> None:
    await make_client(engine).complete()
    assert not lines


@pytest.mark.parametrize(
    "given_id", ["a", "0f8fad5b-d9cb-469f-a165-70867728950e", "A.b_c:d/e+f=g@h-", "x" * MAX_LENGTH]
)
async def test_a_valid_id_comes_back(client: Client, given_id: str) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/completions", {}), ("/none", {})):
        answer = await client.post(path, body, headers={"x-request-id": given_id})
        assert answer.headers["x-request-id"] == given_id


@given(st.text(alphabet=st.characters(max_codepoint=255), max_size=MAX_LENGTH + 2))
def test_only_harmless_ids_are_taken(given_id: str) -> None:
    answer = asyncio.run(make_client(FakeEngine()).call("GET", "/version", headers={"x-request-id": given_id}))
    harmless = 1 <= len(given_id) <= MAX_LENGTH and all(
        c.isascii() and (c.isalnum() or c in "._:/+=@-") for c in given_id
    )
    assert (answer.headers["x-request-id"] == given_id) == harmless
    assert harmless or answer.headers["x-request-id"].startswith("req-")
    if harmless:
        assert check_request_id(given_id) == given_id
    else:
        with pytest.raises(InvalidRequestError, match="request_id"):
            check_request_id(given_id)


async def test_every_answer_has_an_id_of_its_own(client: Client) -> None:
    def broken(*_: object) -> list[object]:
        raise RuntimeError("fault")

    calls = [client.call("GET", path) for path in ("/health", "/metrics", "/v1/models", "/none", "/v1/completions")]
    answers = [await call for call in calls]
    client.engine.script = broken
    answers.append(await client.complete())
    assert [answer.status for answer in answers] == [200, 200, 200, 404, 405, 500]
    assert len({answer.headers["x-request-id"] for answer in answers}) == len(answers)


async def test_a_fault_is_logged_without_its_text(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    quoted = " ".join(("what", "the", "user", "wrote"))

    def broken(*_: object) -> list[object]:
        raise RuntimeError(quoted)

    client.engine.script = broken
    caplog.set_level(logging.INFO)
    assert (await client.complete()).status == 500
    assert "RuntimeError" in caplog.text
    assert "test_observer.py" in caplog.text  # where
    assert "user wrote" not in caplog.text


async def test_a_fault_in_the_middle_of_an_answer_tells_the_http_server_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """uvicorn logs what it catches, text and all."""

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("what the user wrote")

    async def send(_: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/a\nb", "headers": []}
    with pytest.raises(AnswerCutOffError) as cut:
        await Observer(app, {}, ())(scope, None, send)
    logged = "".join(traceback.format_exception(cut.value)) + caplog.text
    assert "user wrote" not in logged.replace('raise RuntimeError("what the user wrote")', "")  # this test's own line
    assert "RuntimeError" in caplog.text
    assert "POST /a%0Ab, request " in caplog.text
    assert str(cut.value) in caplog.text  # the request's id


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/pin_prefix", "/v1/responses"])
async def test_a_client_that_leaves_in_its_body_is_no_fault(
    path: str, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(engine)
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": [], "root_path": "", "scheme": "http", "client": None, "server": None}  # fmt: skip
    await client.app(scope, receive, send)
    assert (sent, caplog.text) == ([], "")
    assert client.state.metrics.http_requests == {(path, "POST", "499"): 1}


async def test_http_requests_are_counted_by_route(client: Client) -> None:
    for path in ("/v1/models/Tiny", "/v1/models/none", "/a", "/b"):
        await client.call("GET", path)
    await client.call("BREW", "/a")
    text = (await client.call("GET", "/metrics")).body.decode()
    expected = [
        '{method="GET",route="/v1/models/{model:path}",status="200"} 1.0',
        '{method="GET",route="/v1/models/{model:path}",status="404"} 1.0',
        '{method="GET",route="other",status="404"} 2.0',
        '{method="other",route="other",status="404"} 1.0',
    ]
    assert all("pinnate:http_requests_total" + line in text for line in expected), text


async def test_pages_of_allowed_origins_may_call(engine: FakeEngine) -> None:
    client = make_client(engine, api_keys=(KEY,), allowed_origins=("https://a.example",))
    asks = {"origin": "https://a.example", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os"}  # fmt: skip
    preflight = await client.call("OPTIONS", "/v1/completions", headers=asks)
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in preflight.headers
    refused = await client.post("/v1/completions", {"prompt": "x"}, headers={"origin": "https://a.example"})
    assert refused.status == 401  # a page that may call still needs the key
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    assert "X-Request-Id" in refused.headers["access-control-expose-headers"]
    assert not engine.submitted
    other = await client.call("OPTIONS", "/v1/completions", headers=asks | {"origin": "https://b.example"})
    assert (other.status, "access-control-allow-origin" in other.headers) == (400, False)
    plain = await client.call("OPTIONS", "/v1/completions", headers={"origin": "https://a.example"})
    assert plain.status == 401  # not a preflight


async def test_no_cors_unless_asked(client: Client) -> None:
    answer = await client.call("GET", "/v1/models", headers={"origin": "https://a.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_stream_that_fails_says_so_in_its_line(
    engine: FakeEngine, lines: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    quoted = " ".join(("what", "the", "user", "wrote"))
    engine.script = lambda *_: [spell("a")[0], RuntimeError(quoted)]
    answer = await logged(engine).complete(stream=True)
    assert answer.events()[-1]["error"]["code"] == "internal_error"
    assert [(line["status"], line["error"], line["finish_reason"]) for line in lines] == [
        (200, "internal_error", "abort")
    ]
    assert "RuntimeError" in caplog.text
    assert quoted not in caplog.text
