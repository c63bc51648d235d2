"""Keys and values kept as int8: how far the default model moves; its bytes do not depend on how it is served."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import numpy as np
import pytest

from pinnate.core.batch import ScheduledSequence, SchedulerOutput
from pinnate.executor.native import NativeExecutor
from pinnate.models.load import LoadedModel, load_model
from pinnate.weights.resolve import resolve_model
from tests.oracle.forced import PAGE_SIZE, forced_logits, spec_for

FORCED = json.loads((Path(__file__).parents[1] / "data/smollm2_forced.json").read_text())
TOKENS: list[int] = FORCED["token_ids"][:600]  # crosses a span of keys
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(resolve_model(None))


def executor(model: LoadedModel, *, kv_int8: bool = True, isa: str = "auto") -> NativeExecutor:
    return NativeExecutor(model.graph, spec_for(len(TOKENS) + PAGE_SIZE), kv_int8=kv_int8, isa=isa, threads=2)


def logits(model: LoadedModel, chunk: int, *, kv_int8: bool = True) -> np.ndarray:
    native = executor(model, kv_int8=kv_int8)
    result = forced_logits(native, TOKENS, chunk)
    native.close()
    return result


@pytest.fixture(scope="module")
def int8_logits(model: LoadedModel) -> np.ndarray:
    return logits(model, 300)


def perplexity(values: np.ndarray) -> float:
    wide = values[:-1].astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(wide - top).sum(axis=-1))
    return float(np.exp(np.mean(total - wide[np.arange(len(wide)), TOKENS[1:]])))


def test_perplexity_stays(model: LoadedModel, int8_logits: np.ndarray) -> None:
    exact = logits(model, 300, kv_int8=False)
    assert perplexity(int8_logits) == pytest.approx(perplexity(exact), rel=0.005)
    assert not np.array_equal(int8_logits, exact)
    assert (int8_logits.argmax(axis=-1) == exact.argmax(axis=-1)).mean() > 0.97


def test_chunks_do_not_show(model: LoadedModel, int8_logits: np.ndarray) -> None:
    np.testing.assert_array_equal(logits(model, 97), int8_logits)


def test_a_copied_page_brings_its_scales(model: LoadedModel, int8_logits: np.ndarray) -> None:
    native = executor(model)
    pages = array("i", range(1, 6))
    native.logits(
        SchedulerOutput((ScheduledSequence(seq_id=1, start=0, token_ids=array("i", TOKENS[:70]), page_table=pages),))
    )
    copied = array("i", [1, 2, 3, 4, 9])
    rest = array("i", TOKENS[70:75])
    sequence = ScheduledSequence(seq_id=2, start=70, token_ids=rest, page_table=copied, score=rest)
    got = native.logits(SchedulerOutput((sequence,), copies=((5, 9),)))
    native.close()
    np.testing.assert_array_equal(got, int8_logits[70:75])


def test_the_pool_is_half_as_large(model: LoadedModel) -> None:
    sizes = {kv_int8: executor(model, kv_int8=kv_int8).describe()["kv_bytes"] for kv_int8 in (False, True)}
    assert sizes[True] / sizes[False] == (64 + 4) / 128
