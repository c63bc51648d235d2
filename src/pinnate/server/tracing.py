"""Traces: one OpenTelemetry span for each request, sent by OTLP over HTTP.

Knows: OpenTelemetry's SDK (extra `otel`), its conventions for generative AI. Must not know: how requests run. A span is
made when its request has ended, from the record's times, so a running request costs nothing; sending is the SDK's own
thread, whose faults are logged and hurt nobody. Prompts and outputs are in no span.

Attributes: https://opentelemetry.io/docs/specs/semconv/gen-ai/ , and `gen_ai.latency.*` as vLLM names its times.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pinnate
from pinnate.core.errors import ConfigError
from pinnate.core.sampling import SamplingParams
from pinnate.server.request_record import Generation, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

CLOSE_SECONDS = 2.0
TRACES_PATH = "/v1/traces"
_LATENCIES = {
    "queue_seconds": "gen_ai.latency.time_in_queue",
    "first_token_seconds": "gen_ai.latency.time_to_first_token",
    "prefill_seconds": "gen_ai.latency.time_in_model_prefill",
    "decode_seconds": "gen_ai.latency.time_in_model_decode",
}
_CHAT_ROUTES = ("/v1/chat", "/v1/messages", "/v1/responses")


def check_tracing(endpoint: str | None) -> None:
    """
    Raises:
        ConfigError: traces are asked for, and the extra is not installed.
    """
    if endpoint is not None and (find_spec("opentelemetry") is None or not _has_exporter()):
        raise ConfigError("--otlp-traces-endpoint needs the extra otel: pip install 'pinnate[otel]'")


def _has_exporter() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def traces_url(endpoint: str) -> str:
    """The endpoint with OTLP's own path, unless it has one."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else parts._replace(path=TRACES_PATH).geturl()


def make_tracer(endpoint: str) -> Tracer:
    """The imports take some tenths of a second: to be called while the engine loads its model."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return Tracer(BatchSpanProcessor(OTLPSpanExporter(traces_url(endpoint))))


class Tracer:
    """A listener for the Observer. `processor` takes the spans that have ended."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = _provider(processor)
        self._tracer = self._provider.get_tracer("pinnate", pinnate.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind, self._error = SpanKind.SERVER, StatusCode.ERROR

    def __call__(self, record: RequestRecord) -> None:
        if record.method != "POST" or record.route is None:
            return
        parent = self._propagator.extract(record.trace_context) if record.trace_context else None
        ended = record.began_ns + int((time.monotonic() - record.began) * 1e9)
        span = self._tracer.start_span(
            _name(record), context=parent, kind=self._kind, attributes=dict(_attributes(record, ended)),
            start_time=record.began_ns,
        )  # fmt: skip
        if record.status >= 500:
            span.set_status(self._error)
        span.end(ended)

    def close(self) -> None:
        """Sends what is left, for at most CLOSE_SECONDS: a collector that does not answer must not delay an end."""
        closing = threading.Thread(target=self._provider.shutdown, name="pinnate-traces-end", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _provider(processor: SpanProcessor) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    resource = Resource.create({"service.version": pinnate.__version__})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):  # else OTEL_SERVICE_NAME
        resource = resource.merge(Resource({"service.name": "pinnate"}))
    # The server ends it itself, within a limit, not at the interpreter's exit.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def _operation(record: RequestRecord) -> str:
    return "chat" if (record.route or "").startswith(_CHAT_ROUTES) else "text_completion"


def _name(record: RequestRecord) -> str:
    if record.generations:
        return f"{_operation(record)} {record.generations[0].model}"
    return f"POST {record.route}"


def _attributes(record: RequestRecord, ended: int) -> Iterator[tuple[str, Any]]:
    yield "http.request.method", record.method
    yield "http.route", record.route
    yield "http.response.status_code", record.status
    yield "http.request.id", record.request_id
    if record.error_code is not None:
        yield "error.type", record.error_code
    elif record.status >= 400:
        yield "error.type", str(record.status)
    if record.generations:
        yield "gen_ai.operation.name", _operation(record)
        yield "gen_ai.latency.e2e", (ended - record.began_ns) / 1e9
        yield from _of_generations(record.generations)


def _of_generations(generations: list[Generation]) -> Iterator[tuple[str, Any]]:
    first = generations[0]
    yield "gen_ai.provider.name", "pinnate"
    yield "gen_ai.request.model", first.model
    yield "gen_ai.response.model", first.model
    yield "gen_ai.response.id", first.id
    yield "gen_ai.response.finish_reasons", [reason for g in generations for reason in g.finish_reasons]
    yield "gen_ai.usage.input_tokens", sum(g.prompt_tokens for g in generations)
    yield "gen_ai.usage.output_tokens", sum(g.output_tokens for g in generations)
    yield "gen_ai.usage.cache_read.input_tokens", sum(g.cached_tokens for g in generations)
    yield from _of_params(first.params)
    for field, name in _LATENCIES.items():
        seconds = getattr(first, field)
        if seconds is not None:
            yield name, seconds


def _of_params(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    """Stop strings are left out: they may quote a prompt."""
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    if params.n > 1:
        yield "gen_ai.request.choice.count", params.n
    if params.seed is not None:
        yield "gen_ai.request.seed", params.seed
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if params.top_k > 0:
        yield "gen_ai.request.top_k", params.top_k
    if params.frequency_penalty:
        yield "gen_ai.request.frequency_penalty", params.frequency_penalty
    if params.presence_penalty:
        yield "gen_ai.request.presence_penalty", params.presence_penalty
