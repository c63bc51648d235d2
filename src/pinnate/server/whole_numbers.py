"""Whole numbers that were written with a point: JSON Schema's `integer` admits 1.0, and JavaScript's, PHP's and other
encoders send it. Where a field's type is an integer, such a number becomes one.

Knows: msgspec's description of types. Must not know: any field. It is asked only when a strict reading has failed, so
an ordinary request pays nothing.
"""

from __future__ import annotations

import functools
from typing import Any

from msgspec import inspect as types

MAX_EXACT = 2.0**53  # beyond it a double is no certain integer


def with_integers(fields: dict[str, Any], struct: type) -> dict[str, Any]:
    """`fields` with 1.0 as 1 wherever the struct wants an integer; what is shared with `fields` is not changed."""
    wanted = _fields(struct)
    return {name: _integral(value, wanted[name]) if name in wanted else value for name, value in fields.items()}


@functools.cache
def _fields(struct: type) -> dict[str, types.Type]:
    described = types.type_info(struct)
    assert isinstance(described, types.StructType)
    return {field.encode_name: field.type for field in described.fields}


def _integral(value: Any, wanted: types.Type) -> Any:
    kinds = wanted.types if isinstance(wanted, types.UnionType) else (wanted,)
    if type(value) is float:
        is_whole = value.is_integer() and abs(value) <= MAX_EXACT
        return int(value) if is_whole and any(isinstance(kind, types.IntType) for kind in kinds) else value
    if type(value) is list:
        for kind in kinds:
            if isinstance(kind, types.ListType):
                return [_integral(item, kind.item_type) for item in value]
    return value
