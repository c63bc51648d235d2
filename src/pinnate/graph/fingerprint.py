"""What a model computes, as one hash: every op with its constants, and every tensor's name, shape, type and bytes.

Knows: graphs. Must not know: files, executors. Two graphs with the same fingerprint give the same keys and values for
the same tokens (in one executor with one set of kernels). Reads all weights: about a second for each GB.
"""

from __future__ import annotations

from dataclasses import fields
from hashlib import sha256

from pinnate.graph.graph import Graph
from pinnate.graph.tensor import Tensor


def fingerprint(graph: Graph) -> bytes:
    """32 bytes. Releases the GIL while it reads, so that it can run beside the packing of the weights."""
    whole = sha256()
    digests: dict[int, bytes] = {}  # a tensor may be used twice
    for op in graph.ops:
        whole.update(type(op).__name__.encode())
        for field in fields(op):
            value = getattr(op, field.name)
            if isinstance(value, Tensor):
                if id(value) not in digests:
                    digests[id(value)] = _tensor_digest(value)
                whole.update(digests[id(value)])
            else:
                whole.update(f"{field.name}={value!r};".encode())
    whole.update(f"{graph.logits!r} {graph.kv_layers!r} {graph.vocab_size}".encode())
    return whole.digest()


def _tensor_digest(tensor: Tensor) -> bytes:
    head = f"{tensor.name} {tensor.shape} {int(tensor.type)} {tensor.row_order!r} {tensor.data.nbytes};"
    digest = sha256(head.encode())
    digest.update(tensor.data)
    return digest.digest()
