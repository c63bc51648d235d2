"""Spans arrive at a collector, as children of the client's, without prompts; a dead collector hurts nobody."""

from __future__ import annotations

import builtins
import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pinnate.core.errors import ConfigError
from pinnate.core.messages import RequestTiming
from pinnate.core.request import FinishReason
from pinnate.engine.output_processor import OutputDelta
from pinnate.server import tracing
from pinnate.server.request_record import RequestRecord
from pinnate.server.settings import ServerSettings
from pinnate.server.tracing import Tracer, check_tracing, traces_url
from tests.unit.server.conftest import Client, FakeEngine, make_client

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """An OTLP collector over HTTP; `spans` as they came."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.paths: list[str] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.paths.append(self.path)
                for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append({a.key: a.value.string_value for a in part.resource.attributes})
                    collector.spans += [span for scope in part.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


def end(client: Client) -> None:
    for close in client.state.closers:
        close()


def plain(span: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


async def test_a_span_arrives_with_its_attributes(engine: FakeEngine, collector: Collector) -> None:
    client = make_client(engine, otlp_traces_endpoint=collector.url)
    engine.script = lambda *_: [
        OutputDelta(0, "a", [97], num_cached_tokens=3, timing=RequestTiming(0.25, 0.5)),
        OutputDelta(0, "b", [98], finish_reason=FinishReason.LENGTH),
    ]
    before = time.time_ns()
    answer = await client.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "secret prompt"}], "max_tokens": 2, "temperature": 0.5, "seed": 7,
         "stop": ["secret stop"]},
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"},
    )  # fmt: skip
    assert answer.status == 200
    end(client)
    assert collector.paths == ["/v1/traces"]
    assert collector.resources[0]["service.name"] == "pinnate"
    (span,) = collector.spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("chat Tiny", TRACE, PARENT)
    assert before <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns() + 10**9
    found = plain(span)
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "pinnate", "gen_ai.request.model": "Tiny",
        "gen_ai.response.id": answer.json["id"], "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.output_tokens": 2, "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.input_tokens": answer.json["usage"]["prompt_tokens"],
        "gen_ai.request.max_tokens": 2, "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 7,
        "gen_ai.latency.time_in_queue": 0.25, "gen_ai.latency.time_in_model_prefill": 0.5,
        "http.route": "/v1/chat/completions", "http.response.status_code": 200, "http.request.id": "mine",
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    assert 0 <= found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"] < 60
    assert "secret" not in str(span)


def in_memory() -> tuple[Tracer, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return Tracer(SimpleSpanProcessor(exporter)), exporter


def record(**fields: Any) -> RequestRecord:
    given = {"request_id": "r", "has_given_id": False, "method": "POST", "path": "/x", "route": "/x", "status": 200}
    return RequestRecord(**(given | fields))


def test_faults_are_marked_and_reads_are_no_spans() -> None:
    tracer, exporter = in_memory()
    for fields in (
        {"status": 500, "error_code": "engine_error"}, {"status": 400, "error_code": "invalid_request"},
        {"status": 499}, {"method": "GET"}, {"route": None},
    ):  # fmt: skip
        tracer(record(**fields))
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["POST /x"] * 3
    assert [span.attributes["error.type"] for span in spans] == ["engine_error", "invalid_request", "499"]
    assert [span.status.is_ok for span in spans] == [False, True, True]


@pytest.mark.parametrize(
    ("context", "parent"),
    [({}, None), ({"traceparent": "nonsense"}, None), ({"traceparent": f"00-{TRACE}-{PARENT}-01"}, PARENT)],
)
def test_the_clients_span_is_the_parent_if_it_is_one(context: dict[str, str], parent: str | None) -> None:
    tracer, exporter = in_memory()
    tracer(record(trace_context=context))
    (span,) = exporter.get_finished_spans()
    assert (None if span.parent is None else f"{span.parent.span_id:016x}") == parent


def test_a_client_that_does_not_sample_gets_no_span() -> None:
    tracer, exporter = in_memory()
    tracer(record(trace_context={"traceparent": f"00-{TRACE}-{PARENT}-00"}))
    assert not exporter.get_finished_spans()


async def test_a_dead_collector_hurts_nobody(engine: FakeEngine) -> None:
    client = make_client(engine, otlp_traces_endpoint="http://127.0.0.1:1")
    for _ in range(3):
        assert (await client.complete()).status == 200
    began = time.monotonic()
    end(client)
    assert time.monotonic() - began < 30  # in the background after CLOSE_SECONDS


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [("http://h:4318", "http://h:4318/v1/traces"), ("http://h:4318/", "http://h:4318/v1/traces"),
     ("https://h/otlp/v1/traces", "https://h/otlp/v1/traces")],
)  # fmt: skip
def test_the_path_is_otlps_own(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("bad", ["localhost:4318", "grpc://h", "http://", "ftp://h/x", ""])
def test_an_endpoint_is_a_url(bad: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        ServerSettings(otlp_traces_endpoint=bad)


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.http"])
def test_without_the_extra_it_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = tracing.find_spec
    monkeypatch.setattr(tracing, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(ConfigError, match=r"pinnate\[otel\]"):
        check_tracing("http://h")
    check_tracing(None)


async def test_nothing_is_imported_unless_asked(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = builtins.__import__, []
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: asked.append(name) or real(name, *rest))
    await make_client(engine).complete()
    assert not [name for name in asked if name.startswith("opentelemetry")]
