"""Reading an answer with a client's own types, strictly: nothing that they do not know, and no coercion."""

from __future__ import annotations

import functools
import json
from typing import Any

import pydantic


def strict(kind: Any, value: Any, ours: frozenset[str] = frozenset()) -> Any:
    """`value` as `kind`: types right, all required there, no unknown member at any depth but those of `ours`."""
    adapter = _adapter(kind)
    parsed = adapter.validate_json(json.dumps(value), strict=True)
    assert adapter.dump_python(parsed, mode="json", by_alias=True, exclude_unset=True) == value
    _no_extras(parsed, "", ours)
    return parsed


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def _no_extras(value: Any, at: str, ours: frozenset[str]) -> None:
    if isinstance(value, pydantic.BaseModel):
        extras = set(value.model_extra or {}) - ours
        assert not extras, f"{at}: unknown {extras}"
        for name in value.model_fields_set & set(type(value).model_fields):
            _no_extras(getattr(value, name), f"{at}.{name}", ours)
    elif isinstance(value, list):
        for item in value:
            _no_extras(item, f"{at}[]", ours)
