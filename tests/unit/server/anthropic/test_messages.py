"""/v1/messages over the app: shapes, the order of events, stop reasons, what a conversation becomes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from anthropic.types import ModelInfo

from pinnate.core.errors import EngineDeadError
from pinnate.core.request import FinishReason
from pinnate.engine.output_processor import OutputDelta
from pinnate.text.chat_template import ChatTemplate
from tests.unit.server.anthropic.helpers import events, joined, message
from tests.unit.server.conftest import Answer, Client, FakeEngine, make_client, spell

USER = [{"role": "user", "content": "hi"}]


async def create(client: Client, **fields: Any) -> Answer:
    return await client.post("/v1/messages", {"model": "Tiny", "max_tokens": 9, "messages": USER, **fields})


def prompt(client: Client) -> str:
    return bytes(client.engine.submitted[-1].prompt).decode()


async def test_a_plain_message(client: Client) -> None:
    client.engine.script = lambda *_: spell("okay", cached=2)
    answer = await create(client, system="Be brief.", temperature=0.5, top_k=3, top_p=0.9, metadata={"user_id": "u"})
    assert answer.status == 200
    shown = message(answer.json)
    assert [block.type for block in shown.content] == ["text"]
    assert shown.content[0].text == "okay"
    assert (shown.role, shown.model, shown.stop_reason, shown.stop_sequence) == ("assistant", "Tiny", "end_turn", None)
    assert shown.id.startswith("msg_")
    submitted = client.engine.submitted[0]
    assert prompt(client) == "[system]Be brief.[user]hi[assistant]"
    assert (shown.usage.input_tokens, shown.usage.cache_read_input_tokens) == (len(submitted.prompt) - 2, 2)
    assert shown.usage.output_tokens == 5
    params = submitted.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0.5, 3, 0.9)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_the_order_of_events(client: Client) -> None:
    client.engine.script = lambda *_: spell("ok", cached=1)
    seen = events(await create(client, stream=True))
    assert [event if event == "ping" else event.type for event in seen] == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    start = seen[0].message
    assert (start.content, start.stop_reason, start.usage.cache_read_input_tokens) == ([], None, 1)
    plain = (await create(client)).json
    assert joined(seen) | {"id": ""} == plain | {"id": ""}


@pytest.mark.parametrize(
    ("last", "max_tokens", "reason", "sequence"),
    [
        ({"finish_reason": FinishReason.STOP}, 9, "end_turn", None),
        ({"finish_reason": FinishReason.STOP, "stop_reason": "zz"}, 9, "stop_sequence", "zz"),
        ({"finish_reason": FinishReason.STOP, "stop_reason": 7}, 9, "end_turn", None),
        ({"finish_reason": FinishReason.LENGTH}, 2, "max_tokens", None),
        ({"finish_reason": FinishReason.LENGTH}, 1000, "model_context_window_exceeded", None),
        ({"finish_reason": FinishReason.LENGTH}, 9, "model_context_window_exceeded", None),
    ],
)
async def test_stop_reasons(client: Client, last: Any, max_tokens: int, reason: str, sequence: str | None) -> None:
    client.engine.script = lambda *_: [OutputDelta(0, "a", [97]), OutputDelta(0, "b", [98], **last)]
    asked = {"max_tokens": max_tokens, "stop_sequences": ["zz"]}
    shown = message((await create(client, **asked)).json)
    assert (shown.stop_reason, shown.stop_sequence) == (reason, sequence)
    assert client.engine.submitted[0].params.stop == ("zz",)
    assert client.engine.submitted[0].params.max_tokens == (None if max_tokens == 1000 else max_tokens)
    delta = events(await create(client, stream=True, **asked))[-2]
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == (reason, sequence)


async def test_no_text_is_no_block(client: Client) -> None:
    client.engine.script = lambda *_: spell("")
    assert message((await create(client)).json).content == []
    assert [getattr(event, "type", event) for event in events(await create(client, stream=True))] == [
        "message_start", "ping", "message_delta", "message_stop",
    ]  # fmt: skip


async def test_turns_and_blocks(client: Client) -> None:
    text = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    await create(
        client,
        system=[{"type": "text", "text": "s"}, {"type": "text", "text": "t"}],
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [text]},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "system", "content": "mid"},
            {"role": "user", "content": "d"},
        ],
    )
    assert prompt(client) == "[system]s\nt[user]a\nb[assistant]c[system]mid[user]d[assistant]"


async def test_a_last_turn_of_the_assistant_is_continued(client: Client) -> None:
    await create(client, messages=[*USER, {"role": "assistant", "content": "The answer is"}])
    assert prompt(client) == "[user]hi[assistant]The answer is"


async def test_thinking_is_a_variable_of_the_template(client: Client) -> None:
    client.engine.chat_template = ChatTemplate("{{ enable_thinking }}")
    enabled = {"type": "enabled", "budget_tokens": 1024}
    for thinking, shown in ((enabled, "True"), ({"type": "disabled"}, "False"), ({"type": "adaptive"}, "")):
        assert (await create(client, thinking=thinking, max_tokens=2000)).status == 200
        assert prompt(client) == shown


async def test_counting_tokens(client: Client) -> None:
    answer = await client.post("/v1/messages/count_tokens", {"model": "Tiny", "messages": USER, "system": "S"})
    assert answer.json == {"input_tokens": len("[system]S[user]hi[assistant]")}
    assert not client.engine.submitted


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]},
        "redacted_thinking",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
        "messages[0].content[0].name",
    ),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"temperature": 1.5}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}, "thinking.display"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"service_tier": "x"}, "service_tier"),
    ({"metadata": {"name": "x"}}, "metadata.name"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"mood": 1}, "mood"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED)
async def test_refusals_name_the_field(fields: dict[str, Any], named: str) -> None:
    client = make_client(FakeEngine(), strict=True)
    answer = await create(client, **fields)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert named in answer.json["error"]["message"]
    assert not client.engine.submitted


async def test_other_refusals(client: Client) -> None:
    unknown = await create(client, model="gpt")
    assert (unknown.status, unknown.json["error"]["type"]) == (404, "not_found_error")
    long = await create(client, messages=[{"role": "user", "content": "x" * 200}])
    assert (long.status, long.json["error"]["type"]) == (400, "invalid_request_error")
    assert "100 tokens" in long.json["error"]["message"]
    client.engine.full = True
    full = await create(client)
    assert (full.status, full.json["error"]["type"]) == (529, "overloaded_error")
    assert full.headers["retry-after"] == "7"
    assert "warnings" not in (await create(make_client(FakeEngine()))).json
    assert (await create(make_client(FakeEngine()), mood=1)).json["warnings"][0]["param"] == "mood"


async def test_keys_in_either_header() -> None:
    client = make_client(FakeEngine(), api_keys=("k",))
    for headers, status in (({"x-api-key": "k"}, 200), ({"authorization": "Bearer k"}, 200), ({}, 401)):
        answer = await client.call(
            "POST", "/v1/messages", b'{"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}', headers
        )
        assert answer.status == status
    assert answer.json["error"]["type"] == "authentication_error"


async def test_failures(client: Client) -> None:
    client.engine.script = lambda *_: [EngineDeadError("gone")]
    for stream in (False, True):
        answer = await create(client, stream=stream)
        assert (answer.status, answer.json["error"]["type"]) == (503, "api_error")
    client.engine.script = lambda *_: [*spell("ok")[:1], EngineDeadError("gone")]
    last = events(await create(client, stream=True))[-1]
    assert (last.type, last.error.type, last.error.message) == ("error", "api_error", "gone")


async def test_a_client_that_leaves_and_a_server_that_ends(client: Client) -> None:
    client.engine.script = lambda *_: [*spell("ok")[:1], asyncio.Event()]
    for end in (client.gone.set, client.state.stop_requests):
        call = asyncio.create_task(create(client, stream=True))
        async with asyncio.timeout(10):
            while not client.state.ongoing:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            end()
            answer = await call
        client.gone.clear()
        assert client.engine.streams[-1].aborted
        assert not client.state.ongoing
    assert events(answer)[-1].error.message == "the server is shutting down"


async def test_models_as_its_clients_know_them(client: Client) -> None:
    version = {"anthropic-version": "2023-06-01"}
    page = (await client.call("GET", "/v1/models", headers=version)).json
    assert {name: page[name] for name in ("has_more", "first_id", "last_id")} == {
        "has_more": False, "first_id": "Tiny", "last_id": "Tiny",
    }  # fmt: skip
    one = (await client.call("GET", "/v1/models/Tiny", headers=version)).json
    assert page["data"] == [one]
    assert ModelInfo.model_validate(one).max_input_tokens == 100
    assert set(one) <= set(ModelInfo.model_fields)
    assert (await client.call("GET", "/v1/models")).json["object"] == "list"
