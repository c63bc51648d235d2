"""What /v1/responses refuses, by name; and what it says in its own words of what the chat refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.conftest import Client, FakeEngine, make_client

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input[0].summary[0].text"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "mcp"}]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"input": "x", "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "x"}}, "tool_choice.mode"),
    ({"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 1}}, "tool_choice.tools"),
    (
        {"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]}},
        "tool_choice.tools",
    ),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"input": "x", "truncation": "auto"}, "truncation"),
    ({"input": "x", "truncation": "middle"}, "truncation"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "max_output_tokens": 1.5}, "max_output_tokens"),
    ({"input": "x", "include": ["x"]}, "include"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "x", "background": True, "store": False}, "background"),
    ({"input": "x", "stream_options": {}}, "stream_options"),
    ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"input": "x", "reasoning": {"summary": "short"}}, "reasoning.summary"),
    ({"input": "x", "metadata": {str(k): "" for k in range(17)}}, "metadata"),
    ({"input": "x", "metadata": {"k" * 65: ""}}, "metadata"),
    ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"input": "x", "metadata": {"k": 1}}, "metadata.k"),
    ({"input": "x", "temperature": -1}, "temperature"),
    ({"input": "x", "top_logprobs": 21}, "top_logprobs"),
    ({"input": "x", "seed": "s"}, "seed"),
    ({"input": "x", "n": 2}, "n"),
    ({"input": "x", "max_output_tokens": 1000}, "input"),
    ({"input": "x", "stop_token_ids": [999]}, "input"),
    ({"input": "x", "previous_response_id": 5}, "previous_response_id"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
@pytest.mark.parametrize("background", [False, True])
async def test_refusals_name_the_field(body: dict[str, Any], param: str, background: bool) -> None:
    client = make_client(FakeEngine(), strict=True)
    answer = await client.post("/v1/responses", {**({"background": True} if background else {}), **body})
    assert answer.status == 400
    assert answer.error["param"] == param, answer.error
    assert not client.engine.submitted
    assert sum(client.state.metrics.rejected.values()) == 1


async def test_unknown_fields_are_warned_of(client: Client) -> None:
    answer = await client.post("/v1/responses", {"input": [{"role": "user", "content": "x", "mood": 1}], "n": 2})
    assert {warning["param"] for warning in answer.json["warnings"]} == {"input[0].mood", "n"}
    assert "warnings" not in (await client.post("/v1/responses", {"input": "x"})).json


async def test_extras_of_the_chat_are_passed_on(client: Client) -> None:
    await client.post("/v1/responses", {"input": "x", "top_k": 7, "seed": 3, "stop": ["z"], "cache_salt": "s"})
    submitted = client.engine.submitted[0]
    assert (submitted.params.top_k, submitted.params.seed, submitted.params.stop) == (7, 3, ("z",))
    assert submitted.salt == "s"


async def test_queries(client: Client) -> None:
    made = (await client.post("/v1/responses", {"input": "x"})).json["id"]
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=msg", "after")):
        answer = await client.call("GET", f"/v1/responses/{made}/input_items", query=query)
        assert (answer.status, answer.error["param"]) == (400, param)
