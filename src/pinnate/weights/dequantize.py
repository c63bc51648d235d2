"""Decoding of the storage types to float32 in NumPy: the definition that native/src must agree with to the bit.

Knows: the block formats (ggml's, as GGUF files hold them). Must not know: files or models. Every value is a chain of
single-precision products and sums in the order written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from pinnate.graph import BLOCK_SIZES, Tensor, TensorType

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def to_float32(tensor: Tensor) -> Floats:
    """The tensor's values, float32 of its shape, `row_order` applied. A fresh array."""
    elements, block_bytes = BLOCK_SIZES[tensor.type]
    count = prod(tensor.shape)
    blocks = np.frombuffer(tensor.data, np.uint8, count // elements * block_bytes).reshape(-1, block_bytes)
    values = _DECODERS[tensor.type](blocks).reshape(tensor.shape)
    return values if tensor.row_order is None else values[np.array(tensor.row_order)]


def _f32(blocks: Bytes) -> Floats:
    return blocks.copy().view("<f4").astype(np.float32)


def _half(two_bytes: Bytes) -> Floats:
    """Half-precision numbers, [n, 2] bytes -> [n, 1]."""
    return np.ascontiguousarray(two_bytes).view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    """bfloat16 is the upper half of a float32."""
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """[n, b] -> [n, 2 b]: all low halves, then all high halves."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _signed(data: Bytes) -> Floats:
    return np.ascontiguousarray(data).view(np.int8).astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    """32 elements: d, nibbles q; d * (q - 8)."""
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    """32 elements: d, m, nibbles q; d * q + m."""
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Floats:
    """32 elements: d, 4 bytes with their fifth bits, nibbles q; d * (q - 16)."""
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    return _half(blocks[:, :2]) * ((_nibbles(blocks[:, 6:]) | fifth << 4).astype(np.float32) - 16)


def _q8_0(blocks: Bytes) -> Floats:
    """32 elements: d, signed bytes q; d * q."""
    return _half(blocks[:, :2]) * _signed(blocks[:, 2:])


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """12 bytes -> 8 scales and 8 minimums of 6 bits. Four of each lie whole in the low bits of bytes 0-7, whose
    upper two bits complete the nibbles of the other four."""
    low, high, tail = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (tail & 15) | (low >> 6) << 4], axis=1)
    minimums = np.concatenate([high & 63, (tail >> 4) | (high >> 6) << 4], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _q45_k(blocks: Bytes, nibbles_at: int, fifth_bits: Bytes | None) -> Floats:
    """256 elements in 8 groups of 32: d, dmin, scales and minimums, nibbles q; (d * scale) * q - dmin * minimum."""
    n = len(blocks)
    scales, minimums = _k_scales(blocks[:, 4:16])
    scales, minimums = _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * minimums
    pairs = blocks[:, nibbles_at:].reshape(n, 4, 1, 32)  # the groups 2i (low halves) and 2i + 1 (high halves)
    q = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(n, 8, 32)
    if fifth_bits is not None:
        q = q | (fifth_bits[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return scales[:, :, None] * q.astype(np.float32) - minimums[:, :, None]


def _q4_k(blocks: Bytes) -> Floats:
    return _q45_k(blocks, 16, None)


def _q5_k(blocks: Bytes) -> Floats:
    """As Q4_K, with 32 bytes whose bit g is the fifth bit of the elements of group g."""
    return _q45_k(blocks, 48, blocks[:, 16:48])


def _q6_k(blocks: Bytes) -> Floats:
    """256 elements in two halves of four quarters of 32: 4 low bits ql, 2 high bits qh, a signed scale for each 16
    elements, d; (d * scale) * (q - 32)."""
    n = len(blocks)
    ql = blocks[:, :128].reshape(n, 2, 64)
    low = np.concatenate([ql & 15, ql >> 4], axis=2).reshape(n, 2, 4, 32)
    qh = blocks[:, 128:192].reshape(n, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low | qh << 4).astype(np.float32) - 32
    scales = _half(blocks[:, 208:]) * _signed(blocks[:, 192:208])
    out: Floats = scales[:, :, None] * q.reshape(n, 16, 16)
    return out


_DECODERS: Mapping[TensorType, Callable[[Bytes], Floats]] = MappingProxyType(
    {
        TensorType.F32: _f32,
        TensorType.F16: _half,
        TensorType.BF16: _bf16,
        TensorType.Q4_0: _q4_0,
        TensorType.Q4_1: _q4_1,
        TensorType.Q5_0: _q5_0,
        TensorType.Q8_0: _q8_0,
        TensorType.Q4_K: _q4_k,
        TensorType.Q5_K: _q5_k,
        TensorType.Q6_K: _q6_k,
    }
)
