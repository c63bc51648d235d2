"""A Graph as a list of native instructions.

Knows: ops, fusions and instructions. Must not know: offsets (plan), weights' bytes, the native module.

A value may exist as fp32, in the compute type (what a product reads), or both; the missing one is converted from
the other when it is first asked for.
"""

from __future__ import annotations

from pinnate.core.errors import ConfigError
from pinnate.executor.native.formats import choose_format
from pinnate.executor.native.fusion import FusedAttention, Uses, emission_order, find_fusions
from pinnate.executor.native.instructions import (
    QKV,
    Binary,
    Buffer,
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
from pinnate.graph import Graph, Tensor
from pinnate.graph.ops import (
    Add,
    Attention,
    Embedding,
    GatherRows,
    Gelu,
    LayerNorm,
    Linear,
    Mul,
    Op,
    RMSNorm,
    Rope,
    Softcap,
    SwiGLU,
    Value,
)


def lower(graph: Graph, *, act_is_f32: bool, quantization: str = "none") -> LoweredProgram:
    """`quantization` decides the formats of the matrices (formats.py).

    Raises:
        ConfigError: what no native instruction computes.
    """
    return _Lowering(graph, act_is_f32, quantization).lower()


def _vector(tensor: Tensor | None) -> Vector | None:
    return None if tensor is None else Vector((tensor,))


def _norm_weight(op: RMSNorm) -> Vector:
    return Vector((op.weight,), op.offset)


class _Lowering:
    """Owns the list of instructions while it grows, and which buffer holds which value."""

    def __init__(self, graph: Graph, act_is_f32: bool, quantization: str) -> None:
        self._graph = graph
        self._act_is_f32 = act_is_f32
        self._quantization = quantization
        self._ops = emission_order(graph.ops)
        self._uses = Uses(self._ops, graph.logits)
        self._fusions = find_fusions(self._ops, self._uses)
        self._code: list[Instruction] = []
        self._f32: dict[int, Buffer] = {}
        self._act: dict[int, Buffer] = {}
        self._num_buffers = 0

    def lower(self) -> LoweredProgram:
        gathered = [op.x for op in self._ops if isinstance(op, GatherRows)]
        for op in self._ops:
            if isinstance(op, GatherRows):
                for value in gathered:  # converted, where that is needed, before the first gather
                    self._read_f32(value)
                gathered = []
            if op.out.id not in self._fusions.absorbed:
                self._emit(op)
        layers = tuple((layer.num_kv_heads, layer.head_dim) for layer in self._graph.kv_layers)
        return LoweredProgram(tuple(self._code), self._read_f32(self._graph.logits), layers)

    def _emit(self, op: Op) -> None:
        match op:
            case Embedding():
                weight = self._weight(op.weight, vocabulary=True)
                self._code.append(Embed(weight, op.scale, self._new_f32(op.out)))
            case Linear():
                self._linear(op)
            case RMSNorm():
                self._norm(op, None, op.group)
            case LayerNorm():
                self._norm(op, op.bias, op.x.width)
            case Rope():
                x = self._read_f32(op.x)
                self._code.append(RotateHeads(op.head_dim, op.table, x, self._new_f32(op.out)))
            case Attention():
                self._attention(op)
            case SwiGLU():
                self._swiglu(op)
            case Gelu():
                self._unary("gelu_tanh" if op.tanh else "gelu_erf", 0.0, op.x, op.out)
            case Softcap():
                self._unary("softcap", op.cap, op.x, op.out)
            case Mul(b=None):
                self._unary("scale", op.factor, op.a, op.out)
            case Mul(b=Value() as b):
                self._binary("mul", op.a, b, op.out)
            case Add():
                self._add(op)
            case GatherRows():
                self._code.append(Gather(self._read_f32(op.x), self._new_f32(op.out)))
            case _:
                raise ConfigError(f"the native executor does not know the op {type(op).__name__}")

    # ---- values and buffers

    def _buffer(self, cols: int, f32: bool, rows: str) -> Buffer:
        self._num_buffers += 1
        return Buffer(self._num_buffers, cols, f32 or self._act_is_f32, rows)

    def _new_f32(self, value: Value) -> Buffer:
        buffer = self._buffer(value.width, True, value.rows)
        self._hold(value, buffer)
        return buffer

    def _new_act(self, value: Value) -> Buffer:
        buffer = self._buffer(value.width, False, value.rows)
        self._hold(value, buffer)
        return buffer

    def _hold(self, value: Value, buffer: Buffer) -> None:
        if buffer.f32:
            self._f32[value.id] = buffer
        if not buffer.f32 or self._act_is_f32:
            self._act[value.id] = buffer

    def _read_f32(self, value: Value) -> Buffer:
        if value.id not in self._f32:
            self._code.append(Convert(self._act[value.id], self._new_f32(value)))
        return self._f32[value.id]

    def _read_act(self, value: Value) -> Buffer:
        if value.id not in self._act:
            self._code.append(Convert(self._f32[value.id], self._new_act(value)))
        return self._act[value.id]

    # ---- ops

    def _weight(self, *tensors: Tensor, swiglu: bool = False, vocabulary: bool = False) -> Weight:
        types = [tensor.type for tensor in tensors]
        chosen = choose_format(types, self._quantization, vocabulary=vocabulary)
        return Weight(tensors, swiglu, chosen.value, chosen.reason)

    def _linear(self, op: Linear) -> None:
        x = self._read_act(op.x)
        to_act = self._uses.feeds_only_linears(op.out)
        out = self._new_act(op.out) if to_act else self._new_f32(op.out)
        epilogue = "store_act" if to_act else "store_f32"
        weight = self._weight(op.weight, vocabulary=op.out.rows == "logits")
        self._code.append(Gemm(weight, _vector(op.bias), epilogue, x, out))

    def _norm(self, op: RMSNorm | LayerNorm, bias: Tensor | None, group: int) -> None:
        x = self._read_f32(op.x)
        out = self._new_act(op.out) if self._uses.feeds_only_linears(op.out) else self._new_f32(op.out)
        weight = _norm_weight(op) if isinstance(op, RMSNorm) else Vector((op.weight,))
        self._code.append(Norm(isinstance(op, LayerNorm), weight, _vector(bias), op.eps, group, x, out))

    def _unary(self, name: str, parameter: float, x: Value, out: Value) -> None:
        self._code.append(Unary(name, parameter, self._read_f32(x), self._new_f32(out)))

    def _binary(self, name: str, a: Value, b: Value, out: Value) -> None:
        self._code.append(Binary(name, self._read_f32(a), self._read_f32(b), self._new_f32(out)))

    def _swiglu(self, op: SwiGLU) -> None:
        fused = self._fusions.swiglu.get(op.out.id)
        if fused is None:
            self._binary("swiglu", op.gate, op.up, op.out)
            return
        gate, up = fused
        x = self._read_act(gate.x)
        weight = self._weight(gate.weight, up.weight, swiglu=True)
        self._code.append(Gemm(weight, None, "swiglu", x, self._new_act(op.out)))

    def _add(self, op: Add) -> None:
        fused = self._fusions.add.get(op.out.id)
        if fused is None:
            self._binary("add", op.a, op.b, op.out)
            return
        x = self._read_act(fused.linear.x)
        residual = self._read_f32(fused.residual)
        weight, bias = self._weight(fused.linear.weight), _vector(fused.linear.bias)
        self._code.append(Gemm(weight, bias, "add_f32", x, residual))
        self._hold(op.out, residual)

    def _attention(self, op: Attention) -> None:
        if op.head_dim % 2:
            raise ConfigError(f"the native executor needs an even head_dim, the model has {op.head_dim}")
        fused = self._fusions.attention[op.out.id]
        joined = self._join_qkv(fused)
        q = self._buffer(op.q.width, False, "tokens")
        norms = [norm for norm in (fused.q_norm, fused.k_norm) if norm is not None]
        self._code.append(
            QKV(
                op.layer,
                op.num_heads,
                None if fused.q_norm is None else _norm_weight(fused.q_norm),
                None if fused.k_norm is None else _norm_weight(fused.k_norm),
                norms[0].eps if norms else 0.0,
                fused.table,
                joined,
                q,
            )
        )
        out = self._new_act(op.out)
        self._code.append(PagedAttention(op.layer, op.num_heads, op.scale, op.window, op.softcap, q, out))

    def _join_qkv(self, fused: FusedAttention) -> Buffer:
        """q, k and v side by side: by one product where they are products of the same value, else copied."""
        joined = self._buffer(fused.q.width + fused.k.width + fused.v.width, True, "tokens")
        if fused.linears is not None:
            x = self._read_act(fused.linears[0].x)
            weight = self._weight(*(linear.weight for linear in fused.linears))
            self._code.append(Gemm(weight, _joined_bias(fused.linears), "store_f32", x, joined))
            return joined
        at = 0
        for value in (fused.q, fused.k, fused.v):
            self._code.append(CopyColumns(at, self._read_f32(value), joined))
            at += value.width
        return joined


def _joined_bias(linears: tuple[Linear, ...]) -> Vector | None:
    if all(linear.bias is None for linear in linears):
        return None
    return Vector(tuple(linear.out.width if linear.bias is None else linear.bias for linear in linears))
