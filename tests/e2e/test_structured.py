"""Structured outputs over HTTP: every way to ask for one, what is wrong with them, hostile ones beside running
streams."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.harness import Api, Server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
GBNF = 'root ::= "x" digit digit\ndigit ::= [0-9]'


def is_record(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "n"] and 0 <= value["n"] <= 99 and len(value["name"]) <= 12


def is_two_digits(text: str) -> bool:
    return re.fullmatch("x[0-9]{2}", text) is not None


WAYS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, is_record),
    ({"structured_outputs": {"json": SCHEMA}}, is_record),
    ({"guided_json": json.dumps(SCHEMA)}, is_record),
    ({"json_schema": json.dumps(SCHEMA)}, is_record),
    ({"structured_outputs": {"regex": "x[0-9]{2}"}}, is_two_digits),
    ({"regex": "x[0-9]{2}"}, is_two_digits),
    ({"ebnf": GBNF}, is_two_digits),
    ({"structured_outputs": {"grammar": "start: /x[0-9]{2}/"}}, is_two_digits),
    ({"guided_choice": ["ďá", "no"]}, lambda text: text in ("ďá", "no")),
    ({"structural_tag": TAG, "stop": ["</f>"]}, lambda _: True),
]


@pytest.mark.parametrize(("fields", "fits"), WAYS, ids=lambda v: str(v)[:40] if isinstance(v, dict) else "")
async def test_every_name_constrains_chats_and_completions_plain_and_streamed(api: Api, fields: Any, fits: Any) -> None:
    common = {"max_tokens": 80, "temperature": 1, "seed": 4, **fields}
    plain = await api.complete("A record:", **common)
    streamed = await api.stream("A record:", **common)
    chat = await api.chat("Hi", **common)
    assert (plain.status, chat.status) == (200, 200)
    if plain.choice()["finish_reason"] == "stop":
        assert fits(plain.text)
    assert streamed.text() == plain.text
    if chat.choice()["finish_reason"] == "stop":
        assert fits(chat.text)


async def test_the_openai_client_parses(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        made = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Give me a record."}],
            response_format={"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA, "strict": True}},
            max_tokens=80,
            n=3,
            seed=1,
        )
    for choice in made.choices:
        assert choice.finish_reason == "stop"
        assert is_record(choice.message.content or "")


FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": {"items": {"type": "foo"}}}, "guided_json", "#/items/type"),
    ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems is not supported"),
    ({"guided_json": {"$ref": "http://127.0.0.1:9/x"}}, "guided_json", "only references within"),
    ({"guided_regex": "foo**"}, "guided_regex", "nothing to repeat"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"ebnf": "root ::= ("}, "ebnf", "GBNF"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": 5}}}},
     "response_format.json_schema.schema", "#/properties"),
    ({"regex": "a", "n": 2, "use_beam_search": True}, "regex", "use_beam_search"),
    ({"regex": "a", "ebnf": GBNF}, "ebnf", "only one is allowed"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), FAULTS, ids=lambda v: str(v)[:30])
async def test_faults_are_named(api: Api, fields: dict[str, Any], param: str, words: str) -> None:
    answer = await api.complete("Hi", max_tokens=5, **fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert words in answer.error["message"]


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "cyclic $ref": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref":
    "#/$defs/a"}}}}, "needs itself": {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required":
    ["a"]}}, "a million": {"guided_regex": "a{1000000}"}, "a million in a schema": {"guided_json": {"type": "string",
    "pattern": "^(a{1000}){1000}$"}}, "100 deep": {"guided_json": nested(100)}, "100 groups": {"guided_regex": "(" *
    100 + "a" + ")" * 100}, "catastrophic": {"guided_regex": "(x+x+)+y"}, "many alternatives": {"guided_regex":
    "(.*a){15000}"}, "intersections": {"guided_json": {"type": "string", "allOf": [{"pattern": f"(.*{c}){{200}}"} for c
    in "abcdefgh"]}}, "a large grammar": {"guided_grammar": "start: " + " | ".join(f"r{i}" for i in range(9000)) + "\n"
    + "\n".join(f'r{i}: "{i}" r{(i * 7) % 9000}' for i in range(9000))}, "5 MB": {"guided_json": {"enum": ["x" * 100 +
    str(i) for i in range(48_000)]}},
}  # fmt: skip


async def test_hostile_ones_are_answered_while_other_streams_keep_their_speed(api: Api) -> None:
    """Their time limit is 2 s; the machine may be busy with other things, so more is allowed here."""
    await api.complete("Hi", max_tokens=2, regex="ab")  # the checking process runs
    stream = asyncio.create_task(api.stream("1, 2, 3,", max_tokens=150, temperature=0, ignore_eos=True))
    loop = asyncio.get_running_loop()
    for name, fields in HOSTILE.items():
        began = loop.time()
        answer = await api.complete("Hi", max_tokens=4, **fields)
        assert answer.status in (200, 400), (name, answer.body[:300])
        if answer.status == 400:
            field = answer.error["param"]
            assert field in fields or (name == "100 deep" and answer.error["code"] == "invalid_json"), name
        assert loop.time() - began < 8, name
    streamed = await stream
    assert streamed.done == 1
    gaps = [later - earlier for earlier, later in zip(streamed.times, streamed.times[1:], strict=False)]
    assert max(gaps) < 3
    alone = await api.stream("1, 2, 3,", max_tokens=150, temperature=0, ignore_eos=True)
    assert streamed.text() == alone.text()
    assert api.server.health() == 200


async def test_a_client_that_leaves_while_its_output_is_checked_leaves_nothing(api: Api) -> None:
    task = asyncio.create_task(api.complete("Hi", max_tokens=4, guided_json=nested(20)))
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    answer = await api.complete("Hi", max_tokens=40, guided_regex="[a-c]{3}")
    assert re.fullmatch("[a-c]{3}", answer.text)


async def test_one_that_cannot_be_followed_later_is_the_requests_fault(api: Api) -> None:
    """What only the engine finds ends this request alone: here no token is left to draw."""
    bad = api.complete("Hi", max_tokens=8, guided_regex="[a-c]{3}", allowed_token_ids=[33])
    answer, plain = await asyncio.gather(bad, api.complete("1, 2,"))
    assert (answer.status, answer.error["code"]) == (400, "structured_output_failed")
    assert "allowed_token_ids leaves no token" in answer.error["message"]
    assert plain.status == 200
    streamed = await api.stream("Hi", max_tokens=8, guided_regex="[a-c]{3}", allowed_token_ids=[33])
    assert streamed.status == 400  # nothing was sent yet
