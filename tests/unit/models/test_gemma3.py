"""Gemma 3: what config.json and GGUF metadata say, and the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pinnate.core.errors import ModelError
from pinnate.executor.base import ExecutorSpec
from pinnate.executor.native import NativeExecutor
from pinnate.executor.reference import ReferenceExecutor
from pinnate.graph.ops import Attention, Embedding, Gelu, RMSNorm, Rope, Softcap
from pinnate.models.config import ModelConfig
from pinnate.models.load import load_model
from pinnate.weights.source import canonical_name, gguf_name
from tests.oracle.forced import forced_logits
from tests.tiny_gemma import CONFIG, HIDDEN, LAYERS, WINDOW, write_tiny_gemma

ROPE_5 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
GGUF = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 7,
    "gemma3.context_length": 4096,
    "gemma3.embedding_length": 640,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": 512,
    "gemma3.vocab_size": 1000,
}


def hf(**changes: object) -> ModelConfig:
    return ModelConfig.from_hf({k: v for k, v in (CONFIG | changes).items() if v is not None})


def gguf(**changes: object) -> ModelConfig:
    return ModelConfig.from_gguf(GGUF | {f"gemma3.{key.replace('__', '.')}": value for key, value in changes.items()})


def test_config_json() -> None:
    config = hf()
    assert config.windows == (WINDOW, WINDOW, WINDOW, 0) * 2
    assert (config.rope_theta, config.rope_scaling, config.qk_norm, config.tie_word_embeddings) == (
        1e6,
        None,
        True,
        True,
    )
    gemma = config.gemma
    assert gemma is not None
    assert (gemma.local_theta, gemma.query_size, gemma.norm_offset) == (1e4, 20.0, 1.0)
    assert (gemma.attention_softcap, gemma.final_softcap) == (5.0, 6.0)
    assert hf(head_dim=None).head_dim == 256


def test_rope_settings_by_kind_of_layer() -> None:
    config = hf(rope_parameters=ROPE_5)
    assert config.rope_theta == 2e6
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 8.0)
    assert config.gemma is not None
    assert config.gemma.local_theta == 5e3


def test_layers_alternate_by_a_pattern_where_they_are_not_named() -> None:
    assert hf(layer_types=None).windows == (WINDOW,) * 5 + (0,) + (WINDOW,) * 2
    assert hf(layer_types=None, sliding_window_pattern=2).windows == (WINDOW, 0) * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention true is not supported"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters must have full_attention"),
        ({"rope_parameters": ROPE_5 | {"sliding_attention": ROPE_5["full_attention"]}}, "other than default"),
        ({"layer_types": ["full_attention"]}, "layer_types must name"),
        ({"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a number above 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        hf(**changes)


def test_gguf_metadata() -> None:
    config = gguf()
    assert config.windows == (512,) * 5 + (0, 512)
    assert config.gemma is not None
    assert (config.rope_theta, config.gemma.local_theta) == (1e6, 1e4)
    assert (config.gemma.query_size, config.gemma.norm_offset) == (256.0, 0.0)
    assert gguf(attention__sliding_window_pattern=3).windows == (512, 512, 0, 512, 512, 0, 512)
    assert gguf(rope__freq_base_swa=5e3).gemma.local_theta == 5e3  # type: ignore[union-attr]
    assert gguf(final_logit_softcapping=30.0).gemma.final_softcap == 30.0  # type: ignore[union-attr]


def test_queries_of_the_largest_model_are_scaled_by_another_size() -> None:
    config = gguf(block_count=62, embedding_length=5376, attention__head_count=32, attention__head_count_kv=16)
    assert config.gemma is not None
    assert config.gemma.query_size == 168.0


def test_names_of_tensors() -> None:
    for theirs, ours in {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }.items():
        assert canonical_name(f"blk.3.{theirs}.weight", "gemma3") == f"model.layers.3.{ours}.weight"
        assert gguf_name(f"model.layers.3.{ours}.weight", "gemma3") == f"blk.3.{theirs}.weight"
    assert canonical_name("blk.3.ffn_norm.weight", "llama") == "model.layers.3.post_attention_layernorm.weight"


def test_the_graph(tmp_path: Path) -> None:
    model = load_model(write_tiny_gemma(tmp_path / "tiny"))
    assert model.warnings == ()
    ops = model.graph.ops
    embedding = next(op for op in ops if isinstance(op, Embedding))
    assert embedding.scale == pytest.approx(HIDDEN**0.5)
    attentions = [op for op in ops if isinstance(op, Attention)]
    assert [op.window for op in attentions] == [WINDOW, WINDOW, WINDOW, 0] * 2
    assert {(op.scale, op.softcap) for op in attentions} == {(20.0**-0.5, 5.0)}
    norms = [op for op in ops if isinstance(op, RMSNorm)]
    assert len(norms) == 6 * LAYERS + 1
    assert {op.offset for op in norms} == {1.0}
    bases = [op.table.inv_freq[1] for op in ops if isinstance(op, Rope)]
    assert bases[:2] == bases[2:4] == bases[4:6] != bases[6:8]
    assert sum(isinstance(op, Gelu) and op.tanh for op in ops) == LAYERS
    assert isinstance(ops[-1], Softcap)
    assert ops[-1].cap == 6.0


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("bfloat16", 0.25)])
def test_native_agrees_with_the_reference(tmp_path: Path, dtype: str, tolerance: float) -> None:
    """Soft caps, offsets of norms, two rope bases and windows, over four windows of text."""
    graph = load_model(write_tiny_gemma(tmp_path / "tiny")).graph
    spec = ExecutorSpec(num_pages=8, page_size=16, max_num_batched_tokens=64, max_num_seqs=1, max_model_len=128)
    tokens = np.random.default_rng(5).integers(0, 97, 110).tolist()
    expected = forced_logits(ReferenceExecutor(graph, spec), tokens, 37)
    found = forced_logits(NativeExecutor(graph, spec, dtype=dtype), tokens, 37)
    assert expected.std() > 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    plain = load_model(write_tiny_gemma(tmp_path / "plain", attn_logit_softcapping=None)).graph
    other = forced_logits(ReferenceExecutor(plain, spec), tokens, 37)
    assert np.abs(other - expected).max() > 2e-3, "the soft cap of attention changes nothing"
