"""Reading answers of the Messages API with Anthropic's own types."""

from __future__ import annotations

import json
from typing import Any

import anthropic.types as types
import jiter
from anthropic.types.shared import ErrorResponse

from tests.unit.server.conftest import Answer
from tests.unit.server.strict_types import strict

OURS = frozenset({"warnings"})
_EVENTS: dict[str, Any] = {
    "message_start": types.RawMessageStartEvent,
    "content_block_start": types.RawContentBlockStartEvent,
    "content_block_delta": types.RawContentBlockDeltaEvent,
    "content_block_stop": types.RawContentBlockStopEvent,
    "message_delta": types.RawMessageDeltaEvent,
    "message_stop": types.RawMessageStopEvent,
    "error": ErrorResponse,
}


def message(value: Any) -> types.Message:
    parsed = strict(types.Message, value, OURS)
    assert isinstance(parsed, types.Message)
    return parsed


def events(answer: Answer) -> list[Any]:
    """The events of a stream, each as its own type; a ping, which has none, is its name."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body.endswith(b"\n\n")
    parsed: list[Any] = []
    for block in answer.body.decode().split("\n\n")[:-1]:
        name, _, data = block.partition("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        parsed.append("ping" if value == {"type": "ping"} else strict(_EVENTS[value["type"]], value, OURS))
    return parsed


def joined(seen: list[Any]) -> dict[str, Any]:
    """The message that the events of a stream add up to, as a client puts it together."""
    whole: dict[str, Any] = {}
    pieces: list[str] = []
    for event in seen:
        if event == "ping":
            continue
        if event.type == "message_start":
            whole = event.message.model_dump(mode="json", by_alias=True, exclude_unset=True)
        elif event.type == "content_block_start":
            assert event.index == len(whole["content"])
            whole["content"].append(event.content_block.model_dump(mode="json", by_alias=True, exclude_unset=True))
            pieces = []
        elif event.type == "content_block_delta":
            _grow(whole["content"][event.index], event.delta, pieces)
        elif event.type == "content_block_stop" and whole["content"][event.index]["type"] == "tool_use":
            whole["content"][event.index]["input"] = _input("".join(pieces))
        elif event.type == "message_delta":
            whole |= event.delta.model_dump(mode="json", exclude_unset=True)
            whole["usage"] |= event.usage.model_dump(mode="json", exclude_unset=True)
    return whole


def _input(text: str) -> Any:
    """As the client reads it, which knows that it may have been cut."""
    try:
        found = jiter.from_json(text.encode(), partial_mode="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _grow(block: dict[str, Any], delta: Any, pieces: list[str]) -> None:
    if delta.type == "input_json_delta":
        pieces.append(delta.partial_json)
    else:
        name = delta.type.removesuffix("_delta")
        block[name] += getattr(delta, name)
