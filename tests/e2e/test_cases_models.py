"""Requests and model files that broke other engines, with the default model as a Hugging Face folder: its weights are
rounded to bfloat16, and float32 arithmetic then gives the reference values of the collection. See test_cases_api.py."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_to_hf import convert

from pinnate import LLM, SamplingParams
from pinnate.core.errors import ModelError
from pinnate.models.load import load_model
from pinnate.weights.resolve import default_model_path
from pinnate.weights.safetensors import INDEX, SafetensorsFolder
from tests.e2e.conftest import MODEL, open_session
from tests.e2e.harness import Api, Server, counting
from tests.e2e.test_cases_api import P1, P1_LOGPROBS, P1_NEXT, P1_TOP, P4

FP32 = 0.02  # what a log-probability may differ by, says the collection
HI = "Hello there! How can I assist you today?"
BEAMS = [(" 2022-01", -9.2318), (" 2023-01", -9.6085), (" 2022-02", -9.6630), (" 2022-12", -9.7744)]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        convert(default_model_path(), Path(path))
        yield Path(path)


@pytest.fixture(scope="module")
def exact_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Case 70, as shipped: the output matrix is the embedding."""
    flags = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16", "--served-model-name", MODEL)
    server = Server(tmp_path_factory.mktemp("exact"), *flags, model=str(folder))
    try:
        yield server.wait_until(200)
    finally:
        server.stop()


@pytest.fixture
async def exact(exact_server: Server) -> AsyncIterator[Api]:
    async with open_session() as session:
        yield Api(exact_server, session, MODEL)


async def test_case_61_beams_have_the_scores_of_the_reference(exact: Api) -> None:
    fields = {"n": 4, "use_beam_search": True, "length_penalty": 0, "logprobs": 0}
    neighbours = [exact.complete(counting(first + 9, first)) for first in (1, 11, 21, 31, 41, 51)]
    alone = await exact.complete(P4, **fields)
    assert alone.texts == [text for text, _ in BEAMS]
    scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in alone.json["choices"]]
    assert scores == pytest.approx([score for _, score in BEAMS], abs=FP32)
    for text, score in zip(alone.texts, scores, strict=True):
        scored = (await exact.complete(P4 + text, echo=True, logprobs=0, max_tokens=0)).choice()["logprobs"]
        assert sum(scored["token_logprobs"][4:]) == pytest.approx(score, abs=1e-4)
    beside, *_ = await asyncio.gather(exact.complete(P4, **fields), *neighbours)
    assert beside.json["choices"] == alone.json["choices"]
    assert len((await exact.complete(P4, **{**fields, "n": 12})).texts) == 12


