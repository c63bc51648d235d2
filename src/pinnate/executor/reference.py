"""ReferenceExecutor: the meaning of every op, in a few NumPy lines of fp32 each. What is not so here is a bug there.

Knows: the op vocabulary and paged KV memory (any page size). Must not know: model families or files. Written to be
read, not to be fast. Its matrix products are NumPy's, whose last bits may depend on how many rows go in together:
outputs agree across batches up to fp32 rounding, not to the bit as those of the native executor do.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from pinnate.core.batch import SchedulerOutput, StepResult
from pinnate.core.layer_groups import one_group, slot_layers
from pinnate.executor.base import ExecutorSpec, WeightGroup
from pinnate.executor.forward_batch import ForwardBatch, build_forward_batch, step_result
from pinnate.executor.sampling import sample_rows
from pinnate.graph import Graph, KVLayer, Tensor
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
from pinnate.weights.dequantize import to_float32

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class ReferenceExecutor:
    """Implements executor.base.Executor. Owns the decoded weights and the KV pages.

    KV of a slot of the pages: keys and values, each [num_pages + 1, page_size, num_kv_heads, head_dim] (page 0 is
    null). A layer has a slot in the pages of its group.
    """

    def __init__(self, graph: Graph, spec: ExecutorSpec) -> None:
        self._graph = graph
        self._spec = spec
        self._weights = _decode_weights(graph)
        self._groups = spec.groups or one_group(len(graph.kv_layers))
        stored = slot_layers(self._groups, graph.kv_layers)
        self._keys = [_new_pages(layer, spec) for layer in stored]
        self._values = [_new_pages(layer, spec) for layer in stored]
        self._last_use = {v.id: i for i, op in enumerate(graph.ops) for v in _inputs(op)}

    @staticmethod
    def weigh(graph: Graph) -> list[WeightGroup]:
        """What the weights will take, before anything is decoded."""
        tensors = {id(tensor): tensor for tensor in _tensors(graph)}
        size = sum(4 * math.prod(tensor.shape) for tensor in tensors.values())
        return [WeightGroup("float32", "the reference executor decodes everything", len(tensors), size)]

    def execute(self, output: SchedulerOutput) -> StepResult:
        batch = build_forward_batch(output, self._spec.page_size)
        return step_result(output, batch, sample_rows(self._forward(batch), batch))

    def logits(self, output: SchedulerOutput) -> Floats:
        """Runs the step, KV writes included, without sampling: [R, vocab], a row for each sequence that samples and
        each scored position, in order."""
        return self._forward(build_forward_batch(output, self._spec.page_size))

    @property
    def kv_committed_bytes(self) -> int:
        return sum(pages.nbytes for pages in (*self._keys, *self._values))

    @property
    def page_bytes(self) -> int:
        return sum(pages[0].nbytes for pages in (*self._keys, *self._values))

    def read_pages(self, pages: array[int], out: bytearray | memoryview) -> None:
        """Keys and values of each layer in turn."""
        self._check_pages(pages, len(out))
        view, at = memoryview(out).cast("B"), 0
        for page in pages:
            for kept in (*self._keys, *self._values):
                data = kept[page].tobytes()
                view[at : at + len(data)] = data
                at += len(data)

    def write_pages(self, pages: array[int], data: bytes | bytearray | memoryview) -> None:
        self._check_pages(pages, len(data))
        at = 0
        for page in pages:
            for kept in (*self._keys, *self._values):
                part = kept[page]
                part[...] = np.frombuffer(data, np.float32, part.size, at).reshape(part.shape)
                at += part.nbytes

    def _check_pages(self, pages: array[int], size: int) -> None:
        if size != len(pages) * self.page_bytes:
            raise ValueError(f"{size} bytes for {len(pages)} pages of {self.page_bytes}")
        if any(not 1 <= page <= self._spec.num_pages for page in pages):
            raise IndexError(f"a page of {list(pages)} is out of the pool")

    def describe(self) -> dict[str, object]:
        return {
            "dtype": "float32",
            "isa": "numpy",
            "threads": 1,
            "weight_bytes": sum(w.nbytes for w in self._weights.values()),
            "kv_bytes": sum(pages.nbytes for pages in (*self._keys, *self._values)),
        }

    def close(self) -> None:
        self._weights.clear()
        self._keys.clear()
        self._values.clear()

    def _forward(self, batch: ForwardBatch) -> Floats:
        for pages in (*self._keys, *self._values):
            for source, target in batch.copies:
                pages[target] = pages[source]
        values: dict[int, Floats] = {}
        for i, op in enumerate(self._graph.ops):
            values[op.out.id] = self._compute(op, batch, [values[v.id] for v in _inputs(op)])
            for used in _inputs(op):
                if self._last_use[used.id] == i:
                    values.pop(used.id, None)
        return values[self._graph.logits.id]

    def _weight(self, tensor: Tensor) -> Floats:
        return self._weights[id(tensor)]

    def _compute(self, op: Op, batch: ForwardBatch, inputs: list[Floats]) -> Floats:
        match op:
            case Embedding(weight=weight, scale=scale):
                return self._weight(weight)[batch.tokens] * np.float32(scale)
            case Linear(weight=weight, bias=bias):
                out = inputs[0] @ self._weight(weight).T
                return out if bias is None else out + self._weight(bias)
            case RMSNorm(weight=weight, eps=eps, group=group, offset=offset):
                return rms_norm(inputs[0], np.float32(offset) + self._weight(weight), eps, group)
            case LayerNorm(weight=weight, bias=bias, eps=eps):
                return layer_norm(inputs[0], self._weight(weight), None if bias is None else self._weight(bias), eps)
            case Rope(head_dim=head_dim, table=table):
                return rope(inputs[0], batch.positions, head_dim, table)
            case Attention():
                return self._attention(op, batch, *inputs)
            case SwiGLU():
                return silu(inputs[0]) * inputs[1]
            case Gelu(tanh=tanh):
                return gelu_tanh(inputs[0]) if tanh else gelu_erf(inputs[0])
            case Add():
                return inputs[0] + inputs[1]
            case Mul(b=b, factor=factor):
                return inputs[0] * (np.float32(factor) if b is None else inputs[1])
            case Softcap(cap=cap):
                return softcap(inputs[0], cap)
            case GatherRows():
                return inputs[0][batch.logit_rows]

    def _attention(self, op: Attention, batch: ForwardBatch, q: Floats, k: Floats, v: Floats) -> Floats:
        group, slot = self._groups.places[op.layer]
        keys, values = self._keys[slot], self._values[slot]
        slots, page_indices = (a.reshape(self._groups.num_groups, -1)[group] for a in (batch.slots, batch.page_indices))
        kv_shape = (-1, op.num_kv_heads, op.head_dim)
        keys.reshape(kv_shape)[slots] = k.reshape(kv_shape)
        values.reshape(kv_shape)[slots] = v.reshape(kv_shape)
        out = np.empty_like(q)
        for s, context in enumerate(batch.contexts):
            rows = slice(batch.seq_starts[s], batch.seq_starts[s + 1])
            pages = page_indices[batch.page_offsets[s] : batch.page_offsets[s + 1]]
            out[rows] = attend(
                op,
                q[rows].reshape(-1, op.num_heads, op.head_dim),
                keys[pages].reshape(kv_shape)[:context],
                values[pages].reshape(kv_shape)[:context],
                batch.positions[rows],
            )
        return out


def rms_norm(x: Floats, weight: Floats, eps: float, group: int) -> Floats:
    grouped = x.reshape(len(x), x.shape[1] // group, group)  # (no -1: a step may want no logits at all)
    mean_square = np.mean(grouped * grouped, axis=-1, keepdims=True)
    out: Floats = grouped / np.sqrt(mean_square + np.float32(eps)) * weight
    return out.reshape(x.shape)


def layer_norm(x: Floats, weight: Floats, bias: Floats | None, eps: float) -> Floats:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    out: Floats = centred / np.sqrt(variance + np.float32(eps)) * weight
    return out if bias is None else out + bias


def rope(x: Floats, positions: Ints, head_dim: int, table: RopeTable) -> Floats:
    """Angles are products of fp32 numbers, as in the checkpoints' training code: rounded so, far positions agree."""
    half = len(table.inv_freq)
    angles = positions.astype(np.float32)[:, None, None] * np.array(table.inv_freq, np.float32)
    cos, sin = (f(angles) * np.float32(table.attention_factor) for f in (np.cos, np.sin))
    heads = x.reshape(len(x), -1, head_dim)
    a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).reshape(x.shape)


