"""The instructions of a native program, still with named buffers and tensors instead of offsets and ids.

Knows: what each instruction reads and writes. Must not know: graphs (lowering), offsets (plan), the native module.
Every instruction has `out`, the buffer it writes; Gemm with "add_f32" and CopyColumns change what is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from pinnate.graph import Tensor
from pinnate.graph.ops import RopeTable


@dataclass(frozen=True, slots=True)
class Buffer:
    """[rows, cols] in the arena; `rows` as in graph.ops.Value. `f32`, else of the compute type."""

    id: int
    cols: int
    f32: bool
    rows: str = "tokens"


@dataclass(frozen=True, slots=True)
class Weight:
    """Matrices stacked by rows and packed as one; with `swiglu`, (gate, up) interleaved. Equal ones are packed once.
    `format` as in formats.py, `reason` says why it is this one."""

    tensors: tuple[Tensor, ...]
    swiglu: bool = False
    format: str = "act"
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Vector:
    """fp32 vectors joined to one, with `offset` added; an int stands for that many zeros."""

    parts: tuple[Tensor | int, ...]
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Embed:
    weight: Weight
    scale: float
    out: Buffer


@dataclass(frozen=True, slots=True)
class Gemm:
    """epilogue: store_f32, add_f32 (out += ...), store_act or swiglu (the last two write the compute type)."""

    weight: Weight
    bias: Vector | None
    epilogue: str
    x: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class Norm:
    layer: bool  # layer_norm, else rms_norm
    weight: Vector
    bias: Vector | None
    eps: float
    group: int
    x: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class Unary:
    op: str  # gelu_tanh, gelu_erf, softcap, scale
    parameter: float
    x: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class Binary:
    op: str  # add, mul, swiglu
    a: Buffer
    b: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class Convert:
    """Between fp32 and the compute type; the direction is that of the buffers."""

    x: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class RotateHeads:
    head_dim: int
    table: RopeTable
    x: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class CopyColumns:
    """out[:, at : at + x.cols] = x."""

    at: int
    x: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class QKV:
    """x holds q, k and v side by side: norms, rotation, then q to `out` and k and v to the pages of `layer`."""

    layer: int
    num_heads: int
    q_norm: Vector | None
    k_norm: Vector | None
    eps: float
    table: RopeTable | None
    x: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class PagedAttention:
    layer: int
    num_heads: int
    scale: float
    window: int
    softcap: float
    q: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class Gather:
    """The logits rows of x. It reads a "tokens" buffer and writes a "logits" buffer; all after it works on blocks."""

    x: Buffer
    out: Buffer


Instruction = Embed | Gemm | Norm | Unary | Binary | Convert | RotateHeads | CopyColumns | QKV | PagedAttention | Gather


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """Instructions in order, the first Gather parting the token rows from the logits rows; `logits` is sampled."""

    instructions: tuple[Instruction, ...]
    logits: Buffer
    kv_layers: tuple[tuple[int, int], ...]  # (num_kv_heads, head_dim)


def buffers_of(instruction: Instruction) -> Iterator[Buffer]:
    """All buffers that an instruction reads or writes."""
    for member in fields(instruction):
        value = getattr(instruction, member.name)
        if isinstance(value, Buffer):
            yield value
