"""ModelConfig from config.json (both spellings) and from GGUF metadata; every refusal names its entry."""

from __future__ import annotations

import math

import pytest

from pinnate.core.errors import ModelError
from pinnate.models.config import ModelConfig
from pinnate.models.rope import RopeScaling

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
GGUF = {
    "general.architecture": "llama",
    "llama.vocab_size": 100,
    "llama.embedding_length": 48,
    "llama.feed_forward_length": 96,
    "llama.block_count": 3,
    "llama.attention.head_count": 6,
    "llama.context_length": 512,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def hf(architecture: str = "Llama", **changes: object) -> ModelConfig:
    return ModelConfig.from_hf(LLAMA | {"architectures": [f"{architecture}ForCausalLM"]} | changes)


def gguf(family: str = "llama", **changes: object) -> ModelConfig:
    """`changes` have `__` for the dots of keys without the family's prefix."""
    metadata = {key.replace("llama.", f"{family}."): value for key, value in GGUF.items()}
    metadata["general.architecture"] = family
    added = {f"{family}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return ModelConfig.from_gguf({k: v for k, v in (metadata | added).items() if v is not None})


def test_defaults_of_config_json():
    config = hf()
    assert (config.family, config.num_kv_heads, config.head_dim) == ("llama", 6, 8)
    assert (config.max_position_embeddings, config.norm_eps, config.rope_theta) == (2048, 1e-6, 10000.0)
    assert config.rope_scaling is None
    assert config.windows == (0, 0, 0)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False, False, False, False)
    assert config.tie_word_embeddings is False
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_null_entries_count_as_absent():
    config = hf(num_key_value_heads=None, head_dim=None, rope_scaling=None, rope_parameters=None, eos_token_id=None)
    assert config == hf()


@pytest.mark.parametrize(
    ("architecture", "changes", "biases", "qk_norm"),
    [
        ("Llama", {"attention_bias": True}, (True, True, False), False),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True), False),
        ("Mistral", {}, (False, False, False), False),
        ("Qwen2", {}, (True, False, False), False),
        ("Qwen3", {}, (False, False, False), True),
        ("Qwen3", {"attention_bias": True}, (True, True, False), True),
    ],
)
def test_what_families_differ_in(architecture, changes, biases, qk_norm):
    config = hf(architecture, **changes)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm is qk_norm


def test_the_head_size_can_be_given():
    assert hf(head_dim=32).head_dim == 32
    assert hf("Qwen3").head_dim == 128
    assert gguf(attention__key_length=32, attention__value_length=32).head_dim == 32
    assert gguf().head_dim == 8


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("Mistral", {"sliding_window": 16}, (16, 16, 16)),
        ("Mistral", {"sliding_window": None}, (0, 0, 0)),
        ("Llama", {"sliding_window": 16}, (0, 0, 0)),  # transformers' Llama has no window
        ("Qwen2", {"sliding_window": 16}, (0, 0, 0)),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True}, (0, 0, 0)),  # max_window_layers is 28
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, (0, 0, 16)),
        (
            "Qwen3",
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (16, 0, 16),
        ),
        ("Qwen3", {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3}, (0, 0, 0)),
    ],
)
def test_windows_of_layers(architecture, changes, windows):
    assert hf(architecture, **changes).windows == windows


def test_both_spellings_of_rope_settings_mean_the_same():
    older = hf(rope_theta=5e5, rope_scaling=YARN)
    assert older == hf(rope_parameters=YARN | {"rope_theta": 5e5})
    assert older == hf(rope_theta=5e5, rope_scaling={"type": "yarn", "factor": 4, **YARN})
    assert older.rope_theta == 5e5
    assert older.rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_context=128)


def test_yarn_stretches_from_the_context_where_no_original_one_is_given():
    config = hf(rope_scaling={"type": "yarn", "factor": 2.0}, max_position_embeddings=256)
    assert config.rope_scaling.original_context == 256


def test_end_tokens_are_united_in_order():
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": [2, 7]}, eos_token_ids=(0, 2, 9)).eos_token_ids == (2, 7, 0, 9)
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": 2, "bos_token_id": 1}).eos_token_ids == (2,)
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": -1}).eos_token_ids == ()


def test_gguf_end_tokens_are_united():
    ids = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.bos_token_id": 1}
    config = ModelConfig.from_gguf(GGUF | ids)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 5))


