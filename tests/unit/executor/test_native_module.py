"""The native module's own surface: CPU facts, peaks, and programs that are built wrongly."""

import numpy as np
import pytest

from pinnate import _native
from pinnate.graph import TensorType

SIZES = {"page_size": 16, "num_pages": 4, "max_tokens": 8, "block_rows": 4}


def program(**change) -> _native.Program:
    options = {"isa": "portable", "act": "float32", "threads": 1, "kv_layers": [(2, 4)], **SIZES}
    return _native.Program(**(options | change))


def matrix(p, rows, cols, swiglu=False):
    values = np.ones((rows, cols), np.float32)
    return p.add_weight([(0, values.tobytes(), rows, cols, None)] * (2 if swiglu else 1), swiglu=swiglu)


def test_cpu_features_name_what_runs():
    facts = _native.cpu_features()
    assert facts["isas"][-1] == "portable"
    assert set(facts["isas"]) <= {"amx", "avx512", "avx2", "portable"}
    assert ("avx2" in facts["isas"]) == ("avx2" in facts["flags"] and "fma" in facts["flags"])


def test_peaks_are_measured_on_the_named_isa():
    peaks = _native.measure_peaks(1, "portable", 0.04)
    assert peaks["f32_gflops"] > 0
    assert peaks["read_gbs"] > 0
    with pytest.raises(ValueError, match="isa"):
        _native.measure_peaks(1, "sse9", 0.01)


def test_dequantisation_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="too few bytes"):
        _native.dequantize(0, bytes(7), 2)
    with pytest.raises(ValueError, match="blocks"):
        _native.dequantize(int(TensorType.Q8_0), bytes(100), 33)
    with pytest.raises(ValueError, match="type"):
        _native.dequantize(99, bytes(100), 1)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ((0, bytes(60), 4, 4, None), "too few bytes"),
        ((0, bytes(64), 4, 4, np.array([0, 1, 2, 4], np.int32)), "row order"),
        ((0, bytes(64), 4, 4, np.array([0], np.int32)), "row order"),
        ((0, bytes(64), 0, 4, None), "too few bytes"),
    ],
)
def test_weights_that_do_not_fit_their_bytes(source, match):
    with pytest.raises(ValueError, match=match):
        program().add_weight([source], swiglu=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"page_size": 8}, "page_size"),
        ({"act": "float16"}, "float16"),
        ({"kv_layers": [(2, 3)]}, "head_dim"),
        ({"num_pages": 2**30}, "31 bits"),
        ({"block_rows": 0}, "at least 1"),
    ],
)
def test_sizes_that_no_kernel_takes(change, match):
    with pytest.raises(ValueError, match=match):
        program(**change)


WRONG = {
    "weight": lambda p: p.embed(weight=3, scale=1.0, out=0),
    "vector": lambda p: p.norm(layer=False, weight=0, bias=-1, eps=0.0, cols=4, group=4, x=0, out=64, out_f32=True),
    "misplaced": lambda p: p.unary(op="scale", parameter=1.0, cols=4, x=8, out=64),
    "unknown name": lambda p: p.unary(op="tan", parameter=1.0, cols=4, x=0, out=64),
    "groups": lambda p: p.norm(layer=False, weight=0, bias=-1, eps=0.0, cols=5, group=2, x=0, out=64, out_f32=True),
    "columns": lambda p: p.copy_columns(cols=4, out_cols=6, at=3, x=0, out=64),
    "rope": lambda p: p.rope(table=0, cols=4, head_dim=4, x=0, out=64),
    "layer": lambda p: p.attention(layer=1, num_heads=2, scale=1.0, window=0, q=0, out=64),
    "heads": lambda p: p.attention(layer=0, num_heads=3, scale=1.0, window=0, q=0, out=64),
    "epilogue": lambda p: p.gemm(weight=matrix(p, 4, 4), bias=-1, epilogue="swiglu", x=0, out=64),
    "swiglu": lambda p: p.embed(weight=matrix(p, 4, 4, swiglu=True), scale=1.0, out=0),
}


@pytest.mark.parametrize("match", WRONG)
def test_instructions_that_name_nothing_are_refused(match):
    with pytest.raises(ValueError, match=match):
        WRONG[match](program())


def test_a_program_must_be_whole_before_it_runs():
    p = program()
    p.embed(weight=matrix(p, 5, 16), scale=1.0, out=0)
    sizes = {"logits": 512, "vocab": 16, "max_position": 32}
    with pytest.raises(ValueError, match="no gather"):
        p.finish(arena_bytes=4096, **sizes)
    p.gather(cols=16, x=0, out=512)
    with pytest.raises(ValueError, match="smaller"):
        p.finish(arena_bytes=512, **sizes)
    with pytest.raises(ValueError, match="14 inputs"):
        p.run((), (), None)
    p.finish(arena_bytes=768, **sizes)
    with pytest.raises(ValueError, match="finished"):
        p.gather(cols=16, x=0, out=512)
