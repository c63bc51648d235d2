"""A real server with keys, TLS, JSON logs, traces and all metrics at once; what it refuses to start with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pinnate.server.auth import namespace
from tests.e2e.conftest import MODEL
from tests.e2e.harness import Server
from tests.unit.server.test_tracing import Collector

KEY, ADMIN = "k-3f9a-secret-key", "admin-77-secret"
SECRET = "the quick brown secret"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


class TLSServer(Server):
    """As Server, over TLS with a certificate that clients check."""

    context: ssl.SSLContext

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}", method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=30, context=self.context) as answer:
                return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()

    def health(self) -> int:
        try:
            return self.ask("GET", "/health")[0]
        except OSError:
            return 0


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def make(kind: type[Server], *flags: str) -> Server:
        started.append(kind(tmp_path, "--executor", "simulated", "--max-model-len", "512", *flags))
        return started[-1]

    yield make
    for server in started:
        server.stop()


def test_all_of_it_at_once(
    start: Callable[..., Server], certificate: tuple[Path, Path], collector: Collector, tmp_path: Path
) -> None:
    cert, key = certificate
    keys = tmp_path / "keys"
    keys.write_text(f"# clients\n{KEY}\n")
    server = start(
        TLSServer, "--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--api-key-file", str(keys),
        "--admin-api-key", ADMIN, "--log-format", "json", "--metrics-compat", "both",
        "--otlp-traces-endpoint", collector.url,
    )  # fmt: skip
    assert isinstance(server, TLSServer)
    server.context = ssl.create_default_context(cafile=str(cert))
    server.wait_until(200)
    bearer, admin = f"Bearer {KEY}", f"Bearer {ADMIN}"

    asked = {"prompt": SECRET, "max_tokens": 4, "ignore_eos": True}
    status, headers, body = server.ask("POST", "/v1/completions", asked, Authorization=bearer, X_Request_Id="mine-1")
    assert (status, headers["x-request-id"]) == (200, "mine-1")
    status, headers, _ = server.ask("POST", "/v1/completions", {}, Authorization=bearer, X_Request_Id="mine-2")
    assert (status, headers["x-request-id"]) == (400, "mine-2")
    assert server.ask("POST", "/v1/completions", asked)[0] == 401
    assert server.ask("GET", "/server_info", Authorization=bearer)[0] == 403
    info = server.ask("GET", "/server_info", Authorization=admin)
    assert info[0] == 200
    check_metrics(server.ask("GET", "/metrics", Authorization=bearer)[2].decode())

    server.signal()
    assert server.exit_code() == 0
    check_spans(collector, json.loads(body))
    check_log(server.text(), json.loads(body))
    assert KEY not in info[2].decode() + server.text()
    assert ADMIN not in info[2].decode() + server.text()


def check_metrics(text: str) -> None:
    values = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples if "le" not in s.labels}
    for name in ("pinnate:", "vllm:", "sglang:"):
        assert values[name + "generation_tokens_total"] == 4
        assert values[name + "time_to_first_token_seconds_count"] == 1
    assert values["vllm:request_queue_time_seconds_count"] == values["vllm:request_prefill_time_seconds_count"] == 1
    steps = values["pinnate:engine_steps_total"]
    assert values["pinnate:engine_step_tokens_count"] == values["vllm:iteration_tokens_total_count"] == steps > 0
    assert values["pinnate:num_requests_running"] == values["sglang:num_running_reqs"] == 0
    assert 0 <= values["pinnate:engine_heartbeat_age_seconds"] < 4


def check_spans(collector: Collector, answer: dict[str, Any]) -> None:
    by_id = {
        next(a.value.string_value for a in span.attributes if a.key == "http.request.id"): span
        for span in collector.spans
    }
    first = {a.key: a.value for a in by_id["mine-1"].attributes}
    assert first["gen_ai.response.id"].string_value == answer["id"]
    assert first["gen_ai.usage.output_tokens"].int_value == 4
    assert "mine-2" in by_id
    assert SECRET not in str(collector.spans)


def check_log(text: str, answer: dict[str, Any]) -> None:
    """Every line of the server and its engine is a JSON object."""
    lines = [json.loads(line) for line in text.splitlines()]
    (start,) = (line for line in lines if line["message"] == "serving")
    assert start["url"].startswith("https://")
    assert start["max_model_len"] == 512
    requests = {line["request_id"]: line for line in lines if line.get("message") == "request"}
    line = requests["mine-1"]
    assert (line["id"], line["status"], line["output_tokens"]) == (answer["id"], 200, 4)
    assert (line["key"], line["finish_reason"]) == (namespace(KEY), "length")
    assert 0 <= line["queue_seconds"] < line["seconds"]
    assert 0 < line["prefill_seconds"] <= line["first_token_seconds"] <= line["seconds"]
    assert requests["mine-2"]["error"] == "invalid_request"
    statuses = [line["status"] for line in requests.values() if line["route"] != "/health"]  # polled while it started
    assert sorted(statuses) == [200, 200, 400, 401, 403]  # no line for /metrics
    assert SECRET not in text


HELD = "xylophone-4711"  # in every part of a request that is a user's


def requests_that_hold_it() -> list[tuple[str, Any]]:
    message = {"role": "user", "content": HELD}
    function = {
        "name": "f",
        "description": HELD,
        "parameters": {"type": "object", "properties": {HELD: {"enum": [HELD]}}},
    }
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "required": [HELD]}}}
    wrong = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": HELD}}}
    chat: dict[str, Any] = {"messages": [message], "max_tokens": 3}
    return [
        ("/v1/completions", {"prompt": HELD, "max_tokens": 3, "stop": [HELD], "bad_words": [HELD], "echo": True}),
        ("/v1/completions", {"prompt": HELD * 5000, "max_tokens": 3}),
        ("/v1/completions", {"prompt": HELD, "max_tokens": 3, "stream": True, "unknown": HELD, "user": HELD}),
        ("/v1/completions", {"prompt": HELD, "temperature": HELD}),
        ("/v1/completions", {"prompt": HELD, "model": HELD}),
        ("/v1/completions", {"prompt": HELD, "structured_outputs": {"regex": HELD + "("}}),
        ("/v1/completions", f'{{"prompt": "{HELD}", '.encode()),
        (
            "/v1/chat/completions",
            chat | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        ),
        ("/v1/chat/completions", chat | {"response_format": schema}),
        ("/v1/chat/completions", chat | {"response_format": wrong}),
        ("/v1/chat/completions", chat | {"messages": [message | {"role": HELD}]}),
        ("/v1/chat/completions", chat | {"chat_template_kwargs": {"x": HELD}}),
        ("/v1/messages", chat | {"model": MODEL, "system": HELD}),
        ("/v1/responses", {"input": HELD, "max_output_tokens": 3, "instructions": HELD, "metadata": {"a": HELD}}),
        ("/generate", {"text": HELD, "sampling_params": {"max_new_tokens": 3, "stop": HELD}}),
        ("/score", {"query": HELD, "items": [HELD], "label_token_ids": [1]}),
        ("/tokenize", {"prompt": HELD}),
        (f"/v1/models/{HELD}", None),
        (f"/v1/completions?key={HELD}", {"prompt": "a", "max_tokens": 1}),
    ]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_level_tells_what_requests_hold(log_format: str, start: Callable[..., Server]) -> None:
    """Good ones, refused ones, and those that an engine died under. A path that no route knows is not a secret, nor is
    a model's name."""
    server = start(Server, "--log-level", "debug", "--log-format", log_format, "--access-log").wait_until(200)
    statuses = [status_of(server, path, body) for path, body in requests_that_hold_it()]
    assert {200, 400, 404} <= set(statuses) <= {200, 400, 404}
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"{HELD} /{HELD} HTTP/9\r\n\r\n".encode())
        assert b"400" in client.recv(4096)
    os.kill(json.loads(ask(server, "/server_info"))["engine"]["pid"], signal.SIGKILL)
    server.wait_until(503)
    server.signal()
    assert server.exit_code() == 0
    told = [line for line in server.text().splitlines() if HELD in line]
    assert [line for line in told if f"/v1/models/{HELD}" not in line] == []


