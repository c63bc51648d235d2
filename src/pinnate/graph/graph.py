"""Graph: a model as a flat list of ops, and the builder that model families use."""

from __future__ import annotations

from dataclasses import dataclass

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
    RopeTable,
    Softcap,
    SwiGLU,
    Value,
)
from pinnate.graph.tensor import Tensor


@dataclass(frozen=True, slots=True)
class KVLayer:
    """What one attention layer keeps for each token: num_kv_heads keys and values of head_dim. It looks at the last
    `window` tokens (0: all)."""

    num_kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops in an order in which every input is made before it is used. `logits` is [R, vocab_size]."""

    ops: tuple[Op, ...]
    logits: Value
    kv_layers: tuple[KVLayer, ...]
    vocab_size: int


class GraphBuilder:
    """Appends ops; each method returns the value its op makes. Checks widths, raises ValueError where they disagree."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._kv_layers: list[KVLayer] = []
        self._next = 0

    def _value(self, width: int, rows: str = "tokens") -> Value:
        value = Value(self._next, width, rows)
        self._next += 1
        return value

    def embedding(self, weight: Tensor, scale: float = 1.0) -> Value:
        out = self._value(weight.shape[1])
        self._ops.append(Embedding(out, weight, scale))
        return out

    def linear(self, x: Value, weight: Tensor, bias: Tensor | None = None) -> Value:
        if weight.shape[1] != x.width:
            raise ValueError(f"{weight.name}: {weight.shape[1]} input columns, value has {x.width}")
        out = self._value(weight.shape[0], x.rows)
        self._ops.append(Linear(out, x, weight, bias))
        return out

    def rms_norm(self, x: Value, weight: Tensor, eps: float, offset: float = 0.0) -> Value:
        group = weight.shape[0]
        if x.width % group:
            raise ValueError(f"{weight.name}: {group} columns do not divide the value's {x.width}")
        out = self._value(x.width, x.rows)
        self._ops.append(RMSNorm(out, x, weight, eps, group, offset))
        return out

    def layer_norm(self, x: Value, weight: Tensor, bias: Tensor | None, eps: float) -> Value:
        out = self._value(x.width, x.rows)
        self._ops.append(LayerNorm(out, x, weight, bias, eps))
        return out

    def rope(self, x: Value, head_dim: int, table: RopeTable) -> Value:
        out = self._value(x.width)
        self._ops.append(Rope(out, x, head_dim, table))
        return out

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        head_dim: int,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Value:
        out = self._value(q.width)
        heads, kv_heads = q.width // head_dim, k.width // head_dim
        if heads * head_dim != q.width or kv_heads * head_dim != k.width or k.width != v.width or heads % kv_heads:
            raise ValueError(f"attention of {q.width}/{k.width}/{v.width} columns with head_dim {head_dim}")
        layer = len(self._kv_layers)
        self._kv_layers.append(KVLayer(kv_heads, head_dim, window))
        used = head_dim**-0.5 if scale is None else scale
        self._ops.append(Attention(out, q, k, v, layer, heads, kv_heads, head_dim, used, window, softcap))
        return out

    def swiglu(self, gate: Value, up: Value) -> Value:
        out = self._same(gate, up)
        self._ops.append(SwiGLU(out, gate, up))
        return out

    def gelu(self, x: Value, *, tanh: bool = True) -> Value:
        out = self._value(x.width, x.rows)
        self._ops.append(Gelu(out, x, tanh))
        return out

    def add(self, a: Value, b: Value) -> Value:
        out = self._same(a, b)
        self._ops.append(Add(out, a, b))
        return out

    def mul(self, a: Value, b: Value | None = None, *, factor: float = 1.0) -> Value:
        out = self._same(a, b if b is not None else a)
        self._ops.append(Mul(out, a, b, factor))
        return out

    def softcap(self, x: Value, cap: float) -> Value:
        out = self._value(x.width, x.rows)
        self._ops.append(Softcap(out, x, cap))
        return out

    def gather_rows(self, x: Value) -> Value:
        out = self._value(x.width, "logits")
        self._ops.append(GatherRows(out, x))
        return out

    def finish(self, logits: Value) -> Graph:
        if logits.rows != "logits":
            raise ValueError("the graph's result must come after gather_rows")
        return Graph(tuple(self._ops), logits, tuple(self._kv_layers), logits.width)

    def _same(self, a: Value, b: Value) -> Value:
        if a.width != b.width or a.rows != b.rows:
            raise ValueError(f"operands of {a.width} and {b.width} columns ({a.rows}, {b.rows})")
        return self._value(a.width, a.rows)
