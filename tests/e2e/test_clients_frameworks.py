"""Frameworks that people put in front of an OpenAI-compatible server: instructor, langchain, litellm. Nothing but the
base URL (and the name of the model) differs from their documentation."""

from __future__ import annotations

import os
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.conftest import MODEL
from tests.e2e.harness import Server

WHY = "installed by `make test`: pip install -e '.[clients]'"
ASK: list[Any] = [{"role": "user", "content": "Ann is 30 and glad."}]


class Person(BaseModel):
    """Somebody."""

    model_config = ConfigDict(extra="forbid")  # else the schema allows more, and a small model never ends

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    mood: Literal["glad", "sad"]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"])
def test_instructor_extracts(server: Server, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason=WHY)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        extract = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
        person = extract.chat.completions.create(
            model=MODEL, messages=ASK, response_model=Person, temperature=0, max_tokens=80, max_retries=0
        )
    assert isinstance(person, Person)


def test_instructor_streams_a_partial(server: Server) -> None:
    instructor = pytest.importorskip("instructor", reason=WHY)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        extract = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        parts = list(
            extract.chat.completions.create_partial(
                model=MODEL, messages=ASK, response_model=Person, temperature=0, max_tokens=80
            )
        )
    assert len(parts) > 2
    assert Person.model_validate(parts[-1].model_dump())


@pytest.fixture
def langchain(server: Server) -> Any:
    module = pytest.importorskip("langchain_openai", reason=WHY)
    return module.ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=64,
        max_retries=0,
        stream_usage=True,
    )


def test_langchain_invokes_and_streams(langchain: Any) -> None:
    langchain.invoke("hi")  # from now on usage says the same: all of the prompt is cached
    answer = langchain.invoke("hi")
    assert answer.content
    assert answer.usage_metadata["input_tokens"] == 31
    assert answer.response_metadata["finish_reason"] == "stop"
    chunks = list(langchain.stream("hi"))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata][-1] == answer.usage_metadata


async def test_langchain_batches(langchain: Any) -> None:
    answers = await langchain.abatch(["hi", "hello", "hi"])
    assert answers[0].content == answers[2].content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(langchain: Any, method: str) -> None:
    assert isinstance(langchain.with_structured_output(Person, method=method).invoke("Ann is 30 and glad."), Person)


def test_a_langchain_agent_uses_its_tool(langchain: Any) -> None:
    messages = pytest.importorskip("langchain_core.messages", reason=WHY)
    tools = pytest.importorskip("langchain_core.tools", reason=WHY)
    asked: list[tuple[int, int]] = []

    @tools.tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        asked.append((a, b))
        return a + b

    history: list[Any] = [messages.HumanMessage("What is 2 + 3?")]
    call = langchain.bind_tools([add], tool_choice="any").invoke(history)
    assert [made["name"] for made in call.tool_calls] == ["add"] * len(call.tool_calls)
    assert call.tool_calls
    assert not call.invalid_tool_calls
    history += [call, *(add.invoke(made) for made in call.tool_calls)]
    assert len(asked) == len(call.tool_calls)
    assert langchain.invoke(history).content
    streamed = list(langchain.bind_tools([add], tool_choice="add").stream(history[:1]))
    whole = streamed[0]
    for chunk in streamed[1:]:
        whole += chunk
    assert whole.tool_calls[0]["name"] == "add"


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network at its import
    return pytest.importorskip("litellm", reason=WHY)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
async def test_litellm(litellm: Any, server: Server, provider: str) -> None:
    asked: dict[str, Any] = {
        "model": f"{provider}/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    plain = await litellm.acompletion(**asked)
    text = plain.choices[0].message.content
    assert text.startswith("Hello")
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (31, 8)
    stream = await litellm.acompletion(**asked, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text
    structured = await litellm.acompletion(**{**asked, "max_tokens": 80}, response_format=Person)
    Person.model_validate_json(structured.choices[0].message.content)
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    called = await litellm.acompletion(
        **{**asked, "max_tokens": 40},
        tools=[{"type": "function", "function": {"name": "pick", "parameters": parameters}}],
        tool_choice="required",
    )
    assert called.choices[0].finish_reason == "tool_calls"
    assert called.choices[0].message.tool_calls[0].function.name == "pick"


async def test_litellm_text_and_errors(litellm: Any, server: Server) -> None:
    where: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none"}
    done = await litellm.atext_completion(
        model=f"text-completion-openai/{MODEL}", prompt="1, 2, 3, 4, 5, 6, 7,", temperature=0, max_tokens=8, **where
    )
    assert done.choices[0].text == " 8, 9, 1"
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        await litellm.acompletion(model=f"openai/{MODEL}", messages=ASK, temperature=-1, **where)
    with pytest.raises(litellm.NotFoundError):
        await litellm.acompletion(model="openai/no-such-model", messages=ASK, **where)