def status_of(server: Server, path: str, body: Any) -> int:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(("level", "env"), [("debug", "error"), ("warning", "debug"), (None, "debug")])
def test_the_engines_process_logs_as_the_flags_say(
    level: str | None, env: str, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its level and format come with its settings, a restart included; its variables do not count once there are flags.
    What it writes past its logging, here the last words of a crash, is a JSON line too."""
    monkeypatch.setenv("PINNATE_LOG_LEVEL", env)
    server = start(Server, "--log-format", "json", "--no-access-log", *(["--log-level", level] if level else []))
    server.wait_until(200)
    os.kill(json.loads(ask(server, "/server_info"))["engine"]["pid"], signal.SIGSEGV)  # faulthandler writes plain text
    server.wait_until(503)
    server.wait_until(200)
    server.signal()
    assert server.exit_code() == 0
    lines = [json.loads(line) for line in server.text().splitlines()]
    ready = [line for line in lines if line.get("process") == "engine" and line["message"].startswith("ready after")]
    assert len(ready) == (2 if (level or env) == "debug" else 0)
    if level == "warning":
        assert {line["level"] for line in lines} <= {"warning", "error"}
    written = [line["message"] for line in lines if line["logger"] == "pinnate.engine.child"]
    assert any("Fatal Python error: Segmentation fault" in message for message in written)
    assert any("killed by SIGSEGV" in line["message"] for line in lines)


def test_counters_grow_over_the_death_of_an_engine(start: Callable[..., Server]) -> None:
    server = start(Server, "--metrics-compat", "both").wait_until(200)
    seen = [read_counters(server)]
    for again in (False, True):
        ask(server, "/v1/completions", {"prompt": "a b c", "max_tokens": 5, "ignore_eos": True})
        seen.append(read_counters(server))
        if not again:
            os.kill(json.loads(ask(server, "/server_info"))["engine"]["pid"], signal.SIGKILL)
            server.wait_until(503)
            seen.append(read_counters(server))
            server.wait_until(200)
            seen.append(read_counters(server))
    for before, after in pairwise(seen):
        assert [name for name, value in before.items() if after[name] < value] == []
    for name in ("pinnate:", "vllm:", "sglang:"):
        tokens = [values[key] for values in seen for key in values if key.startswith(name + "generation_tokens_total")]
        assert tokens == [0, 5, 5, 5, 10]
    assert seen[-1]["pinnate:engine_restarts_total{}"] == 1


def ask(server: Server, path: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def read_counters(server: Server) -> dict[str, float]:
    families = list(text_string_to_metric_families(ask(server, "/metrics").decode()))
    growing = [f for f in families if f.type in ("counter", "histogram") and not f.name.startswith("process")]
    return {f"{s.name}{s.labels or '{}'}": s.value for f in growing for s in f.samples}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--ssl-certfile", "{cert}"), "--ssl-keyfile"),
        (("--ssl-certfile", "{cert}", "--ssl-keyfile", "/no/such"), "--ssl-keyfile"),
        (("--ssl-certfile", "{key}", "--ssl-keyfile", "{cert}"), "--ssl-certfile"),
        (("--api-key-file", "/no/such"), "--api-key-file"),
        (("--otlp-traces-endpoint", "localhost"), "--otlp-traces-endpoint"),
    ],
)
def test_what_cannot_be_honoured_is_said_in_one_line(
    flags: tuple[str, ...], named: str, certificate: tuple[Path, Path], start: Callable[..., Server]
) -> None:
    cert, key = certificate
    server = start(Server, *(flag.format(cert=cert, key=key) for flag in flags))
    assert server.exit_code(30) == 2
    (line,) = server.text().splitlines()
    assert named in line
