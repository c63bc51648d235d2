"""What a Gemma 3 description says beyond the llama family's: two rope bases, windows by a pattern, scales, soft caps.

Knows: the spellings of config.json (transformers 4 and 5) and of GGUF metadata. Must not know: tensors.
Source: Gemma 3 technical report (arXiv:2503.19786); the defaults are those of the published checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from pinnate.models.fields import Fields
from pinnate.models.rope import RopeScaling, scaling_from_hf

PATTERN = 6  # every sixth layer looks at everything
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_LARGEST = 62  # layers of the 27B model, whose GGUF files do not say that its queries are scaled by another size


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """`local_theta` is the rope base of windowed layers. Queries are scaled by `query_size` ** -0.5. Soft caps of 0 are
    off. `norm_offset` is added to the weights of norms: Hugging Face files hold them without the 1, GGUF files with
    it."""

    local_theta: float
    query_size: float
    attention_softcap: float
    final_softcap: float
    norm_offset: float


@dataclass(frozen=True, slots=True)
class HFRope:
    theta: float
    scaling: RopeScaling | None
    local_theta: float = 0.0  # of windowed layers, where they have one of their own


def gemma_from_hf(fields: Fields, local_theta: float) -> GemmaConfig:
    """
    Raises:
        ModelError: an entry is malformed, or the activation is another one.
    """
    activation = fields.opt_text("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise fields.fail("hidden_activation", f"{activation!r} is not supported; supported: gelu_pytorch_tanh")
    if fields.boolean("attention_bias", False):
        raise fields.fail("attention_bias", "true is not supported")
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.fail("use_bidirectional_attention", "true is not supported")
    return GemmaConfig(
        local_theta,
        fields.number("query_pre_attn_scalar", 256.0),
        fields.opt_number("attn_logit_softcapping") or 0.0,
        fields.opt_number("final_logit_softcapping") or 0.0,
        norm_offset=1.0,
    )


def gemma_from_gguf(fields: Fields, layers: int, heads: int, head_dim: int) -> GemmaConfig:
    return GemmaConfig(
        fields.number("rope.freq_base_swa", _LOCAL_THETA),
        fields.integer("embedding_length") / heads if layers == _LARGEST else float(head_dim),
        fields.opt_number("attn_logit_softcapping") or 0.0,
        fields.opt_number("final_logit_softcapping") or 0.0,
        norm_offset=0.0,
    )


def gemma_rope_from_hf(fields: Fields, context: int) -> HFRope:
    """`rope_parameters` by kind of layer (transformers 5), or rope_theta and rope_local_base_freq (4)."""
    by_kind = fields.sub("rope_parameters")
    if by_kind is None:
        scaling = scaling_from_hf(fields.sub("rope_scaling") or Fields(fields.where, {}), context)
        local = fields.number("rope_local_base_freq", _LOCAL_THETA)
        return HFRope(fields.number("rope_theta", _THETA), scaling, local)
    full, local_part = by_kind.sub("full_attention"), by_kind.sub("sliding_attention")
    if full is None or local_part is None:
        raise fields.fail("rope_parameters", "must have full_attention and sliding_attention")
    if scaling_from_hf(local_part, context) is not None:
        raise local_part.fail("rope_type", "other than default is not supported")
    return HFRope(
        full.number("rope_theta", _THETA), scaling_from_hf(full, context), local_part.number("rope_theta", _LOCAL_THETA)
    )


def gemma_windows(window: int, layers: int, pattern: int) -> tuple[int, ...]:
    """Every `pattern`-th layer sees all, the others `window` tokens."""
    return tuple(0 if (layer + 1) % pattern == 0 else window for layer in range(layers))
