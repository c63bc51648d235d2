"""Objects that name their properties have no others: what `strict` means of a schema that does not say so itself.

OpenAI's strict mode demands `additionalProperties: false` of every object; generated schemas (pydantic's, say) leave it
out, and a model that may add properties may never stop. Knows: the keywords of JSON Schema that hold schemas.
"""

from __future__ import annotations

from typing import Any

# Where these stand, what an object may have is put together from several places: closing one of them would refuse what
# another one asks for.
_COMPOSING = frozenset({"allOf", "if", "then", "else", "not", "dependentSchemas", "unevaluatedProperties"})
_OF_MANY = ("properties", "patternProperties", "$defs", "definitions")
_OF_LISTS = ("anyOf", "oneOf", "prefixItems")
_OF_ONE = ("items", "additionalProperties", "contains")


def closed(schema: Any) -> Any:
    """`schema` with `additionalProperties: false` in each object schema that has `properties` and says nothing of
    others. As it is where it composes objects (`allOf`, conditions). Faults in it are left for others to find."""
    try:
        return schema if _composes(schema) else _closed(schema)
    except RecursionError:
        return schema  # too deep, which is one of them


def _composes(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    return bool(schema.keys() & _COMPOSING) or any(_composes(inner) for inner in _inner(schema))


def _inner(schema: dict[str, Any]) -> list[Any]:
    many = [schema[name] for name in _OF_MANY if isinstance(schema.get(name), dict)]
    lists = [schema[name] for name in _OF_LISTS if isinstance(schema.get(name), list)]
    return [
        *(inner for named in many for inner in named.values()),
        *(inner for listed in lists for inner in listed),
        *(schema[name] for name in _OF_ONE if name in schema),
    ]


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name in _OF_MANY:
        if isinstance(schema.get(name), dict):
            result[name] = {key: _closed(inner) for key, inner in schema[name].items()}
    for name in _OF_LISTS:
        if isinstance(schema.get(name), list):
            result[name] = [_closed(inner) for inner in schema[name]]
    for name in _OF_ONE:
        if name in schema:
            result[name] = _closed(schema[name])
    if "properties" in schema and not schema.keys() & {"additionalProperties", "patternProperties", "$ref"}:
        result["additionalProperties"] = False
    return result
