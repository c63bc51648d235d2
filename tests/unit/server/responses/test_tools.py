"""Tools and reasoning in the Responses API: what reaches the chat, which items and events come back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pinnate.core.request import FinishReason
from pinnate.engine.output_processor import OutputDelta
from tests.unit.server.conftest import EOS, Client
from tests.unit.server.responses.helpers import events, item_list, response, without_ids
from tests.unit.server.test_chat_tools import KNOWING, TEXT, THINKING, client_of, grammar_of, prompt_of

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}, "strict": False}
PING = {"type": "function", "name": "ping"}
THOUGHT = "I must add.\n</think>\n" + TEXT


async def create(client: Client, given: Any = "hi", **fields: Any) -> Any:
    return await client.post("/v1/responses", {"input": given, **fields})


def in_pieces(client: Client, text: str, size: int) -> None:
    deltas = [OutputDelta(0, text[at : at + size], [1]) for at in range(0, len(text), size)]
    client.engine.script = lambda *_: [*deltas, OutputDelta(0, "", [EOS], finish_reason=FinishReason.STOP)]


@pytest.mark.parametrize("size", [1, 9, 1000])
async def test_reasoning_a_message_and_two_calls(size: int) -> None:
    client = client_of("", THINKING)
    in_pieces(client, THOUGHT, size)
    answer = await create(client, tools=[ADD, PING])
    shown = response(answer.json)
    assert [item.type for item in shown.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, add, ping = shown.output
    assert reasoning.content[0].text == "I must add."
    assert message.content[0].text == "Sure."
    assert (add.name, json.loads(add.arguments), ping.name, ping.arguments) == ("add", {"a": 1}, "ping", "{}")
    assert add.call_id != ping.call_id
    assert shown.tools[0].name == "add"
    assert shown.usage is not None
    if size == 1:
        assert shown.usage.output_tokens_details.reasoning_tokens == len("I must add.")
    seen = events(await create(client, tools=[ADD, PING], stream=True))
    last = seen[-1].response.model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert without_ids(last) == without_ids(answer.json)
    _check_stream(seen, last["output"])


def _check_stream(seen: list[Any], output: list[dict[str, Any]]) -> None:
    """Each item is added, grows and is done, one after the other; its deltas join to what it has in the end."""
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    order = [event.output_index for event in seen if hasattr(event, "output_index")]
    assert order == sorted(order)
    for index, item in enumerate(output):
        own = [event for event in seen if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item.model_dump(mode="json", by_alias=True, exclude_unset=True) == item
        assert {event.item_id for event in own[1:-1]} == {item["id"]}
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event.delta for event in own if event.type.endswith(".delta")) == text


async def test_a_call_cut_short() -> None:
    client = client_of("")
    client.engine.script = lambda *_: [OutputDelta(0, TEXT[: TEXT.index("1}")], [1], finish_reason=FinishReason.LENGTH)]
    shown = response((await create(client, tools=[ADD])).json)
    assert (shown.status, shown.output[-1].status, shown.output[-1].arguments) == ("incomplete", "incomplete", '{"a": ')
    assert shown.output[0].status == "completed"


async def test_results_go_back() -> None:
    client = client_of(TEXT)
    first = response((await create(client, "add", tools=[ADD, PING])).json)
    call = first.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "2"}]}
    second = await create(client, [result], previous_response_id=first.id, tools=[ADD])
    prompt = prompt_of(client)
    assert prompt.startswith("[user]add[assistant]Sure.1")
    assert "[tool]2" in prompt
    listed = item_list((await client.call("GET", f"/v1/responses/{second.json['id']}/input_items")).json)
    assert [item.type for item in listed.data] == [
        "function_call_output", "function_call", "function_call", "message", "message",
    ]  # fmt: skip
    # The same conversation, sent whole: each item as the client has it.
    sent = [{"role": "user", "content": "add"}, *(item.model_dump(exclude_none=True) for item in first.output), result]
    assert (await create(client, sent, tools=[ADD])).status == 200
    assert prompt_of(client) == prompt


async def test_choices() -> None:
    client = client_of(TEXT)
    await create(client, tools=[ADD, PING])
    assert grammar_of(client) is None
    for choice in ("required", {"type": "function", "name": "add"}):
        await create(client, tools=[ADD, PING], tool_choice=choice)
        assert grammar_of(client) is not None
    await create(client, tools=[ADD, PING], tool_choice="none")
    assert "ping" not in prompt_of(client)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    answer = await create(client, tools=[ADD, PING], tool_choice=allowed)
    assert response(answer.json).tool_choice.mode == "auto"
    assert "ping" not in prompt_of(client)
    one = response((await create(client, tools=[ADD, PING], parallel_tool_calls=False)).json)
    assert [item.type for item in one.output] == ["message", "function_call"]


async def test_what_the_chat_refuses_is_said_in_this_apis_words() -> None:
    for fields, param in (
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [ADD, ADD]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "absent"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ):
        answer = await create(client_of(""), **fields)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert "function." not in answer.error["message"]


async def test_formats_and_efforts() -> None:
    client = client_of("{}", KNOWING)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    shown = response((await create(client, text={"format": form})).json)
    assert shown.text.format.schema_ == schema
    structured = client.engine.submitted[-1].params.structured_output
    assert structured is not None
    assert json.loads(structured.text) == schema
    await create(client, text={"format": {"type": "json_object"}})
    assert client.engine.submitted[-1].params.structured_output is not None
    shown = response((await create(client, reasoning={"effort": "low", "summary": "auto"})).json)
    assert (shown.reasoning.effort, shown.reasoning.summary) == ("low", "auto")
    assert "<tool_call>low" in prompt_of(client)


async def test_a_turn_of_reasoning_alone_goes_back() -> None:
    client = client_of("")
    client.engine.chat_template = type(client.engine.chat_template)(THINKING)  # type: ignore[misc, arg-type]
    client.engine.script = lambda *_: [OutputDelta(0, "Hm", [1, 2], finish_reason=FinishReason.LENGTH)]
    first = response((await create(client)).json)
    assert [item.type for item in first.output] == ["reasoning"]
    assert first.output[0].status == "incomplete"
    assert first.usage.output_tokens_details.reasoning_tokens == 2
    again = await create(client, "and?", previous_response_id=first.id)
    assert again.status == 200
    assert prompt_of(client).startswith("[user]hi[assistant][user]and?")
