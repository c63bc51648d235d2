"""ForwardBatch: one step as flat NumPy arrays, and the way back from sampled rows to a StepResult.

Knows: how a SchedulerOutput maps to rows, slots and CSR arrays. Must not know: models, kernels or scheduling.
Nothing here keeps a view of an array that belongs to a Sequence: everything is copied, so its owner may append at once.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from pinnate.core.batch import Sample, ScheduledSequence, SchedulerOutput, StepResult, TokenLogprobs
from pinnate.core.structured import Matcher

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

# One sampling row: `row` of the logits, and what to do with it. Laid out as SampleRecord in native/src/program.h.
# history, bias and top are ranges of the batch's flat arrays. target >= 0 scores that token instead of drawing one;
# num_top -1 asks for no log-probabilities. mask is a row of the step's masks, -1 for none.
SAMPLE_DTYPE = np.dtype(
    [
        ("seed", "<i8"),
        ("row", "<i4"),
        ("index", "<u4"),
        ("position", "<u4"),
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("top_k", "<i4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("repetition", "<f4"),
        ("history_start", "<i4"),
        ("prompt_len", "<i4"),
        ("output_len", "<i4"),
        ("bias_start", "<i4"),
        ("bias_len", "<i4"),
        ("target", "<i4"),
        ("num_top", "<i4"),
        ("top_start", "<i4"),
        ("mask", "<i4"),
        ("unused", "<i4"),
    ]
)
_PACK = struct.Struct("<qiIIfffifffiiiiiiiiii").pack
_INT_MAX = 2**31 - 1
# Penalties and temperatures beyond these change nothing and would overflow a float.
_HUGE, _TINY = 1e30, 1e-30


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Arrays of one step: T tokens, S sequences, G layer groups, P pages of all page tables of a group, R logits
    rows, N sampling rows. All contiguous, int32 if not said.

    The N rows are in the order of the sequences: a sequence's scored tokens, then its samples. Samples of one
    sequence share a logits row.
    """

    tokens: IntArray  # [T]
    positions: IntArray  # [T]
    slots: IntArray  # [G * T] page * page_size + offset, where the token's key and value go; group by group
    seq_starts: IntArray  # [S + 1] rows of each sequence
    contexts: IntArray  # [S] tokens of each sequence once the step is done
    page_offsets: IntArray  # [S + 1] into each group's page_indices
    page_indices: IntArray  # [G * P] group by group; in windowed groups 0 where no token of the step looks
    copies: IntArray  # [C, 2] source page, target page; in order
    logit_rows: IntArray  # [R] rows of [T] whose logits are wanted, ascending
    samples: NDArray[np.void]  # [N] SAMPLE_DTYPE
    history: IntArray
    bias_ids: IntArray
    bias: FloatArray  # -inf bans a token
    num_top: int  # length of the flat arrays of alternatives
    wants_logprobs: bool
    matchers: tuple[Matcher, ...] = ()  # [M] each fills a row of the step's masks


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What came of a batch's N sampling rows. Where num_top is -1 only `tokens` has a meaning.

    A row's alternatives are top_*[top_start : top_start + num_top], best first; id -1 where the vocabulary ended.
    """

    tokens: IntArray  # [N]
    logprobs: FloatArray  # [N]
    ranks: IntArray  # [N]
    top_ids: IntArray  # [batch.num_top]
    top_logprobs: FloatArray


class _Rows:
    """Collects logits rows and sampling records while the sequences are walked."""

    def __init__(self) -> None:
        self.logit_rows: list[int] = []
        self.records: list[bytes] = []
        self.history: list[bytes] = []
        self.history_len = 0
        self.bias_ids: list[int] = []
        self.bias: list[float] = []
        self.num_top = 0
        self.wants_logprobs = False
        self.matchers: dict[int, tuple[int, Matcher]] = {}  # by identity: choices that have not parted share one

    def score(self, sequence: ScheduledSequence, first_row: int) -> None:
        """Rows that score the tokens after the sequence's first len(score) positions, each with its score_ids."""
        assert sequence.score is not None
        for i, token in enumerate(sequence.score):
            row = len(self.logit_rows)
            self.logit_rows.append(first_row + i)
            self._report(row, token, sequence.score_top)
            for chosen in sequence.score_ids:
                self._report(row, chosen, 0)
        self.wants_logprobs = True

    def _report(self, row: int, token: int, width: int) -> None:
        record = _PACK(0, row, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, token, width, self.num_top, -1, 0)
        self.records.append(record)
        self.num_top += width

    def sample(self, sample: Sample, row: int) -> None:
        params = sample.params
        history_start, prompt_len, output_len = 0, 0, 0
        if sample.token_ids is not None:
            history_start, prompt_len = self.history_len, sample.num_prompt_tokens
            output_len = len(sample.token_ids) - prompt_len
            self.history.append(sample.token_ids.tobytes())
            self.history_len += len(sample.token_ids)
        bias_start = len(self.bias_ids)
        if params.logit_bias and sample.target < 0:
            self.bias_ids += params.logit_bias.keys()
            self.bias += params.logit_bias.values()
        if sample.banned:
            self.bias_ids += sample.banned
            self.bias += [-math.inf] * len(sample.banned)
        width = -1
        top_start = self.num_top
        wanted = params.logprobs if sample.num_top is None else sample.num_top
        if wanted is not None:
            width = wanted
            self.num_top += width
            self.wants_logprobs = True
        self.records.append(
            _PACK(
                _choice_seed(sample),
                row,
                0,
                sample.position,
                min(params.temperature, _HUGE),
                params.top_p,
                params.min_p,
                min(params.top_k, _INT_MAX),
                params.presence_penalty,
                params.frequency_penalty,
                min(max(params.repetition_penalty, _TINY), _HUGE),
                history_start,
                prompt_len,
                output_len,
                bias_start,
                len(self.bias_ids) - bias_start,
                sample.target,
                width,
                top_start,
                self._mask(sample),
                0,
            )
        )

    def _mask(self, sample: Sample) -> int:
        if sample.matcher is None:
            return -1
        return self.matchers.setdefault(id(sample.matcher), (len(self.matchers), sample.matcher))[0]


