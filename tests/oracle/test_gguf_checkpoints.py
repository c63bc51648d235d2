"""GGUF files of the tiny checkpoints give the logits that transformers gave for the originals."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest

from pinnate.executor.reference import ReferenceExecutor
from pinnate.graph import BLOCK_SIZES, Tensor, TensorType
from pinnate.models.load import load_model
from pinnate.weights.dequantize import to_float32
from tests.checkpoints import TINY, tiny_config, tiny_gguf, tiny_tensors
from tests.oracle.forced import forced_logits, spec_for


def llama3_divisors() -> np.ndarray:
    """What converters write as rope_freqs.weight: default frequencies over scaled ones (here of transformers)."""
    scaled = np.array(json.loads((TINY / "llama3" / "expected.json").read_text())["inv_freq"])
    theta = tiny_config("llama3")["rope_theta"]
    return (theta ** (-np.arange(len(scaled)) / len(scaled)) / scaled).astype(np.float32)


def logits_of(path, token_ids) -> np.ndarray:
    model = load_model(path)
    assert model.warnings == ()
    return forced_logits(ReferenceExecutor(model.graph, spec_for(len(token_ids))), token_ids, chunk=16)


# Qwen2's window on some layers has no key in GGUF: there, compare the positions that the window does not reach.
@pytest.mark.parametrize(
    ("name", "architecture", "positions"),
    [
        ("llama2", "llama", 40),
        ("llama3", "llama", 40),
        ("llama-bias", "llama", 40),
        ("mistral", "llama", 40),
        ("qwen2", "qwen2", 9),
        ("qwen3", "qwen3", 40),
    ],
)
def test_gguf_agrees_with_transformers(tmp_path, name, architecture, positions):
    token_ids = json.loads((TINY / name / "expected.json").read_text())["token_ids"][:positions]
    tensors = {"rope_freqs.weight": llama3_divisors()} if name == "llama3" else {}
    path = tiny_gguf(tmp_path / "m.gguf", name, architecture, tensors=tensors)
    expected = np.load(TINY / name / "logits.npy")[:positions]
    np.testing.assert_allclose(logits_of(path, token_ids), expected, rtol=0, atol=1e-4)


# (type of the matrices of 96 columns, whether the writer package can quantise to it)
@pytest.mark.parametrize("type_", [TensorType.F16, TensorType.BF16, TensorType.Q8_0, TensorType.Q4_0, TensorType.Q4_1])
def test_stored_types_survive_the_way_through_a_file(tmp_path, type_):
    """Matrices quantised by the gguf package: the loaded graph holds what the package itself decodes."""
    theirs = gguf.GGMLQuantizationType(int(type_))
    rng = np.random.default_rng(3)
    matrix = rng.standard_normal((48, 96)).astype(np.float32)
    stored = gguf.quants.quantize(matrix, theirs)
    name = "blk.0.ffn_up.weight"
    wide = {
        f"blk.{i}.ffn_{part}.weight": rng.standard_normal((96, 48)).astype(np.float32)
        for i in range(2)
        for part in ("up", "gate")
    }
    down = {f"blk.{i}.ffn_down.weight": (stored, theirs) for i in range(2)}
    path = tiny_gguf(
        tmp_path / "m.gguf", "llama2", "llama", metadata={"llama.feed_forward_length": 96}, tensors=wide | down
    )
    model = load_model(path)
    weights = {op.weight.name: op.weight for op in model.graph.ops if hasattr(op, "weight")}
    loaded = weights["model.layers.1.mlp.down_proj.weight"]
    assert loaded.type is type_
    np.testing.assert_array_equal(to_float32(loaded), gguf.quants.dequantize(stored, theirs).reshape(48, 96))
    np.testing.assert_array_equal(to_float32(weights["model.layers.0.mlp.up_proj.weight"]), wide[name])


def test_block_sizes_are_those_of_the_format():
    for type_, sizes in BLOCK_SIZES.items():
        assert sizes == tuple(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(type_))])


def test_permuted_rows_come_back_in_order(tmp_path):
    model = load_model(tiny_gguf(tmp_path / "m.gguf", "llama3", "llama"))
    weights = {op.weight.name: op.weight for op in model.graph.ops if isinstance(getattr(op, "weight", None), Tensor)}
    for part in ("q_proj", "k_proj"):
        name = f"model.layers.0.self_attn.{part}.weight"
        assert weights[name].row_order is not None
        np.testing.assert_array_equal(to_float32(weights[name]), tiny_tensors("llama3")[name])
