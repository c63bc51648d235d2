"""The native module (native/src/bindings.cpp): CPU facts, dequantisation, and programs.

Buffers are C-contiguous and of the named type. ValueError: sizes or names that do not fit; IndexError: an id out of
range.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

class CpuFeatures(TypedDict):
    model: str
    flags: list[str]
    isas: list[str]  # those this CPU can run, best first

class Peaks(TypedDict):
    bf16_gflops: float
    f32_gflops: float
    int8_gops: float
    read_gbs: float

def cpu_features() -> CpuFeatures: ...
def dequantize(type: int, data: Buffer, count: int, isa: str = "auto") -> NDArray[np.float32]: ...
def measure_peaks(threads: int, isa: str, seconds: float) -> Peaks: ...

# (storage type, bytes, rows, cols, row order as int32 or None)
Source = tuple[int, Buffer, int, int, NDArray[np.int32] | None]

class Program:
    """Built once: weights, then instructions, then finish; then run once a step. Offsets are bytes into one arena,
    multiples of 64. A page holds `kv_layers` (num_kv_heads, head_dim); layer i of the model is number
    kv_places[i][1] in the pages of group kv_places[i][0]; without places all layers share a page. Instructions from
    the first `gather` on run on blocks of at most block_rows logits rows. Id -1: none."""

    def __init__(
        self,
        *,
        isa: str,
        act: str,
        threads: int,
        page_size: int,
        num_pages: int,
        kv_layers: Sequence[tuple[int, int]],
        max_tokens: int,
        block_rows: int,
        kv_int8: bool = False,
        kv_places: Sequence[tuple[int, int]] = (),
    ) -> None: ...
    def add_weight(self, sources: list[Source], *, swiglu: bool, format: str = "act") -> int: ...
    def add_vector(self, data: NDArray[np.float32]) -> int: ...
    def add_rope_table(self, cos: NDArray[np.float32], sin: NDArray[np.float32], *, pairs: int) -> int: ...
    def embed(self, *, weight: int, scale: float, out: int) -> None: ...
    def gemm(self, *, weight: int, bias: int, epilogue: str, x: int, out: int) -> None: ...
    def norm(
        self,
        *,
        layer: bool,
        weight: int,
        bias: int,
        eps: float,
        cols: int,
        group: int,
        x: int,
        out: int,
        out_f32: bool,
    ) -> None: ...
    def unary(self, *, op: str, parameter: float, cols: int, x: int, out: int) -> None: ...
    def binary(self, *, op: str, cols: int, a: int, b: int, out: int) -> None: ...
    def convert(self, *, to_act: bool, cols: int, x: int, out: int) -> None: ...
    def rope(self, *, table: int, cols: int, head_dim: int, x: int, out: int) -> None: ...
    def copy_columns(self, *, cols: int, out_cols: int, at: int, x: int, out: int) -> None: ...
    def qkv(
        self, *, layer: int, num_heads: int, q_norm: int, k_norm: int, eps: float, table: int, x: int, out: int
    ) -> None: ...
    def attention(
        self, *, layer: int, num_heads: int, scale: float, window: int, softcap: float = 0.0, q: int, out: int
    ) -> None: ...
    def gather(self, *, cols: int, x: int, out: int) -> None: ...
    def finish(self, *, arena_bytes: int, logits: int, vocab: int, max_position: int) -> None: ...
    def run(
        self,
        inputs: tuple[NDArray[Any], ...],
        outputs: tuple[NDArray[Any], ...],
        logits: NDArray[np.float32] | None,
        await_masks: Callable[[], None] | None = None,
    ) -> None:
        """One step. inputs: tokens, positions, slots, seq_starts, contexts, page_offsets, page_indices, copies,
        logit_rows, samples, history, bias_ids, bias, masks; outputs: tokens, logprobs, ranks, top_ids, top_logprobs, as
        in executor/forward_batch.py. `logits` [R, vocab] gets the raw logits where given. Another thread may write
        `masks` until `await_masks` has returned, which is called before the first row is sampled. What it raises ends
        the step. Not reentrant."""

    def read_pages(self, pages: Buffer, out: Buffer) -> None:
        """Copies KV pages (int32 ids) to `out`, page_bytes each. May run in any thread beside `run`: a page that the
        step writes comes out torn."""

    def write_pages(self, pages: Buffer, data: Buffer) -> None:
        """The inverse. The step that runs must not touch these pages."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def kv_committed_bytes(self) -> int:
        """Of kv_bytes, what the system has given or will give in idle time. Grows in steps."""
    @property
    def arena_bytes(self) -> int: ...
