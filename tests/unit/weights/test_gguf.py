"""The GGUF reader against files of the gguf package's writer, and its refusals."""

from __future__ import annotations

import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest

from pinnate.core.errors import ModelError
from pinnate.graph import TensorType
from pinnate.weights.gguf import GGUFFile
from tests.checkpoints import write_gguf

HEADER = b"GGUF" + struct.pack("<I", 3)


@pytest.fixture
def writable(tmp_path):
    """(path, write): writes raw bytes and returns the path."""

    def write(data: bytes):
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write


def key_value(key: str, value_type: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", value_type) + value


def tensor_info(name: str, dims: list[int], type_: int, offset: int = 0) -> bytes:
    dims_bytes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return struct.pack("<Q", len(name)) + name.encode() + dims_bytes + struct.pack("<IQ", type_, offset)


def one_tensor(name="w", dims=(32,), type_=0, offset=0, data=b"\0" * 128, version=3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, 1, 0) + tensor_info(name, list(dims), type_, offset)
    return head + b"\0" * (-len(head) % 32) + data


def error_of(path) -> str:
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_reads_what_the_gguf_package_writes(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -(2**31))
    writer.add_float32("a.f32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "grüße\n")
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float64("a.f64", 0.1)
    writer.add_array("a.words", ["ď", "", "three"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.25, -1.5])
    writer.add_array("a.flags", [True, False])
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.add_tensor("m.weight", matrix)
    writer.add_tensor("h.weight", matrix.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile(tmp_path / "m.gguf")
    assert dict(file.metadata) == {
        "general.architecture": "llama", "a.u8": 200, "a.i8": -5, "a.u16": 65535, "a.i16": -300, "a.u32": 2**32 - 1,
        "a.i32": -(2**31), "a.f32": 0.5, "a.bool": True, "a.text": "grüße\n", "a.u64": 2**64 - 1, "a.i64": -(2**63),
        "a.f64": 0.1, "a.words": ["ď", "", "three"], "a.ints": [1, -2, 3], "a.floats": [0.25, -1.5],
        "a.flags": [True, False],
    }  # fmt: skip
    assert file.metadata["a.bool"] is True
    assert len(file.metadata) == 17
    assert (file.metadata.count("a.words"), file.metadata.count("a.u8"), file.metadata.count("b")) == (3, 0, 0)
    tensor = file.tensors["m.weight"]
    assert (tensor.shape, tensor.type, tensor.row_order) == ((2, 3), TensorType.F32, None)
    assert bytes(tensor.data) == matrix.tobytes()
    assert bytes(file.tensors["h.weight"].data) == matrix.astype(np.float16).tobytes()


def test_alignment_of_the_file_is_honoured(tmp_path):
    metadata = {"general.alignment": 256}
    writer_path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(writer_path, "llama")
    writer.add_custom_alignment(metadata["general.alignment"])
    values = [np.full(3, i, np.float32) for i in range(3)]
    for i, value in enumerate(values):
        writer.add_tensor(f"t{i}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(writer_path)
    for i, value in enumerate(values):
        assert bytes(file.tensors[f"t{i}"].data) == value.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(writable, version):
    assert GGUFFile(writable(one_tensor(version=version))).tensors["w"].shape == (32,)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF"),
        (b"GGML" + one_tensor()[4:], "not a GGUF"),
        (b"GGUF" + struct.pack("<I", 99) + b"\0" * 16, "version 99"),
        (b"GGUF" + struct.pack("<I", 1) + b"\0" * 16, "version 1 "),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 16, "big-endian"),
        (HEADER, "tensor count"),
        (HEADER + struct.pack("<QQ", 2**40, 0), "tensor count is 1099511627776"),
        (HEADER + struct.pack("<QQ", 0, 2**63), "metadata count"),
        (HEADER + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**60) + b"\0" * 8, "metadata key"),
        (HEADER + struct.pack("<QQ", 0, 1) + key_value("k", 8, struct.pack("<Q", 2**60)), "string of k"),
        (HEADER + struct.pack("<QQ", 0, 1) + key_value("k", 9, struct.pack("<IQ", 8, 2**60)), "length of k"),
        (HEADER + struct.pack("<QQ", 0, 1) + key_value("k", 9, struct.pack("<IQ", 12, 2**62)), "length of k"),
        (HEADER + struct.pack("<QQ", 0, 1) + key_value("k", 9, struct.pack("<IQ", 9, 0)), "'k' is an array"),
        (HEADER + struct.pack("<QQ", 0, 1) + key_value("k", 77, b""), "value type 77"),
        (HEADER + struct.pack("<QQ", 0, 2) + key_value("k", 0, b"1") * 2, "'k' is there twice"),
        (HEADER + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2) + b"\xff\n" + b"\0" * 8, "UTF-8"),
        (HEADER + struct.pack("<QQ", 0, 1) + key_value("general.alignment", 4, struct.pack("<I", 3)), "power of two"),
        (HEADER + struct.pack("<QQ", 0, 1) + key_value("general.alignment", 8, struct.pack("<Q", 0)), "power of two"),
        (one_tensor(type_=16), "tensor w has the unsupported type IQ2_XXS; supported: F32, F16"),
        (one_tensor(type_=999), "unsupported type number 999"),
        (one_tensor(name="bl\nk"), None),
        (one_tensor(data=b"\0" * 127), "tensor w of 128 bytes"),
        (one_tensor(offset=2**63), "tensor w"),
        (one_tensor(offset=8), "alignment 32"),
        (one_tensor(dims=(2**40, 2**40)), "tensor w"),
        (one_tensor(dims=()), "0 dimensions"),
        (one_tensor(dims=(1,) * 5), "5 dimensions"),
        (one_tensor(dims=(0, 5)), "empty dimension"),
        (one_tensor(dims=(33,), type_=2), "no whole number of Q4_0 blocks"),
    ],
)
def test_damaged_files_are_refused_in_one_line(writable, data, words):
    path = writable(data)
    if words is None:  # a strange name alone is no damage
        assert list(GGUFFile(path).tensors) == ["bl\nk"]
    else:
        assert words in error_of(path)


