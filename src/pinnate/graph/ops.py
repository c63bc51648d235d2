"""The op vocabulary: every computation a model may be described with.

Each op is a frozen record of its input values, weights and attributes, and of the value it makes. The meaning
of each op is its few NumPy lines in executor/reference.py; the native executor must agree with them.
Shapes: T is the number of tokens of the step, R the number of rows whose logits are wanted. All values are
two-dimensional, [T or R, width], logically fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from pinnate.graph.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Value:
    """The result of an op: `rows` is "tokens" ([T, width]) or "logits" ([R, width])."""

    id: int
    width: int
    rows: str = "tokens"


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary embedding: inverse frequencies, one for each pair, after any scaling, and a factor on cos and sin.

    Halves are rotated against each other (x[i], x[i + rotary_dim/2]), as in Hugging Face checkpoints.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Embedding:
    """out[t] = weight[token_ids[t]] * scale; weight [vocab, width]."""

    out: Value
    weight: Tensor
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x @ weight.T + bias; weight [out, in], bias [out]."""

    out: Value
    x: Value
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (offset + weight [group]), over groups of `group` columns: all, or head_dim."""

    out: Value
    x: Value
    weight: Tensor
    eps: float
    group: int
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the width."""

    out: Value
    x: Value
    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates the first 2 * len(inv_freq) columns of each head of x [T, heads * head_dim] by its token's position."""

    out: Value
    x: Value
    head_dim: int
    table: RopeTable


@dataclass(frozen=True, slots=True)
class Attention:
    """Writes k and v of this step into the pages of `layer`, then causal attention of q over the sequence's pages.

    q [T, num_heads * head_dim]; k, v [T, num_kv_heads * head_dim]; query head h uses KV head h // (num_heads //
    num_kv_heads). softmax(q k^T * scale) v over positions max(0, p - window + 1) .. p (window 0: all). Where softcap is
    above 0, scores s = q k^T * scale become softcap * tanh(s / softcap) first.
    """

    out: Value
    q: Value
    k: Value
    v: Value
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """silu(gate) * up."""

    out: Value
    gate: Value
    up: Value


@dataclass(frozen=True, slots=True)
class Gelu:
    """GELU of x; `tanh` selects the tanh approximation."""

    out: Value
    x: Value
    tanh: bool = True


@dataclass(frozen=True, slots=True)
class Add:
    out: Value
    a: Value
    b: Value


@dataclass(frozen=True, slots=True)
class Mul:
    """Elementwise product of a and b, or of a and the constant `factor` where b is None."""

    out: Value
    a: Value
    b: Value | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Softcap:
    """cap * tanh(x / cap)."""

    out: Value
    x: Value
    cap: float


@dataclass(frozen=True, slots=True)
class GatherRows:
    """From the T rows of x, the R rows whose logits are wanted. Ops after it run on R rows."""

    out: Value
    x: Value


Op = Embedding | Linear | RMSNorm | LayerNorm | Rope | Attention | SwiGLU | Gelu | Add | Mul | Softcap | GatherRows
