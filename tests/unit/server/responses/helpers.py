"""Reading answers of the Responses API with OpenAI's own types."""

from __future__ import annotations

import json
from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList

from tests.unit.server.conftest import Answer
from tests.unit.server.strict_types import strict

OURS = frozenset({"store", "warnings"})  # `store` is documented by OpenAI, but not in its types
_EVENTS = {
    kind.model_fields["type"].annotation.__args__[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}


def response(value: Any) -> Response:
    parsed = strict(Response, value, OURS)
    assert isinstance(parsed, Response)
    return parsed


def item_list(value: Any) -> ResponseItemList:
    parsed = strict(ResponseItemList, value)
    assert isinstance(parsed, ResponseItemList)
    return parsed


def events(answer: Answer) -> list[Any]:
    """The events of a stream, each as its own type."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parse_events(answer.body)


def parse_events(body: bytes) -> list[Any]:
    parsed = []
    assert body.endswith(b"\n\n")
    for block in body.decode().split("\n\n")[:-1]:
        name, _, data = block.partition("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        parsed.append(strict(_EVENTS[value["type"]], value, OURS))
    return parsed


def without_ids(value: Any) -> Any:
    """For comparing two runs: ids and times left out."""
    if isinstance(value, dict):
        left_out = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {name: without_ids(member) for name, member in value.items() if name not in left_out}
    return [without_ids(member) for member in value] if isinstance(value, list) else value
