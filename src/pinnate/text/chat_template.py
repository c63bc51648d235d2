"""ChatTemplate: a conversation to the text that the model was trained to continue.

Knows: Jinja, sandboxed, with the names that templates on the Hugging Face hub rely on. Must not know: where the
template came from, tokens, HTTP.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pinnate.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from jinja2 import Template

MAX_RENDERED_CHARS = 64 * 1024 * 1024  # no context is that long: a template that writes more is running away

# Marks the end of the last message's content in a rendering; private-use characters, so no message has it by chance.
# The blank shows whether the template trims contents.
_MARK = "\ue0f1\ue0f2\ue0f3"
_PROBE = _MARK + " "


class TemplateRefusal(Exception):
    """Raised by a template's `raise_exception`; holds its message."""


class ChatTemplate:
    """One template, compiled at its first use and kept. Safe to use from several threads."""

    def __init__(self, source: str, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._template: Template | None = None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text for `messages` (role and content each). It holds its own BOS if the template writes one.

        `continue_final_message` ends the text with the last message's content, so that the model goes on writing it.
        `variables` reach the template by name (`tools`, `documents`, ...).

        Raises:
            InvalidRequestError: the template refuses the messages (its own message is in the text) or fails on them.
        """
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, variables)
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        rendered = self._render(_with_probe(messages), False, variables)
        end = rendered.rfind(_MARK)
        if end < 0:
            raise InvalidRequestError("the chat template does not write the final message", param="messages")
        text = rendered[:end]
        return text if rendered.startswith(_PROBE, end) else text.rstrip()

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        context = {"tools": None, "documents": None, **self._tokens, **variables}
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            if self._template is None:
                self._template = _compile(self.source)
            return "".join(_bounded(self._template.generate(context)))
        except TemplateRefusal as refusal:
            raise InvalidRequestError(str(refusal), param="messages") from None
        except Exception as error:  # a template is a program of the model's author: anything may go wrong in it
            line = " ".join(f"{type(error).__name__}: {error}".split())
            raise InvalidRequestError(f"the chat template failed on these messages: {line}", param="messages") from None


def _with_probe(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of `messages` whose last content ends in the probe."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        marked: Any = content + _PROBE
    elif isinstance(content, list) and content and isinstance(content[-1], dict) and "text" in content[-1]:
        marked = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_PROBE}"}]
    else:
        raise InvalidRequestError(
            "continue_final_message needs a last message with text content", param="continue_final_message"
        )
    return [*messages[:-1], {**messages[-1], "content": marked}]


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > MAX_RENDERED_CHARS:
            raise TemplateRefusal(f"the chat template wrote more than {MAX_RENDERED_CHARS} characters")
        yield piece


def _compile(source: str) -> Template:
    """Compiles with the environment that `apply_chat_template` of Hugging Face documents for templates."""
    from jinja2 import nodes  # imported here: 30 ms that a process without chat never pays
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks what an assistant wrote, for training masks; here its body is simply text."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> str:
    raise TemplateRefusal(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
