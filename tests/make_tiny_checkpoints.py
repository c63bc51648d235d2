"""Writes tests/data/tiny: random checkpoints of each model family, with logits recorded from transformers.

A recording tool, not a test: run it by hand in an environment of its own that has torch==2.13.0 and transformers
(neither is a dependency of the project), and commit what it writes:

    python tests/make_tiny_checkpoints.py

Weights are drawn from a fixed seed and rounded to the storage type first; logits are fp32 with eager attention.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent / "data" / "tiny"
PROMPT_LEN = 40

SMALL = {
    "num_hidden_layers": 2,
    "intermediate_size": 56,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

# name -> (class, config, storage type, bytes of a shard)
CHECKPOINTS = {
    # Llama 3: grouped heads, tied embeddings, scaled rope whose blended band lies inside the table
    "llama3": (
        "Llama",
        {
            "vocab_size": 97,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        torch.float32,
        "1GB",
    ),
    # Llama 2: as many KV heads as heads, an output matrix of its own
    "llama2": ("Llama", {"vocab_size": 96, "hidden_size": 48, "num_attention_heads": 3}, torch.bfloat16, "1GB"),
    # every optional bias, linear scaling
    "llama-bias": (
        "Llama",
        {
            "vocab_size": 65,
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
        torch.bfloat16,
        "1GB",
    ),
    # Mistral: a window much shorter than the prompt, heads wider than the hidden size, two shards
    "mistral": (
        "Mistral",
        {
            "vocab_size": 90,
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "sliding_window": 7,
        },
        torch.float32,
        "60KB",
    ),
    # Qwen2: biases on q, k, v alone, yarn, tied, a window on the second layer
    "qwen2": (
        "Qwen2",
        {
            "vocab_size": 101,
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        torch.float16,
        "1GB",
    ),
    # Qwen3: norms on q and k, heads wider than hidden / heads
    "qwen3": (
        "Qwen3",
        {
            "vocab_size": 89,
            "hidden_size": 32,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 16,
        },
        torch.bfloat16,
        "1GB",
    ),
}


def randomise(model: torch.nn.Module, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Makes every parameter random: norms and biases too, which start as ones and zeros."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * noise
        elif parameter.ndim == 1:
            value = 0.3 * noise
        elif "embed_tokens" in name:
            value = noise
        else:
            value = 1.5 * noise / parameter.shape[1] ** 0.5
        parameter.data = value.to(dtype).float()


def older_spelling(path: Path) -> None:
    """Rewrites config.json the way transformers 4 spells rope settings."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    path.write_text(json.dumps(config, indent=2) + "\n")


def make(name: str, seed: int) -> None:
    family, settings, dtype, shard = CHECKPOINTS[name]
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    config = getattr(transformers, f"{family}Config")(**SMALL, **settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    randomise(model, dtype, generator)
    prompt = torch.randint(0, config.vocab_size, (1, PROMPT_LEN), generator=generator)
    with torch.no_grad():
        logits = model(prompt).logits[0]
    rotary = model.model.rotary_emb
    expected = {
        "transformers": transformers.__version__,
        "token_ids": prompt[0].tolist(),
        "inv_freq": rotary.inv_freq.tolist(),
        "attention_factor": rotary.attention_scaling,
    }
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.save(folder / "logits.npy", logits.numpy())
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    if name in ("llama3", "mistral"):
        older_spelling(folder / "config.json")


def main() -> None:
    for seed, name in enumerate(CHECKPOINTS):
        make(name, seed)
        print(name, sorted(p.name for p in (HERE / name).iterdir()))


if __name__ == "__main__":
    main()
