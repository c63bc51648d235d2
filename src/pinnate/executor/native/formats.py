"""In which format a matrix is held in memory, and what that takes.

Knows: storage types, the native module's formats. Must not know: how a format is packed or multiplied.

Formats: "act" (the compute type), "int8" (a scale for each 32 columns of a row) and "int4" (a scale and a minimum).
Products of the last two quantise the other operand to int8 by itself, row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pinnate.core.autoconfig import Choice
from pinnate.executor.base import WeightGroup
from pinnate.executor.native.instructions import QKV, Embed, Gemm, Instruction, LoweredProgram, Norm, Vector, Weight
from pinnate.graph import TensorType

PANEL = 64  # columns of a product that are packed together; the last panel is padded
# format -> (weights that share their scales, bytes of so many with their scales); a row is padded to whole blocks
_BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"bfloat16": (32, 64), "float32": (1, 4), "int8": (32, 32 + 2), "int4": (32, 16 + 2 + 2)}
)
_WIDE = frozenset({TensorType.F32, TensorType.F16, TensorType.BF16})
_FOUR_BITS = frozenset({TensorType.Q4_0, TensorType.Q4_1, TensorType.Q4_K})


def choose_format(types: Sequence[TensorType], quantization: str, *, vocabulary: bool) -> Choice[str]:
    """The one format of matrices of these `types` that are packed together.

    "int4" never takes bits away from what a file holds quantised: such a matrix gets 8 bits. `vocabulary` matrices (the
    embedding and the output) that are not quantised yet get 8 bits too: they are what 4 bits harm most. Where matrices
    of one product differ, the wider format serves all.
    """
    named = " and ".join(dict.fromkeys(t.name for t in types))
    if quantization == "none":
        return Choice("act", f"{named}: in the compute type")
    if all(t is TensorType.Q8_0 for t in types):
        return Choice("int8", f"{named}: the file's own 8 bits")
    if quantization == "int8":
        return Choice("int8", f"{named}: rounded to 8 bits")
    if all(t in _FOUR_BITS for t in types):
        return Choice("int4", f"{named}: the file's own 4 bits")
    if all(t in _FOUR_BITS | _WIDE for t in types):
        if vocabulary:
            return Choice("int8", f"{named}: rounded to 8 bits, as 4 would harm the vocabulary's matrices most")
        return Choice("int4", f"{named}: rounded to 4 bits")
    return Choice("int8", f"{named}: 8 bits, as the file holds more than 4")


def weight_groups(program: LoweredProgram, dtype: str) -> list[WeightGroup]:
    """All weights of `program`, each counted once as it is packed once; largest group first. `dtype` is the name of the
    compute type."""
    matrices = dict.fromkeys(i.weight for i in program.instructions if isinstance(i, Embed | Gemm))
    vectors: set[Vector] = set()
    for i in program.instructions:
        vectors |= _vectors(i)
    groups: dict[tuple[str, str], tuple[int, int]] = {}
    for matrix in matrices:
        key = (dtype if matrix.format == "act" else matrix.format, matrix.reason)
        count, size = groups.get(key, (0, 0))
        groups[key] = (count + 1, size + matrix_bytes(matrix, dtype))
    if vectors:
        groups["float32", "norms and biases"] = (len(vectors), sum(4 * _length(v) for v in vectors))
    made = [WeightGroup(*key, *value) for key, value in groups.items()]
    return sorted(made, key=lambda group: -group.bytes)


def _vectors(instruction: Instruction) -> set[Vector]:
    match instruction:
        case Gemm(bias=bias):
            found = {bias}
        case Norm(weight=weight, bias=bias):
            found = {weight, bias}
        case QKV(q_norm=q_norm, k_norm=k_norm):
            found = {q_norm, k_norm}
        case _:
            found = set()
    return {vector for vector in found if vector is not None}


def matrix_bytes(weight: Weight, dtype: str) -> int:
    """What the packed matrix takes, padding included."""
    rows = sum(tensor.shape[0] for tensor in weight.tensors)
    block, size = _BLOCKS[dtype if weight.format == "act" else weight.format]
    return -(-rows // PANEL) * PANEL * -(-weight.tensors[0].shape[1] // block) * size


def _length(vector: Vector) -> int:
    return sum(part if isinstance(part, int) else part.shape[0] for part in vector.parts)
