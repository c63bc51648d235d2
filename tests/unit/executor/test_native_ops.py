"""Every op of the vocabulary, native against its definition, at odd shapes, in both types and on every ISA."""

import numpy as np
import pytest

from pinnate.executor.native import NativeExecutor
from pinnate.executor.reference import ReferenceExecutor
from pinnate.graph import GraphBuilder
from tests.unit.executor.native_helpers import ISAS, SPEC, Tensors, llama_graph, rope_table, sequence, step

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
WIDTH, VOCAB = 39, 71
PAGES_A, PAGES_B, PAGES_C = (7, 3, 21, 5), (9, 8), (2,)


def steps():
    """Three sequences: prompts whole and in chunks, then decodes, with pages out of order."""
    rng = np.random.default_rng(0)

    def tokens(count):
        return rng.integers(0, VOCAB, count).tolist()

    yield step(sequence(0, tokens(37), PAGES_A, n=0), sequence(1, tokens(16), PAGES_B))
    yield step(sequence(0, tokens(9), PAGES_A, start=37), sequence(1, tokens(1), PAGES_B, start=16))
    yield step(
        sequence(2, tokens(5), PAGES_C, score=sequence(9, tokens(4), ()).token_ids),
        sequence(0, tokens(1), PAGES_A, start=46),
        sequence(1, tokens(1), PAGES_B, start=17),
    )


def finish(b, make, value):
    """Gathered and multiplied to logits, so that the op's result is seen by a product and by fp32."""
    gathered = b.gather_rows(value)
    return b.finish(b.add(b.linear(gathered, make(VOCAB, value.width)), b.linear(gathered, make(VOCAB, value.width))))


def one_op(name):
    make, b = Tensors(len(name)), GraphBuilder()
    x = b.embedding(make(VOCAB, WIDTH, scale=1.0), scale=1.5 if name == "embedding" else 1.0)
    y = b.linear(x, make(WIDTH, WIDTH))
    values = {
        "embedding": lambda: x,
        "linear": lambda: y,
        "linear_bias": lambda: b.linear(x, make(53, WIDTH), make(53)),
        "rms_norm": lambda: b.rms_norm(x, make(WIDTH, around=1.0), 1e-5),
        "rms_norm_groups": lambda: b.rms_norm(x, make(13, around=1.0), 1e-5),
        "layer_norm": lambda: b.layer_norm(x, make(WIDTH, around=1.0), make(WIDTH), 1e-5),
        "layer_norm_no_bias": lambda: b.layer_norm(x, make(WIDTH, around=1.0), None, 1e-5),
        "swiglu": lambda: b.linear(b.swiglu(b.linear(x, make(45, WIDTH)), b.linear(x, make(45, WIDTH))), make(7, 45)),
        "swiglu_plain": lambda: b.swiglu(x, y),
        "gelu_tanh": lambda: b.gelu(x),
        "gelu_erf": lambda: b.gelu(x, tanh=False),
        "add": lambda: b.add(x, y),
        "add_plain": lambda: b.add(b.add(x, x), y),
        "mul": lambda: b.mul(x, y),
        "mul_factor": lambda: b.mul(x, factor=-0.3),
        "softcap": lambda: b.softcap(x, 2.0),
        "chain_of_products": lambda: b.linear(b.linear(x, make(5, WIDTH)), make(17, 5)),
    }
    return finish(b, make, values[name]())


def attention_graph(name):
    make, b = Tensors(len(name)), GraphBuilder()
    heads, kv_heads, dim = {"grouped": (6, 2, 6), "wide": (2, 1, 80), "one_each": (3, 3, 14)}.get(name, (4, 2, 8))
    x = b.embedding(make(VOCAB, WIDTH, scale=1.0))
    q, k, v = (b.linear(x, make(n * dim, WIDTH)) for n in (heads, kv_heads, kv_heads))
    options = {"head_dim": dim}
    full = rope_table(dim // 2)
    if name == "qk_norm":
        q, k = b.rms_norm(q, make(dim, around=1.0), 1e-6), b.rms_norm(k, make(dim, around=1.0), 1e-6)
    if name == "norm_of_q_only":
        q = b.rms_norm(q, make(dim, around=1.0), 1e-6)
    if name == "norms_differ":
        q, k = b.rms_norm(q, make(dim, around=1.0), 1e-6), b.rms_norm(k, make(dim, around=1.0), 1e-2)
    if name == "two_tables":
        q, k = b.rope(q, dim, full), b.rope(k, dim, rope_table(dim // 2, base=100.0))
    elif name == "partial_rotation":
        q, k = b.rope(q, dim, rope_table(2)), b.rope(k, dim, rope_table(2))
    elif name == "partial_rotation_plain":
        q = b.rope(q, dim, rope_table(2))
    elif name == "norm_after_rope":
        q, k = b.rms_norm(b.rope(q, dim, full), make(dim), 1e-6), b.rms_norm(b.rope(k, dim, full), make(dim), 1e-6)
    elif name != "no_rotation":
        q, k = b.rope(q, dim, full), b.rope(k, dim, full)
    if name == "shared_kv":
        v = k
    if name == "window":
        options["window"] = 11
    if name == "scale":
        options["scale"] = 1.0
    out = b.attention(q, k, v, **options)
    return finish(b, make, b.mul(out, factor=2.0) if name == "read_in_fp32" else out)


def agree(graph, dtype, isa):
    native = NativeExecutor(graph, SPEC, dtype=dtype, isa=isa, threads=2)
    reference = ReferenceExecutor(graph, SPEC)
    for output in steps():
        expected, got = reference.logits(output), native.logits(output)
        assert got.shape == expected.shape
        spread = 1.0 if dtype == "float32" else max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE[dtype] * spread)


OPS = [
    "embedding",
    "linear",
    "linear_bias",
    "rms_norm",
    "rms_norm_groups",
    "layer_norm",
    "layer_norm_no_bias",
    "swiglu",
    "swiglu_plain",
    "gelu_tanh",
    "gelu_erf",
    "add",
    "add_plain",
    "mul",
    "mul_factor",
    "softcap",
    "chain_of_products",
]
ATTENTIONS = [
    "grouped",
    "wide",
    "one_each",
    "qk_norm",
    "norm_of_q_only",
    "norms_differ",
    "two_tables",
    "partial_rotation",
    "partial_rotation_plain",
    "norm_after_rope",
    "no_rotation",
    "shared_kv",
    "window",
    "scale",
    "read_in_fp32",
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OPS)
def test_op(name, dtype, isa):
    agree(one_op(name), dtype, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name, dtype, isa):
    agree(attention_graph(name), dtype, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_whole_model(dtype, isa):
    agree(llama_graph(vocab=VOCAB, bias=True, qk_norm=True, tied=False), dtype, isa)
