"""Whatever happens to the bytes of a checkpoint, loading gives a model or a ModelError in one line: nothing else."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinnate.core.errors import ModelError
from pinnate.graph.ops import Rope
from pinnate.models.load import load_model
from pinnate.weights.gguf import GGUFFile
from tests.checkpoints import TINY, tiny_gguf

MAX_BYTES = 20_000_000  # of Python objects; the intact file takes well under 1 MB


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory) -> bytes:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama2", "llama").read_bytes()


@pytest.fixture(scope="module")
def header_bytes(gguf_bytes) -> int:
    """Where the data of the first tensor starts, roughly: the last byte of a tensor name is before it."""
    return gguf_bytes.rindex(b"_norm.weight") + 64


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


def load_gguf(path, data: bytes) -> None:
    """Loads the file whole: config, graph, and every metadata value."""
    path.write_bytes(data)
    message = None
    tracemalloc.start()
    try:
        load_model(path)
        for _ in GGUFFile(path).metadata.values():
            pass
    except ModelError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_BYTES
    check_message(message, path)


def check_message(message: str | None, path) -> None:
    if message is not None:
        assert str(path) in message
        assert "\n" not in message
        assert len(message) < 1000


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_cut_gguf_never_loads(gguf_bytes, header_bytes, scratch, data):
    place = st.one_of(st.integers(0, header_bytes), st.integers(0, len(gguf_bytes) - 1))
    cut = data.draw(place)
    path = scratch / "cut.gguf"
    load_gguf(path, gguf_bytes[:cut])
    with pytest.raises(ModelError):
        load_model(path)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_flipped_bytes_in_a_gguf_header(gguf_bytes, header_bytes, scratch, data):
    damaged = bytearray(gguf_bytes)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, header_bytes))] ^= data.draw(st.integers(1, 255))
    load_gguf(scratch / "flipped.gguf", bytes(damaged))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_counts_and_lengths_of_any_size_in_a_gguf_header(gguf_bytes, header_bytes, scratch, data):
    damaged = bytearray(gguf_bytes)
    at = data.draw(st.integers(4, header_bytes))
    damaged[at : at + 8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1)))
    load_gguf(scratch / "counts.gguf", bytes(damaged))


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_rubbish_after_the_magic(scratch, rubbish):
    load_gguf(scratch / "rubbish.gguf", b"GGUF" + struct.pack("<I", 3) + rubbish)


def load_folder(folder) -> bool:
    message = None
    try:
        load_model(folder)
    except ModelError as error:
        message = str(error)
    check_message(message, folder)
    return message is None


@pytest.fixture(scope="module")
def folder(scratch):
    """A copy of a checkpoint, and its intact weights."""
    target = scratch / "folder"
    target.mkdir()
    (target / "config.json").write_bytes((TINY / "llama2" / "config.json").read_bytes())
    return target, (TINY / "llama2" / "model.safetensors").read_bytes()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_cut_safetensors_never_loads(folder, data):
    target, intact = folder
    header_end = 8 + struct.unpack_from("<Q", intact)[0]
    cut = data.draw(st.one_of(st.integers(0, header_end), st.integers(0, len(intact) - 1)))
    (target / "model.safetensors").write_bytes(intact[:cut])
    assert not load_folder(target)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_flipped_bytes_in_a_safetensors_header(folder, data):
    target, intact = folder
    damaged = bytearray(intact)
    header_end = 8 + struct.unpack_from("<Q", intact)[0]
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, header_end - 1))] ^= data.draw(st.integers(1, 255))
    (target / "model.safetensors").write_bytes(bytes(damaged))
    load_folder(target)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_value_of_any_config_entry(scratch, data):
    name = data.draw(st.sampled_from(["llama3", "mistral", "qwen2", "qwen3"]))
    config = json.loads((TINY / name / "config.json").read_text())
    config[data.draw(st.sampled_from(sorted(config)))] = data.draw(JSON)
    target = scratch / f"config-{name}"
    if not target.exists():
        target.mkdir()
        for file in (TINY / name).glob("model*"):
            (target / file.name).write_bytes(file.read_bytes())
    (target / "config.json").write_text(json.dumps(config))
    load_folder(target)


NUMBER = st.one_of(st.integers(-1, 2**31), st.floats(allow_nan=False), st.sampled_from([1, 1.0, 1e-320, 1e308]))


@given(
    st.sampled_from(["linear", "llama3", "yarn"]),
    st.fixed_dictionaries(
        {"rope_theta": NUMBER, "factor": NUMBER, "original_max_position_embeddings": st.integers(-1, 2**31)},
        optional=dict.fromkeys(
            ["low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"], NUMBER
        ),
    ),
)
@settings(max_examples=300, deadline=None)
def test_any_numbers_in_rope_settings(scratch, kind, numbers):
    target = scratch / "rope"
    if not target.exists():
        target.mkdir()
        (target / "model.safetensors").write_bytes((TINY / "llama2" / "model.safetensors").read_bytes())
    config = json.loads((TINY / "llama2" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": kind, **numbers}
    (target / "config.json").write_text(json.dumps(config))
    if load_folder(target):
        table = next(op.table for op in load_model(target).graph.ops if isinstance(op, Rope))
        assert all(math.isfinite(f) for f in (*table.inv_freq, table.attention_factor))
