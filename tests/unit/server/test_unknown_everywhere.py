"""Unknown fields on every route that takes any, and unknown parameters of queries: a warning in the answer and the
log, or a refusal where the server is strict; never silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pinnate.server.operations import operations
from tests.unit.server.conftest import Answer, Client, FakeEngine, make_client
from tests.unit.server.test_unknown_fields import UNKNOWN as OPENAI
from tests.unit.server.test_whole_numbers import scoring_engine

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"free": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{**TEXT, "y": 1}], "z": 1}
SCHEMA = {"type": "object", "free": 1}
# route, body, the paths that are not known
UNKNOWN: list[tuple[str, dict[str, Any], list[str]]] = [
    *OPENAI,
    (
        "/v1/responses",
        {"input": "hi", "x": 1, "text": {"y": 1, "format": {"type": "text", "z": 1}}},
        ["x", "text.y", "text.format.z"],
    ),
    ("/v1/responses", {"input": "hi", "reasoning": {"x": 1}, "metadata": {"free": "1"}}, ["reasoning.x"]),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x", "a": 1}], "b": 1},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x", "c": 1}], "d": 1},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "e": 1},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": "", "f": 1}],
                },
            ]
        },
        [
            "input[0].b",
            "input[0].content[0].a",
            "input[1].d",
            "input[1].summary[0].c",
            "input[2].e",
            "input[3].output[0].f",
        ],
    ),
    (
        "/v1/responses",
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "x": 1}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f", "y": 1}],
                "z": 1,
            },
        },
        ["tools[0].x", "tool_choice.z", "tool_choice.tools[0].y"],
    ),
    (
        "/v1/responses",
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {"type": "function", "name": "f", "x": 1},
        },
        ["tool_choice.x"],
    ),
    ("/v1/responses/input_tokens", {"input": "hi", "x": 1, "text": {"y": 1}}, ["x", "text.y"]),
    ("/v1/messages", {"messages": [{**MESSAGES[0], "x": 1}], "max_tokens": 5, "y": 1}, ["y", "messages[0].x"]),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{**TEXT, "x": 1, "cache_control": {"type": "ephemeral", "a": 1}}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "b": 1}, {**USE, "c": 1}]},
                {"role": "user", "content": [RESULT]},
            ],
            "max_tokens": 5,
            "system": [{**TEXT, "x": 1}],
            "cache_control": {"type": "ephemeral", "d": 1},
        },
        [
            "cache_control.d",
            "system[0].x",
            "messages[0].content[0].cache_control.a",
            "messages[0].content[0].x",
            "messages[1].content[0].b",
            "messages[1].content[1].c",
            "messages[2].content[0].z",
            "messages[2].content[0].content[0].y",
        ],
    ),
    (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "max_tokens": 2000,
            "tools": [{"name": "f", "input_schema": SCHEMA, "x": 1}],
            "tool_choice": {"type": "auto", "y": 1},
            "thinking": {"type": "disabled", "z": 1},
            "metadata": {"v": 1},
        },
        ["metadata.v", "tools[0].x", "tool_choice.y", "thinking.z"],
    ),
    (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "max_tokens": 5,
            "output_config": {"x": 1, "format": {"type": "json_schema", "schema": SCHEMA, "y": 1}},
        },
        ["output_config.x", "output_config.format.y"],
    ),
    ("/v1/messages/count_tokens", {"messages": [{**MESSAGES[0], "x": 1}], "y": 1}, ["y", "messages[0].x"]),
    (
        "/generate",
        {"text": "hi", "x": 1, "sampling_params": {"y": 1}, "custom_labels": {"free": 1}},
        ["x", "sampling_params.y"],
    ),
    ("/generate", {"text": ["hi", "ho"], "sampling_params": [{}, {"y": 1}]}, ["sampling_params[1].y"]),
    ("/abort_request", {"rid": "r", "x": 1}, ["x"]),
    *(
        (path, {"query": "q", "items": ["a"], "label_token_ids": [5], "x": 1}, ["x"])
        for path in ("/score", "/v1/score", "/generative_scoring")
    ),
    ("/tokenize", {"messages": [{**MESSAGES[0], "x": 1}], "y": 1}, ["y", "messages[0].x"]),
    ("/pin_prefix", {"prompt": "hi", "x": 1}, ["x"]),
    ("/debug/match", {"prompt": "hi", "x": 1}, ["x"]),
    ("/flush_cache", {"x": 1}, ["x"]),
    ("/resync_kv_events", {"x": 1}, ["x"]),
    ("/debug/check_integrity", {"x": 1}, ["x"]),
]
# Those that generate: in a stream the first event says it.
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate")
ELSEWHERE = {
    "/v1/batches", "/v1/batches/{batch_id}/cancel", "/v1/files",  # tests/unit/server/batches
    "/v1/responses/{id}/cancel", "/ping",  # below
}  # fmt: skip
IDS = [f"{path} {' '.join(names)}"[:70] for path, _, names in UNKNOWN]


def make(path: str, **settings: Any) -> Client:
    engine = scoring_engine() if "scor" in path else FakeEngine(max_model_len=4000)
    engine.replies = [{"pinned": True, "report": [2, 0, "new_text", 0, 0]}]
    return make_client(engine, **settings)


def warned(answer: Answer) -> list[str]:
    """The params of the warnings, wherever the API has room for them."""
    given = answer.json[0] if isinstance(answer.json, list) else answer.json
    return [warning["param"] for warning in given.get("meta_info", given)["warnings"]]


def test_no_route_is_left_out() -> None:
    posts = {name.partition(" ")[2] for name in operations() if name.startswith(("POST ", "PUT "))}
    assert {path for path, _, _ in UNKNOWN} | ELSEWHERE == posts


@pytest.mark.parametrize(("path", "body", "names"), UNKNOWN, ids=IDS)
async def test_answer_and_log_name_each(
    path: str, body: dict[str, Any], names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    answer = await make(path).post(path, body)
    assert answer.status == 200, answer.body
    assert sorted(warned(answer)) == sorted(names)
    (line,) = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert all(repr(name) in line for name in names)


@pytest.mark.parametrize(("path", "body", "names"), UNKNOWN, ids=IDS)
async def test_strict_server_refuses(path: str, body: dict[str, Any], names: list[str]) -> None:
    answer = await make(path, strict=True).post(path, body)
    error = answer.json["error"]
    assert answer.status == 400
    assert any(error["message"] == f"unknown field: {name}" for name in names)
    if answer.json.get("type") != "error":  # Anthropic's have no param
        assert error["param"] in names


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [case for case in UNKNOWN if case[0] in STREAMED and not isinstance(case[1].get("text"), list)],
)
async def test_streams_say_it_once(path: str, body: dict[str, Any], names: list[str]) -> None:
    answer = await make(path).post(path, {**body, "stream": True})
    assert answer.status == 200, answer.body
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    first = events[0].get("response") or events[0].get("message") or events[0].get("meta_info") or events[0]
    assert sorted(warning["param"] for warning in first["warnings"]) == sorted(names)
    if path != "/v1/responses":  # whose events show the whole response
        assert not any("warnings" in json.dumps(event) for event in events[1:])


@pytest.mark.parametrize("name", sorted(operations()))
async def test_unknown_parameters_of_a_query(name: str, caplog: pytest.LogCaptureFixture) -> None:
    method, _, path = name.partition(" ")
    path = path.replace("{model:path}", "Tiny").replace("{", "").replace("}", "")
    answer = await make_client(FakeEngine()).call(method, path, query="no_such=1")
    if answer.status == 200:
        assert answer.headers["x-warnings"] == "unknown field: no_such; it has no effect"
    assert "without effect: ['no_such']" in caplog.text
    strict = await make_client(FakeEngine(), strict=True).call(method, path, query="no_such=1")
    assert strict.status == 400
    assert "unknown field: no_such" in strict.json["error"]["message"]


async def test_known_parameters_of_a_query(client: Client) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 5}).encode()
    answer = await client.call("POST", "/v1/messages", body, query="beta=true")
    assert (answer.status, "x-warnings" in answer.headers) == (200, False)
    made = (await client.post("/v1/responses", {"input": "hi"})).json["id"]
    for query in ("stream=false&include[]=message.output_text.logprobs&include_obfuscation=true", "stream=False"):
        answer = await client.call("GET", f"/v1/responses/{made}", query=query)
        assert (answer.status, "x-warnings" in answer.headers) == (200, False)
    bad = await client.call("GET", f"/v1/responses/{made}", query="stream=maybe")
    assert (bad.status, bad.error["param"]) == (400, "stream")
    forged = await client.call("GET", "/load", query="a%0d%0aSet-Cookie:%20b=1")
    assert forged.headers["x-warnings"] == "unknown field: a%0D%0ASet-Cookie%3A%20b; it has no effect"


async def test_cancelling_a_response(client: Client) -> None:
    made = (await client.post("/v1/responses", {"input": "hi", "background": True})).json["id"]
    answer = await client.post(f"/v1/responses/{made}/cancel", {"x": 1})
    assert (answer.status, warned(answer)) == (200, ["x"])
    assert "warnings" not in (await client.post(f"/v1/responses/{made}/cancel", b"")).json
