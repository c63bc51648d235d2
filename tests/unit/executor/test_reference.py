"""The reference executor: each op against plain float64 arithmetic, and the life of a step (pages, copies, samples)."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import numpy as np
import pytest

from pinnate.core.batch import Sample, ScheduledSequence, SchedulerOutput
from pinnate.core.sampling import SamplingParams
from pinnate.executor.base import ExecutorSpec
from pinnate.executor.reference import ReferenceExecutor
from pinnate.graph import GraphBuilder, Tensor, TensorType
from pinnate.graph.ops import RopeTable
from pinnate.models.load import load_model

TINY = Path(__file__).parents[2] / "data" / "tiny"
RNG = np.random.default_rng(11)
TOKENS = [3, 0, 4, 4, 1, 2]
SPEC = ExecutorSpec(num_pages=12, page_size=4, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=48)
EMBEDDING = RNG.standard_normal((5, 12)).astype(np.float32)
GREEDY = SamplingParams(temperature=0.0)


def tensor(values: np.ndarray, name: str = "w") -> Tensor:
    values = np.ascontiguousarray(values, np.float32)
    return Tensor(name, values.shape, TensorType.F32, memoryview(values.tobytes()))


def sequence(tokens, pages, start=0, seq_id=1, score=True, samples=()) -> ScheduledSequence:
    ids = array("i", tokens)
    return ScheduledSequence(seq_id, start, ids, array("i", pages), samples, score=ids if score else None)


def sample(position: int, params: SamplingParams = GREEDY, index: int = 0) -> Sample:
    return Sample(params, seed=1, index=index, position=position)


def compute(describe) -> tuple[np.ndarray, np.ndarray]:
    """(x, y): the embedded tokens in float64 [6, 12], and what `describe(graph, x)` makes of them."""
    graph = GraphBuilder()
    out = describe(graph, graph.embedding(tensor(EMBEDDING)))
    executor = ReferenceExecutor(graph.finish(graph.gather_rows(out)), SPEC)
    y = executor.logits(SchedulerOutput((sequence(TOKENS, [1, 2]),)))
    return EMBEDDING[TOKENS].astype(np.float64), y


def close(actual: np.ndarray, expected) -> None:
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, np.array(expected, np.float64), rtol=2e-6, atol=2e-6)


class TestOps:
    def test_embedding_and_scale(self):
        graph = GraphBuilder()
        out = graph.gather_rows(graph.embedding(tensor(EMBEDDING), scale=3.5))
        y = ReferenceExecutor(graph.finish(out), SPEC).logits(SchedulerOutput((sequence(TOKENS, [1, 2]),)))
        close(y, EMBEDDING[TOKENS].astype(np.float64) * 3.5)

    def test_linear(self):
        weight, bias = RNG.standard_normal((7, 12)), RNG.standard_normal(7)
        x, y = compute(lambda g, v: g.linear(v, tensor(weight)))
        expected = [[sum(row[k] * np.float32(w[k]) for k in range(12)) for w in weight] for row in x]
        close(y, expected)
        _, with_bias = compute(lambda g, v: g.linear(v, tensor(weight), tensor(bias)))
        close(with_bias, np.array(expected) + bias.astype(np.float32))

    @pytest.mark.parametrize("group", [12, 4])
    def test_rms_norm(self, group):
        weight = RNG.standard_normal(group).astype(np.float32)
        x, y = compute(lambda g, v: g.rms_norm(v, tensor(weight), 0.5))
        for row, out in zip(x, y, strict=True):
            for first in range(0, 12, group):
                part = row[first : first + group]
                root = math.sqrt(sum(v * v for v in part) / group + 0.5)
                close(out[first : first + group], part / root * weight)

    def test_layer_norm(self):
        weight, bias = RNG.standard_normal((2, 12)).astype(np.float32)
        x, y = compute(lambda g, v: g.layer_norm(v, tensor(weight), tensor(bias), 0.25))
        normal = [(row - row.mean()) / math.sqrt(row.var() + 0.25) for row in x]
        close(y, np.array(normal) * weight + bias)
        _, plain = compute(lambda g, v: g.layer_norm(v, tensor(weight), None, 0.25))
        close(plain, np.array(normal) * weight)

    def test_rope_rotates_halves_of_a_head_and_leaves_the_rest(self):
        table = RopeTable((1.0, 0.1), attention_factor=1.5)
        x, y = compute(lambda g, v: g.rope(v, 6, table))
        expected = x.copy()
        for position, row in enumerate(x):
            for head in (0, 6):
                for pair, frequency in enumerate(table.inv_freq):
                    a, b = head + pair, head + pair + 2
                    turned = complex(row[a], row[b]) * 1.5 * np.exp(1j * position * frequency)
                    expected[position, a], expected[position, b] = turned.real, turned.imag
        close(y, expected)

    @pytest.mark.parametrize("window", [0, 1, 3])
    def test_attention(self, window):
        k_weight, v_weight = RNG.standard_normal((2, 4, 12)).astype(np.float32)

        def describe(g, x):
            k, v = g.linear(x, tensor(k_weight)), g.linear(x, tensor(v_weight))
            return g.attention(x, k, v, head_dim=2, scale=0.7, window=window)

        x, y = compute(describe)
        keys, values = x @ k_weight.T, x @ v_weight.T
        expected = np.zeros_like(x)
        for p in range(len(x)):
            first = max(0, p - window + 1) if window else 0
            for head in range(6):
                kv = slice(head // 3 * 2, head // 3 * 2 + 2)
                weights = [math.exp(0.7 * (x[p, 2 * head : 2 * head + 2] @ keys[j, kv])) for j in range(first, p + 1)]
                mixed = sum(w * values[first + i, kv] for i, w in enumerate(weights))
                expected[p, 2 * head : 2 * head + 2] = mixed / sum(weights)
        close(y, expected)

    def test_elementwise_ops(self):
        for describe, expected in [
            (lambda g, x: g.swiglu(x, g.mul(x, factor=2.0)), lambda v: v / (1 + math.exp(-v)) * 2 * v),
            (lambda g, x: g.gelu(x), lambda v: v / 2 * (1 + math.tanh((2 / math.pi) ** 0.5 * (v + 0.044715 * v**3)))),
            (lambda g, x: g.gelu(x, tanh=False), lambda v: v / 2 * (1 + math.erf(v / 2**0.5))),
            (lambda g, x: g.add(x, g.mul(x, x)), lambda v: v + v * v),
            (lambda g, x: g.softcap(x, 0.5), lambda v: 0.5 * math.tanh(v / 0.5)),
        ]:
            x, y = compute(describe)
            close(y, np.vectorize(expected)(x))

    def test_silu_of_very_negative_numbers_is_zero(self):
        _, y = compute(lambda g, x: g.swiglu(g.mul(g.mul(x, x), factor=-1e6), x))
        assert np.isfinite(y).all()
        np.testing.assert_allclose(y, 0, atol=1e-3)


@pytest.fixture(scope="module")
def graph():
    return load_model(TINY / "mistral").graph  # grouped heads and a window of 7


class TestSteps:
    @pytest.fixture
    def executor(self, graph):
        return ReferenceExecutor(graph, SPEC)

    def whole(self, graph, tokens) -> np.ndarray:
        return ReferenceExecutor(graph, SPEC).logits(SchedulerOutput((sequence(tokens, [1, 2, 3, 4, 5]),)))

    TOKENS = [5, 80, 3, 3, 61, 17, 42, 8, 9, 77, 30, 2, 2, 19, 64, 7, 11]

    @pytest.mark.parametrize("chunk", [1, 3, 5])
    def test_chunks_and_page_order_change_nothing(self, graph, executor, chunk):
        parts = [
            executor.logits(SchedulerOutput((sequence(self.TOKENS[at : at + chunk], [9, 2, 12, 4, 7], at),)))
            for at in range(0, len(self.TOKENS), chunk)
        ]
        np.testing.assert_allclose(np.concatenate(parts), self.whole(graph, self.TOKENS), rtol=0, atol=2e-5)

    def test_sequences_in_one_step_do_not_see_each_other(self, graph, executor):
        other = self.TOKENS[::-1]
        step = SchedulerOutput((sequence(self.TOKENS[:9], [1, 2, 3]), sequence(other, [4, 5, 6, 7, 8], seq_id=2)))
        expected = np.concatenate([self.whole(graph, self.TOKENS[:9]), self.whole(graph, other)])
        np.testing.assert_allclose(executor.logits(step), expected, rtol=0, atol=2e-5)

    def test_pages_shared_by_two_sequences_are_read_by_both(self, graph, executor):
        executor.logits(SchedulerOutput((sequence(self.TOKENS[:8], [1, 2]),)))
        ends = [[1, 2, 3], [50, 60, 70, 80]]
        step = SchedulerOutput(
            (sequence(ends[0], [1, 2, 3], 8), sequence(ends[1], [1, 2, 4], 8, seq_id=2)),
        )
        expected = np.concatenate([self.whole(graph, self.TOKENS[:8] + end)[8:] for end in ends])
        np.testing.assert_allclose(executor.logits(step), expected, rtol=0, atol=2e-5)

    def test_copies_run_before_the_step_writes(self, graph, executor):
        """Page 2 holds tokens 4 and 5 of the first sequence; the second one continues on a copy of it."""
        first, second = self.TOKENS[:6], [*self.TOKENS[:6], 33, 44]
        executor.logits(SchedulerOutput((sequence(first, [1, 2]),)))
        step = SchedulerOutput(
            (sequence([88, 87], [1, 2], 6), sequence(second[6:], [1, 6], 6, seq_id=2)), copies=((2, 6),)
        )
        expected = np.concatenate([self.whole(graph, [*first, 88, 87])[6:], self.whole(graph, second)[6:]])
        np.testing.assert_allclose(executor.logits(step), expected, rtol=0, atol=2e-5)

    def test_copies_run_in_order(self, graph, executor):
        executor.logits(SchedulerOutput((sequence(self.TOKENS[:4], [1]),)))
        step = SchedulerOutput((sequence([8], [3, 4], 4),), copies=((1, 2), (2, 3)))
        expected = self.whole(graph, [*self.TOKENS[:4], 8])[4:]
        np.testing.assert_allclose(executor.logits(step), expected, rtol=0, atol=2e-5)

    def test_only_wanted_rows_have_logits(self, graph, executor):
        sampled = sequence(self.TOKENS, [1, 2, 3, 4, 5], score=False, samples=(sample(17), sample(17, index=1)))
        silent = sequence(self.TOKENS[:3], [6], seq_id=2, score=False)
        logits = executor.logits(SchedulerOutput((silent, sampled)))
        np.testing.assert_allclose(logits, self.whole(graph, self.TOKENS)[-1:], rtol=0, atol=2e-5)
        assert executor.logits(SchedulerOutput((silent,))).shape == (0, 90)

    def test_execute_samples_and_scores(self, graph, executor):
        logits = self.whole(graph, self.TOKENS).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        asked = SamplingParams(temperature=0.0, logprobs=2)
        scored = ScheduledSequence(
            seq_id=7,
            start=0,
            token_ids=array("i", self.TOKENS),
            page_table=array("i", [1, 2, 3, 4, 5]),
            samples=(sample(17, asked), sample(17)),
            score=array("i", self.TOKENS[1:]),
            score_top=1,
        )
        result = executor.execute(SchedulerOutput((scored,)))
        best = int(logits[-1].argmax())
        assert result.token_ids == [best, best]
        assert result.logprobs[1] is None
        assert result.logprobs[0].token_id == best
        assert result.logprobs[0].logprob == pytest.approx(logprobs[-1, best], abs=1e-4)
        assert [token for token, _ in result.logprobs[0].top] == np.argsort(-logits[-1])[:2].tolist()
        scores = result.scores[7]
        assert [s.token_id for s in scores] == self.TOKENS[1:]
        expected = [logprobs[i, token] for i, token in enumerate(self.TOKENS[1:])]
        np.testing.assert_allclose([s.logprob for s in scores], expected, rtol=0, atol=1e-4)

    def test_facts_and_closing(self, executor):
        facts = executor.describe()
        assert facts["dtype"] == "float32"
        assert facts["kv_bytes"] == 2 * 2 * 13 * 4 * 16 * 4  # k and v, layers, pages, slots, columns, bytes
        assert facts["weight_bytes"] > 0
        executor.close()
        assert executor.describe()["weight_bytes"] == 0

    def test_a_tied_matrix_is_decoded_once(self):
        model = load_model(TINY / "llama3")
        parameters = sum(np.prod(t.shape) for t in {id(t): t for t in _tensors(model.graph)}.values())
        assert ReferenceExecutor(model.graph, SPEC).describe()["weight_bytes"] == 4 * parameters


def _tensors(graph) -> list[Tensor]:
    named = [getattr(op, name, None) for op in graph.ops for name in ("weight", "bias")]
    return [t for t in named if t is not None]


def test_pages_go_out_and_come_back_to_other_places():
    graph = load_model(TINY / "llama3").graph
    source, target = ReferenceExecutor(graph, SPEC), ReferenceExecutor(graph, SPEC)
    source.logits(SchedulerOutput((sequence(TOKENS + TOKENS[:2], [3, 5]),)))
    expected = source.logits(SchedulerOutput((sequence([1, 2], [3, 5, 7], start=8),)))
    data = bytearray(2 * source.page_bytes)
    source.read_pages(array("i", [3, 5]), data)
    target.write_pages(array("i", [12, 1]), data)
    np.testing.assert_array_equal(target.logits(SchedulerOutput((sequence([1, 2], [12, 1, 2], start=8),))), expected)
    for pages, size in (([0], 1), ([13], 1), ([1, 2], 1)):
        with pytest.raises((IndexError, ValueError)):
            target.write_pages(array("i", pages), bytes(size * source.page_bytes))
        with pytest.raises((IndexError, ValueError)):
            target.read_pages(array("i", pages), bytearray(size * source.page_bytes))
