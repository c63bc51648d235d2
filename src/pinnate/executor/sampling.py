"""Sampling, defined in NumPy: what native/src/kernels/sample.cpp must compute.

Knows: logits rows and the records of a ForwardBatch. Must not know: models or how logits are made.

Where the order of roundings decides which token is drawn, both sides round alike: penalties, the shift by the
maximum and the division by the temperature are float32; exp, sums and the draw are float64 here (the kernel's exp is
a float32 one, so that a draw within its error of a boundary may differ; greedy rows never do).

All choices are those of a total order: larger value first, lower id first among equals. A draw takes one uniform
number and walks the remaining tokens by ascending id.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pinnate.executor.forward_batch import FloatArray, ForwardBatch, IntArray, SampledRows
from pinnate.executor.masks import MaskArray, fill_masks

GREEDY_BELOW = 1e-5
_EXP_ZERO_BELOW = -87.0  # exp is taken as 0 from here on: the end of normal floats
_MASK = 0xFFFFFFFF


def philox_4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10: four random 32-bit words for a counter and a key.

    Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _MASK, (left >> 32) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, index: int, position: int) -> float:
    """The number in [0, 1), of 53 bits, that draws the token at `position` of choice `index`."""
    first, second, _, _ = philox_4x32((position, index, 0, 0), (seed & _MASK, (seed >> 32) & _MASK))
    return float(((first >> 5) << 26) + (second >> 6)) * 2.0**-53


def sample_rows(logits: FloatArray, batch: ForwardBatch) -> SampledRows:
    """Samples every row of the batch from its raw `logits` [R, vocab] (float32, not changed). What a matcher does not
    allow has a logit of -inf before anything else happens to it."""
    masks = fill_masks(batch.matchers, logits.shape[1])
    count = len(batch.samples)
    result = SampledRows(
        np.zeros(count, np.int32),
        np.zeros(count, np.float32),
        np.zeros(count, np.int32),
        np.full(batch.num_top, -1, np.int32),
        np.zeros(batch.num_top, np.float32),
    )
    for i, record in enumerate(batch.samples):
        raw = logits[record["row"]]
        token = int(record["target"]) if record["target"] >= 0 else choose_token(raw, record, batch, masks)
        result.tokens[i] = token
        if record["num_top"] >= 0:
            logprobs = _raw_logprobs(raw)
            result.logprobs[i] = logprobs[token]
            result.ranks[i] = 1 + np.count_nonzero(raw > raw[token]) + np.count_nonzero(raw[:token] == raw[token])
            best = _ranking(raw)[: record["num_top"]]
            top = slice(record["top_start"], record["top_start"] + len(best))
            result.top_ids[top], result.top_logprobs[top] = best, logprobs[best]
    return result


def choose_token(raw: FloatArray, record: np.void, batch: ForwardBatch, masks: MaskArray) -> int:
    """The token drawn from one row of raw logits [vocab]."""
    allowed = raw
    if record["mask"] >= 0:
        bits = np.unpackbits(masks[record["mask"]].view(np.uint8), bitorder="little")[: len(raw)]
        allowed = np.where(bits == 1, raw, np.float32(-np.inf))
    logits = _penalised(allowed, record, batch)
    bias = slice(record["bias_start"], record["bias_start"] + record["bias_len"])
    np.add.at(logits, batch.bias_ids[bias], batch.bias[bias])
    largest = logits.max()
    if largest == -np.inf:
        return int(np.argmax(allowed))  # every token is banned
    if record["temperature"] < GREEDY_BELOW:
        return int(np.argmax(logits))
    scaled = (logits - largest) * (np.float32(1) / record["temperature"])
    kept = _kept(scaled, record)
    cumulative = np.cumsum(_exp(scaled[kept]))
    drawn = uniform(int(record["seed"]), int(record["index"]), int(record["position"])) * cumulative[-1]
    return int(kept[min(int(np.searchsorted(cumulative, drawn, side="right")), len(kept) - 1)])


def _penalised(raw: FloatArray, record: np.void, batch: ForwardBatch) -> FloatArray:
    logits = raw.copy()
    start, middle = record["history_start"], record["history_start"] + record["prompt_len"]
    output = batch.history[middle : middle + record["output_len"]]
    seen = np.unique(batch.history[start : middle + record["output_len"]])
    chosen = logits[seen]
    logits[seen] = np.where(chosen > 0, chosen / record["repetition"], chosen * record["repetition"])
    ids, counts = np.unique(output, return_counts=True)
    logits[ids] = logits[ids] - record["frequency"] * counts.astype(np.float32) - record["presence"]
    return logits


def _kept(scaled: FloatArray, record: np.void) -> IntArray:
    """Ids left after top_k, top_p and min_p, ascending; `scaled` is at most 0 and 0 for the top token."""
    kept = np.arange(len(scaled), dtype=np.int32)
    if record["top_k"] > 0 or record["top_p"] < 1:
        kept = _ranking(scaled)
    if record["top_k"] > 0:
        kept = kept[: record["top_k"]]
    if record["top_p"] < 1:
        mass = np.cumsum(_exp(scaled[kept]))
        before = np.concatenate([[0.0], mass[:-1]])
        kept = kept[before < float(record["top_p"]) * mass[-1]]
    if record["min_p"] > 0:
        kept = kept[scaled[kept] >= np.float32(math.log(record["min_p"]))]
    return np.sort(kept)


def _ranking(values: FloatArray) -> IntArray:
    return np.argsort(-values, kind="stable").astype(np.int32)


def _exp(scaled: FloatArray) -> NDArray[np.float64]:
    return np.where(scaled < _EXP_ZERO_BELOW, 0.0, np.exp(scaled.astype(np.float64)))


def _raw_logprobs(raw: FloatArray) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = (raw - raw.max()).astype(np.float64)
    return shifted - math.log(np.exp(shifted).sum())
