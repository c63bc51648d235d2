"""Products with quantised weights: what is held is what the file holds, or near it by as much as a format may round.

Rows that are zero but in one place pass the quantisation of activations unharmed, so a product with them shows the
packed weights themselves.
"""

import math
from array import array

import numpy as np
import pytest

from pinnate.executor.base import ExecutorSpec
from pinnate.executor.native import NativeExecutor
from pinnate.executor.native.formats import choose_format
from pinnate.graph import BLOCK_SIZES, Graph, GraphBuilder, Tensor, TensorType
from pinnate.weights.dequantize import to_float32
from tests.unit.executor.native_helpers import ISAS, sequence, step

T = TensorType
ROWS = 70  # not whole panels
EXACT_ISAS = [isa for isa in ISAS if isa != "amx"]  # a product on tiles rounds the weights it reads
ONE = 127 / 128  # a value that is exact as d * q with q = 127, and in bfloat16
HALVES = {T.Q4_0: (0,), T.Q4_1: (0, 2), T.Q5_0: (0,), T.Q8_0: (0,), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,)}


def q8_0(values: np.ndarray) -> Tensor:
    """[n, 32 i] as Q8_0, to the nearest."""
    blocks = values.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
    with np.errstate(invalid="ignore"):
        quants = np.nan_to_num(np.rint(blocks / scales.astype(np.float32))).clip(-127, 127).astype(np.int8)
    data = np.concatenate([scales.view(np.uint8), quants.view(np.uint8)], axis=1)
    return Tensor("embedding", values.shape, T.Q8_0, memoryview(data.tobytes()))


def matrix(type_: TensorType, cols: int, rows: int = ROWS) -> Tensor:
    """Any bits with moderate scales; plain types hold normal numbers."""
    rng = np.random.default_rng(int(type_))
    elements, size = BLOCK_SIZES[type_]
    count = rows * cols // elements
    if type_ in HALVES:
        blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
        for at in HALVES[type_]:
            scales = (rng.uniform(0.5, 1.5, count) * rng.choice([-0.01, 0.01], count)).astype("<f2")
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
        data = blocks.tobytes()
    else:
        values = rng.standard_normal(count).astype(np.float32)
        wide = values.view(np.uint32)
        data = {T.F32: values, T.F16: values.astype("<f2"), T.BF16: (wide >> 16).astype("<u2")}[type_].tobytes()
    return Tensor("w", (rows, cols), type_, memoryview(data))


