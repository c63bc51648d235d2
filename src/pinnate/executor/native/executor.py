"""NativeExecutor: implements executor.base.Executor with one native call a step.

Knows: how a graph becomes a Program, and how a step's arrays go in and out. Must not know: kernels, scheduling.
"""

from __future__ import annotations

import logging
from array import array

import numpy as np
from numpy.typing import NDArray

from pinnate import _native
from pinnate.core.autoconfig import choose_quantization, size_text
from pinnate.core.batch import SchedulerOutput, StepResult
from pinnate.core.config import QUANTIZATIONS
from pinnate.core.errors import ConfigError
from pinnate.core.layer_groups import one_group, slot_layers
from pinnate.executor.base import ExecutorSpec, WeightGroup
from pinnate.executor.forward_batch import ForwardBatch, SampledRows, build_forward_batch, step_result
from pinnate.executor.masks import NO_MASKS, MaskArray, MaskFiller
from pinnate.executor.native.assemble import assemble
from pinnate.executor.native.formats import weight_groups
from pinnate.executor.native.lowering import lower
from pinnate.executor.native.plan import plan_arena
from pinnate.graph import Graph

log = logging.getLogger(__name__)

LOGITS_BLOCK = 64  # logits rows computed and sampled at once: bounds their memory when a whole prompt is scored
ACT_BYTES = {"bfloat16": 2, "float32": 4}


