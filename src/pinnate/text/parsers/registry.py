"""The formats of tool calls and of reasoning: a table of each, and the choice from a chat template's text.

Knows: which format a template was written for, by its marks. Must not know: requests, servers. A choice comes with its
reason, which the server logs.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pinnate.core.errors import ConfigError
from pinnate.text.parsers import hermes, json_calls, mistral, pythonic
from pinnate.text.parsers.call_object import CallRules
from pinnate.text.parsers.cursor import Cursor, ScriptParser, Sink, Steps

_ALPHANUMERIC = string.ascii_letters + string.digits


def openai_id() -> str:
    return "call_" + secrets.token_hex(12)


def mistral_id() -> str:
    """Mistral's templates refuse any other form."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes calls.

    `call` is the shape of one call around NAME and ARGUMENTS, `begin` and `end` stand around all of them and
    `separator` between two: what we ask for where we do (tool_grammar.py, tool_prompt.py). Its parser reads that and
    what models make of it. `marks`: tokens that the parser must see even if the tokenizer calls them special.
    `is_marked`: a mark says that a call is meant, whatever its name.
    """

    name: str
    script: Callable[[Cursor, Sink, CallRules], Steps]
    begin: str = ""
    call: tuple[str, str, str]
    separator: str = "\n"
    end: str = ""
    marks: tuple[str, ...] = ()
    is_marked: bool = False
    new_id: Callable[[], str] = openai_id

    def new_parser(self, names: Collection[str]) -> ScriptParser:
        """`names`: the tools of the request."""
        rules = CallRules(None if self.is_marked else frozenset(names))
        return ScriptParser(lambda cursor, sink: self.script(cursor, sink, rules), self.new_id)


_OBJECT = ('{"name": "', '", "arguments": ', "}")
_FORMATS = (
    ToolFormat(
        name="hermes",
        script=hermes.hermes,
        call=("<tool_call>\n" + _OBJECT[0], _OBJECT[1], "}\n</tool_call>"),
        marks=("<tool_call>", "</tool_call>"),
        is_marked=True,
    ),
    ToolFormat(
        name="llama3_json",
        script=json_calls.json_calls,
        call=('{"name": "', '", "parameters": ', "}"),
        separator="; ",
        marks=(json_calls.PYTHON_TAG,),
    ),
    ToolFormat(
        name="mistral",
        script=mistral.mistral,
        begin="[TOOL_CALLS][",
        call=_OBJECT,
        separator=", ",
        end="]",
        marks=(mistral.OPEN, mistral.CALL_ID, mistral.ARGS),
        is_marked=True,
        new_id=mistral_id,
    ),
    ToolFormat(
        name="pythonic",
        script=pythonic.pythonic,
        begin="[",
        call=("", "(", ")"),
        separator=", ",
        end="]",
        marks=(pythonic.OPEN, pythonic.CLOSE),
    ),
    ToolFormat(name="json", script=json_calls.json_calls, begin="[", call=_OBJECT, separator=", ", end="]"),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({each.name: each for each in _FORMATS})
# Names that users of other servers know them by.
TOOL_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "qwen": "hermes",
        "qwen25": "hermes",
        "qwen3": "hermes",
        "llama3": "llama3_json",
        "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic",
        "olmo3": "pythonic",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """`always_open`: the output begins inside the thinking even if the prompt's text does not show it."""

    name: str
    marks: tuple[str, str]
    always_open: bool = False


_THINK = ("<think>", "</think>")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "think": ReasoningFormat(name="think", marks=_THINK),
        "deepseek_r1": ReasoningFormat(name="deepseek_r1", marks=_THINK, always_open=True),
        "mistral": ReasoningFormat(name="mistral", marks=("[THINK]", "[/THINK]")),
    }
)
REASONING_ALIASES: Mapping[str, str] = MappingProxyType({"qwen3": "think", "magistral": "mistral"})


def knows_tools(template: str) -> bool:
    """Whether a template shows the model the tools it is given."""
    return re.search(r"\btools\b", template) is not None


def choose_tool_format(template: str | None, wanted: str = "auto") -> tuple[ToolFormat, str]:
    """The format and why. `wanted`: what the operator asks for, "auto" to read it off the template.

    Raises:
        ConfigError: there is no format of that name.
    """
    if wanted != "auto":
        name = TOOL_ALIASES.get(wanted, wanted)
        if name not in TOOL_FORMATS:
            known = ", ".join(TOOL_FORMATS)
            raise ConfigError(f"--tool-call-parser {wanted}: there is none of that name (there are: auto, {known})")
        return TOOL_FORMATS[name], "as --tool-call-parser says"
    signs = (
        ("mistral", "[TOOL_CALLS]"),
        ("hermes", "<tool_call>"),
        ("pythonic", "<|python_start|>"),
        ("llama3_json", "<|python_tag|>"),
        ("llama3_json", '"parameters": dictionary of argument name and its value'),
    )
    for name, sign in signs:
        if template is not None and sign in template:
            return TOOL_FORMATS[name], f"the chat template has {sign}"
    if template is None or not knows_tools(template):
        return TOOL_FORMATS[
            "hermes"
        ], "the chat template knows no tools: they are described to the model in this format"
    return TOOL_FORMATS["json"], "the chat template gives no sign of another format"


def choose_reasoning_format(template: str | None, wanted: str = "auto") -> tuple[ReasoningFormat | None, str]:
    """The format, None for a model that does not think aloud, and why.

    Raises:
        ConfigError: there is no format of that name.
    """
    if wanted == "none":
        return None, "as --reasoning-parser says"
    if wanted != "auto":
        name = REASONING_ALIASES.get(wanted, wanted)
        if name not in REASONING_FORMATS:
            known = ", ".join(REASONING_FORMATS)
            raise ConfigError(
                f"--reasoning-parser {wanted}: there is none of that name (there are: auto, none, {known})"
            )
        return REASONING_FORMATS[name], "as --reasoning-parser says"
    for name in ("think", "mistral"):
        mark = REASONING_FORMATS[name].marks[1]
        if template is not None and mark in template:
            return REASONING_FORMATS[name], f"the chat template has {mark}"
    return None, "the chat template gives no sign of it"
