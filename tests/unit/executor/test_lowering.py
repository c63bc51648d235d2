"""Which instructions a graph becomes."""

import pytest

from pinnate.core.errors import ConfigError
from pinnate.executor.native.instructions import (
    QKV,
    Binary,
    Convert,
    CopyColumns,
    Embed,
    Gather,
    Gemm,
    Norm,
    PagedAttention,
    RotateHeads,
    Unary,
)
from pinnate.executor.native.lowering import lower
from pinnate.graph import GraphBuilder
from tests.unit.executor.native_helpers import Tensors, llama_graph, rope_table

LAYER = ["Norm", "Gemm", "QKV", "PagedAttention", "Gemm", "Norm", "Gemm", "Gemm"]


def names(program):
    return [type(i).__name__ for i in program.instructions]


def of(program, kind):
    return [i for i in program.instructions if isinstance(i, kind)]


@pytest.mark.parametrize("act_is_f32", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_llama_layer_is_eight_instructions(act_is_f32, bias, qk_norm):
    program = lower(llama_graph(layers=3, bias=bias, qk_norm=qk_norm), act_is_f32=act_is_f32)
    assert names(program) == ["Embed", *LAYER * 3, "Gather", "Norm", "Gemm"]
    assert [g.epilogue for g in of(program, Gemm)[:4]] == ["store_f32", "add_f32", "swiglu", "add_f32"]
    assert len(of(program, Gemm)[0].weight.tensors) == 3
    assert (of(program, Gemm)[0].bias is not None) is bias
    assert (of(program, QKV)[0].q_norm is not None) is qk_norm


def test_the_residual_stays_in_one_fp32_buffer():
    program = lower(llama_graph(), act_is_f32=False)
    residual = of(program, Embed)[0].out
    assert residual.f32
    assert all(g.out == residual for g in of(program, Gemm) if g.epilogue == "add_f32")
    assert of(program, Gather)[0].x == residual
    assert all(not n.out.f32 for n in of(program, Norm))


def test_tied_embeddings_share_one_weight():
    tied = lower(llama_graph(tied=True), act_is_f32=False)
    assert of(tied, Embed)[0].weight == of(tied, Gemm)[-1].weight
    untied = lower(llama_graph(tied=False), act_is_f32=False)
    assert of(untied, Embed)[0].weight != of(untied, Gemm)[-1].weight


def test_partial_bias_is_joined_with_zeros():
    make, b = Tensors(), GraphBuilder()
    x = b.embedding(make(9, 8))
    q, k = b.linear(x, make(8, 8), make(8)), b.linear(x, make(4, 8))
    v = b.linear(x, make(4, 8), make(4))
    out = b.attention(q, k, v, head_dim=4)
    program = lower(b.finish(b.gather_rows(out)), act_is_f32=False)
    bias = of(program, Gemm)[0].bias
    assert bias is not None
    assert bias.parts[1] == 4


def test_a_residual_read_later_is_not_overwritten():
    """x + f(x) where x is used once more afterwards."""
    make, b = Tensors(), GraphBuilder()
    x = b.embedding(make(9, 8))
    y = b.add(x, b.linear(x, make(8, 8)))
    z = b.add(y, x)
    program = lower(b.finish(b.gather_rows(z)), act_is_f32=False)
    assert [g.epilogue for g in of(program, Gemm)] == ["store_f32"]
    assert len(of(program, Binary)) == 2


def test_a_deferred_product_keeps_its_input_alive():
    """second reads x but is computed where the last add stands: by then the first add must not have changed x."""
    make, b = Tensors(), GraphBuilder()
    x = b.embedding(make(9, 8))
    first, second = b.linear(x, make(8, 8)), b.linear(x, make(8, 8))
    y = b.add(b.add(x, first), second)
    program = lower(b.finish(b.gather_rows(y)), act_is_f32=True)
    assert [g.epilogue for g in of(program, Gemm)] == ["store_f32", "add_f32"]
    assert of(program, Gemm)[1].out == of(program, Binary)[0].out != of(program, Gemm)[1].x


def test_sources_of_attention_that_are_not_one_product_are_copied_together():
    make, b = Tensors(), GraphBuilder()
    x = b.embedding(make(9, 8))
    h = b.mul(x, factor=2.0)
    q, k, v = b.linear(x, make(8, 8)), b.linear(h, make(8, 8)), b.linear(x, make(8, 8))
    out = b.attention(b.rope(q, 4, rope_table(2)), b.rope(k, 4, rope_table(2)), v, head_dim=4)
    program = lower(b.finish(b.gather_rows(out)), act_is_f32=False)
    assert [c.at for c in of(program, CopyColumns)] == [0, 8, 16]
    assert of(program, QKV)[0].table == rope_table(2)
    assert not of(program, RotateHeads)


@pytest.mark.parametrize("case", ["tables", "one_sided", "shared", "other_heads"])
def test_rotations_that_differ_are_instructions_of_their_own(case):
    make, b = Tensors(), GraphBuilder()
    x = b.embedding(make(9, 8))
    q, k, v = (b.linear(x, make(8, 8)) for _ in range(3))
    rotated = b.rope(q, 8 if case == "other_heads" else 4, rope_table(2))
    if case == "tables":
        k = b.rope(k, 4, rope_table(2, base=50.0))
    elif case == "shared":
        k = rotated
    out = b.attention(rotated, k, v, head_dim=4)
    program = lower(b.finish(b.gather_rows(out)), act_is_f32=False)
    assert len(of(program, RotateHeads)) == (2 if case == "tables" else 1)
    assert of(program, QKV)[0].table is None
    assert len(of(program, CopyColumns)) == 3


def test_swiglu_with_biases_or_other_readers_is_not_fused():
    make, b = Tensors(), GraphBuilder()
    x = b.embedding(make(9, 8))
    with_bias = b.swiglu(b.linear(x, make(6, 8), make(6)), b.linear(x, make(6, 8)))
    wide = b.swiglu(b.linear(x, make(6, 8)), b.linear(x, make(6, 8)))
    y = b.linear(b.add(with_bias, wide), make(8, 6))
    program = lower(b.finish(b.gather_rows(y)), act_is_f32=False)
    assert [i.op for i in of(program, Binary)] == ["swiglu", "swiglu", "add"]
    assert all(g.epilogue == "store_f32" for g in of(program, Gemm))


def test_values_are_converted_once_and_only_where_needed():
    make, b = Tensors(), GraphBuilder()
    x = b.embedding(make(9, 8))
    g = b.gelu(x)
    low, high = b.linear(g, make(3, 8)), b.linear(g, make(3, 8))
    y = b.linear(b.linear(b.mul(low, high), make(5, 3)), make(8, 5))
    graph = b.finish(b.gather_rows(b.softcap(y, 3.0)))
    program = lower(graph, act_is_f32=False)
    assert len(of(program, Convert)) == 2  # the gelu, once for two readers; the product of low and high
    assert [g.epilogue for g in of(program, Gemm)] == ["store_f32", "store_f32", "store_act", "store_f32"]
    assert [u.op for u in of(program, Unary)] == ["gelu_tanh", "softcap"]
    assert not of(lower(graph, act_is_f32=True), Convert)


def test_attention_that_is_gathered_is_widened_before_the_logits_part():
    make, b = Tensors(), GraphBuilder()
    x = b.embedding(make(9, 8))
    q, k, v = (b.linear(x, make(8, 8)) for _ in range(3))
    out = b.attention(q, k, v, head_dim=4)
    program = lower(b.finish(b.add(b.gather_rows(out), b.gather_rows(x))), act_is_f32=False)
    assert names(program)[-5:] == ["PagedAttention", "Convert", "Gather", "Gather", "Binary"]
    assert of(program, PagedAttention)[0].out == program.instructions[-4].x


def test_odd_heads_are_refused_by_name():
    make, b = Tensors(), GraphBuilder()
    x = b.embedding(make(9, 6))
    out = b.attention(x, b.linear(x, make(6, 6)), b.linear(x, make(6, 6)), head_dim=3)
    with pytest.raises(ConfigError, match="head_dim"):
        lower(b.finish(b.gather_rows(out)), act_is_f32=False)
