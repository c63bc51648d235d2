"""A Hugging Face folder made of a GGUF file: the same model for programs that read only such folders.

    python benchmarks/gguf_to_hf.py OUT [--gguf FILE] [--dtype bfloat16|float32]

Without --gguf: the default model. Weights are decoded, rounded to --dtype, and written in the order of the layers;
tokenizer, chat template and ends of a turn are those that `pinnate serve FILE` would use. Only architecture llama.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pinnate.core.errors import ModelError
from pinnate.models.config import ModelConfig
from pinnate.models.load import read_config
from pinnate.text.gguf_tokenizer import vocabulary_from_gguf
from pinnate.text.vocabulary import Vocabulary
from pinnate.weights.dequantize import to_float32
from pinnate.weights.gguf import GGUFFile
from pinnate.weights.resolve import resolve_model
from pinnate.weights.source import WeightSource, canonical_name

DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16 numbers, ties to even; values must be finite."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def layer_order(name: str) -> tuple[int, int, str]:
    """Embedding, layer after layer, final norm, output matrix."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer:
        return 1, int(layer[1]), name
    return (0 if "embed_tokens" in name else 2), 0, name


def write_weights(file: GGUFFile, config: ModelConfig, path: Path, dtype: str) -> None:
    source = WeightSource.from_gguf(file, family="llama", permuted_heads=(config.num_heads, config.num_kv_heads))
    shapes = {canonical_name(name): tensor.shape for name, tensor in file.tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes, key=layer_order):
        start, end = end, end + int(np.prod(shapes[name])) * (2 if dtype == "bfloat16" else 4)
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(shapes, key=layer_order):
            values = to_float32(source.take(name, shapes[name]))
            out.write((bf16_bits(values) if dtype == "bfloat16" else values.astype("<f4")).tobytes())


def check_plain(file: GGUFFile, config: ModelConfig) -> None:
    """Raises ModelError where config.json would not say all that the file says."""
    scaled = config.rope_scaling is not None or "rope_freqs.weight" in file.tensors
    if config.family != "llama" or scaled or any(config.windows):
        found = f"{config.family}{', rope scaling' if scaled else ''}{', windows' if any(config.windows) else ''}"
        raise ModelError(f"{file.path}: only plain llama files can be converted: this is {found}")


def hf_config(file: GGUFFile, config: ModelConfig, vocabulary: Vocabulary, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": float(f"{config.norm_eps:.7g}"),  # stored with the seven digits of a float32
        "rope_theta": config.rope_theta,
        "attention_bias": bool(config.qkv_bias),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": vocabulary.bos_token_id,
        "eos_token_id": vocabulary.eos_token_ids[0] if vocabulary.eos_token_ids else None,
        "torch_dtype": dtype,
    }


def convert(gguf: Path, out: Path, dtype: str = "bfloat16") -> None:
    """Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja (where the
    file has one) and model.safetensors.

    Raises:
        ModelError: the file is damaged or of a kind that is not supported.
    """
    file, config = GGUFFile(gguf), read_config(gguf)
    check_plain(file, config)
    vocabulary = vocabulary_from_gguf(file.metadata)
    described = hf_config(file, config, vocabulary, dtype)
    out.mkdir(parents=True, exist_ok=True)
    adds_bos = bool(vocabulary.backend.encode("").ids)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.bos_token,
        "eos_token": vocabulary.eos_token,
        "add_bos_token": adds_bos,
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"bos_token_id": vocabulary.bos_token_id, "eos_token_id": list(vocabulary.eos_token_ids)}
    for name, content in (
        ("config.json", described),
        ("generation_config.json", generation),
        ("tokenizer_config.json", settings),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    vocabulary.backend.save(str(out / "tokenizer.json"))
    if vocabulary.chat_template is not None:
        (out / "chat_template.jinja").write_text(vocabulary.chat_template)
    write_weights(file, config, out / "model.safetensors", dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", help="default: the model of `pinnate serve` without a name")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    args = parser.parse_args()
    convert(resolve_model(args.gguf), args.out, args.dtype)


if __name__ == "__main__":
    main()
