"""A LoweredProgram put into a native Program: weights packed, vectors decoded, buffers given their offsets.

Knows: the native module's building calls. Must not know: graphs or fusions. Source bytes are only read here; once
packed, nothing refers to them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pinnate import _native
from pinnate.core.errors import ModelError
from pinnate.executor.native.instructions import (
    QKV,
    Binary,
    Convert,
    CopyColumns,
    Embed,
    Gather,
    Gemm,
    Instruction,
    LoweredProgram,
    Norm,
    PagedAttention,
    RotateHeads,
    Unary,
    Vector,
    Weight,
)
from pinnate.executor.native.plan import ArenaPlan
from pinnate.graph import BLOCK_SIZES, Tensor
from pinnate.graph.ops import RopeTable

FloatArray = NDArray[np.float32]


def rope_tables(table: RopeTable, positions: int) -> tuple[FloatArray, FloatArray]:
    """cos and sin [positions, pairs], the attention factor included. Angles are float32 products, as in the
    checkpoints' training code; their cosines are exact to the rounding."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * np.array(table.inv_freq, np.float32)
    wide = angles.astype(np.float64)
    factor = table.attention_factor
    return (np.cos(wide) * factor).astype(np.float32), (np.sin(wide) * factor).astype(np.float32)


def assemble(lowered: LoweredProgram, plan: ArenaPlan, program: _native.Program, max_position: int) -> None:
    """Fills `program` and finishes it.

    Raises:
        ModelError: a tensor's bytes do not match its shape and type.
    """
    assembler = _Assembler(plan, program, max_position)
    for instruction in lowered.instructions:
        assembler.emit(instruction)
    logits = lowered.logits
    program.finish(arena_bytes=plan.size, logits=plan.offsets[logits], vocab=logits.cols, max_position=max_position)


class _Assembler:
    """Adds each weight, vector and table once, when the first instruction needs it."""

    def __init__(self, plan: ArenaPlan, program: _native.Program, max_position: int) -> None:
        self._at = plan.offsets
        self._program = program
        self._max_position = max_position
        self._weights: dict[Weight, int] = {}
        self._vectors: dict[Vector, int] = {}
        self._tables: dict[RopeTable, int] = {}

    def emit(self, instruction: Instruction) -> None:
        at, program = self._at, self._program
        match instruction:
            case Embed(weight, scale, out):
                program.embed(weight=self._weight(weight), scale=scale, out=at[out])
            case Gemm(weight, bias, epilogue, x, out):
                program.gemm(
                    weight=self._weight(weight), bias=self._vector(bias), epilogue=epilogue, x=at[x], out=at[out]
                )
            case Norm():
                self._norm(instruction)
            case Unary(op, parameter, x, out):
                program.unary(op=op, parameter=parameter, cols=x.cols, x=at[x], out=at[out])
            case Binary(op, a, b, out):
                program.binary(op=op, cols=a.cols, a=at[a], b=at[b], out=at[out])
            case Convert(x, out):
                program.convert(to_act=x.f32, cols=x.cols, x=at[x], out=at[out])
            case RotateHeads(head_dim, table, x, out):
                program.rope(table=self._table(table), cols=x.cols, head_dim=head_dim, x=at[x], out=at[out])
            case CopyColumns(column, x, out):
                program.copy_columns(cols=x.cols, out_cols=out.cols, at=column, x=at[x], out=at[out])
            case QKV():
                self._qkv(instruction)
            case PagedAttention():
                self._attention(instruction)
            case Gather(x, out):
                program.gather(cols=x.cols, x=at[x], out=at[out])

    def _norm(self, op: Norm) -> None:
        self._program.norm(
            layer=op.layer,
            weight=self._vector(op.weight),
            bias=self._vector(op.bias),
            eps=op.eps,
            cols=op.x.cols,
            group=op.group,
            x=self._at[op.x],
            out=self._at[op.out],
            out_f32=op.out.f32,
        )

    def _qkv(self, op: QKV) -> None:
        self._program.qkv(
            layer=op.layer,
            num_heads=op.num_heads,
            q_norm=self._vector(op.q_norm),
            k_norm=self._vector(op.k_norm),
            eps=op.eps,
            table=-1 if op.table is None else self._table(op.table),
            x=self._at[op.x],
            out=self._at[op.out],
        )

    def _attention(self, op: PagedAttention) -> None:
        self._program.attention(
            layer=op.layer,
            num_heads=op.num_heads,
            scale=op.scale,
            window=op.window,
            softcap=op.softcap,
            q=self._at[op.q],
            out=self._at[op.out],
        )

    def _weight(self, weight: Weight) -> int:
        if weight not in self._weights:
            sources = [_source(tensor) for tensor in weight.tensors]
            self._weights[weight] = self._program.add_weight(sources, swiglu=weight.swiglu, format=weight.format)
        return self._weights[weight]

    def _vector(self, vector: Vector | None) -> int:
        if vector is None:
            return -1
        if vector not in self._vectors:
            parts = [np.zeros(p, np.float32) if isinstance(p, int) else _decode(p) for p in vector.parts]
            self._vectors[vector] = self._program.add_vector(np.concatenate(parts) + np.float32(vector.offset))
        return self._vectors[vector]

    def _table(self, table: RopeTable) -> int:
        if table not in self._tables:
            cos, sin = rope_tables(table, self._max_position)
            self._tables[table] = self._program.add_rope_table(cos, sin, pairs=len(table.inv_freq))
        return self._tables[table]


def _checked_bytes(tensor: Tensor) -> memoryview:
    elements, size = BLOCK_SIZES[tensor.type]
    expected = math.prod(tensor.shape) // elements * size
    if tensor.shape[-1] % elements or len(tensor.data) != expected:
        what = f"shape {tensor.shape} of type {tensor.type.name}"
        raise ModelError(f"{tensor.name}: {len(tensor.data)} bytes for {what}, not {expected}")
    return tensor.data


def _source(tensor: Tensor) -> _native.Source:
    if len(tensor.shape) != 2:
        raise ModelError(f"{tensor.name}: a matrix is needed, the shape is {tensor.shape}")
    order = None if tensor.row_order is None else np.array(tensor.row_order, np.int32)
    return int(tensor.type), _checked_bytes(tensor), tensor.shape[0], tensor.shape[1], order


def _decode(tensor: Tensor) -> FloatArray:
    values = _native.dequantize(int(tensor.type), _checked_bytes(tensor), math.prod(tensor.shape))
    return values if tensor.row_order is None else values[np.array(tensor.row_order)]
