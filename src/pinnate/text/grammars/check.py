"""check: whether a structured output can be followed, and in which form the engine takes it; where not, the reason.

Knows: the order of the checks, how a fault that only the compiler sees is located in a schema. Must not know:
processes. May take long, or for ever where a compile is stuck: engine/grammar_worker.py is there to be killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from time import perf_counter
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher

from pinnate.core.errors import GrammarError
from pinnate.core.structured import StructuredOutput
from pinnate.text.grammars.faults import Fault
from pinnate.text.grammars.limits import MAX_BYTES
from pinnate.text.grammars.schema import subschemas
from pinnate.text.grammars.source import checked, grammar_of

LOCATE_SECONDS = 0.3

# What llguidance says in terms of its own options, in a client's terms; whether it is a matter of support.
_WORDS: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "oneOf constraints": ("oneOf is supported where no value can fit two of its schemas; use anyOf", True),
        "min/maxProperties": ("minProperties and maxProperties need every listed property to be required", True),
        "NoExtension": ("no finite value fits", False),
    }
)

Compile = Callable[[str], None]  # raises GrammarError


def check(structured: StructuredOutput, compile_grammar: Compile | None = None) -> StructuredOutput:
    """The checked form of `structured` (see `source.checked`), once `compile_grammar` took its grammar. Without it
    only the grammar's own rules are looked at, which is quick and needs no vocabulary.

    Raises:
        Fault: with the path of what is wrong, too large or unsupported.
    """
    check_size(structured)
    found = checked(structured)
    compiles = compile_grammar or _validate
    try:
        compiles(grammar_of(found))
    except GrammarError as error:
        message = str(error)
        path = _locate(found, message, compiles) if found.kind == "json_schema" else ""
        for theirs, (ours, unsupported) in _WORDS.items():
            if message.startswith(theirs):
                raise Fault(ours, path, unsupported=unsupported) from None
        raise Fault(message, path) from None
    return found


def check_size(structured: StructuredOutput) -> None:
    size = len(structured.text.encode("utf-8", "replace"))
    if size > MAX_BYTES:
        raise Fault(f"{size} bytes, at most {MAX_BYTES} are allowed")


def _validate(grammar: str) -> None:
    message = LLMatcher.validate_grammar(grammar)
    if message and not message.startswith("WARNING"):
        raise GrammarError(" ".join(message.split())[:500])


def _locate(structured: StructuredOutput, message: str, compiles: Compile) -> str:
    """The path of the innermost schema that fails with the same message."""
    root = json.loads(structured.text)
    shared = {name: root[name] for name in ("$defs", "definitions") if isinstance(root, dict) and name in root}
    path, here, end = "#", root, perf_counter() + LOCATE_SECONDS
    while True:
        for inner_path, inner in subschemas(here, path):
            if perf_counter() > end:
                return path
            if isinstance(inner, dict) and _fails(structured, {**shared, **inner}, message, compiles):
                path, here = inner_path, inner
                break
        else:
            return path


def _fails(structured: StructuredOutput, schema: dict[str, Any], message: str, compiles: Compile) -> bool:
    text = json.dumps(schema, ensure_ascii=False)
    try:
        compiles(grammar_of(StructuredOutput(kind="json_schema", text=text, param=structured.param)))
    except GrammarError as error:
        return str(error) == message
    return False
