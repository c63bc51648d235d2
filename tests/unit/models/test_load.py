"""load_model and read_config on folders and GGUF files that are right, odd, and wrong."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from pinnate.core.errors import ModelError
from pinnate.graph import Tensor
from pinnate.graph.ops import Attention, Embedding, Linear, Rope
from pinnate.models.load import load_model, read_config
from pinnate.weights.dequantize import to_float32
from tests.checkpoints import TINY, tiny_config, tiny_gguf, tiny_tensors, write_folder

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def copy(tmp_path):
    """copy(name): a folder of its own with that tiny checkpoint."""
    return lambda name: shutil.copytree(TINY / name, tmp_path / name)


def error_of(path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def head_and_embedding(path) -> tuple[Tensor, Tensor]:
    ops = load_model(path).graph.ops
    head = ops[-1]
    assert isinstance(ops[0], Embedding)
    assert isinstance(head, Linear)
    return head.weight, ops[0].weight


@pytest.mark.parametrize("name", ["llama2", "mistral", "qwen2", "qwen3"])
def test_graphs_have_the_shape_that_the_config_says(name):
    model = load_model(TINY / name)
    config = model.config
    assert config == read_config(TINY / name)
    assert model.graph.vocab_size == config.vocab_size
    assert [(k.num_kv_heads, k.head_dim) for k in model.graph.kv_layers] == [
        (config.num_kv_heads, config.head_dim)
    ] * config.num_layers
    attention = [op for op in model.graph.ops if isinstance(op, Attention)]
    assert tuple(op.window for op in attention) == config.windows
    assert all(op.scale == pytest.approx(config.head_dim**-0.5) for op in attention)


@pytest.mark.parametrize("path", ["nowhere", "nowhere.gguf"])
def test_a_path_that_does_not_exist(tmp_path, path):
    assert f"{tmp_path / path}: there is no such file or folder" in error_of(tmp_path / path)


@pytest.mark.parametrize("extra", [False, True])
def test_tied_embeddings_win_over_an_output_matrix_in_the_file(tmp_path, extra):
    tensors = tiny_tensors("llama3")
    if extra:
        tensors["lm_head.weight"] = np.zeros_like(tensors["model.embed_tokens.weight"])
    write_folder(tmp_path, tiny_config("llama3"), tensors)
    head, embedding = head_and_embedding(tmp_path)
    assert head is embedding
    assert load_model(tmp_path).warnings == ()


def test_untied_without_an_output_matrix_is_refused(tmp_path):
    write_folder(tmp_path, tiny_config("llama3") | {"tie_word_embeddings": False}, tiny_tensors("llama3"))
    assert f"{tmp_path / 'model.safetensors'}: tensor lm_head.weight is missing" in error_of(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_missing_tensor_is_named(tmp_path, shards):
    tensors = tiny_tensors("llama2")
    del tensors[NORM]
    write_folder(tmp_path, tiny_config("llama2"), tensors, shards=shards)
    message = error_of(tmp_path)
    assert f"tensor {NORM} is missing" in message
    assert str(tmp_path) in message


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    tensors = tiny_tensors("llama2") | {NORM: np.ones(47, np.float32)}
    write_folder(tmp_path, tiny_config("llama2"), tensors)
    assert f"tensor {NORM} has the shape [47], the config says [48]" in error_of(tmp_path)


def test_unknown_tensors_are_named_in_a_warning_and_stored_rotary_frequencies_are_not(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32), "odd.one": np.ones(1, np.float32)}
    write_folder(tmp_path, tiny_config("llama2"), tiny_tensors("llama2") | extra)
    (warning,) = load_model(tmp_path).warnings
    assert "odd.one" in warning
    assert "inv_freq" not in warning


def test_many_unknown_tensors_make_one_bounded_line(tmp_path):
    extra = {f"odd.{i:03d}": np.ones(1, np.float32) for i in range(100)}
    write_folder(tmp_path, tiny_config("llama2"), tiny_tensors("llama2") | extra)
    (warning,) = load_model(tmp_path).warnings
    assert "and 80 more" in warning


def test_a_bias_that_the_config_denies_is_not_used_but_reported(tmp_path):
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(48, np.float32)}
    write_folder(tmp_path, tiny_config("llama2"), tiny_tensors("llama2") | bias)
    assert "q_proj.bias" in load_model(tmp_path).warnings[0]


def test_tensors_outside_the_index_are_reported_and_not_used(tmp_path):
    places = write_folder(tmp_path, tiny_config("llama2"), tiny_tensors("llama2"), shards=3)
    first = places["model.embed_tokens.weight"]
    own = {name: values for name, values in tiny_tensors("llama2").items() if places[name] == first}
    stale = next(name for name, file in places.items() if file != first)
    write_folder(tmp_path / "new", {}, own | {stale: np.zeros(1, np.float32)})
    (tmp_path / "new" / "model.safetensors").rename(tmp_path / first)
    (warning,) = load_model(tmp_path).warnings
    assert f"{stale} ({first})" in warning


def test_a_folder_without_config(copy):
    folder = copy("llama2")
    (folder / "config.json").unlink()
    assert f"{folder / 'config.json'}: the file is missing" in error_of(folder)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff", b'{"a": NaN}', b"[" * 100_000])
def test_a_malformed_config(copy, text):
    folder = copy("llama2")
    (folder / "config.json").write_bytes(text)
    assert f"{folder / 'config.json'}: malformed" in error_of(folder)


def test_code_in_the_folder_is_never_run(copy):
    folder = copy("llama2")
    marker = folder / "marker"
    (folder / "modeling_foo.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = tiny_config("llama2") | {"auto_map": {"AutoModelForCausalLM": "modeling_foo.FooForCausalLM"}}
    (folder / "config.json").write_text(json.dumps(config))
    load_model(folder)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["FooForCausalLM"]}))
    assert "'FooForCausalLM' is not supported" in error_of(folder)
    assert not marker.exists()


class TestEndTokens:
    """All ids that any file of the folder names as an end of turn count."""

    @pytest.fixture
    def folder(self, copy):
        return copy("llama2")  # config.json says 2

    def write(self, folder, name, **content):
        (folder / f"{name}.json").write_text(json.dumps(content))

    def test_generation_config_adds_one_or_many(self, folder):
        assert read_config(folder).eos_token_ids == (2,)
        self.write(folder, "generation_config", eos_token_id=[0, 2, 5])
        assert read_config(folder).eos_token_ids == (2, 0, 5)
        self.write(folder, "generation_config", eos_token_id=0)
        assert read_config(folder).eos_token_ids == (2, 0)

    @pytest.mark.parametrize("token", ["<end>", {"content": "<end>", "special": True}])
    def test_the_tokenizer_adds_its_own(self, folder, token):
        self.write(folder, "tokenizer_config", eos_token=token, added_tokens_decoder={"7": {"content": "<end>"}})
        assert read_config(folder).eos_token_ids == (2, 7)
        self.write(folder, "tokenizer_config", eos_token=token)
        assert read_config(folder).eos_token_ids == (2,)
        self.write(folder, "tokenizer", added_tokens=[{"id": 3, "content": "<s>"}, {"id": 9, "content": "<end>"}])
        assert read_config(folder).eos_token_ids == (2, 9)

    def test_only_the_tokenizer_knows(self, folder):
        config = {k: v for k, v in tiny_config("llama2").items() if k != "eos_token_id"}
        self.write(folder, "config", **config)
        self.write(folder, "tokenizer_config", eos_token="<end>")
        self.write(folder, "tokenizer", added_tokens=[{"id": 2, "content": "<end>"}])
        assert read_config(folder).eos_token_ids == (2,)

    @pytest.mark.parametrize("name", ["generation_config", "tokenizer_config", "tokenizer"])
    def test_malformed_files_are_named(self, folder, name):
        self.write(folder, "tokenizer_config", eos_token="<end>")
        (folder / f"{name}.json").write_text("{")
        with pytest.raises(ModelError, match=rf"{name}\.json: malformed"):
            read_config(folder)


class TestGGUF:
    def test_without_output_matrix_the_embedding_is_tied(self, tmp_path):
        head, embedding = head_and_embedding(
            tiny_gguf(tmp_path / "m.gguf", "llama2", "llama", without=["output.weight"])
        )
        assert head is embedding

    def test_with_output_matrix_it_is_used(self, tmp_path):
        head, embedding = head_and_embedding(tiny_gguf(tmp_path / "m.gguf", "llama2", "llama"))
        np.testing.assert_array_equal(to_float32(head), tiny_tensors("llama2")["lm_head.weight"])
        assert head is not embedding

    def test_a_missing_tensor_is_named_as_in_the_file(self, tmp_path):
        path = tiny_gguf(tmp_path / "m.gguf", "llama2", "llama", without=["blk.1.attn_norm.weight"])
        assert f"{path}: tensor blk.1.attn_norm.weight is missing" in error_of(path)

    def test_unknown_tensors_are_named_in_a_warning(self, tmp_path):
        path = tiny_gguf(tmp_path / "m.gguf", "llama2", "llama", tensors={"odd.one": np.ones(1, np.float32)})
        (warning,) = load_model(path).warnings
        assert "odd.one" in warning

    def test_rope_divisors_divide_the_frequencies(self, tmp_path):
        divisors = np.linspace(1, 8, 8, dtype=np.float32)
        plain = tiny_gguf(tmp_path / "a.gguf", "llama2", "llama")
        scaled = tiny_gguf(tmp_path / "b.gguf", "llama2", "llama", tensors={"rope_freqs.weight": divisors})
        tables = [
            next(op.table.inv_freq for op in load_model(path).graph.ops if isinstance(op, Rope))
            for path in (plain, scaled)
        ]
        np.testing.assert_allclose(np.array(tables[0]) / divisors, tables[1], rtol=1e-12)
        assert load_model(scaled).warnings == ()

    @pytest.mark.parametrize(
        ("divisors", "words"),
        [
            (np.ones(7, np.float32), "has the shape [7]"),
            (np.ones(8, np.float16), "must be F32, it is F16"),
            (np.zeros(8, np.float32), "must hold numbers above 0"),
            (np.full(8, np.nan, np.float32), "must hold numbers above 0"),
        ],
    )
    def test_bad_rope_divisors(self, tmp_path, divisors, words):
        path = tiny_gguf(tmp_path / "m.gguf", "llama2", "llama", tensors={"rope_freqs.weight": divisors})
        message = error_of(path)
        assert words in message
        assert "rope_freqs.weight" in message

    def test_an_unknown_architecture(self, tmp_path):
        path = tiny_gguf(tmp_path / "m.gguf", "llama2", "foo")
        assert f"{path}: general.architecture 'foo' is not supported; supported: llama, qwen2, qwen3" in error_of(path)
