"""Rotary frequencies: how a model's rope parameters become the RopeTable of the graph.

Knows: the default table and its linear, llama3 and yarn scalings. Must not know: tensors or files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pinnate.graph.ops import RopeTable
from pinnate.models.fields import Fields

SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """`kind` is one of SCALINGS but "default". `original_context` in tokens; fields a kind does not use are ignored."""

    kind: str
    factor: float
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


def scaling_from_hf(rope: Fields, context: int) -> RopeScaling | None:
    """From `rope_scaling` (transformers 4) or `rope_parameters` (5). `context` is max_position_embeddings.

    Raises:
        ModelError: an unknown or unsupported kind (dynamic, longrope, ...), or a kind's parameter is missing.
    """
    kind = rope.opt_text("rope_type") or rope.opt_text("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind=kind, factor=rope.number("factor"))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.fail("low_freq_factor", f"must be below high_freq_factor, got {low} and {high}")
        return RopeScaling(
            kind=kind,
            factor=rope.number("factor"),
            original_context=rope.integer("original_max_position_embeddings"),
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        for key in ("mscale", "mscale_all_dim"):
            if rope.has(key):
                raise rope.fail(key, "is not supported with yarn rope scaling")
        if not rope.boolean("truncate", True):
            raise rope.fail("truncate", "false is not supported with yarn rope scaling")
        original = rope.opt_integer("original_max_position_embeddings") or context
        return RopeScaling(
            kind=kind,
            factor=rope.number("factor"),
            original_context=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.opt_number("attention_factor"),
        )
    raise rope.fail("rope_type", f"{kind!r} is not supported; supported: {', '.join(SCALINGS)}")


def scaling_from_gguf(fields: Fields, context: int) -> RopeScaling | None:
    """From `{architecture}.rope.scaling.*`. llama3 scaling comes as a tensor (`rope_freqs.weight`), not as keys."""
    kind = fields.opt_text("rope.scaling.type") or "none"
    if kind == "none":
        linear = fields.opt_number("rope.scale_linear")  # files from before rope.scaling.type
        return None if linear is None or linear == 1.0 else RopeScaling(kind="linear", factor=linear)
    if kind == "linear":
        return RopeScaling(kind=kind, factor=fields.number("rope.scaling.factor"))
    if kind == "yarn":
        factor = fields.number("rope.scaling.factor")
        attention = fields.opt_number("rope.scaling.attn_factor")
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_context=fields.opt_integer("rope.scaling.original_context_length") or context,
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            # the key multiplies the paper's factor rather than replacing it
            attention_factor=None if attention is None else attention * _yarn_attention_factor(factor),
        )
    raise fields.fail("rope.scaling.type", f"{kind!r} is not supported; supported: none, linear, yarn")


def rope_table(
    rotary_dim: int, theta: float, scaling: RopeScaling | None, divisors: tuple[float, ...] | None = None
) -> RopeTable:
    """The table for heads of `rotary_dim` columns. `divisors`, one for each pair, divide the frequencies (GGUF)."""
    freqs = [theta ** (-i / rotary_dim) for i in range(0, rotary_dim, 2)]
    factor = 1.0
    if divisors is not None:
        freqs = [f / d for f, d in zip(freqs, divisors, strict=True)]
    elif scaling is not None and scaling.kind == "linear":
        freqs = [f / scaling.factor for f in freqs]
    elif scaling is not None and scaling.kind == "llama3":
        freqs = [_llama3(f, scaling) for f in freqs]
    elif scaling is not None and scaling.kind == "yarn":
        freqs = _yarn(freqs, rotary_dim, theta, scaling)
        given = scaling.attention_factor
        factor = _yarn_attention_factor(scaling.factor) if given is None else given
    return RopeTable(tuple(freqs), factor)


def _llama3(freq: float, scaling: RopeScaling) -> float:
    """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_context / wavelength - low) / (high - low)
    smooth = min(1.0, max(0.0, smooth))
    return (1 - smooth) * freq / scaling.factor + smooth * freq


def _yarn(freqs: list[float], rotary_dim: int, theta: float, scaling: RopeScaling) -> list[float]:
    """YaRN (arXiv:2309.00071), section 3.2: a ramp over the pairs between stretched and kept frequencies."""

    def pair_of(rotations: float) -> float:  # the pair that turns this many times over the original context
        return rotary_dim * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), rotary_dim - 1)
    span = high - low or 0.001
    kept = [1 - min(1.0, max(0.0, (i - low) / span)) for i in range(len(freqs))]
    return [f / scaling.factor * (1 - k) + f * k for f, k in zip(freqs, kept, strict=True)]


def _yarn_attention_factor(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
