import json
from pathlib import Path
from typing import Any

import pytest

from pinnate.core.errors import ModelError
from pinnate.text.tokenizer import Tokenizer
from tests.unit.text.helpers import byte_level_tokenizer, sentencepiece_tokenizer

TEXT = "the tools  say é <|end|>"


def folder(path: Path, source: Tokenizer | None = None, **files: Any) -> Path:
    """A Hugging Face folder; `files` are its JSON files by stem."""
    (source or byte_level_tokenizer())._vocabulary.backend.save(str(path / "tokenizer.json"))
    for stem, value in files.items():
        (path / f"{stem}.json").write_text(json.dumps(value))
    return path


def test_ids_and_text_are_those_of_the_file(tmp_path: Path) -> None:
    made, read = byte_level_tokenizer(), Tokenizer.from_hf(folder(tmp_path))
    assert read.encode(TEXT) == made.encode(TEXT)
    assert read.decode(made.encode(TEXT), skip_special_tokens=False) == TEXT
    assert read.vocab_size == made.vocab_size
    assert read.eos_token_ids == ()
    assert read.chat_template is None


def test_sentencepiece_style_file(tmp_path: Path) -> None:
    made, read = sentencepiece_tokenizer(), Tokenizer.from_hf(folder(tmp_path, sentencepiece_tokenizer()))
    ids = made.encode("in order, 汉")
    assert read.encode("in order, 汉") == ids
    assert read.decode(ids) == "in order, 汉"
    assert read.strips_leading_space


def test_metaspace_decoder(tmp_path: Path) -> None:
    folder(tmp_path, sentencepiece_tokenizer())
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    for scheme, expected in (("first", "in or"), ("never", " in or")):
        content["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
        path.write_text(json.dumps(content))
        read = Tokenizer.from_hf(tmp_path)
        assert read.decode(read.encode("in or", add_special_tokens=False)) == expected


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    folder(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "!",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.from_hf(tmp_path).encode("xyz")) == 3


@pytest.mark.parametrize("written", ["<|end|>", {"content": "<|end|>", "lstrip": False}])
def test_eos_token_as_text_or_object(tmp_path: Path, written: object) -> None:
    read = Tokenizer.from_hf(folder(tmp_path, tokenizer_config={"eos_token": written, "bos_token": None}))
    assert read.eos_token == "<|end|>"
    assert read.eos_token_ids == (read.token_id("<|end|>"),)
    assert read.bos_token_id is None


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    files = {"special_tokens_map": {"eos_token": "<|end|>", "bos_token": "<|start|>"}}
    read = Tokenizer.from_hf(folder(tmp_path, tokenizer_config={"eos_token": None}, **files))
    assert (read.eos_token, read.bos_token) == ("<|end|>", "<|start|>")


def test_ends_of_turn_of_the_generation_config(tmp_path: Path) -> None:
    config = {"eos_token": "<|end|>"}
    folder(tmp_path, tokenizer_config=config, config={"eos_token_id": 7})
    eos = Tokenizer.from_hf(tmp_path).token_id("<|end|>")
    assert Tokenizer.from_hf(tmp_path).eos_token_ids == (eos, 7)
    folder(tmp_path, generation_config={"eos_token_id": [5, eos, 6]})
    assert Tokenizer.from_hf(tmp_path).eos_token_ids == (eos, 5, 6)
    folder(tmp_path, generation_config={"eos_token_id": None}, tokenizer_config={})
    assert Tokenizer.from_hf(tmp_path).eos_token_ids == (7,)


def test_add_bos_token_overrules_the_file(tmp_path: Path) -> None:
    folder(tmp_path, tokenizer_config={"bos_token": "<|start|>", "add_bos_token": True})
    adding = Tokenizer.from_hf(tmp_path)
    assert adding.encode("x") == [adding.bos_token_id, ord("x")]
    assert adding.encode("<|start|>x") == [adding.bos_token_id, ord("x")]
    adding._vocabulary.backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_hf(tmp_path).encode("x") == [adding.bos_token_id, ord("x")]
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|start|>", "add_bos_token": false}')
    assert Tokenizer.from_hf(tmp_path).encode("x") == [ord("x")]


def test_chat_template_places(tmp_path: Path) -> None:
    folder(tmp_path, tokenizer_config={"chat_template": "plain"})
    assert Tokenizer.from_hf(tmp_path).chat_template == "plain"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_hf(tmp_path).chat_template == "d"
    folder(tmp_path, tokenizer_config={"chat_template": named[:1]})
    assert Tokenizer.from_hf(tmp_path).chat_template is None
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_hf(tmp_path).chat_template == "from the file"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", b"{", "tokenizer.json cannot be read"),
        ("tokenizer.json", b'{"version": "1.0"}', "tokenizer.json cannot be read"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b"[1]", "must hold a JSON object"),
        ("generation_config.json", b"\xff\xfe", "generation_config.json cannot be read"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    folder(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_hf(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_unsupported_decoder_is_refused(tmp_path: Path, decoder: object) -> None:
    folder(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["decoder"] = decoder
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"decoder .*(none|WordPiece).* is not supported"):
        Tokenizer.from_hf(tmp_path)
