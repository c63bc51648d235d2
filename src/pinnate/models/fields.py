"""Typed reading of a model's description (config.json or GGUF metadata).

Knows: how to refuse a missing, mistyped or out-of-range entry by name. Must not know: what the entries mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pinnate.core.errors import ModelError

_MAX_INT = 2**31 - 1
_TINY, _HUGE = 1e-30, 1e30  # no honest number lies outside, and products of two of them stay finite


@dataclass(frozen=True, slots=True)
class Fields:
    """Entries of one file. `where` names the file in errors; `prefix` goes before every key.

    A default of None makes an entry optional; without one it is required. JSON null counts as absent.
    """

    where: str
    entries: Mapping[str, object]
    prefix: str = ""

    def fail(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.where}: {self.prefix}{key} {problem}")

    def get(self, key: str) -> object:
        return self.entries.get(self.prefix + key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def opt_integer(self, key: str, least: int = 1) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_INT:
            raise self.fail(key, f"must be an integer of at least {least}, got {_show(value)}")
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.opt_integer(key, least)
        if value is not None:
            return value
        if default is None:
            raise self.fail(key, "is missing")
        return default

    def opt_number(self, key: str) -> float | None:
        """A number above 0, from 1e-30 to 1e30."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not _TINY <= value <= _HUGE:
            raise self.fail(key, f"must be a number above 0, got {_show(value)}")
        return float(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.opt_number(key)
        if value is not None:
            return value
        if default is None:
            raise self.fail(key, "is missing")
        return default

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, got {_show(value)}")
        return value

    def opt_text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, f"must be a string, got {_show(value)}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty where absent. Negative ids (a custom for "none") are left out."""
        value = self.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        ids = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
        if len(ids) != len(values):
            raise self.fail(key, f"must be a token id or a list of token ids, got {_show(value)}")
        return tuple(i for i in ids if 0 <= i <= _MAX_INT)

    def sub(self, key: str) -> Fields | None:
        """The nested object `key`, its entries named `key.name` in errors."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"must be an object, got {_show(value)}")
        name = f"{self.prefix}{key}."
        return Fields(self.where, {name + str(k): v for k, v in value.items()}, name)


def _show(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
