"""tools, tool_choice and parallel_tool_calls: what they ask for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pinnate.core.errors import RequestError
from pinnate.server.tools import MAX_TOOLS, NO_TOOLS, tool_use


def tool(name: str, **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **members}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


SCHEMA = {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}}
TOOLS = [tool("ping", parameters=SCHEMA, strict=True, description="Ping"), tool("add.two-3", parameters=None)]


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_without_tools_there_is_nothing_to_choose(choice: str | None) -> None:
    assert tool_use([], choice) is NO_TOOLS


def test_none_hides_the_tools() -> None:
    assert tool_use(TOOLS, "none") is NO_TOOLS


def test_auto_is_the_default() -> None:
    use = tool_use(TOOLS, None)
    assert use == tool_use(TOOLS, "auto")
    shown = [TOOLS[0], {"type": "function", "function": {"name": "add.two-3"}}]  # a null member is not given
    assert (use.mode, use.many, list(use.shown)) == ("auto", True, shown)
    assert [(each.name, each.parameters, each.is_strict) for each in use.callable] == [
        ("ping", SCHEMA, True),
        ("add.two-3", {}, False),
    ]


def test_required_and_parallel() -> None:
    assert (tool_use(TOOLS, "required").mode, tool_use(TOOLS, "required").many) == ("required", True)
    assert not tool_use(TOOLS, "required", parallel=False).many


def test_a_named_tool_is_the_one_that_may_be_called() -> None:
    use = tool_use(TOOLS, named("ping"))
    assert (use.mode, use.many, len(use.shown)) == ("required", False, 2)
    assert [each.name for each in use.callable] == ["ping"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(mode: str) -> None:
    use = tool_use(TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named("ping")]}})
    assert (use.mode, list(use.shown)) == (mode, TOOLS[:1])
    assert [each.name for each in use.callable] == ["ping"]


@pytest.mark.parametrize(
    "choice",
    [
        {}, "xyz", "", {"type": "x"}, {"type": "function"}, {"type": "function", "function": {}}, named("absent"),
        {"type": "function", "function": {"name": 5}}, {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [named("ping")]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("absent")]}},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_choices(choice: Any) -> None:
    with pytest.raises(RequestError) as caught:
        tool_use(TOOLS, choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("choice", ["required", named("ping")])
def test_a_call_without_tools_to_call(choice: Any) -> None:
    with pytest.raises(RequestError) as caught:
        tool_use([], choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("param", "tools"),
    [
        ("tools[0]", [5]),
        ("tools[0].type", [{"function": {"name": "f"}}]),
        ("tools[0].type", [{"type": "custom", "custom": {"name": "f"}}]),
        ("tools[0].function", [{"type": "function"}]),
        ("tools[0].function.name", [tool("")]),
        ("tools[0].function.name", [tool("a b")]),
        ("tools[0].function.name", [tool("é")]),
        ("tools[0].function.name", [tool("f\n")]),
        ("tools[0].function.name", [tool("f" * 129)]),
        ("tools[0].function.description", [tool("f", description=5)]),
        ("tools[0].function.strict", [tool("f", strict="yes")]),
        ("tools[0].function.parameters", [tool("f", parameters=5)]),
        ("tools[0].function.parameters", [tool("f", parameters=[])]),
        ("tools[0].function.parameters.type", [tool("f", parameters={"type": "string"})]),
        ("tools[0].function.parameters.properties", [tool("f", parameters={"properties": 5})]),
        ("tools[1].function.name", [tool("f"), tool("f")]),
        ("tools", [tool(f"f{number}") for number in range(MAX_TOOLS + 1)]),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("choice", ["none", "auto"])
def test_malformed_tools_whatever_the_choice(param: str, tools: Any, choice: str) -> None:
    with pytest.raises(RequestError) as caught:
        tool_use(tools, choice)
    assert caught.value.param == param
