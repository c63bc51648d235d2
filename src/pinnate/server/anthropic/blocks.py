"""Messages made of content blocks, checked and turned into the messages of a chat.

Knows: the kinds of blocks, what a chat message holds. Must not know: HTTP, the rest of a request. Turns of the same
role that follow each other are one turn, as in Anthropic's API. A tool's result becomes a message of its own.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.server.body import FieldNotes, convert
from pinnate.server.protocol.anthropic import (
    CacheControl,
    InputMessage,
    TextBlockParam,
    ThinkingBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)

T = TypeVar("T")

ROLES = ("user", "assistant", "system")


class Conversation:
    """Chat messages, and for each the place in the request it came from."""

    def __init__(self, notes: FieldNotes) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self._notes = notes
        self._role = ""  # of the message before, in the client's terms

    def add_system(self, system: str | list[dict[str, Any]]) -> None:
        texts = [system] if isinstance(system, str) else self._texts(system, "system")
        if any(texts):
            self._append("system", {"role": "system", "content": _parts(texts)})

    def add(self, given: dict[str, Any], at: str) -> None:
        """
        Raises:
            InvalidRequestError, UnsupportedError: naming the block at fault.
        """
        message = convert(given, InputMessage, at=at, notes=self._notes)
        if message.role not in ROLES:
            raise InvalidRequestError(f"{at}.role must be one of {', '.join(ROLES)}", param=f"{at}.role")
        content = message.content
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message.role == "assistant":
            self._assistant(blocks, at)
        elif message.role == "system":
            self._append(at, {"role": "system", "content": _parts(self._texts(blocks, f"{at}.content"))})
        else:
            self._user(blocks, at)
        self._role = message.role

    @property
    def ends_with_assistant(self) -> bool:
        """Whether the answer goes on with what the last message says."""
        return self._role == "assistant" and "tool_calls" not in self.messages[-1]

    def _user(self, blocks: list[dict[str, Any]], at: str) -> None:
        texts: list[str] = []
        for number, block in enumerate(blocks):
            here = f"{at}.content[{number}]"
            if block.get("type") == "tool_result":
                result = self._block(block, ToolResultBlockParam, here)
                content = result.content
                parts = [content] if isinstance(content, str) else self._texts(content, f"{here}.content")
                self._append(here, {"role": "tool", "tool_call_id": result.tool_use_id, "content": _parts(parts)})
            else:
                texts.append(self._text(block, here))
        before = self.messages[-1] if self.messages and self._role == "user" else None
        if not texts:
            if not blocks:
                raise InvalidRequestError(f"{at}.content must not be an empty list", param=f"{at}.content")
        elif before is not None and before["role"] == "user":
            before["content"] = _parts([*_texts_of(before["content"]), *texts])
        else:
            self._append(at, {"role": "user", "content": _parts(texts)})

    def _assistant(self, blocks: list[dict[str, Any]], at: str) -> None:
        """Text after a tool's use stays in the same message: a chat has one text for each."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for number, block in enumerate(blocks):
            here, kind = f"{at}.content[{number}]", block.get("type")
            if kind == "thinking":
                thoughts.append(self._block(block, ThinkingBlockParam, here).thinking)
            elif kind == "tool_use":
                use = self._block(block, ToolUseBlockParam, here)
                arguments = msgspec.json.encode(use.input).decode()
                function = {"name": use.name, "arguments": arguments}
                calls.append({"id": use.id, "type": "function", "function": function})
            else:
                texts.append(self._text(block, here))
        continues = self._role == "assistant" and "tool_calls" not in self.messages[-1]
        if continues:
            message = self.messages[-1]
            texts = [*_texts_of(message.get("content", [])), *texts]
        else:
            message = {"role": "assistant"}
            self._append(at, message)
        if texts or not calls:
            message["content"] = _parts(texts or [""])
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls

    def _text(self, block: dict[str, Any], at: str) -> str:
        kind = block.get("type")
        if kind != "text":
            shown = kind[:64] if isinstance(kind, str) else "none"
            raise UnsupportedError(f"{at}: content blocks of type {shown} are not supported here", param=f"{at}.type")
        return self._block(block, TextBlockParam, at).text

    def _block(self, given: dict[str, Any], kind: type[T], at: str) -> T:
        check_cache_control(given, at, self._notes)
        return convert(given, kind, at=at, notes=self._notes)

    def _texts(self, blocks: list[dict[str, Any]], at: str) -> list[str]:
        return [self._text(block, f"{at}[{number}]") for number, block in enumerate(blocks)]

    def _append(self, origin: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.origins.append(origin)


def check_cache_control(given: dict[str, Any], at: str, notes: FieldNotes) -> None:
    """It has no effect, but what is not known in it is said. `given` is what it is a member of, at `at`."""
    control = given.get("cache_control")
    if isinstance(control, dict):
        convert(control, CacheControl, at=f"{at}.cache_control".lstrip("."), notes=notes)


def _parts(texts: list[str]) -> str | list[dict[str, Any]]:
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _texts_of(content: str | list[dict[str, Any]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]
