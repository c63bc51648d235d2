"""A tiny Gemma 3 with random weights as a Hugging Face folder: 8 layers, every fourth of them sees the whole
context, the others 24 tokens. Soft caps are on, so that they are tested too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.checkpoints import write_folder

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, WINDOW, PATTERN = 97, 48, 64, 4, 2, 16, 8, 24, 4

CONFIG: dict[str, object] = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 20.0,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention" if (i + 1) % PATTERN == 0 else "sliding_attention" for i in range(LAYERS)],
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 6.0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def tiny_gemma_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 1.5 * columns**-0.5).astype(np.float32)

    def norm(size: int) -> np.ndarray:  # without the 1
        return (rng.standard_normal(size) * 0.2).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": norm(HIDDEN)}
    for layer in range(LAYERS):
        sizes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (HEADS * DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * DIM),
            "self_attn.q_norm": (DIM,),
            "self_attn.k_norm": (DIM,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "pre_feedforward_layernorm": (HIDDEN,),
            "post_feedforward_layernorm": (HIDDEN,),
        }
        for name, size in sizes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*size) if len(size) == 2 else norm(*size)
    return tensors


def write_tiny_gemma(folder: Path, **changes: object) -> Path:
    write_folder(folder, CONFIG | changes, tiny_gemma_tensors())
    return folder
