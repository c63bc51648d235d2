"""`system_fingerprint`: names what computes the answers.

Knows: which facts of a start decide the bits of an answer. Must not know: requests. Two answers with the same
fingerprint, prompt, parameters and seed have the same tokens; a changed one says that they may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec

import pinnate

# Of the engine's `info`. What moves work about (threads, batch sizes, pages) is not among them: it changes no bits.
_FACTS = ("family", "executor", "dtype", "quantization", "weights", "kv_cache_dtype", "vocab_size")
_DIGITS = 12


def fingerprint(model: str, info: Mapping[str, Any]) -> str:
    """Of the model's file or folder (its name, not its place) and the engine's `info`."""
    facts: dict[str, Any] = {"version": pinnate.__version__, "model": PurePath(model).name}
    facts["isa"] = info.get("device", {}).get("isa")
    facts |= {name: info[name] for name in _FACTS if name in info}
    return "fp_" + hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:_DIGITS]