def _choice_seed(sample: Sample) -> int:
    """seed + index, around the end of 64 bits."""
    seed = sample.seed + sample.index
    return seed if seed < 1 << 63 else seed - (1 << 64)


def build_forward_batch(output: SchedulerOutput, page_size: int) -> ForwardBatch:
    """The arrays of a step. A sequence's page table must cover start + len(token_ids) positions.

    Raises:
        ValueError: no sequence, a sequence without tokens, with too few pages, or with more scores than tokens.
    """
    sequences = output.sequences
    if not sequences:
        raise ValueError("a step needs at least one sequence")
    lengths = [len(s.token_ids) for s in sequences]
    starts = np.array([s.start for s in sequences], np.int32)
    pages = [len(s.page_table) for s in sequences]
    counts = np.array(lengths, np.int32)
    seq_starts = _offsets(lengths)
    page_offsets = _offsets(pages)
    contexts = starts + counts
    _check(sequences, lengths, pages, page_size)
    tables = [s.page_table for s in sequences]
    num_groups = 1 + len(sequences[0].window_tables)
    for group in range(num_groups - 1):
        tables += [s.window_tables[group] for s in sequences]
    page_indices = np.frombuffer(b"".join(tables), np.int32)
    if len(sequences) == int(seq_starts[-1]):  # a pure decode step: one token each
        positions, first_page = starts, page_offsets[:-1]
    else:
        positions = np.arange(seq_starts[-1], dtype=np.int32) + np.repeat(starts - seq_starts[:-1], counts)
        first_page = np.repeat(page_offsets[:-1], counts)
    logical, offset = np.divmod(positions, np.int32(page_size))
    at = first_page + logical
    pages_of_rows = page_indices[at] if num_groups == 1 else page_indices.reshape(num_groups, -1)[:, at]
    rows = _collect_rows(sequences, lengths)
    return ForwardBatch(
        tokens=np.frombuffer(b"".join([s.token_ids for s in sequences]), np.int32),
        positions=positions,
        slots=(pages_of_rows * np.int32(page_size) + offset).ravel(),
        seq_starts=seq_starts,
        contexts=contexts,
        page_offsets=page_offsets,
        page_indices=page_indices,
        copies=np.array(output.copies, np.int32).reshape(-1, 2),
        logit_rows=np.array(rows.logit_rows, np.int32),
        samples=np.frombuffer(b"".join(rows.records), SAMPLE_DTYPE),
        history=np.frombuffer(b"".join(rows.history), np.int32),
        bias_ids=np.array(rows.bias_ids, np.int32),
        bias=np.array(rows.bias, np.float32),
        num_top=rows.num_top,
        wants_logprobs=rows.wants_logprobs,
        matchers=tuple([matcher for _, matcher in rows.matchers.values()]),
    )


