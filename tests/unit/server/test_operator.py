"""Health, models, key check, metrics and the small routes."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pinnate.core.errors import ConfigError
from pinnate.core.messages import EngineStats
from pinnate.server.metrics import Metrics
from pinnate.server.settings import ServerSettings, model_names
from pinnate.server.state import Phase
from tests.unit.server.conftest import Client, FakeEngine, make_client, spell

KEY = "k-secret"


def samples(text: bytes) -> dict[str, float]:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


async def test_health_follows_the_engine(client: Client) -> None:
    assert (await client.call("GET", "/health")).status == 200
    client.engine.state = "dead"
    for answer in (await client.call("GET", "/health"), await client.complete(), await client.chat(stream=True)):
        assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    client.engine.state = "ready"
    client.state.phase = Phase.SHUTTING_DOWN
    answer = await client.complete()
    assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert answer.headers["retry-after"] == "1"


async def test_before_the_engine_is_there() -> None:
    client = make_client(None)
    for path in ("/health", "/v1/models", "/server_info"):
        answer = await client.call("GET", path)
        assert (answer.status, answer.error["code"]) == (503, "starting")
    assert (await client.complete()).status == 503
    assert (await client.call("GET", "/metrics")).status == 200


async def test_a_full_queue_is_429_and_says_when_to_return(client: Client) -> None:
    client.engine.full = True
    for stream in (True, False):
        answer = await client.complete(stream=stream)
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (429, "queue_full", "7")
    assert client.state.metrics.rejected == {"queue_full": 2}
    assert not client.state.metrics.finished


async def test_models(client: Client) -> None:
    card = (await client.call("GET", "/v1/models")).json["data"][0]
    assert card == (await client.call("GET", "/v1/models/Tiny")).json
    assert (card["id"], card["object"], card["max_model_len"]) == ("Tiny", "model", 100)
    assert (await client.complete(model="Tiny")).json["model"] == "Tiny"


async def test_served_names(engine: FakeEngine) -> None:
    client = make_client(engine, served_model_name=("org/big", "alias"))
    assert [m["id"] for m in (await client.call("GET", "/v1/models")).json["data"]] == ["org/big", "alias"]
    assert (await client.call("GET", "/v1/models/org/big")).status == 200
    assert (await client.complete()).json["model"] == "org/big"
    assert (await client.complete(model="alias")).json["model"] == "alias"
    assert (await client.complete(model="Tiny")).status == 404


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/a/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("/a/llama-q4_k_m.gguf", "llama"),
        ("x-BF16.gguf", "x"),
        ("v1.5.gguf", "v1.5"),
        ("/models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
    ],
)
def test_default_names(model: str, name: str) -> None:
    assert model_names(model, ()) == (name,)


@pytest.mark.parametrize("bad", [{"port": -1}, {"port": 70000}, {"shutdown_timeout": -1.0}, {"api_keys": (" ",)}])
def test_settings_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--"):
        ServerSettings(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/nothing"), ("POST", "/v1/completions/"), ("POST", "//v1/completions")]
)
async def test_unknown_routes_are_404(client: Client, method: str, path: str) -> None:
    answer = await client.call(method, path)
    assert (answer.status, answer.error["code"]) == (404, "not_found")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_other_methods_are_405(client: Client, method: str, path: str) -> None:
    answer = await client.call(method, path)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer nope", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer kéy"],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/flush_cache"),
     ("GET", "/version"), ("GET", "/no-such-route"), ("GET", "//health"), ("POST", "/health"), ("GET", "/health/")],
)  # fmt: skip
async def test_nothing_passes_without_the_key(engine: FakeEngine, header: str, method: str, path: str) -> None:
    client = make_client(engine, api_keys=(KEY,))
    answer = await client.call(method, path, b'{"prompt": "hi"}', headers={"authorization": header})
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert KEY not in answer.body.decode()
    assert not engine.submitted


async def test_the_key_opens_and_health_needs_none(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = make_client(engine, api_keys=(KEY,))
    assert (await client.call("GET", "/health")).status == 200
    for scheme in ("Bearer", "bearer"):
        headers = {"authorization": f"{scheme} {KEY}"}
        assert (await client.post("/v1/completions", {"prompt": "hi"}, headers=headers)).status == 200
    info = await client.call("GET", "/server_info", headers={"authorization": f"Bearer {KEY}"})
    assert info.json["server"]["api_keys"] == 1
    assert info.json["engine"] == {"dtype": "float32", "max_num_seqs": 64}
    assert KEY not in info.body.decode() + caplog.text


async def test_flush_cache_is_the_engines(client: Client) -> None:
    assert (await client.call("POST", "/flush_cache")).json == {"freed_pages": 3}
    assert client.engine.commands == ["flush_cache"]


async def test_tokenize_and_back(client: Client) -> None:
    body = (await client.post("/tokenize", {"prompt": "hď", "return_token_strs": True})).json
    assert body["tokens"] == [104, 0xC4, 0x8F]
    assert (body["count"], body["max_model_len"], body["token_strs"][0]) == (3, 100, "h")
    assert (await client.post("/detokenize", {"tokens": body["tokens"]})).json == {"prompt": "hď"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert bytes((await client.post("/tokenize", chat)).json["tokens"]) == b"[user]hi[assistant]"
    for bad in ({}, {"prompt": "x", **chat}):
        assert (await client.post("/tokenize", bad)).status == 400
    assert (await client.post("/detokenize", {"tokens": [999]})).error["param"] == "tokens"
    assert (await client.call("GET", "/version")).json["version"]


async def test_metrics_text(client: Client) -> None:
    await client.complete(n=1)
    await client.complete(prompt="")
    client.engine.stats = EngineStats(
        num_running=2, num_waiting=3, num_pages=10, num_free_pages=4, num_cached_pages=1, prompt_tokens=7,
        generation_tokens=5, prefix_cache_queries=7, prefix_cache_hits=4, preemptions=1, steps=9,
        kv_committed_bytes=512,
    )  # fmt: skip
    answer = await client.call("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = samples(answer.body)
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_cache_usage_perc": 0.5,
        "kv_committed_bytes": 512,
        "prompt_tokens_total": 7,
        "generation_tokens_total": 5,
        "prefix_cache_queries_total": 7,
        "prefix_cache_hits_total": 4,
        "num_preemptions_total": 1,
        "request_success_total{finished_reason=stop}": 1,
        "requests_rejected_total{code=invalid_request}": 1,
        "time_to_first_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
        "inter_token_latency_seconds_count": 2,
        "request_time_per_output_token_seconds_count": 1,
        "request_prompt_tokens_sum": 2,
        "request_generation_tokens_bucket{le=5.0}": 1,
        "request_generation_tokens_bucket{le=2.0}": 0,
    }
    assert {name: values[f"pinnate:{name}"] for name in expected} == expected


def test_counters_never_fall_when_the_engine_restarts() -> None:
    metrics = Metrics()
    seen = []
    for tokens in (5, 9, 0, 2, 2, 1):
        metrics.record_stats(EngineStats(generation_tokens=tokens, steps=tokens, num_running=tokens))
        values = samples(metrics.text())
        seen.append(values["pinnate:generation_tokens_total"])
        assert values["pinnate:num_requests_running"] == tokens
    assert seen == [5, 9, 9, 11, 11, 12]
    assert values["pinnate:engine_restarts_total"] == 2


async def test_a_fault_of_ours_is_500_without_its_text(client: Client) -> None:
    def broken(*_: object) -> list[object]:
        raise RuntimeError("/secret/path")

    client.engine.script = broken
    answer = await client.complete()
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert b"secret" not in answer.body
    assert client.state.metrics.rejected == {"internal_error": 1}


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping")]
)
async def test_health_follows_the_engines_heartbeat(client: Client, method: str, path: str) -> None:
    assert (await client.call(method, path)).status == 200
    client.engine.heartbeat_age = 3.5  # some beats late: a busy machine
    assert (await client.call(method, path)).status == 200
    client.engine.heartbeat_age = 4.5
    answer = await client.call(method, path)
    assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    client.engine.heartbeat_age = 0.0
    client.state.phase = Phase.SHUTTING_DOWN
    assert (await client.call(method, path)).status == 503


async def test_load_counts_requests_under_way(client: Client) -> None:
    assert (await client.call("GET", "/load")).json == {"server_load": 0}
    gate = asyncio.Event()
    client.engine.script = lambda *_: [gate, *spell("ok")]
    asked = [asyncio.create_task(client.complete()) for _ in range(2)]
    while len(client.engine.streams) < 2:
        await asyncio.sleep(0)
    assert (await client.call("GET", "/load")).json == {"server_load": 2}
    gate.set()
    await asyncio.gather(*asked)
    assert (await client.call("GET", "/load")).json == {"server_load": 0}


async def test_tokenizer_info(client: Client) -> None:
    info = (await client.call("GET", "/tokenizer_info")).json
    template = client.engine.chat_template
    assert template is not None
    assert (info["vocab_size"], info["model_max_length"]) == (client.engine.vocab_size, client.engine.max_model_len)
    assert (info["bos_token"], info["eos_token"], info["chat_template"]) == ("", "", template.source)
    client.engine.chat_template = None
    assert (await client.call("GET", "/tokenizer_info")).json["chat_template"] is None
