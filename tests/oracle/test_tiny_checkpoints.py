"""Every model family against logits recorded from transformers (tests/make_tiny_checkpoints.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pinnate._native import cpu_features
from pinnate.executor.native import NativeExecutor
from pinnate.executor.reference import ReferenceExecutor
from pinnate.graph.ops import Rope
from pinnate.models.load import load_model
from tests.oracle.forced import forced_logits, spec_for

DATA = Path(__file__).parents[1] / "data" / "tiny"
NAMES = sorted(p.name for p in DATA.iterdir())
TOLERANCE = 1e-4


def recorded(name: str) -> tuple[list[int], np.ndarray]:
    return json.loads((DATA / name / "expected.json").read_text())["token_ids"], np.load(DATA / name / "logits.npy")


def test_every_family_is_recorded():
    assert NAMES == ["llama-bias", "llama2", "llama3", "mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize(("chunk", "page_size"), [(40, 16), (7, 16), (1, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_reference_agrees_with_transformers(name, chunk, page_size):
    token_ids, expected = recorded(name)
    model = load_model(DATA / name)
    assert model.warnings == ()
    executor = ReferenceExecutor(model.graph, spec_for(len(token_ids), page_size))
    logits = forced_logits(executor, token_ids, chunk, page_size)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("isa", cpu_features()["isas"])
@pytest.mark.parametrize("chunk", [40, 7])
@pytest.mark.parametrize("name", NAMES)
def test_native_fp32_agrees_with_transformers(name, chunk, isa):
    token_ids, expected = recorded(name)
    spec = spec_for(len(token_ids))
    executor = NativeExecutor(load_model(DATA / name).graph, spec, dtype="float32", isa=isa, threads=1)
    logits = forced_logits(executor, token_ids, chunk)
    executor.close()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_rope_tables_agree_with_transformers(name):
    expected = json.loads((DATA / name / "expected.json").read_text())
    table = next(op.table for op in load_model(DATA / name).graph.ops if isinstance(op, Rope))
    np.testing.assert_allclose(table.inv_freq, expected["inv_freq"], rtol=1e-6)
    assert table.attention_factor == pytest.approx(expected["attention_factor"], rel=1e-6)


def test_the_windows_of_the_checkpoints_are_shorter_than_the_prompt():
    """Otherwise the comparisons above would not see the window at all."""
    assert load_model(DATA / "mistral").config.windows == (7, 7)
    assert load_model(DATA / "qwen2").config.windows == (0, 9)
