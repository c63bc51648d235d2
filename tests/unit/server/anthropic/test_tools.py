"""Tools and thinking in the Messages API: what reaches the chat, which blocks and events come back."""

from __future__ import annotations

from typing import Any

import pytest

from pinnate.core.request import FinishReason
from pinnate.engine.output_processor import OutputDelta
from tests.unit.server.anthropic.helpers import events, joined, message
from tests.unit.server.conftest import EOS, Answer, Client
from tests.unit.server.test_chat_tools import KNOWING, TEXT, THINKING, client_of, grammar_of, prompt_of

ADD = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"a": {}}},
    "cache_control": {"type": "ephemeral"},
}
PING = {"name": "ping", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}
THOUGHT = "I must add.\n</think>\n" + TEXT


async def create(client: Client, *messages: Any, **fields: Any) -> Answer:
    given = list(messages) or [{"role": "user", "content": "hi"}]
    return await client.post("/v1/messages", {"max_tokens": 2000, "messages": given, **fields})


@pytest.mark.parametrize("size", [1, 9, 1000])
async def test_thinking_text_and_two_uses(size: int) -> None:
    client = client_of("", THINKING)
    deltas = [OutputDelta(0, THOUGHT[at : at + size], [1]) for at in range(0, len(THOUGHT), size)]
    client.engine.script = lambda *_: [*deltas, OutputDelta(0, "", [EOS], finish_reason=FinishReason.STOP)]
    answer = await create(client, tools=[ADD, PING])
    shown = message(answer.json)
    assert [block.type for block in shown.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, add, ping = shown.content
    assert (thinking.thinking, text.text) == ("I must add.", "Sure.")
    assert (add.name, add.input, ping.name, ping.input) == ("add", {"a": 1}, "ping", {})
    assert add.id != ping.id
    assert shown.stop_reason == "tool_use"
    seen = events(await create(client, tools=[ADD, PING], stream=True))
    assert _anonymous(joined(seen)) == _anonymous(answer.json)
    kinds = [event.content_block.type for event in seen if getattr(event, "type", "") == "content_block_start"]
    assert kinds == [block.type for block in shown.content]
    if size == 1:
        assert shown.usage.output_tokens_details.thinking_tokens == len("I must add.")


def _anonymous(shown: dict[str, Any]) -> dict[str, Any]:
    return {**shown, "id": "", "content": [{**block, "id": ""} for block in shown["content"]]}


async def test_a_use_cut_short() -> None:
    client = client_of("")
    cut = TEXT[: TEXT.index("1}")] + '"x'
    client.engine.script = lambda *_: [OutputDelta(0, cut, [1], finish_reason=FinishReason.LENGTH)]
    shown = message((await create(client, tools=[ADD])).json)
    assert shown.content[-1].input == {"a": "x"}
    assert shown.stop_reason == "model_context_window_exceeded"


async def test_results_go_back() -> None:
    client = client_of(TEXT)
    first = (await create(client, tools=[ADD, PING])).json
    results = [
        {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "2"},
        {"type": "tool_result", "tool_use_id": first["content"][2]["id"], "content": [{"type": "text", "text": "3"}],
         "is_error": True},
        {"type": "text", "text": "go on"},
    ]  # fmt: skip
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first["content"]}]
    answer = await create(client, *turns, {"role": "user", "content": results}, tools=[ADD, PING])
    assert answer.status == 200
    prompt = prompt_of(client)
    assert prompt.startswith("[user]hi[assistant]Sure.1")
    assert "[tool]2[tool]3[user]go on" in prompt
    assert prompt.endswith("[assistant]")


async def test_choices() -> None:
    client = client_of(TEXT)
    await create(client, tools=[ADD, PING])
    assert grammar_of(client) is None
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        await create(client, tools=[ADD, PING], tool_choice=choice)
        assert grammar_of(client) is not None
    await create(client, tools=[ADD, PING], tool_choice={"type": "none"})
    assert "ping" not in prompt_of(client)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    shown = message((await create(client, tools=[ADD, PING], tool_choice=one)).json)
    assert [block.type for block in shown.content] == ["text", "tool_use"]


async def test_what_the_chat_refuses_is_said_in_this_apis_words() -> None:
    for fields, named in (
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "absent"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"effort": "low"}}, ""),
    ):
        answer = await create(client_of("", KNOWING), **fields)
        assert answer.status == (400 if named else 200)
        assert named in str(answer.json)
        assert "function" not in str(answer.json)


async def test_formats_and_thinking() -> None:
    client = client_of("{}", KNOWING)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await create(client, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "max"})
    assert client.engine.submitted[-1].params.structured_output is not None
    assert "<tool_call>xhigh" in prompt_of(client)
    enabled = {"type": "enabled", "budget_tokens": 1024}
    warned = await create(client, thinking=enabled)
    assert [warning["param"] for warning in warned.json["warnings"]] == ["thinking"]
    assert "warnings" not in (await create(client_of("x", THINKING), thinking=enabled)).json
