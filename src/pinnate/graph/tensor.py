"""Tensor: a weight as it lies in its file. Shape, storage type and the mapped bytes; nothing is decoded here."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TensorType(enum.IntEnum):
    """Storage types, numbered as in the GGUF specification."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


# type -> (elements per block, bytes per block)
BLOCK_SIZES: dict[TensorType, tuple[int, int]] = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q8_0: (32, 34),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A weight. `shape` is row-major, [out, in] for matrices; `data` is the raw bytes (usually of a mapped file).

    Where `row_order` is given, row i of the tensor is stored at row row_order[i] (GGUF llama q/k matrices are stored
    permuted; see weights/gguf.py).
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    data: memoryview
    row_order: tuple[int, ...] | None = None
