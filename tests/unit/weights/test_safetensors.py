"""The safetensors reader: single and sharded folders, and everything that may be wrong with them."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from pinnate.core.errors import ModelError
from pinnate.graph import TensorType
from pinnate.weights.dequantize import to_float32
from pinnate.weights.safetensors import INDEX, SafetensorsFolder
from tests.checkpoints import write_folder

TENSORS = {f"t{i}": np.full((2, i + 1), i, np.float32) for i in range(6)}


@pytest.fixture
def single(tmp_path):
    write_folder(tmp_path, {}, TENSORS)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    """Three shards of two tensors each."""
    write_folder(tmp_path, {}, TENSORS, shards=3)
    return tmp_path


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00003.safetensors"


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def read_all(folder) -> None:
    files = SafetensorsFolder(folder)
    for name in files.names:
        files.tensor(name)


def error_of(folder) -> str:
    with pytest.raises(ModelError) as caught:
        read_all(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("shards", [1, 3])
def test_all_tensors_are_read(tmp_path, shards):
    write_folder(tmp_path, {}, TENSORS, shards=shards)
    folder = SafetensorsFolder(tmp_path)
    assert sorted(folder.names) == sorted(TENSORS)
    for name, values in TENSORS.items():
        tensor = folder.tensor(name)
        assert (tensor.shape, tensor.type) == (values.shape, TensorType.F32)
        np.testing.assert_array_equal(to_float32(tensor), values)
    assert folder.unindexed == []


def test_half_types_and_metadata(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "h": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]},
        "b": {"dtype": "BF16", "shape": [1, 1], "data_offsets": [4, 6]},
    }
    data = np.array([1.5, -2], "<f2").tobytes() + b"\x80\x3f"
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, data))
    folder = SafetensorsFolder(tmp_path)
    assert to_float32(folder.tensor("h")).tolist() == [1.5, -2]
    assert to_float32(folder.tensor("b")).tolist() == [[1.0]]


def test_the_index_wins_over_a_stale_single_file(sharded):
    write_folder(sharded / "old", {}, {name: -values for name, values in TENSORS.items()})
    (sharded / "old" / "model.safetensors").rename(sharded / "model.safetensors")
    np.testing.assert_array_equal(to_float32(SafetensorsFolder(sharded).tensor("t3")), TENSORS["t3"])


def test_stray_files_are_not_opened(single):
    (single / "model-00009-of-00009.safetensors").write_bytes(b"rubbish")
    (single / "consolidated.safetensors").write_bytes(b"")
    assert sorted(SafetensorsFolder(single).names) == sorted(TENSORS)


def test_a_copy_that_the_index_does_not_place_there_is_not_used(sharded):
    write_folder(sharded / "new", {}, {"t0": TENSORS["t0"], "t1": TENSORS["t1"], "t4": -TENSORS["t4"]})
    (sharded / "new" / "model.safetensors").rename(sharded / shard(1))
    folder = SafetensorsFolder(sharded)
    np.testing.assert_array_equal(to_float32(folder.tensor("t4")), TENSORS["t4"])
    assert folder.unindexed == [f"t4 ({shard(1)})"]


def test_an_absent_shard_is_named(sharded):
    (sharded / shard(2)).unlink()
    assert f"{shard(2)}: the file is missing" in error_of(sharded)


def test_a_cut_shard_is_named_with_a_tensor_that_it_lacks(sharded):
    path = sharded / shard(3)
    path.write_bytes(path.read_bytes()[:-10])
    message = error_of(sharded)
    assert str(path) in message
    assert "tensor t5" in message
    assert "truncated" in message


def test_swapped_shards_are_noticed(sharded):
    one, two = sharded / shard(1), sharded / shard(2)
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    message = error_of(sharded)
    assert "is missing" in message
    assert "tensor t" in message


def test_an_index_with_a_tensor_that_no_shard_has(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["ghost"] = shard(1)
    (sharded / INDEX).write_text(json.dumps(index))
    assert f"{shard(1)}: tensor ghost is missing" in error_of(sharded)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "pytorch_model.bin", ""]
)
def test_an_index_cannot_lead_out_of_the_folder_or_to_another_format(tmp_path, file):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    assert "no safetensors file of this folder" in error_of(tmp_path)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"weight_map": []}', b'{"weight_map": {"w": 5}}', b"\xff\xfe", b"{}", b'{"weight_map": {}}'],
)
def test_malformed_indexes(tmp_path, text):
    (tmp_path / INDEX).write_bytes(text)
    assert f"{INDEX}: malformed" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\0\0\0", "truncated"),
        (raw_file(b"", length=2**60), "a header of 1152921504606846976 bytes"),
        (raw_file(b"{}", length=3), "a header of 3 bytes"),
        (raw_file(b"{"), "header is malformed"),
        (raw_file(b"[]"), "header is malformed"),
        (raw_file(b"\xff\xff"), "header is malformed"),
        (raw_file(b'{"w":' * 5000 + b"1" + b"}" * 5000), "header is malformed"),
        (raw_file({"w": 5}), "header is malformed"),
        (raw_file(entry(shape=[-1]), bytes(8)), "header is malformed"),
        (raw_file(entry(data_offsets=[0]), bytes(8)), "header is malformed"),
        (raw_file(entry(shape=[2**64, 2**64]), bytes(8)), "w"),
        (raw_file(entry(data_offsets=[8, 0]), bytes(8)), "tensor w has the impossible data offsets"),
        (raw_file(entry(data_offsets=[0, 2**62]), bytes(8)), "tensor w ends at data byte"),
        (raw_file(entry(), bytes(7)), "tensor w ends at data byte 8, the file has 7"),
        (raw_file(entry(shape=[3]), bytes(8)), "tensor w has 8 bytes, which is not F32 of shape [3]"),
        (raw_file(entry(dtype="F8_E4M3"), bytes(8)), "tensor w has the unsupported type F8_E4M3; supported: F32"),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, data, words):
    (tmp_path / "model.safetensors").write_bytes(data)
    message = error_of(tmp_path)
    assert "model.safetensors" in message
    assert words in message


def test_pickles_are_refused_by_name_and_not_read(tmp_path):
    marker = tmp_path / "marker"
    pickle = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    (tmp_path / "pytorch_model.bin").write_bytes(pickle)
    message = error_of(tmp_path)
    assert "pytorch_model.bin is a pickle file, which is never read" in message
    assert not marker.exists()


def test_a_folder_without_weights(tmp_path):
    assert "there is no model.safetensors" in error_of(tmp_path)
