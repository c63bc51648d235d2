"""Reading answers of the Responses API strictly: OpenAI's own types, and nothing that they do not know."""

from __future__ import annotations

import json
from typing import Any, get_args

import pydantic
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList

from tests.unit.server.conftest import Answer

OURS = {"store", "warnings"}  # `store` is documented by OpenAI, but not in its types
_EVENTS = {
    kind.model_fields["type"].annotation.__args__[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}


def strict(kind: Any, value: Any) -> Any:
    """`value` as `kind`: types right without coercion, all required there, no unknown member at any depth."""
    parsed = pydantic.TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    dumped = pydantic.TypeAdapter(kind).dump_python(parsed, mode="json", by_alias=True, exclude_unset=True)
    assert dumped == value
    _no_extras(parsed, "")
    return parsed


def _no_extras(value: Any, at: str) -> None:
    if isinstance(value, pydantic.BaseModel):
        extras = set(value.model_extra or {}) - OURS
        assert not extras, f"{at}: unknown {extras}"
        for name in value.model_fields_set & set(type(value).model_fields):
            _no_extras(getattr(value, name), f"{at}.{name}")
    elif isinstance(value, list):
        for item in value:
            _no_extras(item, f"{at}[]")


def response(value: Any) -> Response:
    parsed = strict(Response, value)
    assert isinstance(parsed, Response)
    return parsed


def item_list(value: Any) -> ResponseItemList:
    parsed = strict(ResponseItemList, value)
    assert isinstance(parsed, ResponseItemList)
    return parsed


def events(answer: Answer) -> list[Any]:
    """The events of a stream, each as its own type; names and numbers checked."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parse_events(answer.body)


def parse_events(body: bytes) -> list[Any]:
    parsed = []
    assert body.endswith(b"\n\n")
    for block in body.decode().split("\n\n")[:-1]:
        name, _, data = block.partition("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        parsed.append(strict(_EVENTS[value["type"]], value))
    return parsed


def without_ids(value: Any) -> Any:
    """For comparing two runs: ids and times left out."""
    if isinstance(value, dict):
        left_out = ("id", "call_id", "item_id", "created_at", "completed_at")
        return {name: without_ids(member) for name, member in value.items() if name not in left_out}
    return [without_ids(member) for member in value] if isinstance(value, list) else value