def test_names_from_the_file_cannot_break_the_line(writable):
    message = error_of(writable(one_tensor(name="a\nb\x1b[31m" + "x" * 2000, type_=999)))
    assert "a?b?[31m" in message
    assert len(message) < 700


def test_two_tensors_of_one_name_are_refused(writable):
    head = HEADER + struct.pack("<QQ", 2, 0) + tensor_info("w", [8], 0) * 2
    assert "tensor w is there twice" in error_of(writable(head + b"\0" * 128))


def test_text_that_is_not_utf8_is_an_error_when_it_is_asked_for(writable):
    bad = struct.pack("<Q", 1) + b"\xff"
    words = struct.pack("<IQ", 8, 2) + struct.pack("<Q", 1) + b"a" + bad
    body = key_value("one", 8, bad) + key_value("many", 9, words)
    file = GGUFFile(writable(HEADER + struct.pack("<QQ", 0, 2) + body))
    with pytest.raises(ModelError, match="one is not valid UTF-8"):
        file.metadata["one"]
    with pytest.raises(ModelError, match="entry 1 of many"):
        file.metadata["many"]
    with pytest.raises(KeyError):
        file.metadata["absent"]


def test_missing_file_and_folder_are_model_errors(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        assert str(path) in error_of(path)


def test_tensors_outlive_the_file_object(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": np.arange(8, dtype=np.float32)})
    tensor = GGUFFile(path).tensors["w"]
    path.unlink()
    assert bytes(tensor.data) == np.arange(8, dtype=np.float32).tobytes()


def test_reading_needs_no_numpy():
    code = "import sys, pinnate.weights.gguf, pinnate.models.load; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
