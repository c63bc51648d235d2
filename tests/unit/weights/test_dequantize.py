"""Decoding of every storage type against the gguf package, on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pinnate import _native
from pinnate.graph import BLOCK_SIZES, Tensor, TensorType
from pinnate.weights.dequantize import to_float32

# Where a block holds half-precision numbers; all other bytes of quantised blocks may have any value.
HALVES = {
    TensorType.Q4_0: (0,),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0,),
    TensorType.Q8_0: (0,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
}


def random_blocks(type_: TensorType, count: int, seed: int = 0) -> np.ndarray:
    """[count, block bytes] of any bits, but for scales that are finite (zero and denormal ones among them)."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCK_SIZES[type_][1]), dtype=np.uint8)
    for at in HALVES.get(type_, ()):
        scales = (rng.standard_normal(count) * 10.0 ** rng.integers(-8, 3, count)).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


@pytest.mark.parametrize("type_", HALVES)
def test_quantised_types_agree_with_the_gguf_package_to_the_bit(type_):
    blocks = random_blocks(type_, 60)
    elements = BLOCK_SIZES[type_][0]
    ours = to_float32(Tensor("w", (6, 10 * elements), type_, memoryview(blocks.tobytes())))
    theirs = gguf.quants.dequantize(blocks.reshape(6, -1), gguf.GGMLQuantizationType(int(type_)))
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours.view(np.uint32) & 0x7FFFFFFF, theirs.view(np.uint32) & 0x7FFFFFFF)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("isa", _native.cpu_features()["isas"])
@pytest.mark.parametrize("type_", TensorType)
def test_native_decoding_agrees_to_the_bit(type_, isa):
    blocks = random_blocks(type_, 37, seed=2)
    if type_ in (TensorType.F32, TensorType.F16, TensorType.BF16):
        blocks[:, -1] &= 0xBF  # no NaN: their payload bits are nobody's business
    count = 37 * BLOCK_SIZES[type_][0]
    expected = to_float32(Tensor("w", (count,), type_, memoryview(blocks.tobytes())))
    values = _native.dequantize(int(type_), blocks, count, isa)
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type_", [TensorType.F32, TensorType.F16, TensorType.BF16])
def test_plain_types_keep_every_bit_pattern(type_):
    data = random_blocks(type_, 4096, seed=1).tobytes()
    ours = to_float32(Tensor("w", (64, 64), type_, memoryview(data)))
    if type_ is TensorType.BF16:
        expected = np.frombuffer(data, "<u2").astype(np.uint32) << 16
    else:
        expected = np.frombuffer(data, "<f4" if type_ is TensorType.F32 else "<f2").astype(np.float32).view(np.uint32)
    np.testing.assert_array_equal(ours.view(np.uint32).ravel(), expected)


def test_data_may_lie_at_any_address():
    values = np.arange(12, dtype=np.float32)
    shifted = memoryview(b"x" + values.tobytes())[1:]
    np.testing.assert_array_equal(to_float32(Tensor("w", (12,), TensorType.F32, shifted)), values)


def test_the_result_is_a_copy_of_the_file():
    data = bytearray(np.ones(4, np.float32).tobytes())
    values = to_float32(Tensor("w", (4,), TensorType.F32, memoryview(data)))
    values[:] = 7
    assert data == np.ones(4, np.float32).tobytes()


def test_row_order_says_where_a_row_is_stored():
    stored = np.arange(8, dtype=np.float32).reshape(4, 2)
    tensor = Tensor("w", (4, 2), TensorType.F32, memoryview(stored.tobytes()), row_order=(2, 0, 3, 1))
    np.testing.assert_array_equal(to_float32(tensor), stored[[2, 0, 3, 1]])


def test_every_storage_type_has_a_decoder():
    for type_, (elements, size) in BLOCK_SIZES.items():
        assert to_float32(Tensor("w", (elements,), type_, memoryview(bytes(size)))).shape == (elements,)