def attend(op: Attention, q: Floats, keys: Floats, values: Floats, positions: Ints) -> Floats:
    """One sequence: q [T, heads, d] at `positions` [T]; keys and values [C, kv_heads, d] of positions 0 .. C-1.

    Returns [T, heads * d].
    """
    distance = positions[:, None] - np.arange(len(keys), dtype=np.int32)
    visible = (distance >= 0) & ((distance < op.window) | (op.window == 0))
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))
    out = np.empty_like(q)
    for head in range(op.num_heads):
        kv_head = head // (op.num_heads // op.num_kv_heads)
        scores = q[:, head] @ keys[:, kv_head].T * np.float32(op.scale)
        if op.softcap:
            scores = softcap(scores, op.softcap)
        scores += mask
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights @ values[:, kv_head] / weights.sum(axis=-1, keepdims=True)
    return out.reshape(len(q), -1)


def silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp(-x) may be inf: the quotient is then the right 0
        out: Floats = x / (1 + np.exp(-x))
    return out


def gelu_tanh(x: Floats) -> Floats:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    out: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return out


def gelu_erf(x: Floats) -> Floats:
    erf = np.vectorize(math.erf, otypes=[np.float32])
    out: Floats = np.float32(0.5) * x * (1 + erf(x / np.float32(math.sqrt(2))))
    return out


def softcap(x: Floats, cap: float) -> Floats:
    out: Floats = np.float32(cap) * np.tanh(x / np.float32(cap))
    return out


def _inputs(op: Op) -> list[Value]:
    """The values an op reads, in the order of its fields."""
    named = [(f.name, getattr(op, f.name)) for f in fields(op)]
    return [value for name, value in named if name != "out" and isinstance(value, Value)]


def _decode_weights(graph: Graph) -> dict[int, Floats]:
    """By the identity of the Tensor: a matrix that two ops share is decoded once."""
    weights: dict[int, Floats] = {}
    for tensor in _tensors(graph):
        if id(tensor) not in weights:
            weights[id(tensor)] = to_float32(tensor)
    return weights


def _tensors(graph: Graph) -> Iterator[Tensor]:
    for op in graph.ops:
        for field in fields(op):
            tensor = getattr(op, field.name)
            if isinstance(tensor, Tensor):
                yield tensor


def _new_pages(layer: KVLayer, spec: ExecutorSpec) -> Floats:
    return np.zeros((spec.num_pages + 1, spec.page_size, layer.num_kv_heads, layer.head_dim), np.float32)
