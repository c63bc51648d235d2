"""Input items: checked, given ids, and turned into the messages of a chat.

Knows: the kinds of items, what a chat message holds. Must not know: HTTP, the rest of a request. An item that has been
through `check_items` is a JSON object of the shape that GET input_items shows; it is never changed afterwards.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.server.body import FieldNotes, convert, without_nulls
from pinnate.server.protocol.responses import (
    InputCall,
    InputCallOutput,
    InputMessage,
    InputPart,
    InputReasoning,
    InputThought,
    ItemReference,
)

Item = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "refusal")


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def references(given: str | list[dict[str, Any]]) -> set[str]:
    """The ids that item_references name."""
    if isinstance(given, str):
        return set()
    ids = [item.get("id") for item in given if _kind(item) == "item_reference"]
    return {item_id for item_id in ids if isinstance(item_id, str)}


def check_items(given: str | list[dict[str, Any]], named: Mapping[str, Item], notes: FieldNotes) -> list[Item]:
    """The items of `input`. `named` has what its item_references name, as far as it is stored.

    Raises:
        InvalidRequestError, UnsupportedError: naming the item at fault.
    """
    if isinstance(given, str):
        return [_message(InputMessage(role="user", content=given), "input", notes)]
    return [_check(item, f"input[{number}]", named, notes) for number, item in enumerate(given)]


def _kind(given: dict[str, Any]) -> Any:
    names = without_nulls(given).keys()
    return given["type"] if "type" in names else "item_reference" if names == {"id"} else "message"


def _check(given: dict[str, Any], at: str, named: Mapping[str, Item], notes: FieldNotes) -> Item:
    kind = _kind(given)
    if kind == "message":
        return _message(convert(given, InputMessage, at=at, notes=notes), at, notes)
    if kind == "function_call":
        return _call(convert(given, InputCall, at=at, notes=notes))
    if kind == "function_call_output":
        return _output(convert(given, InputCallOutput, at=at, notes=notes), at, notes)
    if kind == "reasoning":
        return _reasoning(convert(given, InputReasoning, at=at, notes=notes), at, notes)
    if kind == "item_reference":
        reference = convert(given, ItemReference, at=at, notes=notes)
        found = named.get(reference.id)
        if found is None:
            raise InvalidRequestError(f"{at}.id: no item with this id is stored here", param=f"{at}.id")
        return found
    shown = kind[:64] if isinstance(kind, str) else "not a string"
    raise UnsupportedError(f"{at}: items of type {shown} are not supported", param=f"{at}.type")


def _message(message: InputMessage, at: str, notes: FieldNotes) -> Item:
    if message.role not in ROLES:
        raise InvalidRequestError(f"{at}.role must be one of {', '.join(ROLES)}", param=f"{at}.role")
    answer = message.role == "assistant"
    kind = "output_text" if answer else "input_text"
    if isinstance(message.content, str):
        texts = [message.content]
    else:
        texts = _texts(message.content, f"{at}.content", notes)
    parts = [{"type": kind, "text": text, **({"annotations": []} if answer else {})} for text in texts]
    return {
        "type": "message",
        "id": message.id or new_id("msg"),
        "status": "completed",
        "role": message.role,
        "content": parts,
    }


def _texts(parts: list[dict[str, Any]], at: str, notes: FieldNotes) -> list[str]:
    if not parts:
        raise InvalidRequestError(f"{at} must not be an empty list", param=at)
    texts = []
    for number, given in enumerate(parts):
        here = f"{at}[{number}]"
        kind = given.get("type")
        if kind not in _TEXT_PARTS:
            shown = kind[:64] if isinstance(kind, str) else "none"
            raise UnsupportedError(f"{here}: parts of type {shown} are not supported, only text", param=f"{here}.type")
        part = convert(given, InputPart, at=here, notes=notes)
        text = part.refusal if kind == "refusal" else part.text
        if text is None:
            name = f"{here}.{'refusal' if kind == 'refusal' else 'text'}"
            raise InvalidRequestError(f"{name} is required", param=name)
        texts.append(text)
    return texts


def _call(call: InputCall) -> Item:
    return {
        "type": "function_call",
        "id": call.id or new_id("fc"),
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _output(output: InputCallOutput, at: str, notes: FieldNotes) -> Item:
    if isinstance(output.output, str):
        shown: Any = output.output
    else:
        shown = [{"type": "input_text", "text": text} for text in _texts(output.output, f"{at}.output", notes)]
    return {
        "type": "function_call_output",
        "id": output.id or new_id("fco"),
        "call_id": output.call_id,
        "output": shown,
        "status": "completed",
    }


def _reasoning(item: InputReasoning, at: str, notes: FieldNotes) -> Item:
    """`encrypted_content` cannot be read by anybody here; the text beside it can."""
    shown: Item = {"type": "reasoning", "id": item.id or new_id("rs"), "summary": [], "status": "completed"}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        shown[name] = []
        for number, part in enumerate(getattr(item, name) or []):
            here = f"{at}.{name}[{number}]"
            thought = convert(part, InputThought, at=here, notes=notes)
            if thought.type != kind:
                raise InvalidRequestError(f"{here}.type must be {kind}", param=f"{here}.type")
            shown[name].append({"type": kind, "text": thought.text})
    return shown


def to_messages(items: Iterable[tuple[str, Item]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Chat messages, and for each the place in the request it came from. `items` are (place, item)."""
    conversation = _Conversation()
    for place, item in items:
        conversation.add(place, item)
    for message in conversation.messages:
        if "tool_calls" not in message:  # a turn that ended while the model was still thinking
            message.setdefault("content", "")
    return conversation.messages, conversation.origins


class _Conversation:
    """What the model said in one turn (reasoning, a message, calls) becomes one assistant message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self._turn: dict[str, Any] | None = None  # the assistant message that still grows

    def add(self, place: str, item: Item) -> None:
        kind = item["type"]
        if kind == "reasoning":
            text = "\n".join(part["text"] for part in (item.get("content") or item["summary"]))
            if text:
                self._assistant(place, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text
        elif kind == "message" and item["role"] == "assistant":
            self._assistant(place, "content", "tool_calls")["content"] = _parts(item["content"])
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls = self._assistant(place).setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        else:
            self._turn = None
            self._append(place, _plain_message(item))

    def _assistant(self, place: str, *already: str) -> dict[str, Any]:
        """The turn that goes on, or a new one where it has got one of `already`."""
        if self._turn is None or any(name in self._turn for name in already):
            self._turn = {"role": "assistant"}
            self._append(place, self._turn)
        return self._turn

    def _append(self, place: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.origins.append(place)


def _plain_message(item: Item) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": item["role"], "content": _parts(item["content"])}
    output = item["output"]
    return {
        "role": "tool",
        "tool_call_id": item["call_id"],
        "content": output if isinstance(output, str) else _parts(output),
    }


def _parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if len(parts) == 1:
        return str(parts[0]["text"])
    return [{"type": "text", "text": part["text"]} for part in parts]
