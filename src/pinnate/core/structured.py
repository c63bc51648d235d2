"""StructuredOutput: the language that an output must belong to, as the client wrote it; and Matcher.

Knows: the kinds, what each kind's text is, what the engine asks of a compiled language. Must not know: how one is
compiled, or how tokens are drawn.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

StructuredKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """`text` by kind:

    json_object: "" (any JSON object). json_schema: the schema as JSON. regex: the pattern, matched against the whole
    output. choice: a JSON list of texts. grammar: Lark (llguidance's dialect, `%json {...}` included) or GBNF/EBNF.
    structural_tag: its JSON, as the API takes it.
    """

    kind: StructuredKind
    text: str = ""
    param: str = "structured_outputs"  # the field that holds it, for errors


class Matcher(Protocol):
    """Where one sequence is in its language. The scheduler owns it and advances it, the executor reads it."""

    @property
    def is_terminated(self) -> bool:
        """Whether the language allows nothing more: the output is complete."""
        ...

    def advance(self, token: int) -> None:
        """Takes in the next token of the sequence.

        Raises:
            GrammarError: the token is not allowed here, or the language went beyond its limits.
        """
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next, where only one text may; empty where there is a choice.

        The tokens are those that the tokenizer would make of the text; `fill` allows no others.
        """
        ...

    def clone(self) -> Matcher: ...

    def fill(self, mask: memoryview) -> None:
        """Writes which tokens may come next: bit i % 32 of word i // 32 (uint32, writable, zeros before). Never
        raises: what goes wrong, `advance` tells. May run in another thread while nobody else uses the matcher."""
        ...
