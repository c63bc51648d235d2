"""Makes checkpoints for tests out of those in tests/data/tiny: edited folders, and GGUF files of the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from pinnate.weights.dequantize import to_float32
from pinnate.weights.safetensors import SafetensorsFolder

TINY = Path(__file__).parent / "data" / "tiny"


def tiny_config(name: str) -> dict[str, object]:
    return json.loads((TINY / name / "config.json").read_text())


def tiny_tensors(name: str) -> dict[str, np.ndarray]:
    """The tensors of a tiny checkpoint as float32 (exact: every storage type there is narrower or equal)."""
    folder = SafetensorsFolder(TINY / name)
    return {tensor: to_float32(folder.tensor(tensor)) for tensor in folder.names}


def write_folder(
    path: Path, config: Mapping[str, object], tensors: dict[str, np.ndarray], *, shards: int = 1
) -> dict[str, str]:
    """Writes a Hugging Face folder; with more than one shard also the index. Returns tensor -> file."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return dict.fromkeys(names, "model.safetensors")
    places = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, path / file)
        places.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensor_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """As converters to GGUF do for llama: a head's two halves become interleaved."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(name: str, architecture: str) -> dict[str, np.ndarray]:
    config = tiny_config(name)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for hf_name, values in tiny_tensors(name).items():
        part = hf_name.split(".")[-2]
        if architecture == "llama" and part in heads:
            values = permute(values, heads[part])
        tensors[gguf_tensor_name(hf_name)] = values
    return tensors


def gguf_metadata(name: str, architecture: str) -> dict[str, object]:
    """Keys without the architecture's prefix; Python ints become UINT32, floats FLOAT32."""
    config = tiny_config(name)
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})}
    metadata = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.get("head_dim"):
        metadata |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if architecture == "llama" and config.get("sliding_window"):
        metadata["attention.sliding_window"] = config["sliding_window"]
    if rope.get("rope_type") in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        if rope["rope_type"] == "yarn":
            metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {f"{architecture}.{key}": value for key, value in metadata.items()} | tokenizer_metadata(config)


def tokenizer_metadata(config: Mapping[str, object]) -> dict[str, object]:
    size = int(config["vocab_size"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(size)],
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(
    path: Path,
    architecture: str | None,
    metadata: Mapping[str, object],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
) -> Path:
    """Writes a GGUF file with the gguf package. A pair is raw block bytes [rows, bytes] and their type."""
    writer = gguf.GGUFWriter(path, architecture or "")
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        data, type_ = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def tiny_gguf(path: Path, name: str, architecture: str, **changes: object) -> Path:
    """The tiny checkpoint `name` as a GGUF file. `changes`: metadata= and tensors= to add, without= tensors to drop."""
    metadata = gguf_metadata(name, architecture) | changes.get("metadata", {})
    tensors = gguf_tensors(name, architecture) | changes.get("tensors", {})
    for dropped in changes.get("without", ()):
        del tensors[dropped]
    return write_gguf(path, architecture, metadata, tensors)
