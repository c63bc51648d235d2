"""A GGUF file and the folder made of it are the same model: config, tensors, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf_to_hf import bf16_bits, convert, layer_order

from pinnate.core.errors import ModelError
from pinnate.models.load import load_model, read_config
from pinnate.text.tokenizer import Tokenizer
from pinnate.weights.dequantize import to_float32
from pinnate.weights.gguf import GGUFFile
from pinnate.weights.safetensors import SafetensorsFolder
from tests.checkpoints import tiny_config, tiny_gguf, tiny_tensors

CHECKPOINT = "llama3"


def tiny_file(path: Path, **metadata: object) -> Path:
    """With a tokenizer of single bytes, a merge, and two special tokens."""
    size = int(str(tiny_config(CHECKPOINT)["vocab_size"]))
    letters = [chr(code) for code in range(33, 127)][: size - 4]
    tokens = ["<|start|>", "<|end|>", "Ġ", "12", *letters]
    types = [3, 3, 1, 1] + [1] * len(letters)
    filler = size - len(tokens)
    known: dict[str, object] = {
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + [f"unused{i}" for i in range(filler)],
        "tokenizer.ggml.token_type": types + [5] * filler,
        "tokenizer.ggml.merges": ["1 2"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return tiny_gguf(path / "x.gguf", CHECKPOINT, "llama", metadata=known | metadata)


def test_the_folder_is_the_same_model(tmp_path: Path) -> None:
    file, out = tiny_file(tmp_path), tmp_path / "out"
    convert(file, out, "float32")
    ours, theirs = read_config(file), read_config(out)
    names = (
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "hidden_size",
        "vocab_size",
        "rope_theta",
        "windows",
    )
    assert {n: getattr(ours, n) for n in names} == {n: getattr(theirs, n) for n in names}
    assert theirs.norm_eps == pytest.approx(ours.norm_eps)
    assert theirs.eos_token_ids == (1,)
    assert theirs.tie_word_embeddings
    assert not load_model(out).warnings
    written = SafetensorsFolder(out)
    expected = tiny_tensors(CHECKPOINT)
    assert set(written.names) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(to_float32(written.tensor(name)), values)


def test_the_tokenizer_is_the_files(tmp_path: Path) -> None:
    file, out = tiny_file(tmp_path), tmp_path / "out"
    convert(file, out)
    ours, theirs = Tokenizer.from_gguf(GGUFFile(file).metadata), Tokenizer.from_hf(out)
    for text in ("a12b", "12 12<|end|>1", "", "<|start|>x"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text))
    assert theirs.encode("12")[0] == theirs.bos_token_id == 0
    assert (theirs.eos_token_ids, theirs.chat_template) == ((1,), "{{ messages }}")
    assert (theirs.vocab_size, ours.vocab_size) == (tiny_config(CHECKPOINT)["vocab_size"],) * 2


def test_weights_are_rounded_and_in_the_order_of_layers(tmp_path: Path) -> None:
    convert(tiny_file(tmp_path), tmp_path / "out")
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    del entries["__metadata__"]
    assert list(entries) == sorted(entries, key=layer_order)
    assert {entry["dtype"] for entry in entries.values()} == {"BF16"}
    ends = [entry["data_offsets"] for entry in entries.values()]
    assert [start for start, _ in ends[1:]] == [end for _, end in ends[:-1]]
    values = to_float32(SafetensorsFolder(tmp_path / "out").tensor("model.norm.weight"))
    np.testing.assert_allclose(values, tiny_tensors(CHECKPOINT)["model.norm.weight"], rtol=2**-8)


def test_layers_are_ordered_by_number() -> None:
    wanted = [
        "model.embed_tokens.weight",
        "model.layers.2.b",
        "model.layers.10.a",
        "lm_head.weight",
        "model.norm.weight",
    ]
    assert sorted([*wanted[3:], *wanted[:3]], key=layer_order) == wanted


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20, -2.5, 0.0], np.float32)
    back = (bf16_bits(values).astype(np.uint32) << 16).view(np.float32)
    assert back.tolist() == [1.0, 1.0, 1.0 + 2**-6, 1.0 + 2**-7, -2.5, 0.0]


def test_what_config_json_would_not_say_is_refused(tmp_path: Path) -> None:
    scaled = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(ModelError, match="rope scaling"):
        convert(tiny_file(tmp_path, **scaled), tmp_path / "out")
    with pytest.raises(ModelError, match="qwen2"):
        convert(tiny_gguf(tmp_path / "q.gguf", "qwen2", "qwen2"), tmp_path / "out")
