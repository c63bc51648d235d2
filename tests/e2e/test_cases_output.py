"""Requests that broke other engines: structured outputs, tools, clients that leave. See test_cases_api.py."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import Api, counting, fresh_ids
from tests.e2e.test_cases_api import P1, P1_NEXT, P2, P2_NEXT, P3, P4

MB = 1 << 20


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def record(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


NUMBER = record({"n": {"type": "integer", "minimum": 0, "maximum": 99}})
CONSTRAINED: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    (json_schema({"enum": ["red", "green"]}), lambda text: json.loads(text) in ("red", "green")),
    (json_schema(NUMBER), lambda text: json.loads(text)["n"] in range(100)),
    ({"structured_outputs": {"regex": "[a-c]{6}"}}, lambda text: re.fullmatch("[a-c]{6}", text) is not None),
]
FREE = [(P1, P1_NEXT[:40]), (P2, P2_NEXT[:28])] + [
    (counting(first + 9, first), (" " + counting(first + 19, first + 10))[:12]) for first in (5, 41, 101)
]


@pytest.mark.parametrize("order", range(4))
async def test_case_42_constrained_and_free_in_one_batch(api: Api, order: int) -> None:
    """In every order; and with one constrained request, the first or the last."""
    wanted = [CONSTRAINED, CONSTRAINED, CONSTRAINED[:1], CONSTRAINED[1:2]][order]
    jobs: list[tuple[Any, ...]] = [*wanted, *FREE] if order % 2 == 0 else [*FREE, *wanted]
    if order == 1:
        random.Random(42).shuffle(jobs)

    async def run(place: int, first: Any, second: Any) -> None:
        await asyncio.sleep(0.02 * place * (order % 2))
        if isinstance(first, str):
            assert (await api.complete(first, max_tokens=len(second))).text == second
            return
        answer = await api.complete(P4, max_tokens=30, temperature=1, seed=order, **first)
        assert answer.choice()["finish_reason"] == "stop"
        assert second(answer.text)

    await asyncio.gather(*(run(place, *job) for place, job in enumerate(jobs)))


BAD_GRAMMARS: list[dict[str, Any]] = [
    *({"structured_outputs": {"regex": regex}} for regex in ("foo**", "[", "(", "(?<=a)b", "a{1000000}")),
    *({"structured_outputs": {"regex": r}} for r in ("(a{1000}){1000}", "x" * MB, "(" * 500 + "a" + ")" * 500)),
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    *(json_schema(schema) for schema in ("notaschema", {"type": "foo"}, {"type": "object", "properties": 5})),
    json_schema({"type": "string", "pattern": "foo**["}),
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
    {"response_format": {"type": "xyz"}},
]  # fmt: skip


async def test_case_53_bad_grammars_fail_their_own_request(api: Api) -> None:
    """Nothing is accepted and ignored: what is not refused keeps to the grammar."""
    await api.complete(P4, max_tokens=2, structured_outputs={"regex": "ab"})  # the checking process runs
    before = await api.bytes_beside_kv()
    neighbour = asyncio.create_task(api.complete(P1, max_tokens=60))
    for fields in BAD_GRAMMARS:
        answer = await asyncio.wait_for(api.complete(P4, max_tokens=6, **fields), 10)
        if answer.status == 200:
            assert re.fullmatch("[ax]+", answer.text), fields
            continue
        assert answer.status == 400, fields
        param = answer.error["param"] or ""
        assert param.split(".")[0] in fields, (param, str(fields)[:100])
    assert (await neighbour).text == P1_NEXT[:60]
    assert await api.bytes_beside_kv() - before < 200 * MB
    assert api.server.health() == 200


async def test_case_53_a_nested_quantifier_is_followed(api: Api) -> None:
    answer = await api.complete(P4, max_tokens=6, structured_outputs={"regex": "(a+)+$"})
    assert re.fullmatch("a+", answer.text)


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "logit_bias": {"198": 50}}]
)
async def test_case_55_no_endless_blanks(api: Api, fields: dict[str, Any]) -> None:
    """Token 198 is a newline: favoured, it may come where JSON allows it, never for ever."""
    wanted = record(
        {"name": {"type": "string", "maxLength": 20}, "n": {"type": "integer", "maximum": 999}, "c": {"enum": ["red"]}}
    )
    seeds = range(1 if fields["temperature"] == 0 else 6)
    prompt = "Describe a thing as JSON:" + "\n" * 12
    common = {"max_tokens": 120, **json_schema(wanted), **fields}
    for answer in await asyncio.gather(*(api.complete(prompt, seed=seed, **common) for seed in seeds)):
        assert answer.choice()["finish_reason"] == "stop"
        assert list(json.loads(answer.text)) == ["name", "n", "c"]
        assert not re.search(r"\s{5}", re.sub(r'"(?:[^"\\]|\\.)*"', '""', answer.text))


ENDS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "abc"}}, "abc"),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
    ({"structured_outputs": {"regex": "a|aa"}}, "a|aa"),
    ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
    (json_schema({"const": 5}), "5"),
]


@pytest.mark.parametrize(("fields", "full"), ENDS, ids=[full for _, full in ENDS])
async def test_case_57_the_end_of_a_grammar(api: Api, fields: dict[str, Any], full: str) -> None:
    whole = await api.complete(P4, max_tokens=20, **fields)
    assert re.fullmatch(full, whole.text)
    assert whole.choice()["finish_reason"] == "stop"
    count = whole.json["usage"]["completion_tokens"]
    for limit in (1, 3):
        cut = await api.complete(P4, max_tokens=limit, **fields)
        assert whole.text.startswith(cut.text)
        assert cut.choice()["finish_reason"] == ("stop" if limit >= count else "length")
    # Beside it: what contradicts the grammar ends with it, or is refused; no token that it forbids is ever drawn.
    for odd in ({"ignore_eos": True}, {"min_tokens": 10}, {"stop": ["b"]}):
        answer = await asyncio.wait_for(api.complete(P4, max_tokens=20, **fields, **odd), 10)
        assert answer.status in (200, 400)
        assert answer.status == 400 or re.match(full, answer.text + "bc"), odd


async def test_case_57_the_only_legal_tokens_are_disfavoured_or_banned(api: Api) -> None:
    """-100 is a bias, and all tokens that are left have it: the text still fits. A ban leaves none: the request's
    fault."""
    digits = {"structured_outputs": {"regex": "[0-9]{3}"}}
    biased = await api.complete(P4, max_tokens=20, logit_bias={str(token): -100 for token in range(32, 42)}, **digits)
    assert re.fullmatch("[0-9]{3}", biased.text)
    banned = await api.complete(P4, max_tokens=20, allowed_token_ids=[500], **digits)
    assert (banned.status, banned.error["code"]) == (400, "structured_output_failed")
    assert (await api.complete(P1)).text == P1_NEXT[:8]


PING = {"type": "function", "function": {"name": "ping", "parameters": record({"k": {"enum": ["a", "b"]}})}}
STORE = {"type": "function", "function": {"name": "store", "parameters": NUMBER}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BAD_CHOICES: list[dict[str, Any]] = [
    *({"tools": [PING], "tool_choice": c} for c in ({}, "xyz", 5, {"type": "function"}, named("absent"))),
    {"tool_choice": "required"},
    {"tool_choice": "required", "tools": []},
    {"tool_choice": named("ping")},
    {"tools": [{"type": "function", "function": {"name": ""}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
    {"tools": {"a": 1}},
    {"tools": [PING, PING]},
]


@pytest.mark.parametrize("fields", BAD_CHOICES, ids=lambda fields: json.dumps(fields)[-40:])
async def test_case_60_bad_tool_choices_are_refused(api: Api, fields: dict[str, Any]) -> None:
    answer = await api.chat("hi", **fields)
    assert answer.status == 400
    assert answer.error["param"].startswith("tool")


async def test_case_60_tool_choices_are_followed(api: Api) -> None:
    unnamed = {"type": "function", "function": {"name": "f"}}  # takes no arguments
    for fields in (
        {"tool_choice": "none"}, {"tool_choice": None}, {"tool_choice": "auto"}, {"tools": None, "tool_choice": None},
        {"tool_choice": "none", "tools": [PING]}, {"tool_choice": "none", "tools": [unnamed]},
    ):  # fmt: skip
        message = (await api.chat("hi", **fields)).choice()["message"]
        assert message["content"]
        assert not message.get("tool_calls")
    called = (await api.chat("hi", tools=[STORE, PING], tool_choice=named("ping"), max_tokens=60)).choice()
    assert [call["function"]["name"] for call in called["message"]["tool_calls"]] == ["ping"]


async def test_case_46_dropped_connections_leave_nothing(api: Api) -> None:
    """Beyond the KV memory that was committed for what is cached now, the processes stay as large as they are."""

    async def rounds(count: int) -> None:
        for number in range(count):
            bodies = [
                api.completion_body(fresh_ids(30), max_tokens=1900, ignore_eos=True, stream=i < 2) for i in range(4)
            ]
            await asyncio.gather(
                *(api.drop(body, 0.2 * random.random(), reset=(i + number) % 2 == 0) for i, body in enumerate(bodies))
            )

    await rounds(2)
    await api.until_idle(1)
    before = await api.bytes_beside_kv()
    await rounds(12)
    after = await api.until_idle(1)
    assert await api.bytes_beside_kv() - before < 30 * MB
    assert after["kv_pages_free"] + after["kv_pages_cached"] == after["kv_pages"]
    await asyncio.sleep(0.2)
    assert (await api.metrics())["generation_tokens_total"] == after["generation_tokens_total"]
    assert (await api.complete(P1)).text == P1_NEXT[:8]


async def test_case_49_all_choices_end_with_their_client(api: Api) -> None:
    bodies = [
        {"prompt": [P1, P2, P3], "n": 2, "temperature": 1, "max_tokens": 1000, "ignore_eos": True},
        {"prompt": P1, "n": 4, "temperature": 1, "max_tokens": 1000, "ignore_eos": True},
    ]
    for number in range(6):
        body = api.completion_body(**bodies[number % 2])
        if number < 2:
            await api.drop({**body, "stream": True}, 0.0)
        else:
            streamed = await api.stream_of("/v1/completions", {**body, "stream": True}, leave_after=1)
            assert streamed.status == 200
    values = await api.until_idle(1.5)
    assert values["kv_cache_usage_perc"] == 0
    assert (await api.complete(P1)).text == P1_NEXT[:8]