class NativeExecutor:
    """Owns the native program: packed weights, KV pages, arena and threads. One step at a time.

    Args:
        dtype: "bfloat16" or "float32", of weights, of what enters a product, and of keys and values. Sums and
            the residual stream are float32 either way.
        quantization: "none", "int8" or "int4", of matrices (formats.py); they need "bfloat16".
        kv_int8: keys and values are kept as int8 instead, with a scale for each token and head.
        isa: "auto", "amx", "avx512", "avx2" or "portable".

    Raises:
        ConfigError: a setting that no native kernel can honour.
        ModelError: a tensor's bytes do not match its shape.
    """

    def __init__(
        self,
        graph: Graph,
        spec: ExecutorSpec,
        *,
        dtype: str = "bfloat16",
        quantization: str = "none",
        kv_int8: bool = False,
        isa: str = "auto",
        threads: int = 1,
    ) -> None:
        if dtype not in ACT_BYTES:
            raise ConfigError(f"--dtype must be one of {', '.join(ACT_BYTES)} for the native executor, got {dtype!r}")
        if quantization not in QUANTIZATIONS:
            raise ConfigError(f"--quantization must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}")
        choose_quantization(quantization, "native", dtype)
        if spec.page_size % 16:
            raise ConfigError(
                f"--page-size must be a multiple of 16 for the native executor, got {spec.page_size} "
                "(prefix reuse is exact to the token at any page size)"
            )
        if threads < 1:
            raise ConfigError(f"--threads must be at least 1, got {threads}")
        lowered = lower(graph, act_is_f32=dtype == "float32", quantization=quantization)
        max_tokens = max(spec.max_num_batched_tokens, spec.max_num_seqs)
        block_rows = min(LOGITS_BLOCK, max_tokens)
        plan = plan_arena(lowered, {"tokens": max_tokens, "logits": block_rows}, ACT_BYTES[dtype])
        groups = spec.groups or one_group(len(lowered.kv_layers))
        try:
            program = _native.Program(
                isa=isa,
                act=dtype,
                threads=threads,
                page_size=spec.page_size,
                num_pages=spec.num_pages,
                kv_layers=slot_layers(groups, lowered.kv_layers),
                kv_places=groups.places,
                max_tokens=max_tokens,
                block_rows=block_rows,
                kv_int8=kv_int8,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        assemble(lowered, plan, program, spec.max_model_len)
        self._program: _native.Program | None = program
        self._committed = program.kv_committed_bytes
        self._spec = spec
        self._dtype = dtype
        self._quantization = quantization
        self._kv_dtype = "int8" if kv_int8 else dtype
        self._vocab_size = graph.vocab_size
        self._num_instructions = len(lowered.instructions)
        self._masks = MaskFiller(graph.vocab_size)

    @staticmethod
    def weigh(graph: Graph, dtype: str, quantization: str) -> list[WeightGroup]:
        """What the weights will take, before anything is packed. Raises as the constructor does."""
        return weight_groups(lower(graph, act_is_f32=dtype == "float32", quantization=quantization), dtype)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Runs the step. ValueError or IndexError: ids or sizes out of range; then nothing has run."""
        batch = build_forward_batch(output, self._spec.page_size)
        result = step_result(output, batch, self._run(batch, None))
        self._report_growth()
        return result

    def logits(self, output: SchedulerOutput) -> NDArray[np.float32]:
        """Raw logits [R, vocab] of the step (KV writes included): a row for each sequence that samples and each scored
        position, in order."""
        batch = build_forward_batch(output, self._spec.page_size)
        out = np.empty((len(batch.logit_rows), self._vocab_size), np.float32)
        self._run(batch, out)
        return out

    def _report_growth(self) -> None:
        program = self._open()
        committed = program.kv_committed_bytes
        if program.threads > 1 and committed != self._committed:
            sizes = (size_text(self._committed), size_text(committed), size_text(program.kv_bytes))
            log.info("KV memory grows from %s to %s, of a pool of %s: more of it is in use or cached", *sizes)
            self._committed = committed

    def _open(self) -> _native.Program:
        if self._program is None:
            raise ConfigError("the executor is closed")
        return self._program

    def _run(self, batch: ForwardBatch, logits: NDArray[np.float32] | None) -> SampledRows:
        program = self._open()
        masks = self._masks.start(batch.matchers) if batch.matchers else NO_MASKS
        try:
            return self._run_program(program, batch, masks, logits)
        finally:
            self._masks.wait()  # where the step failed before it came to sampling

    def _run_program(
        self, program: _native.Program, batch: ForwardBatch, masks: MaskArray, logits: NDArray[np.float32] | None
    ) -> SampledRows:
        count = len(batch.samples)
        rows = SampledRows(
            np.empty(count, np.int32),
            np.empty(count, np.float32),
            np.empty(count, np.int32),
            np.empty(batch.num_top, np.int32),
            np.empty(batch.num_top, np.float32),
        )
        program.run(
            (
                batch.tokens,
                batch.positions,
                batch.slots,
                batch.seq_starts,
                batch.contexts,
                batch.page_offsets,
                batch.page_indices,
                batch.copies,
                batch.logit_rows,
                batch.samples,
                batch.history,
                batch.bias_ids,
                batch.bias,
                masks,
            ),
            (rows.tokens, rows.logprobs, rows.ranks, rows.top_ids, rows.top_logprobs),
            logits,
            self._masks.wait if batch.matchers else None,
        )
        return rows

    @property
    def page_bytes(self) -> int:
        return self._open().page_bytes

    @property
    def kv_committed_bytes(self) -> int:
        return 0 if self._program is None else self._program.kv_committed_bytes

    def read_pages(self, pages: array[int], out: bytearray | memoryview) -> None:
        self._open().read_pages(pages, out)

    def write_pages(self, pages: array[int], data: bytes | bytearray | memoryview) -> None:
        self._open().write_pages(pages, data)

    def describe(self) -> dict[str, object]:
        facts: dict[str, object] = {
            "dtype": self._dtype,
            "quantization": self._quantization,
            "kv_cache_dtype": self._kv_dtype,
        }
        if self._program is not None:
            facts |= {
                "isa": self._program.isa,
                "threads": self._program.threads,
                "weight_bytes": self._program.weight_bytes,
                "kv_bytes": self._program.kv_bytes,
                "arena_bytes": self._program.arena_bytes,
                "instructions": self._num_instructions,
            }
        return facts

    def close(self) -> None:
        """Gives weights, pages and threads back. The executor cannot be used afterwards."""
        self._masks.close()
        self._program = None
