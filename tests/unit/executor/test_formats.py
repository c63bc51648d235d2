"""In which format each matrix is held, and what the weights take."""

import dataclasses

import pytest

from pinnate.core.errors import ConfigError
from pinnate.executor.native import NativeExecutor
from pinnate.executor.native.formats import choose_format, weight_groups
from pinnate.executor.native.instructions import Embed, Gemm, Weight
from pinnate.executor.native.lowering import lower
from pinnate.executor.reference import ReferenceExecutor
from pinnate.graph import Graph, Tensor, TensorType
from pinnate.graph.ops import Embedding, Linear
from tests.unit.executor.native_helpers import SPEC, llama_graph

T = TensorType


def stored_as(graph: Graph, types: dict[int, TensorType]) -> Graph:
    """The same graph, the matrix with this many rows said to be of another storage type; its bytes are never read."""
    made: dict[int, Tensor] = {}

    def retyped(tensor: Tensor) -> Tensor:
        changed = dataclasses.replace(tensor, type=types.get(tensor.shape[0], tensor.type))
        return made.setdefault(id(tensor), changed)

    ops = tuple(
        dataclasses.replace(op, weight=retyped(op.weight)) if isinstance(op, Embedding | Linear) else op
        for op in graph.ops
    )
    return dataclasses.replace(graph, ops=ops)


@pytest.mark.parametrize("type_", list(TensorType))
def test_none_and_int8_take_any_type(type_):
    assert choose_format([type_], "none", vocabulary=False).value == "act"
    assert choose_format([type_], "int8", vocabulary=False).value == "int8"


@pytest.mark.parametrize(
    ("types", "vocabulary", "expected"),
    [
        ([T.Q4_0], False, "int4"),
        ([T.Q4_1], True, "int4"),  # a file that holds the embedding in 4 bits gains nothing by 8
        ([T.Q4_K], False, "int4"),
        ([T.Q8_0], False, "int8"),
        ([T.Q5_K], False, "int8"),
        ([T.Q6_K], True, "int8"),
        ([T.BF16], False, "int4"),
        ([T.F16], False, "int4"),
        ([T.F32], True, "int8"),
        ([T.Q4_1, T.Q4_1, T.Q4_1], False, "int4"),
        ([T.Q4_K, T.Q4_K, T.Q6_K], False, "int8"),
        ([T.Q8_0, T.Q4_1], False, "int8"),
        ([T.Q4_0, T.BF16], False, "int4"),
        ([T.BF16, T.Q8_0], False, "int8"),
    ],
)
def test_int4_takes_no_bits_from_what_a_file_holds_quantised(types, vocabulary, expected):
    chosen = choose_format(types, "int4", vocabulary=vocabulary)
    assert chosen.value == expected
    assert all(type_.name in chosen.reason for type_ in types)


def test_reasons_tell_whether_anything_is_lost():
    assert "own 8 bits" in choose_format([T.Q8_0], "int8", vocabulary=False).reason
    assert "own 8 bits" in choose_format([T.Q8_0], "int4", vocabulary=False).reason
    assert "rounded to 8" in choose_format([T.Q4_1], "int8", vocabulary=False).reason
    assert "own 4 bits" in choose_format([T.Q4_1], "int4", vocabulary=False).reason
    assert "rounded to 4" in choose_format([T.BF16], "int4", vocabulary=False).reason
    assert choose_format([T.Q4_K, T.Q4_K, T.Q6_K], "int4", vocabulary=False).reason.startswith("Q4_K and Q6_K: 8 bits")


def formats(graph: Graph, quantization: str) -> list[str]:
    program = lower(graph, act_is_f32=False, quantization=quantization)
    return [i.weight.format for i in program.instructions if isinstance(i, Embed | Gemm)]


def test_every_matrix_of_a_graph_gets_its_format():
    wide = llama_graph(layers=1)
    assert formats(wide, "none") == ["act"] * 6
    assert formats(wide, "int8") == ["int8"] * 6
    assert formats(wide, "int4") == ["int8", "int4", "int4", "int4", "int4", "int8"]  # embedding ... output


def test_sources_of_one_product_share_the_wider_format():
    """Rows of 60: q; 20: k and v; 48: o and down; 70: gate and up; 101: the vocabulary."""
    stored = {60: T.Q4_0, 20: T.Q8_0, 48: T.Q4_0, 70: T.Q4_0, 101: T.Q4_0}
    assert formats(stored_as(llama_graph(layers=1), stored), "int4") == ["int4", "int8", "int4", "int4", "int4", "int4"]


def test_tied_embeddings_are_packed_once_whatever_the_format():
    for quantization in ("none", "int8", "int4"):
        program = lower(llama_graph(tied=True), act_is_f32=False, quantization=quantization)
        matrices = [i.weight for i in program.instructions if isinstance(i, Embed | Gemm)]
        assert matrices[0] == matrices[-1]
        groups = weight_groups(program, "bfloat16")
        assert sum(g.pieces for g in groups if g.format != "float32") == len(matrices) - 1


def test_groups_name_the_format_and_its_reason():
    stored = {60: T.Q4_1, 20: T.Q4_1, 48: T.Q4_1, 70: T.Q4_1, 101: T.Q8_0}
    graph = stored_as(llama_graph(layers=2), stored)
    groups = {g.format: g for g in NativeExecutor.weigh(graph, "bfloat16", "int4")}
    assert groups.keys() == {"int4", "int8", "float32"}
    assert (groups["int4"].pieces, groups["int8"].pieces, groups["float32"].pieces) == (8, 1, 5)
    assert groups["int8"].reason == "Q8_0: the file's own 8 bits"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_weight_foreseen_is_the_weight_packed(dtype, bias):
    graph = llama_graph(bias=bias, qk_norm=bias, tied=not bias)
    executor = NativeExecutor(graph, SPEC, dtype=dtype)
    assert executor.describe()["weight_bytes"] == sum(g.bytes for g in NativeExecutor.weigh(graph, dtype, "none"))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_quantised_weight_foreseen_is_the_weight_packed(quantization):
    graph = llama_graph(width=64)
    executor = NativeExecutor(graph, SPEC, quantization=quantization)
    foreseen = NativeExecutor.weigh(graph, "bfloat16", quantization)
    assert executor.describe()["weight_bytes"] == sum(g.bytes for g in foreseen)
    assert executor.describe()["quantization"] == quantization


def test_the_reference_weighs_what_it_decodes():
    for tied in (True, False):
        graph = llama_graph(tied=tied)
        executor = ReferenceExecutor(graph, SPEC)
        assert executor.describe()["weight_bytes"] == sum(g.bytes for g in ReferenceExecutor.weigh(graph))


def test_quantised_weights_that_cannot_be_honoured():
    with pytest.raises(ConfigError, match="--quantization must be one of none, int8, int4, got 'int3'"):
        NativeExecutor(llama_graph(), SPEC, quantization="int3")
    with pytest.raises(ConfigError, match="--quantization int4 needs --dtype bfloat16"):
        NativeExecutor(llama_graph(), SPEC, dtype="float32", quantization="int4")


def test_weights_that_differ_in_format_are_different_weights():
    tensors = (llama_graph().ops[0].weight,)
    assert Weight(tensors, format="int8", reason="a") == Weight(tensors, format="int8", reason="b")
    assert Weight(tensors, format="int8") != Weight(tensors)
