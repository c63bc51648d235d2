"""A chat with tools and reasoning: what reaches the template and the engine, what comes back, streamed and whole."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from pinnate.core.errors import ConfigError
from pinnate.core.request import FinishReason
from pinnate.core.sampling import SamplingParams
from pinnate.engine.output_processor import OutputDelta
from pinnate.server.chat_formats import ChatFormats
from pinnate.server.settings import ServerSettings
from pinnate.text.chat_template import ChatTemplate
from tests.unit.server.conftest import EOS, TEMPLATE, Answer, Client, FakeEngine, make_client, score, spell

KNOWING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments.a }}"
    "{% endfor %}{% endfor %}{{ tools }}<tool_call>{{ reasoning_effort }}{{ enable_thinking }}"
    "{% if add_generation_prompt %}[assistant]{{ extra }}{% endif %}"
)
THINKING = KNOWING.replace(
    "{{ extra }}", "{% if enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
PING = {"type": "function", "function": {"name": "ping", "strict": True}}
ADD = {"type": "function", "function": {"name": "add"}}
TEXT = (
    'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
)


def client_of(text: str, template: str = KNOWING, **settings: Any) -> Client:
    engine = FakeEngine(chat_template=ChatTemplate(template), max_model_len=5000)
    engine.script = lambda *_: list(spell(text))
    return make_client(engine, **settings)


def prompt_of(client: Client) -> str:
    return bytes(client.engine.submitted[-1].prompt).decode()


def grammar_of(client: Client) -> str | None:
    structured = client.engine.submitted[-1].params.structured_output
    return None if structured is None else structured.text


def message_of(answer: Answer) -> dict[str, Any]:
    """Without the ids of calls, which are checked."""
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    message = dict(choice["message"])
    calls = message.pop("tool_calls", None)
    if calls is not None:
        assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
        assert len({call["id"] for call in calls}) == len(calls)
        message["calls"] = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return {**message, "finish": choice["finish_reason"]}


def joined(answer: Answer, index: int = 0) -> dict[str, Any]:
    """The message that the chunks of a stream add up to."""
    message: dict[str, Any] = {"content": None, "refusal": None}
    calls: list[list[str]] = []
    for event in answer.events()[:-1]:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for name in ("role", "content", "reasoning", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                function = piece["function"]
                if piece["index"] == len(calls):
                    assert piece["type"] == "function"
                    assert piece["id"].startswith("call_")
                    calls.append([function["name"], ""])
                else:
                    assert set(piece) == {"index", "function"}
                    assert set(function) == {"arguments"}
                calls[piece["index"]][1] += function["arguments"]
            if choice["finish_reason"]:
                message["finish"] = choice["finish_reason"]
    if calls:
        message["calls"] = [(name, arguments) for name, arguments in calls]
    return message


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_streamed_and_whole_are_the_same(size: int) -> None:
    client = client_of("")
    deltas = [OutputDelta(0, TEXT[at : at + size], [1]) for at in range(0, len(TEXT), size)]
    deltas.append(OutputDelta(0, "", [EOS], finish_reason=FinishReason.STOP))
    client.engine.script = lambda *_: deltas
    fields: dict[str, Any] = {"tools": [TOOL, PING]}
    expected = {
        "role": "assistant",
        "content": "Sure.",
        "refusal": None,
        "calls": [("add", '{"a": 1}'), ("ping", "{}")],
        "finish": "tool_calls",
    }
    assert message_of(await client.chat(**fields)) == expected
    assert joined(await client.chat(**fields, stream=True)) == expected


async def test_calls_alone_have_null_content() -> None:
    client = client_of(TEXT.removeprefix("Sure.\n"))
    assert message_of(await client.chat(tools=[TOOL]))["content"] is None


async def test_an_answer_cut_short_ends_for_its_length() -> None:
    client = client_of("")
    client.engine.script = lambda *_: [OutputDelta(0, TEXT[: TEXT.index("1}")], [1], finish_reason=FinishReason.LENGTH)]
    for stream in (False, True):
        answer = await client.chat(tools=[TOOL], stream=stream)
        message = joined(answer) if stream else message_of(answer)
        assert message["finish"] == "length"
        assert message["calls"] == [("add", '{"a": ')]


async def test_the_beginning_of_a_forced_call_is_no_content() -> None:
    client = client_of("")
    client.engine.script = lambda *_: [OutputDelta(0, '<tool_call>\n{"na', [1], finish_reason=FinishReason.LENGTH)]
    for choice, content in (("required", ""), (ADD, ""), ("auto", '<tool_call>\n{"na')):
        for stream in (False, True):
            answer = await client.chat(tools=[TOOL], tool_choice=choice, stream=stream)
            message = joined(answer) if stream else message_of(answer)
            assert (message["content"] or "", message["finish"]) == (content, "length")


async def test_no_tools_no_calls() -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        client = client_of(TEXT)
        assert message_of(await client.chat(**fields))["content"] == TEXT
        assert prompt_of(client).count("add") == 0


async def test_one_call_alone() -> None:
    for stream in (False, True):
        answer = await client_of(TEXT).chat(tools=[TOOL, PING], parallel_tool_calls=False, stream=stream)
        message = joined(answer) if stream else message_of(answer)
        assert message["calls"] == [("add", '{"a": 1}')]


async def test_each_choice_has_its_own_parser() -> None:
    client = client_of("")

    def script(_: int, params: SamplingParams) -> list[Any]:
        assert params.n == 2
        call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
        return [
            [OutputDelta(0, call[:20], [1]), OutputDelta(1, "No", [1])],
            [OutputDelta(0, call[20:], [1]), OutputDelta(1, ".", [1], finish_reason=FinishReason.STOP)],
            [OutputDelta(0, "", [EOS], finish_reason=FinishReason.STOP)],
        ]

    client.engine.script = script
    answer = await client.chat(tools=[TOOL], n=2, stream=True)
    assert joined(answer)["calls"] == [("add", "{}")]
    assert (joined(answer, 1)["content"], joined(answer, 1)["finish"]) == ("No.", "stop")


async def test_log_probabilities_are_all_there_once() -> None:
    client = client_of("")
    client.engine.script = lambda *_: [
        OutputDelta(d.index, d.text, d.token_ids, [score(t) for t in d.token_ids], d.finish_reason) for d in spell(TEXT)
    ]
    fields: dict[str, Any] = {"tools": [TOOL], "logprobs": True, "return_token_ids": True}
    whole = (await client.chat(**fields)).json["choices"][0]
    chunks = [event["choices"][0] for event in (await client.chat(**fields, stream=True)).events()[:-1]]
    scored = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert scored == whole["logprobs"]["content"]
    assert len(scored) == len(TEXT) + 1
    assert [token for chunk in chunks for token in chunk.get("token_ids", ())] == whole["token_ids"]


async def test_the_template_gets_tools_and_arguments_as_objects() -> None:
    client = client_of("ok")
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 42}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "43"},
    ]
    assert (await client.chat(messages=messages, tools=[TOOL])).status == 200
    assert prompt_of(client).startswith("[user]hi[assistant]42[tool]43[{'type': 'function'")
    tokens = await client.post("/tokenize", {"messages": messages, "tools": [TOOL]})
    assert tokens.json["tokens"] == client.engine.submitted[-1].prompt


async def test_a_template_that_knows_no_tools_gets_them_described() -> None:
    client = client_of("ok", TEMPLATE)
    await client.chat(tools=[TOOL])
    prompt = prompt_of(client)
    assert prompt.startswith("[system]You may call functions")
    assert json.dumps(TOOL) in prompt
    assert prompt.endswith("[user]hi[assistant]")
    await client.chat(tools=[TOOL], tool_choice="none")
    assert prompt_of(client) == "[user]hi[assistant]"


async def test_what_must_be_called_is_a_grammar() -> None:
    client = client_of(TEXT)
    await client.chat(tools=[TOOL, PING], tool_choice="required")
    both = grammar_of(client)
    assert both is not None
    assert "ping" in both
    assert "(" + '"\\n" call)*' in both
    await client.chat(tools=[TOOL, PING], tool_choice=ADD)
    one = grammar_of(client)
    assert one is not None
    assert "ping" not in one
    assert "call)*" not in one
    await client.chat(tools=[TOOL, PING], tool_choice=ADD, response_format={"type": "json_object"})
    assert grammar_of(client) == one
    await client.chat(tools=[TOOL])
    assert grammar_of(client) is None
    await client.chat(tools=[TOOL, PING])
    strict = grammar_of(client)
    assert strict is not None
    assert "lazy" in strict


async def test_calls_or_an_answer_in_json() -> None:
    client = client_of(TEXT)
    await client.chat(tools=[TOOL], response_format={"type": "json_object"})
    grammar = grammar_of(client)
    assert grammar is not None
    assert "start: (calls | content)" in grammar
    await client.chat(tools=[TOOL], tool_choice="none", regex="a+")
    assert grammar_of(client) == "a+"


async def test_reasoning_that_the_template_has_opened() -> None:
    fields: dict[str, Any] = {"tools": [TOOL]}
    client = client_of("Hm.\n</think>\n\n" + TEXT, THINKING)
    for stream in (False, True):
        answer = await client.chat(**fields, stream=stream)
        message = joined(answer) if stream else message_of(answer)
        assert message["reasoning"] == message["reasoning_content"] == "Hm."
        assert message["content"] == "Sure."
        assert len(message["calls"]) == 2
    hidden = message_of(await client.chat(**fields, include_reasoning=False))
    assert "reasoning" not in hidden
    assert hidden["content"] == "Sure."


async def test_thinking_switched_off() -> None:
    client = client_of("Yes", THINKING)
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        message = message_of(await client.chat(**fields))
        assert (message["content"], message.get("reasoning")) == ("Yes", None)
    await client.chat(reasoning_effort="low")
    assert "low" in prompt_of(client)
    answer = await client.chat(reasoning_effort="huge")
    assert (answer.status, answer.error["param"]) == (400, "reasoning_effort")


async def test_constraints_are_of_the_answer_not_of_the_thinking() -> None:
    client = client_of("x</think>5", THINKING)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    message = message_of(await client.chat(response_format=schema))
    assert (message["reasoning"], message["content"]) == ("x", "5")
    grammar = grammar_of(client)
    assert grammar is not None
    assert "start: thought (content)" in grammar
    await client.chat(response_format=schema, reasoning_effort="none")
    assert grammar_of(client) == '{"type":"integer"}'
    await client.chat(tools=[TOOL], tool_choice="required")
    assert "start: thought (calls)" in (grammar_of(client) or "")
    # A whole grammar of the client's own leaves no room for thinking: all is content.
    message = message_of(await client.chat(structured_outputs={"grammar": "start: /a/"}))
    assert message["content"] == "x</think>5"


async def test_special_marks_are_kept_for_the_parser_alone() -> None:
    class Tokenizer(type(FakeEngine().tokenizer)):  # type: ignore[misc]
        def token_id(self, token: str) -> int | None:
            return {"<tool_call>": 1, "</tool_call>": 2}.get(token)

        def is_special(self, token_id: int) -> bool:
            return token_id in (EOS, 1)

    client = client_of(TEXT)
    client.engine.tokenizer = Tokenizer()
    await client.chat(tools=[TOOL], tool_choice="required")
    assert client.engine.submitted[-1].params.kept_special_tokens == (1,)
    assert "<[1]>" in (grammar_of(client) or "")
    await client.chat()
    assert client.engine.submitted[-1].params.kept_special_tokens == ()


async def test_the_operator_chooses_the_parsers(caplog: pytest.LogCaptureFixture) -> None:
    client = client_of('[{"name": "add", "arguments": {}}]', tool_call_parser="json", reasoning_parser="none")
    assert message_of(await client.chat(tools=[TOOL]))["calls"] == [("add", "{}")]
    with caplog.at_level(logging.INFO):
        ChatFormats.choose(KNOWING, "auto", "qwen3").log()
    assert "tool calls: hermes (the chat template has <tool_call>); reasoning: think (as" in caplog.text
    for flag in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match="none of that name"):
            ServerSettings(**{flag: "xyz"})
