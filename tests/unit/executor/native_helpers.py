"""Random tensors, a llama-like graph and step builders for the tests of the native executor."""

from array import array

import numpy as np

from pinnate import _native
from pinnate.core.batch import Sample, ScheduledSequence, SchedulerOutput
from pinnate.core.sampling import SamplingParams
from pinnate.executor.base import ExecutorSpec
from pinnate.graph import Graph, GraphBuilder, Tensor, TensorType
from pinnate.graph.ops import RopeTable

ISAS = _native.cpu_features()["isas"]
SPEC = ExecutorSpec(num_pages=40, page_size=16, max_num_batched_tokens=96, max_num_seqs=8, max_model_len=160)
GREEDY = SamplingParams(temperature=0.0)


class Tensors:
    """Makes named F32 tensors from one seed."""

    def __init__(self, seed: int = 0):
        self._rng = np.random.default_rng(seed)
        self._count = 0

    def __call__(self, *shape: int, scale: float | None = None, around: float = 0.0) -> Tensor:
        self._count += 1
        spread = shape[-1] ** -0.5 if scale is None else scale
        values = (around + spread * self._rng.standard_normal(shape)).astype(np.float32)
        return tensor(f"t{self._count}", values)


def tensor(name: str, values: np.ndarray) -> Tensor:
    return Tensor(name, values.shape, TensorType.F32, memoryview(values.astype(np.float32).tobytes()))


def rope_table(pairs: int, base: float = 10000.0) -> RopeTable:
    return RopeTable(tuple(base ** (-i / pairs) for i in range(pairs)))


def llama_graph(
    *, layers=2, width=48, inner=70, heads=6, kv_heads=2, head_dim=10, vocab=101, bias=False, qk_norm=False, tied=True
) -> Graph:
    make = Tensors(layers * 1000 + width)
    b = GraphBuilder()
    embedding = make(vocab, width)
    table = rope_table(head_dim // 2)
    x = b.embedding(embedding)

    def vector(n):
        return make(n, around=1.0, scale=0.1)

    for _ in range(layers):
        h = b.rms_norm(x, vector(width), 1e-5)
        q = b.linear(h, make(heads * head_dim, width), vector(heads * head_dim) if bias else None)
        k = b.linear(h, make(kv_heads * head_dim, width), vector(kv_heads * head_dim) if bias else None)
        v = b.linear(h, make(kv_heads * head_dim, width), vector(kv_heads * head_dim) if bias else None)
        if qk_norm:
            q, k = b.rms_norm(q, vector(head_dim), 1e-6), b.rms_norm(k, vector(head_dim), 1e-6)
        q, k = b.rope(q, head_dim, table), b.rope(k, head_dim, table)
        x = b.add(x, b.linear(b.attention(q, k, v, head_dim=head_dim), make(width, heads * head_dim)))
        h = b.rms_norm(x, vector(width), 1e-5)
        gate, up = b.linear(h, make(inner, width)), b.linear(h, make(inner, width))
        x = b.add(x, b.linear(b.swiglu(gate, up), make(width, inner)))
    h = b.rms_norm(b.gather_rows(x), vector(width), 1e-5)
    return b.finish(b.linear(h, embedding if tied else make(vocab, width)))


def sequence(seq_id, tokens, pages, *, start=0, params=GREEDY, n=1, **fields) -> ScheduledSequence:
    """`tokens` at start.. of a sequence; n samples after the last one."""
    drawn = tuple(Sample(params, 11, i, start + len(tokens)) for i in range(n))
    return ScheduledSequence(seq_id, start, array("i", tokens), array("i", pages), drawn, **fields)


def step(*sequences: ScheduledSequence, copies=()) -> SchedulerOutput:
    return SchedulerOutput(sequences, copies)
