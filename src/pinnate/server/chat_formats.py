"""How the served model writes tool calls and reasoning, and what that means for one chat's output.

Knows: formats, the tokens of their marks. Must not know: HTTP, how a template renders. The choice is made once for a
model and logged with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pinnate.core.sampling import SamplingParams
from pinnate.core.structured import StructuredOutput
from pinnate.server.tools import ToolUse
from pinnate.text.parsers.events import (
    ChatEvent,
    ChatParser,
    ContentDelta,
    PlainParser,
    ToolCallDelta,
    ToolCallStart,
)
from pinnate.text.parsers.reasoning import ReasoningParser
from pinnate.text.parsers.registry import (
    ReasoningFormat,
    ToolFormat,
    choose_reasoning_format,
    choose_tool_format,
)
from pinnate.text.tool_grammar import SpecialToken, calls_grammar, content_rule, strict_grammar

_logger = logging.getLogger("pinnate.server")


class Tokens(Protocol):
    """What is needed of a tokenizer."""

    def token_id(self, token: str) -> int | None: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """Of the model that is served, with the template that is used."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    why: tuple[str, str]  # tools, reasoning

    @classmethod
    def choose(cls, template: str | None, tool_parser: str, reasoning_parser: str) -> ChatFormats:
        """
        Raises:
            ConfigError: a parser that there is none of.
        """
        tools, why_tools = choose_tool_format(template, tool_parser)
        reasoning, why_reasoning = choose_reasoning_format(template, reasoning_parser)
        return cls(tools, reasoning, (why_tools, why_reasoning))

    def log(self) -> None:
        reasoning = "none" if self.reasoning is None else self.reasoning.name
        _logger.info("tool calls: %s (%s); reasoning: %s (%s)", self.tools.name, self.why[0], reasoning, self.why[1])

    def is_thinking(self, prompt: str) -> bool:
        """Whether an answer to `prompt` begins inside the reasoning."""
        if self.reasoning is None:
            return False
        opening, closing = self.reasoning.marks
        end = prompt.rstrip()
        return end.endswith(opening) or (self.reasoning.always_open and not end.endswith(closing))

    def is_over(self, prompt: str) -> bool:
        """Whether `prompt` ends with the reasoning's end: the template was told that there shall be none."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.marks[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOutput:
    """What one chat's output may hold. `prompt`: its rendered text. `given`: the client's constraint."""

    formats: ChatFormats
    use: ToolUse
    prompt: str
    given: StructuredOutput | None = None
    shows_reasoning: bool = True

    def new_parser(self) -> ChatParser:
        """Of one choice."""
        parser: ChatParser = PlainParser()
        if self.use.mode != "none":
            parser = self.formats.tools.new_parser([tool.name for tool in self.use.callable])
            if not self.use.many:
                parser = Filtered(parser, _is_no_later_call)
            if self.use.mode == "required":  # all is calls: what is none is the beginning of one that was cut off
                parser = Filtered(parser, _is_no_content)
        reasoning = self.formats.reasoning
        if reasoning is None or not self._may_think:
            return parser
        is_open = self.formats.is_thinking(self.prompt)
        return ReasoningParser(parser, reasoning.marks, is_open=is_open, shown=self.shows_reasoning)

    def constrain(self, params: SamplingParams, tokens: Tokens) -> SamplingParams:
        """`params` with what makes the output so: the grammar of calls that must come, and the special tokens that the
        parsers must see. A constraint of the client's own is of the answer: thinking comes before it, and where tools
        may be called, calls may take its place. Where a tool must be called there is no such answer.

        Raises:
            UnsupportedError: the arguments of a tool cannot be written in the model's format.
        """
        kept = tuple(sorted(self._marks(tokens)))
        constraint = self._constraint(_special(tokens))
        if not kept and constraint is params.structured_output:
            return params
        return msgspec.structs.replace(params, kept_special_tokens=kept, structured_output=constraint)

    @property
    def _may_think(self) -> bool:
        """Not in an answer that a whole grammar of the client's own describes."""
        return self.given is None or self.use.mode == "required" or content_rule(self.given) is not None

    def _marks(self, tokens: Tokens) -> set[int]:
        marks = list(self.formats.tools.marks) if self.use.mode != "none" else []
        if self.formats.reasoning is not None:
            marks += self.formats.reasoning.marks
        ids = (tokens.token_id(mark) for mark in marks)
        return {token for token in ids if token is not None and tokens.is_special(token)}

    def _constraint(self, special: SpecialToken) -> StructuredOutput | None:
        form, use, given = self.formats.tools, self.use, self.given
        reasoning = self.formats.reasoning
        thinking = None if reasoning is None or self.formats.is_over(self.prompt) else reasoning.marks
        if given is None and use.mode != "required":
            if form.is_marked and any(tool.is_strict for tool in use.callable):
                return _grammar(strict_grammar(form, use.callable, special=special))
            return None
        content = None if given is None or use.mode == "required" else content_rule(given)
        if use.mode != "required" and (content is None or (use.mode == "none" and thinking is None)):
            return given
        text = calls_grammar(
            form,
            use.callable,
            many=use.many,
            thinking=thinking,
            is_open=self.formats.is_thinking(self.prompt),
            content=content,
            special=special,
        )
        return _grammar(text, "tools" if given is None or use.mode == "required" else given.param)


class Filtered:
    """A parser of whose events only some are passed on."""

    def __init__(self, parser: ChatParser, is_wanted: Callable[[ChatEvent], bool]) -> None:
        self._parser = parser
        self._is_wanted = is_wanted

    def push(self, text: str) -> list[ChatEvent]:
        return list(filter(self._is_wanted, self._parser.push(text)))

    def finish(self) -> list[ChatEvent]:
        return list(filter(self._is_wanted, self._parser.finish()))


def _is_no_later_call(event: ChatEvent) -> bool:
    return not (isinstance(event, ToolCallStart | ToolCallDelta) and event.index)


def _is_no_content(event: ChatEvent) -> bool:
    return not isinstance(event, ContentDelta)


def _special(tokens: Tokens) -> SpecialToken:
    def special(text: str) -> int | None:
        token = tokens.token_id(text)
        return token if token is not None and tokens.is_special(token) else None

    return special


def _grammar(text: str, param: str = "tools") -> StructuredOutput:
    return StructuredOutput(kind="grammar", text=text, param=param)
