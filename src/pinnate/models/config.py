"""ModelConfig: what a builder needs to know of a model, from config.json or GGUF metadata.

Knows: the spellings of both worlds, and which entries change results and are refused. Must not know: tensors,
tokenizers, NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pinnate.core.errors import ModelError
from pinnate.models.fields import Fields
from pinnate.models.gemma3_config import (
    PATTERN,
    GemmaConfig,
    HFRope,
    gemma_from_gguf,
    gemma_from_hf,
    gemma_rope_from_hf,
    gemma_windows,
)
from pinnate.models.rope import RopeScaling, scaling_from_gguf, scaling_from_hf

# config.json's architectures[0] -> family; GGUF's general.architecture is the family's name itself
HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

_MAX_LAYERS = 1024
_QK_NORM = ("qwen3", "gemma3")
_HEAD_DIMS = {"qwen3": 128, "gemma3": 256}  # where config.json does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer of the llama family, or like it. Sizes in elements, contexts in tokens.

    `windows` has one entry for each layer: attention looks at this many last tokens (0: all). The bias flags
    and `tie_word_embeddings` are None where the description does not say: then the tensors in the file decide.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    windows: tuple[int, ...]
    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    tie_word_embeddings: bool | None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    gemma: GemmaConfig | None = None  # of family gemma3

    @classmethod
    def from_hf(
        cls, config: Mapping[str, object], *, where: str = "config.json", eos_token_ids: tuple[int, ...] = ()
    ) -> ModelConfig:
        """From a parsed config.json, as transformers 4 or 5 writes it; `eos_token_ids` are added to its own.

        Raises:
            ModelError: names the entry that is missing, malformed or not supported.
        """
        fields = Fields(where, config)
        family = _hf_family(fields)
        gemma = family == "gemma3"
        _refuse_unsupported(fields, "hidden_act" if not gemma else None)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        layers = fields.integer("num_hidden_layers")
        context = fields.integer("max_position_embeddings", 2048)
        rope = gemma_rope_from_hf(fields, context) if gemma else _hf_rope(fields, context)
        # Qwen2 always has biases on q, k, v and never on o; the others have all four or none.
        all_bias = family in ("llama", "qwen3") and fields.boolean("attention_bias", False)
        return _checked(
            fields,
            cls(
                family=family,
                vocab_size=fields.integer("vocab_size"),
                hidden_size=hidden,
                intermediate_size=fields.integer("intermediate_size"),
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=fields.integer("num_key_value_heads", heads),
                head_dim=fields.integer("head_dim", _HEAD_DIMS.get(family) or hidden // heads or 1),
                max_position_embeddings=context,
                norm_eps=fields.number("rms_norm_eps", 1e-6),
                rope_theta=rope.theta,
                rope_scaling=rope.scaling,
                windows=_hf_windows(fields, family, layers),
                qkv_bias=all_bias or family == "qwen2",
                o_bias=all_bias,
                mlp_bias=family == "llama" and fields.boolean("mlp_bias", False),
                qk_norm=family in _QK_NORM,
                tie_word_embeddings=fields.boolean("tie_word_embeddings", gemma),
                bos_token_id=next(iter(fields.ids("bos_token_id")), None),
                eos_token_ids=_union(fields.ids("eos_token_id"), eos_token_ids),
                gemma=gemma_from_hf(fields, rope.local_theta) if gemma else None,
            ),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, object], *, where: str = "GGUF metadata", num_tokens: int | None = None
    ) -> ModelConfig:
        """From the metadata of a GGUF file. `num_tokens` is the size of its token list where the caller knows it.

        Raises:
            ModelError: names the key that is missing, malformed or not supported.
        """
        family = Fields(where, metadata).opt_text("general.architecture")
        if family not in GGUF_ARCHITECTURES:
            shown = "is missing" if family is None else f"{family!r} is not supported"
            raise ModelError(f"{where}: general.architecture {shown}; supported: {', '.join(GGUF_ARCHITECTURES)}")
        fields = Fields(where, metadata, f"{family}.")
        tokenizer = Fields(where, metadata, "tokenizer.ggml.")
        if fields.has("expert_count") and fields.integer("expert_count", least=0) > 0:
            raise fields.fail("expert_count", "above 0: mixtures of experts are not supported")
        heads, layers = fields.integer("attention.head_count"), fields.integer("block_count")
        head_dim = _gguf_head_dim(fields, heads)
        context = fields.integer("context_length")
        window = fields.integer("attention.sliding_window", 0, least=0)
        gemma = gemma_from_gguf(fields, layers, heads, head_dim) if family == "gemma3" else None
        pattern = fields.integer("attention.sliding_window_pattern", PATTERN) if gemma else _MAX_LAYERS + 1
        return _checked(
            fields,
            cls(
                family=family,
                vocab_size=_gguf_vocab_size(fields, tokenizer, num_tokens),
                hidden_size=fields.integer("embedding_length"),
                intermediate_size=fields.integer("feed_forward_length"),
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=fields.integer("attention.head_count_kv", heads),
                head_dim=head_dim,
                max_position_embeddings=context,
                norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
                rope_theta=fields.number("rope.freq_base", 1e6 if gemma else 1e4),
                rope_scaling=scaling_from_gguf(fields, context),
                windows=gemma_windows(window, min(layers, _MAX_LAYERS), pattern),
                qkv_bias=None if family == "llama" else family == "qwen2",
                o_bias=None if family == "llama" else False,
                mlp_bias=None if family == "llama" else False,
                qk_norm=family in _QK_NORM,
                tie_word_embeddings=None,
                bos_token_id=next(iter(tokenizer.ids("bos_token_id")), None),
                eos_token_ids=_union(*(tokenizer.ids(f"{end}_token_id") for end in ("eos", "eot", "eom"))),
                gemma=gemma,
            ),
        )


def _union(*ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for group in ids for i in group))


def _hf_family(fields: Fields) -> str:
    names = fields.get("architectures")
    supported = ", ".join(HF_ARCHITECTURES)
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        problem = "is missing" if names is None else "must be a list of one class name"
        raise fields.fail("architectures", f"{problem}; supported: {supported}")
    if names[0] not in HF_ARCHITECTURES:
        raise fields.fail("architectures", f"{names[0][:80]!r} is not supported; supported: {supported}")
    return HF_ARCHITECTURES[names[0]]


def _refuse_unsupported(fields: Fields, activation_key: str | None) -> None:
    activation = (activation_key and fields.opt_text(activation_key)) or "silu"
    if activation_key and activation != "silu":
        raise fields.fail(activation_key, f"{activation!r} is not supported; supported: silu")
    if fields.has("quantization_config"):
        settings = fields.sub("quantization_config")
        method = settings.opt_text("quant_method") if settings is not None else None
        raise fields.fail("quantization_config", f"{method!r}: quantised safetensors are not supported")


def _hf_rope(fields: Fields, context: int) -> HFRope:
    """From the object with the rope settings: `rope_parameters` of transformers 5, `rope_scaling` of 4, or none."""
    rope = fields.sub("rope_parameters") or fields.sub("rope_scaling") or Fields(fields.where, {})
    for source in (fields, rope):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise source.fail("partial_rotary_factor", "other than 1 is not supported")
    theta = rope.opt_number("rope_theta") or fields.number("rope_theta", 10000.0)
    return HFRope(theta, scaling_from_hf(rope, context))


def _hf_windows(fields: Fields, family: str, layers: int) -> tuple[int, ...]:
    """Mistral: `sliding_window` on every layer. Qwen: on the layers from `max_window_layers`, if it is switched on.
    Gemma: on all but every sixth."""
    window = fields.integer("sliding_window", 512 if family == "gemma3" else 0, least=0) if family != "llama" else 0
    if family in ("qwen2", "qwen3") and not fields.boolean("use_sliding_window", False):
        window = 0
    layers = min(layers, _MAX_LAYERS)
    kinds = fields.get("layer_types")
    if family in ("qwen2", "qwen3", "gemma3") and kinds is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
            raise fields.fail("layer_types", f"must name {' or '.join(known)} for each of {layers} layers")
        return tuple(window if k == "sliding_attention" else 0 for k in kinds)
    if family == "gemma3":
        return gemma_windows(window, layers, fields.integer("sliding_window_pattern", PATTERN))
    first = fields.integer("max_window_layers", 28, least=0) if family in ("qwen2", "qwen3") else 0
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _gguf_head_dim(fields: Fields, heads: int) -> int:
    head_dim = fields.integer("attention.key_length", fields.integer("embedding_length") // heads or 1)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.fail("attention.value_length", f"other than the key length {head_dim} is not supported")
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise fields.fail("rope.dimension_count", f"other than the head size {head_dim} is not supported")
    return head_dim


def _gguf_vocab_size(fields: Fields, tokenizer: Fields, num_tokens: int | None) -> int:
    size = fields.opt_integer("vocab_size")
    if size is not None:
        return size
    if num_tokens is None:
        tokens = tokenizer.get("tokens")
        num_tokens = len(tokens) if isinstance(tokens, list) else 0
    if not num_tokens:
        raise fields.fail("vocab_size", "is missing, and there is no token list")
    return num_tokens


def _checked(fields: Fields, config: ModelConfig) -> ModelConfig:
    if config.num_layers > _MAX_LAYERS:
        raise ModelError(f"{fields.where}: {config.num_layers} layers, more than {_MAX_LAYERS} are not supported")
    if config.num_heads % config.num_kv_heads:
        heads = f"{config.num_heads} attention heads, {config.num_kv_heads} key-value heads"
        raise ModelError(f"{fields.where}: {heads}: the former must be a multiple of the latter")
    if config.rope_theta <= 1:
        raise ModelError(f"{fields.where}: the rope base {config.rope_theta} must be above 1")
    if config.head_dim % 2:
        raise ModelError(f"{fields.where}: the head size {config.head_dim} must be even")
    return config