def _offsets(counts: list[int]) -> IntArray:
    return np.array(list(accumulate(counts, initial=0)), np.int32)


def _check(sequences: tuple[ScheduledSequence, ...], lengths: list[int], pages: list[int], page_size: int) -> None:
    for sequence, length, count in zip(sequences, lengths, pages, strict=True):
        if length == 0:
            raise ValueError(f"sequence {sequence.seq_id} has no tokens in this step")
        if sequence.start + length > count * page_size:
            raise ValueError(f"sequence {sequence.seq_id}: {count} pages for {sequence.start + length} tokens")
        if sequence.window_tables and any(len(table) != count for table in sequence.window_tables):
            raise ValueError(f"sequence {sequence.seq_id}: its page tables differ in length")
        if sequence.score is not None and len(sequence.score) > length:
            raise ValueError(f"sequence {sequence.seq_id}: {len(sequence.score)} scores for {length} tokens")


def _collect_rows(sequences: tuple[ScheduledSequence, ...], lengths: list[int]) -> _Rows:
    rows = _Rows()
    first = 0
    for sequence, length in zip(sequences, lengths, strict=True):
        if sequence.score is not None:
            rows.score(sequence, first)
        first += length
        if sequence.samples:
            if not (rows.logit_rows and rows.logit_rows[-1] == first - 1):
                rows.logit_rows.append(first - 1)
            row = len(rows.logit_rows) - 1
            for sample in sequence.samples:
                rows.sample(sample, row)
    return rows


def step_result(output: SchedulerOutput, batch: ForwardBatch, rows: SampledRows) -> StepResult:
    """Puts the sampled rows back in the order of the SchedulerOutput."""
    tokens: list[int] = rows.tokens.tolist()
    if not batch.wants_logprobs:
        return StepResult(tokens, [None] * len(tokens), {})
    entries = _logprob_entries(batch, rows)
    drawn: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    scores: dict[int, list[TokenLogprobs]] = {}
    at = 0
    for sequence in output.sequences:
        if sequence.score is not None:
            stride = 1 + len(sequence.score_ids)
            count = len(sequence.score) * stride
            scores[sequence.seq_id] = _with_chosen(entries[at : at + count], stride)
            at += count
        drawn += tokens[at : at + len(sequence.samples)]
        logprobs += entries[at : at + len(sequence.samples)]
        at += len(sequence.samples)
    return StepResult(drawn, logprobs, scores)


def _with_chosen(entries: list[TokenLogprobs | None], stride: int) -> list[TokenLogprobs]:
    """Of each `stride` entries the first, which gets the others as `chosen`."""
    reported = [entry for entry in entries if entry is not None]
    if stride == 1:
        return reported
    return [
        msgspec.structs.replace(
            reported[first], chosen=[(e.token_id, e.logprob) for e in reported[first + 1 : first + stride]]
        )
        for first in range(0, len(reported), stride)
    ]


def _logprob_entries(batch: ForwardBatch, rows: SampledRows) -> list[TokenLogprobs | None]:
    widths: list[int] = batch.samples["num_top"].tolist()
    starts: list[int] = batch.samples["top_start"].tolist()
    top = list(zip(rows.top_ids.tolist(), rows.top_logprobs.tolist(), strict=True))
    values = zip(rows.tokens.tolist(), rows.logprobs.tolist(), rows.ranks.tolist(), widths, starts, strict=True)
    return [
        None
        if width < 0
        else TokenLogprobs(token, logprob, rank, [pair for pair in top[start : start + width] if pair[0] >= 0])
        for token, logprob, rank, width, start in values
    ]
