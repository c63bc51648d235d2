"""Calls as Python writes them: [get_weather(city="Paris", days=3), ...], the whole answer (Llama 4, Llama 3.2, OLMo).

Knows: keyword arguments whose values are literals of Python or JSON. They become JSON one by one, as soon as each is
complete. An answer that begins otherwise, or with a name that is no tool of the request, is content.
"""

from __future__ import annotations

import ast
import json
import math
import string
import warnings
from collections.abc import Generator
from typing import Any

from pinnate.text.parsers.call_object import CallRules
from pinnate.text.parsers.cursor import END, Cursor, Found, Sink, Steps, blanks, give_back, literal, one_of, run_of

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
_IDENTIFIER = frozenset(string.ascii_letters + string.digits + "_")
_NAME = _IDENTIFIER | frozenset(".-")
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_CONSTANTS = {"true": True, "false": False, "null": None}


def pythonic(cursor: Cursor, sink: Sink, rules: CallRules) -> Steps:
    yield from blanks(cursor)
    marked = cursor.char == "<"
    if marked:
        if not (yield from literal(cursor, OPEN)):
            return
        yield from blanks(cursor)
    if not (yield from literal(cursor, "[")):
        return
    yield from blanks(cursor)
    while cursor.char in _NAME:
        if not (yield from _call(cursor, sink, rules)):
            return
        yield from blanks(cursor)
        if not (yield from one_of(cursor, ",")):
            break
        yield from blanks(cursor)
    if not sink.num_calls or not (yield from literal(cursor, "]")):
        return
    cursor.held.clear()
    yield from blanks(cursor)
    if marked and (yield from literal(cursor, CLOSE)):
        cursor.held.clear()
    give_back(cursor, sink)


def _call(cursor: Cursor, sink: Sink, rules: CallRules) -> Found:
    """The call is in the sink once its first argument is known to be sound."""
    name = yield from run_of(cursor, _NAME)
    if not (yield from literal(cursor, "(")) or not rules.is_name(name):
        return False
    count = 0
    yield from blanks(cursor)
    while cursor.char != ")":
        argument = yield from _argument(cursor)
        if argument is None:
            return False
        if not count:
            sink.start(name)
        cursor.held.clear()
        sink.arguments((", " if count else "{") + argument)
        count += 1
        if not (yield from one_of(cursor, ",")):
            break
        yield from blanks(cursor)
    if not (yield from literal(cursor, ")")):
        return False
    if not count:
        sink.start(name)
    sink.arguments("}" if count else "{}")
    cursor.held.clear()
    return True


def _argument(cursor: Cursor) -> Generator[None, None, str | None]:
    """`key=value` as a JSON member; None where there is none."""
    key = yield from run_of(cursor, _IDENTIFIER)
    yield from blanks(cursor)
    if not key or not (yield from literal(cursor, "=")):
        return None
    begin = len(cursor.held)
    if not (yield from _expression(cursor)):
        return None
    converted = to_json("".join(cursor.held[begin:]).strip())
    return None if converted is None else f"{json.dumps(key)}: {converted}"


def _expression(cursor: Cursor) -> Found:
    """Reads to the comma or bracket that ends a value. False at a wrong bracket and at the end."""
    open_ones: list[str] = []
    while cursor.char != END:
        char = cursor.char
        if char in _CLOSING:
            open_ones.append(_CLOSING[char])
        elif not open_ones and char in (",", ")"):
            return True
        elif char in ("}", "]", ")") and (not open_ones or open_ones.pop() != char):
            return False
        cursor.hold()
        yield
        if char in ("'", '"'):
            yield from _rest_of_string(cursor, char)
    return False


def _rest_of_string(cursor: Cursor, quote: str) -> Steps:
    while cursor.char not in (quote, END):
        if cursor.char == "\\":
            cursor.hold()
            yield
            if cursor.char == END:
                return
        cursor.hold()
        yield
    if cursor.char == quote:
        cursor.hold()
        yield


def to_json(text: str) -> str | None:
    """A literal of JSON or Python as JSON; None for what is neither, or not finite, or not Unicode."""
    try:
        try:
            meant = json.loads(text, strict=False)
        except ValueError:
            meant = _evaluate(text)
        written = json.dumps(meant, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return written


def _evaluate(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes that Python does not know
        tree = ast.parse(text, mode="eval")
    return _meaning(tree.body)


def _meaning(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):  # bool is an int
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if math.isfinite(value):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_meaning(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _meaning(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("not a JSON key")
