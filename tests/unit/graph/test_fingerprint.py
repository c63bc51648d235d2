"""The fingerprint tells models apart by every byte, name and constant; and nothing else changes it."""

from __future__ import annotations

import dataclasses

from pinnate.graph import Graph, GraphBuilder, Tensor, TensorType
from pinnate.graph.fingerprint import fingerprint


def graph(*, data: bytes = bytes(range(64)), name: str = "w", eps: float = 1e-5, width: int = 4, order=None) -> Graph:
    b = GraphBuilder()
    weight = Tensor(name, (16 // width, width), TensorType.F32, memoryview(data), order)
    x = b.embedding(weight)
    x = b.rms_norm(b.gather_rows(x), Tensor("n", (width,), TensorType.F32, memoryview(bytes(4 * width))), eps)
    return b.finish(b.linear(x, weight))


def test_the_same_model_has_the_same_fingerprint() -> None:
    assert fingerprint(graph()) == fingerprint(graph())
    assert len(fingerprint(graph())) == 32


def test_whatever_a_model_computes_with_changes_it() -> None:
    flipped = bytearray(range(64))
    flipped[37] ^= 1
    others = [
        graph(data=bytes(flipped)),
        graph(name="v"),
        graph(eps=1e-6),
        graph(width=8),
        graph(order=(1, 0, 2, 3)),
        dataclasses.replace(graph(), vocab_size=5),
    ]
    assert len({fingerprint(other) for other in (graph(), *others)}) == len(others) + 1
