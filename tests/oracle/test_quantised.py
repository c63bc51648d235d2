"""Quantised weights, natively: what they cost on a text, and on the tiny checkpoints, quantised as they are loaded.

benchmarks/accuracy.py measures; docs/accuracy.md holds its figures. The bars on perplexity are the engine's promise.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from benchmarks.accuracy import FACTS, measure

from pinnate._native import cpu_features
from pinnate.executor.native import NativeExecutor
from pinnate.models.load import load_model
from tests.checkpoints import TINY
from tests.oracle.forced import forced_logits, spec_for


@pytest.mark.timeout(600)  # 2,224 positions where the cores are shared
@pytest.mark.parametrize(("precision", "bar"), [("int8", 0.003), ("int4", 0.01)])
def test_perplexity_and_top_tokens_of_the_default_model(precision: str, bar: float) -> None:
    """The file holds weights of 4 and 8 bits, so int4 rounds nothing but what enters a product."""
    result = measure(precision, json.loads(FACTS.read_text()), threads=2)
    assert abs(result.perplexity_change) < bar
    assert result.same_top > 0.955
    assert result.same_clear_top > 0.99
    assert result.logprob_error < 0.15


@pytest.mark.parametrize("isa", cpu_features()["isas"])
@pytest.mark.parametrize(("quantization", "bar"), [("int8", 0.06), ("int4", 0.4)])
@pytest.mark.parametrize("name", ["llama2", "llama-bias", "qwen3"])
def test_tiny_checkpoints_stay_near_transformers(name: str, quantization: str, bar: float, isa: str) -> None:
    """Error of the logits over their spread. Rows of 16 to 96 random weights average no error out (bfloat16: 0.01);
    real models fare far better."""
    token_ids = json.loads((TINY / name / "expected.json").read_text())["token_ids"]
    expected = np.load(TINY / name / "logits.npy")
    graph = load_model(TINY / name).graph
    executor = NativeExecutor(graph, spec_for(len(token_ids)), quantization=quantization, isa=isa)
    error = forced_logits(executor, token_ids, chunk=16) - expected
    executor.close()
    assert np.sqrt(np.mean(error**2)) < bar * np.std(expected)
