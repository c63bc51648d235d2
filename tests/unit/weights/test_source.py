"""WeightSource: names, the permutation of GGUF llama files, and strict accounting."""

from __future__ import annotations

import numpy as np
import pytest

from pinnate.core.errors import ModelError
from pinnate.weights.dequantize import to_float32
from pinnate.weights.gguf import GGUFFile
from pinnate.weights.safetensors import SafetensorsFolder
from pinnate.weights.source import WeightSource, canonical_name, gguf_name, interleaved_rows
from tests.checkpoints import GGUF_NAMES, gguf_tensor_name, permute, write_folder, write_gguf

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def gguf_source(tmp_path):
    tensors = {"blk.0.attn_q.weight": np.ones((4, 2), np.float32), "extra": np.ones(3, np.float32)}
    return WeightSource.from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", {}, tensors)))


def test_names_map_both_ways():
    stems = [s if s.startswith("model.") or s == "lm_head" else f"model.layers.17.{s}" for s in GGUF_NAMES]
    names = [f"{stem}.weight" for stem in stems] + ["model.layers.3.self_attn.q_proj.bias"]
    for name in names:
        assert canonical_name(gguf_tensor_name(name)) == name
        assert gguf_name(name) == gguf_tensor_name(name)


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_rot.weight", "blk.x.attn_q.weight", "blk.0.attn_q.scale"]
)
def test_unknown_names_stay(name):
    assert canonical_name(name) == name
    assert gguf_name(name) == name


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 16), (9, 64), (7, 6)])
def test_interleaved_rows_undo_the_converters_permutation(heads, head_dim):
    rows = np.arange(heads * head_dim)
    order = interleaved_rows(len(rows), heads)
    np.testing.assert_array_equal(permute(rows, heads)[list(order)], rows)


def test_rows_that_do_not_divide_have_no_order():
    assert interleaved_rows(10, 3) is None


def test_only_q_and_k_of_llama_files_are_permuted(tmp_path):
    values = np.arange(16, dtype=np.float32).reshape(8, 2)
    tensors = {f"blk.0.attn_{part}.weight": values for part in "qkv"} | {"blk.0.attn_q.bias": values[:, 0]}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", {}, tensors))
    plain, permuted = WeightSource.from_gguf(file), WeightSource.from_gguf(file, permuted_heads=(2, 1))
    for part, heads in (("q", 2), ("k", 1)):
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        np.testing.assert_array_equal(permute(to_float32(permuted.take(name, (8, 2))), heads), values)
        np.testing.assert_array_equal(to_float32(plain.take(name, (8, 2))), values)
    np.testing.assert_array_equal(to_float32(permuted.take("model.layers.0.self_attn.v_proj.weight", (8, 2))), values)
    bias = to_float32(permuted.take("model.layers.0.self_attn.q_proj.bias", (8,)))
    np.testing.assert_array_equal(permute(bias, 2), values[:, 0])


def test_errors_name_the_file_and_its_own_name_for_the_tensor(gguf_source):
    assert gguf_source.has(Q)
    with pytest.raises(ModelError, match=r"m\.gguf: tensor blk\.0\.attn_q\.weight has the shape \[4, 2\].* \[2, 4\]"):
        gguf_source.take(Q, (2, 4))
    with pytest.raises(ModelError, match=r"m\.gguf: tensor blk\.5\.ffn_up\.weight is missing"):
        gguf_source.take("model.layers.5.mlp.up_proj.weight", (1, 1))


def test_what_nobody_takes_is_left(gguf_source):
    assert gguf_source.finish() == [Q, "extra"]
    assert gguf_source.take(Q, (4, 2)).name == Q
    assert gguf_source.take(Q, (4, 2)).shape == (4, 2)
    gguf_source.discard("extra")
    gguf_source.discard("never there")
    assert gguf_source.finish() == []


def test_a_tensor_of_a_wrong_shape_is_not_counted_as_used(gguf_source):
    with pytest.raises(ModelError):
        gguf_source.take(Q, (1, 1))
    assert Q in gguf_source.finish()


@pytest.mark.parametrize("shards", [1, 2])
def test_safetensors_errors_name_file_and_tensor(tmp_path, shards):
    tensors = {"a": np.ones(2, np.float32), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    places = write_folder(tmp_path, {}, tensors, shards=shards)
    source = WeightSource.from_safetensors(SafetensorsFolder(tmp_path))
    with pytest.raises(ModelError) as caught:
        source.take("a", (3,))
    assert f"{tmp_path / places['a']}: tensor a has the shape [2]" in str(caught.value)
    with pytest.raises(ModelError) as caught:
        source.take("b", (3,))
    assert f"{tmp_path if shards > 1 else tmp_path / 'model.safetensors'}: tensor b is missing" in str(caught.value)
    assert source.finish() == ["a"]  # stored rotary frequencies are left out
