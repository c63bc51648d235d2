"""Formats of strings that llguidance takes too loosely, as exact patterns (RFC 3339): days of a month, leap years.

Seconds of 60 are left out, and so are the year 0000 and fractions beyond nanoseconds: they are valid, and hardly a
reader takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LONG = r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT = r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = r"02-(?:0[1-9]|1[0-9]|2[0-8])"
_FOURTH = r"(?:0[48]|[2468][048]|[13579][26])"  # two digits, a multiple of 4, not 00
_DATE = rf"(?:{_YEAR}-(?:{_LONG}|{_SHORT}|{_FEBRUARY})|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"

PATTERNS: Mapping[str, str] = MappingProxyType(
    {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
)


def with_exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a pattern in place of a format above."""
    name = schema.get("format")
    pattern = PATTERNS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return schema
    rest = {key: value for key, value in schema.items() if key != "format"}
    if "pattern" not in rest:
        return {**rest, "pattern": pattern}
    return {**rest, "allOf": [*rest.get("allOf", ()), {"pattern": pattern}]}