def test_gguf_families():
    assert (gguf().qkv_bias, gguf().o_bias, gguf().mlp_bias, gguf().qk_norm) == (None, None, None, False)
    assert (gguf("qwen2").qkv_bias, gguf("qwen2").o_bias) == (True, False)
    assert (gguf("qwen3").qkv_bias, gguf("qwen3").qk_norm) == (False, True)
    assert gguf().tie_word_embeddings is None
    assert gguf(attention__sliding_window=32).windows == (32, 32, 32)


def test_gguf_vocabulary_size_is_the_key_or_the_number_of_tokens():
    without = {k: v for k, v in GGUF.items() if k != "llama.vocab_size"}
    assert ModelConfig.from_gguf(without | {"tokenizer.ggml.tokens": ["a", "b"]}).vocab_size == 2
    assert ModelConfig.from_gguf(without, num_tokens=7).vocab_size == 7
    assert ModelConfig.from_gguf(GGUF, num_tokens=7).vocab_size == 100
    with pytest.raises(ModelError, match="vocab_size is missing"):
        ModelConfig.from_gguf(without)


def test_gguf_rope_scaling():
    assert gguf().rope_scaling is None
    assert gguf(rope__scaling__type="none", rope__scale_linear=1.0).rope_scaling is None
    linear = RopeScaling(kind="linear", factor=4.0)
    assert gguf(rope__scaling__type="linear", rope__scaling__factor=4.0).rope_scaling == linear
    assert gguf(rope__scale_linear=4.0).rope_scaling == linear
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    assert gguf(**yarn).rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_context=512)
    scaled = gguf(**yarn, rope__scaling__attn_factor=0.5, rope__scaling__original_context_length=128).rope_scaling
    assert scaled.original_context == 128
    assert scaled.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["FooForCausalLM"]}, "architectures 'FooForCausalLM' is not supported; supported: Llama"),
        ({"architectures": None}, "architectures is missing; supported: LlamaForCausalLM, Mistral"),
        ({"architectures": []}, "architectures must be a list"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be a list"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size must be an integer of at least 1, got '48'"),
        ({"hidden_size": 48.0}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"num_hidden_layers": 10**6}, "1000000 layers"),
        ({"vocab_size": 2**40}, "vocab_size must be"),
        ({"num_key_value_heads": 4}, "6 attention heads, 4 key-value heads"),
        ({"head_dim": 7}, "head size 7 must be even"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number above 0, got nan"),
        ({"rms_norm_eps": "x" * 1000}, "rms_norm_eps must be"),
        ({"rope_theta": -1}, "rope_theta must be"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"hidden_act": 3}, "hidden_act must be a string"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config 'gptq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor other than 1"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "supported: default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor must be a number above 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is missing"),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, "rope_scaling.mscale is not supported"),
        ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate false is not supported"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id or a list"),
        ({"eos_token_id": [2, None]}, "eos_token_id must be a token id or a list"),
    ],
)
def test_config_json_refusals_name_the_entry(changes, words):
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_hf(LLAMA | changes, where="m/config.json")
    assert str(caught.value).startswith("m/config.json: ")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


def test_llama3_bounds_must_be_ordered():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
    with pytest.raises(ModelError, match="low_freq_factor must be below high_freq_factor"):
        hf(rope_scaling=scaling | {"original_max_position_embeddings": 64})


def test_layer_types_must_fit_the_layers():
    for kinds in (["full_attention"], ["full_attention"] * 2 + ["chunked_attention"], "full_attention"):
        with pytest.raises(ModelError, match="layer_types must name"):
            hf("Qwen3", layer_types=kinds)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"general.architecture": "mamba"},
            "general.architecture 'mamba' is not supported; supported: llama, qwen2, qwen3",
        ),
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"general.architecture": 5}, "general.architecture must be a string"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": "3"}, "llama.block_count must be an integer"),
        ({"llama.attention.head_count_kv": [1, 2, 3]}, "llama.attention.head_count_kv must be an integer"),
        ({"llama.expert_count": 8}, "llama.expert_count above 0"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length other than the key length 8"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count other than the head size 8"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
        ({"llama.rope.freq_base": math.inf}, "llama.rope.freq_base must be"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "tokenizer.ggml.eos_token_id must be"),
    ],
)
def test_gguf_refusals_name_the_key(changes, words):
    metadata = {k: v for k, v in (GGUF | changes).items() if v is not None}
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_gguf(metadata, where="m.gguf")
    assert str(caught.value).startswith("m.gguf: ")
    assert words in str(caught.value)
