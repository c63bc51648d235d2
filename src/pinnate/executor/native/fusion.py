"""Which ops of a Graph become one instruction. Only decides; lowering.py emits.

Knows: the op vocabulary and what the native instructions can do at once. Must not know: buffers.

A fused op is emitted where its consumer stands, so it reads its inputs later than its own place says. `last_read`
accounts for that: the residual may be updated in place only where nobody reads the old value afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from pinnate.graph.ops import Add, Attention, GatherRows, Linear, Op, RMSNorm, Rope, RopeTable, SwiGLU, Value


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """q_norm, k_norm and the table are applied by the QKV instruction; q, k, v are what goes into it. `linears`: where
    one product makes all three."""

    q: Value
    k: Value
    v: Value
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    table: RopeTable | None = None
    linears: tuple[Linear, Linear, Linear] | None = None


@dataclass(frozen=True, slots=True)
class FusedAdd:
    """`linear` is added onto the buffer of `residual`."""

    linear: Linear
    residual: Value


@dataclass(slots=True)
class Fusions:
    """By the value each op makes. `absorbed` ops are emitted by their consumer alone."""

    attention: dict[int, FusedAttention] = field(default_factory=dict)
    swiglu: dict[int, tuple[Linear, Linear]] = field(default_factory=dict)
    add: dict[int, FusedAdd] = field(default_factory=dict)
    absorbed: set[int] = field(default_factory=set)


class Uses:
    """Who makes and who reads each value of `ops`, which are in the order of emission."""

    def __init__(self, ops: Sequence[Op], result: Value) -> None:
        self._producers = {op.out.id: op for op in ops}
        self._readers: dict[int, list[Op]] = {op.out.id: [] for op in ops}
        counts: Counter[int] = Counter({result.id: 2})  # the result is read by no op and never belongs to one alone
        for op in ops:
            for value in inputs_of(op):
                self._readers[value.id].append(op)
                counts[value.id] += 1
        self._counts = counts
        self._last_read: dict[int, int] = {}
        place: dict[int, int] = {}
        for i in reversed(range(len(ops))):
            op = ops[i]
            place[op.out.id] = max([i, *(place[r.out.id] for r in self._readers[op.out.id] if self._may_absorb(r, op))])
            for value in inputs_of(op):
                self._last_read[value.id] = max(self._last_read.get(value.id, 0), place[op.out.id])

    def _may_absorb(self, reader: Op, op: Op) -> bool:
        return isinstance(op, Linear | RMSNorm | Rope) and isinstance(reader, Add | SwiGLU | Attention | RMSNorm | Rope)

    def producer(self, value: Value) -> Op:
        return self._producers[value.id]

    def only_use(self, value: Value) -> bool:
        return self._counts[value.id] == 1

    def own_linear(self, value: Value) -> Linear | None:
        """The Linear that makes this value, where nobody else reads it."""
        op = self._producers[value.id]
        return op if isinstance(op, Linear) and self.only_use(value) else None

    def last_read(self, value: Value) -> int:
        return self._last_read.get(value.id, -1)

    def feeds_only_linears(self, value: Value) -> bool:
        readers = self._readers[value.id]
        return len(readers) == self._counts[value.id] > 0 and all(isinstance(r, Linear) for r in readers)


def inputs_of(op: Op) -> list[Value]:
    named = [(f.name, getattr(op, f.name)) for f in fields(op)]
    return [value for name, value in named if name != "out" and isinstance(value, Value)]


def emission_order(ops: Sequence[Op]) -> list[Op]:
    """Ops on token rows first, then the gathers and what works on logits rows."""
    tokens = [op for op in ops if op.out.rows == "tokens"]
    gathers = [op for op in ops if isinstance(op, GatherRows)]
    return [*tokens, *gathers, *(op for op in ops if op.out.rows == "logits" and not isinstance(op, GatherRows))]


def find_fusions(ops: Sequence[Op], uses: Uses) -> Fusions:
    """`ops` in the order of emission."""
    found = Fusions()
    for i, op in enumerate(ops):
        match op:
            case Attention():
                _fuse_attention(op, uses, found)
            case SwiGLU():
                _fuse_swiglu(op, uses, found)
            case Add():
                _fuse_add(op, i, uses, found)
    return found


def _fuse_attention(op: Attention, uses: Uses, found: Fusions) -> None:
    q, q_norm, q_rope, q_ops = _head_chain(op.q, op.head_dim, uses)
    k, k_norm, k_rope, k_ops = _head_chain(op.k, op.head_dim, uses)
    q_table, k_table = (None if rope is None else rope.table for rope in (q_rope, k_rope))
    same_eps = q_norm is None or k_norm is None or q_norm.eps == k_norm.eps
    if q_table != k_table or not same_eps or op.q == op.k:
        found.attention[op.out.id] = FusedAttention(op.q, op.k, op.v)
        return
    linears = (uses.own_linear(q), uses.own_linear(k), uses.own_linear(op.v))
    found.absorbed |= {*q_ops, *k_ops}
    match linears:
        case (Linear() as lq, Linear() as lk, Linear() as lv) if lq.x == lk.x == lv.x:
            found.absorbed |= {lq.out.id, lk.out.id, lv.out.id}
            joined = (lq, lk, lv)
            found.attention[op.out.id] = FusedAttention(q, k, op.v, q_norm, k_norm, q_table, joined)
        case _:
            found.attention[op.out.id] = FusedAttention(q, k, op.v, q_norm, k_norm, q_table)


def _head_chain(value: Value, head_dim: int, uses: Uses) -> tuple[Value, RMSNorm | None, Rope | None, set[int]]:
    """Walks back over an own Rope, then an own RMSNorm of single heads. Returns its end and the ops passed."""
    norm: RMSNorm | None = None
    rope: Rope | None = None
    passed: set[int] = set()
    op = uses.producer(value)
    if isinstance(op, Rope) and op.head_dim == head_dim and uses.only_use(value):
        rope, value = op, op.x
        passed.add(op.out.id)
        op = uses.producer(value)
    if isinstance(op, RMSNorm) and op.group == head_dim and uses.only_use(value):
        norm, value = op, op.x
        passed.add(op.out.id)
    return value, norm, rope, passed


def _fuse_swiglu(op: SwiGLU, uses: Uses, found: Fusions) -> None:
    gate, up = uses.own_linear(op.gate), uses.own_linear(op.up)
    if gate is None or up is None or gate.bias is not None or up.bias is not None:
        return
    if gate.x == up.x and uses.feeds_only_linears(op.out):
        found.swiglu[op.out.id] = (gate, up)
        found.absorbed |= {gate.out.id, up.out.id}


def _fuse_add(op: Add, place: int, uses: Uses, found: Fusions) -> None:
    for value, residual in ((op.b, op.a), (op.a, op.b)):
        linear = uses.own_linear(value)
        if linear is not None and value != residual and uses.last_read(residual) <= place:
            found.add[op.out.id] = FusedAdd(linear, residual)
            found.absorbed.add(linear.out.id)
            return