async def test_case_21_scores_of_a_prompt_are_those_of_the_reference(exact: Api) -> None:
    scores = (await exact.complete(P1, echo=True, logprobs=1, max_tokens=0)).choice()["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert scores[1:] == pytest.approx(P1_LOGPROBS[1:], abs=FP32)


async def test_case_45_logprobs_are_those_of_the_reference(exact: Api) -> None:
    top = (await exact.complete(P1, max_tokens=1, logprobs=5)).choice()["logprobs"]["top_logprobs"][0]
    assert top == pytest.approx(P1_TOP, abs=FP32)


async def test_case_16_case_70_and_case_74_answers_are_those_of_the_reference(exact: Api) -> None:
    assert (await exact.complete(P1, max_tokens=48)).text == P1_NEXT[:48]
    whole = await exact.chat("hi", max_tokens=60)
    assert (whole.text, whole.choice()["finish_reason"]) == (HI, "stop")
    cut = await exact.chat("hi", max_completion_tokens=3, max_tokens=None)
    assert (cut.text, cut.choice()["finish_reason"]) == ("Hello there!", "length")


# Folders made of links to the real one. A split into three shards is written once.


@pytest.fixture(scope="module")
def split(folder: Path) -> Iterator[Path]:
    """The same model in three shards, with an index."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made)
        link(folder, path, without=WEIGHTS)
        data = (folder / WEIGHTS).read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        entries = json.loads(data[8:start])
        del entries["__metadata__"]
        names, places = list(entries), {}
        for number in range(3):
            part = names[number * len(names) // 3 : (number + 1) * len(names) // 3]
            begin, end = entries[part[0]]["data_offsets"][0], entries[part[-1]]["data_offsets"][1]
            for name in part:
                entries[name]["data_offsets"] = [at - begin for at in entries[name]["data_offsets"]]
            write_shard(path / shard(number), {name: entries[name] for name in part}, data[start + begin : start + end])
            places |= dict.fromkeys(part, shard(number))
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        yield path


def shard(number: int) -> str:
    return f"model-{number + 1:05d}-of-00003.safetensors"


def link(source: Path, target: Path, without: str = "") -> None:
    for file in source.iterdir():
        if file.name != without:
            (target / file.name).symlink_to(file)


def write_shard(path: Path, entries: dict[str, Any], data: bytes) -> None:
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def replace(path: Path, content: bytes | str | dict[str, Any]) -> None:
    path.unlink(missing_ok=True)
    text = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def edit(path: Path, **changes: Any) -> None:
    replace(path, json.loads(path.read_text()) | changes)


def places_of(path: Path) -> dict[str, str]:
    return dict(json.loads((path / INDEX).read_text())["weight_map"])


def continuation(path: Path) -> str:
    llm = LLM(str(path), max_model_len=64, num_pages=16)
    try:
        return llm.generate(P1, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    finally:
        llm.close()


def test_case_70_and_case_71_only_what_index_and_config_say_is_used(split: Path, tmp_path: Path) -> None:
    """Three shards, and beside them: an output matrix that the config ties away, an unknown tensor, stored rotary
    frequencies, a stale copy of a matrix where the index does not place it, and an old file of the whole model."""
    link(split, tmp_path)
    embedding = SafetensorsFolder(split).tensor("model.embed_tokens.weight")
    wrong = np.zeros(embedding.shape, np.uint16).tobytes()
    stale = "model.layers.3.self_attn.q_proj.weight"
    rest = {"mystery": (4,), "model.layers.0.self_attn.rotary_emb.inv_freq": (2,), stale: (576, 576)}
    entries, at = {"lm_head.weight": {"dtype": "BF16", "shape": embedding.shape, "data_offsets": [0, len(wrong)]}}, 0
    at = len(wrong)
    for name, shape in rest.items():
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * int(np.prod(shape))]}
        at = entries[name]["data_offsets"][1]
    write_shard(tmp_path / "extra.safetensors", entries, wrong + bytes(at - len(wrong)))
    extra = dict.fromkeys([name for name in entries if name != stale], "extra.safetensors")
    replace(tmp_path / INDEX, {"weight_map": places_of(split) | extra})
    replace(tmp_path / WEIGHTS, b"an old copy")
    assert continuation(tmp_path) == P1_NEXT[:12]
    warned = " ".join(load_model(tmp_path).warnings)
    assert "mystery" in warned
    assert f"{stale} (extra.safetensors)" in warned
    assert "inv_freq" not in warned


def test_case_70_a_missing_output_matrix_or_norm_is_named(split: Path, tmp_path: Path) -> None:
    link(split, tmp_path)
    edit(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        load_model(tmp_path)
    edit(tmp_path / "config.json", tie_word_embeddings=True)
    norm = "model.layers.7.input_layernorm.weight"
    replace(tmp_path / INDEX, {"weight_map": {k: v for k, v in places_of(split).items() if k != norm}})
    with pytest.raises(ModelError, match=rf"{norm} is missing"):
        load_model(tmp_path)


def damage(path: Path, split: Path, kind: str) -> tuple[str, ...]:
    """What the message must name."""
    second, wrong = path / shard(1), "model.layers.3.self_attn.q_proj.weight"
    if kind == "a shard is absent":
        second.unlink()
        return (shard(1), "missing")
    if kind == "a shard is cut":
        replace(second, (split / shard(1)).read_bytes()[:-1000])
        return (shard(1), "tensor model.layers.")
    if kind == "a header of 2**60 bytes":
        replace(second, struct.pack("<Q", 2**60) + bytes(100))
        return (shard(1), str(2**60))
    if kind == "two are swapped":
        second.unlink()
        second.symlink_to(split / shard(2))
        return (shard(1), "tensor model.layers.")
    places = places_of(split)
    replace(path / INDEX, {"weight_map": places | ({wrong: shard(2)} if kind == "another shard" else {"x": shard(2)})})
    return (shard(2), wrong if kind == "another shard" else "tensor x is missing")


@pytest.mark.parametrize(
    "kind",
    ["a shard is absent", "a shard is cut", "a header of 2**60 bytes", "two are swapped", "another shard", "nowhere"],
)
def test_case_71_damaged_weights_name_file_and_tensor(split: Path, tmp_path: Path, kind: str) -> None:
    link(split, tmp_path)
    words = damage(tmp_path, split, kind)
    with pytest.raises(ModelError) as refused:
        load_model(tmp_path)
    assert all(word in str(refused.value) for word in words)
    assert "\n" not in str(refused.value)


def gguf_of(*parts: bytes) -> bytes:
    return b"GGUF" + struct.pack("<I", 3) + b"".join(parts)


UNSAFE: dict[str, tuple[bytes, str]] = {
    "bad magic": (b"FUGG" + struct.pack("<IQQ", 3, 0, 0), "not a GGUF file"),
    "version 99": (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
    "2**40 tensors": (gguf_of(struct.pack("<QQ", 2**40, 0)), str(2**40)),
    "a string of 2**60": (gguf_of(struct.pack("<QQQ", 0, 1, 2**60), b"general"), str(2**60)),
    "unknown architecture": (
        gguf_of(struct.pack("<QQQ", 0, 1, 20), b"general.architecture", struct.pack("<IQ", 8, 3), b"foo"), "'foo'",
    ),
}  # fmt: skip


def refusal(model: Path) -> str:
    """What `pinnate serve` says, in one line, before it ends. It must not start."""
    command = [sys.executable, "-m", "pinnate.cli.main", "serve", str(model), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=model.parent)
    text = ended.stdout + ended.stderr
    assert ended.returncode == 2, text
    assert "Traceback" not in text
    assert len([line for line in text.splitlines() if "error" in line]) == 1
    return text


@pytest.mark.parametrize("kind", UNSAFE)
def test_case_73_headers_of_gguf_files_are_not_trusted(tmp_path: Path, kind: str) -> None:
    content, words = UNSAFE[kind]
    (tmp_path / "x.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as refused:
            load_model(tmp_path / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert words in str(refused.value)


def test_case_73_an_unknown_architecture_is_named_though_the_tokenizer_is_missing_too(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(UNSAFE["unknown architecture"][0])
    assert "general.architecture 'foo' is not supported; supported: llama" in refusal(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"general\.architecture 'foo'"):
        LLM(str(tmp_path / "x.gguf"))


def test_case_73_nothing_in_a_folder_is_run(folder: Path, tmp_path: Path) -> None:
    path, marker = tmp_path / "model", tmp_path / "marker"
    path.mkdir()
    link(folder, path, without=WEIGHTS)
    (path / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
    (path / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: pass\n")
    edit(path / "config.json", auto_map={"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.C"})
    assert "pytorch_model.bin is a pickle file, which is never read" in refusal(path)
    edit(path / "config.json", architectures=["EvilForCausalLM"], model_type="evil")
    assert "'EvilForCausalLM'" in refusal(path)
    replace(path / "config.json", "{broken")
    assert "config.json: malformed" in refusal(path)
    assert "no such file or folder" in refusal(tmp_path / "absent")
    assert not marker.exists()
