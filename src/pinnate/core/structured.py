"""StructuredOutput: the language that an output must belong to, as the client wrote it.

Knows: the kinds, and what each kind's text is. Must not know: how a language is compiled, tokens.
"""

from __future__ import annotations

from typing import Literal

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