def product(embedding: Tensor, weight: Tensor, quantization: str, isa: str, threads: int = 1) -> np.ndarray:
    """All rows of `embedding` times `weight`."""
    count = embedding.shape[0]
    b = GraphBuilder()
    graph = b.finish(b.gather_rows(b.linear(b.embedding(embedding), weight)))
    graph = Graph(graph.ops, graph.logits, (), ROWS)
    pages = -(-count // 16)
    spec = ExecutorSpec(
        num_pages=pages, page_size=16, max_num_batched_tokens=count, max_num_seqs=1, max_model_len=count
    )
    executor = NativeExecutor(graph, spec, quantization=quantization, isa=isa, threads=threads)
    scored = array("i", [0] * count)
    return executor.logits(step(sequence(0, range(count), range(1, pages + 1), n=0, score=scored)))


def held(weight: Tensor, quantization: str, isa: str) -> np.ndarray:
    """The values of `weight` as packed, float64, read through a product."""
    units = q8_0(np.eye(weight.shape[1], dtype=np.float32) * np.float32(ONE))
    return product(units, weight, quantization, isa).T.astype(np.float64) / ONE


def block_extremes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each 32 columns, in the shape of `values`."""
    blocks = values.reshape(-1, 32)
    low, high = (f(blocks, axis=1, keepdims=True).repeat(32, axis=1).reshape(values.shape) for f in (np.min, np.max))
    return low, high


EXACT = [(T.Q8_0, "int8"), (T.Q8_0, "int4"), (T.Q4_0, "int4"), (T.Q4_1, "int4"), (T.Q4_K, "int4")]


@pytest.mark.parametrize("isa", EXACT_ISAS)
@pytest.mark.parametrize(("type_", "quantization"), EXACT)
def test_stored_blocks_are_held_without_a_second_loss(type_, quantization, isa):
    """Q4_K's scales are products of two numbers; what holds them may round those, never the 4-bit numbers."""
    weight = matrix(type_, 256)
    expected = to_float32(weight).astype(np.float64)
    low, high = block_extremes(expected)
    relative = 1e-3 if type_ is T.Q4_K else 1e-6
    assert (np.abs(held(weight, quantization, isa) - expected) <= relative * (np.abs(low) + high - low)).all()


@pytest.mark.parametrize("isa", EXACT_ISAS)
@pytest.mark.parametrize("type_", [T.Q5_0, T.Q5_K, T.Q6_K, T.F32, T.F16, T.BF16])
def test_eight_bits_round_by_at_most_half_a_step(type_, isa):
    weight = matrix(type_, 256)
    expected = to_float32(weight).astype(np.float64)
    low, high = block_extremes(expected)
    errors = np.abs(held(weight, "int8", isa) - expected) / np.maximum(-low, high)
    assert errors.max() < 0.0041  # 1 / 254, and a scale in half precision
    assert errors.max() > 0.001  # it is 8 bits indeed


@pytest.mark.parametrize("isa", EXACT_ISAS)
@pytest.mark.parametrize(("type_", "share"), [(T.Q4_0, 0.1), (T.Q4_1, 0.6), (T.Q4_K, 0.6)])
def test_four_bit_numbers_become_eight_bits_on_a_grid_that_fits_them(type_, share, isa):
    """`share`: of the error of rounding to a 127th of the largest."""
    weight = matrix(type_, 256)
    expected = to_float32(weight).astype(np.float64)
    low, high = block_extremes(expected)
    largest = np.maximum(-low, high)
    plain = np.rint(expected / largest * 127) * largest / 127 - expected
    errors = held(weight, "int8", isa) - expected
    assert np.sqrt(np.mean(errors**2)) < share * np.sqrt(np.mean(plain**2))
    assert (np.abs(errors) / largest).max() < 0.006


@pytest.mark.parametrize("isa", EXACT_ISAS)
@pytest.mark.parametrize("type_", [T.F32, T.F16, T.BF16])
def test_four_bits_are_no_worse_than_sixteen_even_steps(type_, isa):
    """Ranges that clip a block's extremes are allowed where that makes the sum of squares smaller."""
    weight = matrix(type_, 256)
    expected = to_float32(weight).astype(np.float64)
    low, high = block_extremes(expected)
    steps = (high - low) / 15
    plain = low + np.rint((expected - low) / steps) * steps
    ours = ((held(weight, "int4", isa) - expected) ** 2).reshape(-1, 32).sum(axis=1)
    theirs = ((plain - expected) ** 2).reshape(-1, 32).sum(axis=1)
    assert (ours < 1.01 * theirs).all()
    assert ours.mean() > 0.5 * theirs.mean()  # it is 4 bits indeed


@pytest.mark.parametrize("cols", [2, 31, 32, 33, 48, 70, 96])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("isa", ISAS)
def test_columns_need_not_be_whole_blocks(cols, quantization, isa):
    weight = matrix(T.F32, cols)
    expected = to_float32(weight).astype(np.float64)
    rng = np.random.default_rng(cols)
    x = rng.standard_normal((40, cols)).astype(np.float32)
    data = Tensor("embedding", x.shape, T.F32, memoryview(x.tobytes()))
    wanted = x @ expected.T
    error = product(data, weight, quantization, isa, threads=2) - wanted
    assert np.sqrt(np.mean(error**2)) < {"int8": 0.02, "int4": 0.15}[quantization] * np.std(wanted)


def to_bfloat16(x: np.ndarray, *, halves_up: bool = False) -> np.ndarray:
    """To nearest; halves to even, or away from zero."""
    bits = x.astype(np.float32).view(np.uint32)
    half = 0x8000 if halves_up else 0x7FFF + (bits >> 16 & 1)
    return ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def to_integers(x: np.ndarray, largest: int) -> np.ndarray:
    """With a scale for each 32."""
    blocks = x.reshape(-1, 32)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / largest
    return (np.rint(blocks / scales) * scales).reshape(x.shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("type_", "quantization"), EXACT)
def test_one_operand_is_rounded_and_nothing_else_is(type_, quantization, isa):
    """Activations to 8 bits in blocks (AVX2, weights of 8: to 16); with tile registers, weights to bfloat16."""
    rng = np.random.default_rng(5)
    # Blocks of very different size: one scale for a whole row would lose the small ones.
    x = rng.standard_normal((50, 8, 32)) * 10.0 ** rng.integers(-3, 1, (50, 8, 1))
    embedding = q8_0(x.reshape(50, 256).astype(np.float32))
    weight = matrix(type_, 256)
    values = to_float32(embedding)
    wide = held(weight, quantization, "avx512") if isa == "amx" else to_float32(weight).astype(np.float64)
    near = to_bfloat16(values)
    largest = 32767 if isa == "avx2" and type_ is T.Q8_0 else 127
    expected = near @ to_bfloat16(wide, halves_up=True).T if isa == "amx" else to_integers(near, largest) @ wide.T
    error = product(embedding, weight, quantization, isa, threads=2) - expected
    cost = values.astype(np.float64) @ wide.T - expected  # of the rounding itself
    assert math.sqrt(np.mean(error**2)) < 0.2 * math.sqrt(np.mean(cost**2))


@pytest.mark.skipif("amx" not in ISAS, reason="this CPU has no tile registers")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("type_", [T.F32, T.Q4_0, T.Q4_1, T.Q8_0, T.Q6_K])
def test_tiles_hold_the_same_weights_rounded_to_bfloat16(type_, quantization):
    weight = matrix(type_, 256)
    rounded = to_bfloat16(held(weight, quantization, "avx512"), halves_up=True)
    np.testing.assert_array_equal(held(weight, quantization, "amx"), rounded)


def test_the_formats_here_are_those_that_are_chosen():
    for type_, quantization in EXACT:
        assert "own" in choose_format([type_], quantization, vocabulary=False).reason
