"""NativeExecutor as a whole: same bytes whatever the batch, pages copied in order, bad input refused before it runs."""

import dataclasses
import os
import time
from array import array
from pathlib import Path

import numpy as np
import pytest

from pinnate.core.batch import ScheduledSequence
from pinnate.core.errors import ConfigError, ModelError
from pinnate.core.sampling import SamplingParams
from pinnate.executor.base import ExecutorSpec
from pinnate.executor.forward_batch import build_forward_batch
from pinnate.executor.native import NativeExecutor, plan
from pinnate.executor.native.executor import LOGITS_BLOCK
from pinnate.executor.reference import ReferenceExecutor
from pinnate.graph import Graph
from tests.unit.executor.native_helpers import ISAS, SPEC, Tensors, llama_graph, sequence, step

TOKENS = np.random.default_rng(1).integers(0, 101, 70).tolist()
PRECISIONS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, logprobs=3)


def build(**options) -> NativeExecutor:
    return NativeExecutor(llama_graph(), SPEC, **({"dtype": "bfloat16", "threads": 1} | options))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_same_bytes_alone_in_a_batch_in_chunks_and_on_two_threads(precision, isa):
    pages = (4, 9, 2, 11, 30)
    options = PRECISIONS[precision] | {"isa": isa}
    alone = build(**options).logits(step(sequence(0, TOKENS, pages)))

    chunked = build(**options, threads=2)
    for start in range(0, 63, 7):
        chunked.logits(step(sequence(0, TOKENS[start : start + 7], pages, start=start, n=0)))
    np.testing.assert_array_equal(chunked.logits(step(sequence(0, TOKENS[63:], pages, start=63))), alone)

    batched = build(**options, threads=2)
    batched.logits(step(sequence(0, TOKENS[:60], pages, n=0)))
    others = [sequence(i, TOKENS[i : i + 8], (12 + i,)) for i in range(1, 8)]
    both = batched.logits(step(*others[:3], sequence(0, TOKENS[60:], pages, start=60), *others[3:]))
    np.testing.assert_array_equal(both[3], alone[0])
    np.testing.assert_array_equal(both[0], build(**options).logits(step(others[0]))[0])


def scores_of_two_prompts(piece: int, **options) -> list[list[float]]:
    """Of every prompt token but the first of a piece, for prompts of 400 and 200 tokens. The rows of the inner layer
    are longer than a slice of their product."""
    graph = llama_graph(inner=1500, bias=True, qk_norm=True)
    spec = ExecutorSpec(num_pages=50, page_size=16, max_num_batched_tokens=600, max_num_seqs=8, max_model_len=420)
    executor = NativeExecutor(graph, spec, **options)
    tokens = np.random.default_rng(2).integers(0, 101, 600).tolist()
    prompts = [(tokens[:400], tuple(range(1, 26))), (tokens[400:], tuple(range(26, 39)))]
    found: list[list[float]] = [[], []]
    for start in range(0, 400, piece):
        parts = [
            sequence(i, part, pages, start=start, n=0, score=array("i", [7] * (len(part) - 1)))
            for i, (prompt, pages) in enumerate(prompts)
            if (part := prompt[start : start + piece])
        ]
        for i, entries in executor.execute(step(*parts)).scores.items():
            found[i] += [entry.logprob for entry in entries]
    return found


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_same_bytes_in_bands_of_rows(precision, isa):
    """600 rows go through the layers in bands, on one thread and on three; pieces of 50 do not."""
    options = PRECISIONS[precision] | {"isa": isa}
    in_pieces, in_bands = (scores_of_two_prompts(piece, threads=1, **options) for piece in (50, 400))
    for short, whole in zip(in_pieces, in_bands, strict=True):
        assert short == [score for i, score in enumerate(whole) if (i + 1) % 50]
        assert len(set(short)) > len(short) // 2
    assert scores_of_two_prompts(400, threads=3, **options) == in_bands


def test_bands_are_safe_where_buffers_share_memory(monkeypatch):
    """A plan in which a buffer takes the place of one that only the bands before have read."""
    expected = scores_of_two_prompts(400, threads=2)
    monkeypatch.setattr(plan, "_stretches", lambda program: [(i, i) for i in range(len(program.instructions))])
    assert scores_of_two_prompts(400, threads=2) == expected


def test_seeded_draws_and_logprobs_do_not_depend_on_the_batch():
    alone = build().execute(step(sequence(0, TOKENS[:9], (1,), params=SEEDED)))
    others = [sequence(i, TOKENS[i : i + 8], (5 + i,), params=SEEDED) for i in range(1, 8)]
    batched = build(threads=2).execute(step(*others, sequence(0, TOKENS[:9], (1,), params=SEEDED)))
    assert batched.token_ids[-1] == alone.token_ids[0]
    assert batched.logprobs[-1] == alone.logprobs[0]


def test_samples_of_one_sequence_are_those_of_separate_ones():
    params = SamplingParams(temperature=1.5, logit_bias={3: 2.0}, logprobs=1)
    together = build(threads=2).execute(step(sequence(0, TOKENS[:9], (1,), params=params, n=6)))
    assert len(set(together.token_ids)) > 1
    for index in range(6):
        one = sequence(0, TOKENS[:9], (1,), params=params, n=6).samples[index]
        separate = dataclasses.replace(sequence(0, TOKENS[:9], (1,)), samples=(one,))
        result = build().execute(step(separate))
        assert (result.token_ids[0], result.logprobs[0]) == (together.token_ids[index], together.logprobs[index])


def test_scores_of_a_prompt_longer_than_a_block_of_logits():
    assert len(TOKENS) > LOGITS_BLOCK
    scored = sequence(5, TOKENS, (1, 2, 3, 4, 5), score=array("i", TOKENS[1:]), score_top=2)
    native, reference = build(dtype="float32", threads=2), ReferenceExecutor(llama_graph(), SPEC)
    ours, theirs = native.execute(step(scored)), reference.execute(step(scored))
    assert ours.token_ids == theirs.token_ids
    assert len(ours.scores[5]) == len(TOKENS) - 1
    for a, b in zip(ours.scores[5], theirs.scores[5], strict=True):
        assert (a.token_id, a.rank, [t for t, _ in a.top]) == (b.token_id, b.rank, [t for t, _ in b.top])
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_copies_run_before_the_pass_and_in_order():
    """Page 1 is copied to 2, and 2 on to 3: the sequence then continues from page 3."""
    expected = build()
    expected.logits(step(sequence(0, TOKENS[:9], (1,), n=0)))
    wanted = expected.logits(step(sequence(0, TOKENS[9:12], (1,), start=9)))
    copied = build(threads=2)
    copied.logits(step(sequence(0, TOKENS[:9], (1,), n=0)))
    continued = step(sequence(0, TOKENS[9:12], (3,), start=9), copies=((1, 2), (2, 3)))
    np.testing.assert_array_equal(copied.logits(continued), wanted)


def test_a_greedy_generation_equals_the_reference():
    native, reference = build(dtype="float32", threads=2), ReferenceExecutor(llama_graph(), SPEC)
    drawn = []
    for executor in (native, reference):
        tokens = [5, 17, 3]
        fresh = tokens
        while len(tokens) < 40:
            output = step(sequence(0, fresh, (8, 1, 6), start=len(tokens) - len(fresh)))
            fresh = executor.execute(output).token_ids
            tokens = tokens + fresh
        drawn.append(tokens)
    assert drawn[0] == drawn[1]


def test_the_mode_for_denormals_is_put_back():
    build().execute(step(sequence(0, [1], (1,))))
    tiny = np.full(1, 1e-40, np.float32)
    assert (tiny * np.float32(0.5))[0] > 0


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (sequence(0, [101], (1,)), IndexError, "token 101"),
        (sequence(0, [-1], (1,)), IndexError, "token -1"),
        (sequence(0, [1], (0,)), IndexError, "page 0"),
        (sequence(0, [1], (41,)), IndexError, "page 41"),
        (sequence(0, [1] * 97, (1, 2, 3, 4, 5, 6, 7)), ValueError, "more tokens"),
        (sequence(0, [1], tuple(range(1, 12)), start=160), IndexError, "161 tokens"),
        (sequence(0, [1, 2], (1,), score=array("i", [101])), IndexError, "scored token 101"),
        (sequence(0, [1], (1,), params=SamplingParams(logit_bias={101: 1.0})), IndexError, "biased token 101"),
    ],
)
def test_bad_steps_are_refused_and_leave_no_trace(bad, error, match):
    executor = build()
    with pytest.raises(error, match=match):
        executor.execute(step(bad))
    result = executor.execute(step(sequence(0, TOKENS[:9], (1,))))
    assert result == build().execute(step(sequence(0, TOKENS[:9], (1,))))


def test_bad_copies_are_refused():
    for copies in (((1, 41),), ((0, 1),)):
        with pytest.raises(IndexError, match="copied page"):
            build().execute(step(sequence(0, [1], (1,)), copies=copies))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"slots": np.array([5], np.int32)}, "slots disagree"),
        ({"positions": np.array([3], np.int32)}, "positions disagree"),
        ({"seq_starts": np.array([0, 2], np.int32)}, "seq_starts"),
        ({"page_offsets": np.array([0, 9], np.int32)}, "page_offsets"),
        ({"contexts": np.array([40], np.int32)}, "more pages"),
        ({"contexts": np.zeros(0, np.int32)}, "no tokens"),
        ({"positions": np.zeros(2, np.int32)}, "positions or slots"),
        ({"tokens": np.zeros(1, np.int64)}, "format"),
        ({"samples": np.zeros(1, np.int32)}, "format"),
        ({"bias": np.zeros(3, np.float32)}, "not pairs"),
    ],
)
def test_inconsistent_arrays_never_reach_a_kernel(change, match):
    batch = build_forward_batch(step(sequence(0, [1], (1,))), 16)
    with pytest.raises(ValueError, match=match):
        build()._run(dataclasses.replace(batch, **change), None)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("row", 1, "row"),
        ("history_start", -1, "history"),
        ("output_len", 3, "history"),
        ("bias_len", 1, "bias"),
        ("num_top", 9, "top"),
    ],
)
def test_records_out_of_range_never_reach_a_kernel(field, value, match):
    batch = build_forward_batch(step(sequence(0, [1], (1,))), 16)
    samples = batch.samples.copy()
    samples[field] = value
    with pytest.raises(ValueError, match=match):
        build()._run(dataclasses.replace(batch, samples=samples), None)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float16"}, "--dtype"),
        ({"threads": 0}, "--threads"),
        ({"isa": "sse9"}, "isa"),
    ],
)
def test_settings_that_cannot_be_honoured(options, match):
    with pytest.raises(ConfigError, match=match):
        build(**options)


def test_page_sizes_of_whole_tiles_only():
    with pytest.raises(ConfigError, match="--page-size"):
        NativeExecutor(llama_graph(), dataclasses.replace(SPEC, page_size=8))
    wide = NativeExecutor(llama_graph(), dataclasses.replace(SPEC, page_size=32), dtype="float32")
    narrow = build(dtype="float32")
    np.testing.assert_array_equal(
        wide.logits(step(sequence(0, TOKENS, (3, 1, 2)))), narrow.logits(step(sequence(0, TOKENS, (3, 1, 2, 5, 4))))
    )


def test_a_tensor_that_is_too_short_is_named():
    make = Tensors()
    short = dataclasses.replace(make(101, 48), data=memoryview(bytes(100)), name="model.embed_tokens.weight")
    graph = llama_graph()
    embedding = dataclasses.replace(graph.ops[0], weight=short)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight: 100 bytes"):
        NativeExecutor(Graph((embedding, *graph.ops[1:]), graph.logits, graph.kv_layers, 101), SPEC)


def test_describe_and_close():
    executor = build(threads=2)
    facts = executor.describe()
    assert facts["dtype"] == "bfloat16"
    assert facts["threads"] == 2
    assert facts["isa"] == ISAS[0]
    assert all(facts[name] > 0 for name in ("weight_bytes", "kv_bytes", "arena_bytes"))
    executor.close()
    with pytest.raises(ConfigError, match="closed"):
        executor.execute(step(sequence(0, [1], (1,))))


def test_a_chunk_without_samples_returns_nothing():
    result = build().execute(step(ScheduledSequence(0, 0, array("i", [1, 2]), array("i", [1]))))
    assert (result.token_ids, result.logprobs, result.scores) == ([], [], {})


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_for_resident(least: int) -> None:
    deadline = time.monotonic() + 30
    while resident_bytes() < least:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = 0
    while (now := resident_bytes()) - before > 1 << 20:  # until the other thread has made what it makes
        before = now
        time.sleep(0.3)


def test_memory_grows_in_steps_and_not_at_all_between(caplog):
    """512 MiB first; the double once less than half of it is fresh. What is used in between makes no difference."""
    spec = dataclasses.replace(SPEC, num_pages=2_000_000)
    before = resident_bytes()
    executor = NativeExecutor(llama_graph(), spec, dtype="bfloat16", threads=2)
    assert executor.describe()["kv_bytes"] > 1 << 30
    page, first = executor.page_bytes, 512 << 20
    wait_for_resident(before + first - (32 << 20))
    settled = resident_bytes()
    assert settled - before < first + (48 << 20)
    for pages in ((1,), (20_000,), ((first // 2 - (2 << 20)) // page,)):
        executor.execute(step(sequence(0, TOKENS[:16], pages)))
    time.sleep(0.1)
    assert 0 <= executor.kv_committed_bytes - first + page < 2 * page
    assert resident_bytes() - settled < 8 << 20
    assert not caplog.records
    with caplog.at_level("INFO"):
        executor.execute(step(sequence(0, TOKENS[:16], ((first // 2 + (2 << 20)) // page,))))
    assert 0 <= executor.kv_committed_bytes - 2 * first + 2 * page < 3 * page
    assert "grows from 512.0 MiB to 1024.0 MiB" in caplog.text
    wait_for_resident(settled + first // 4)
    executor.close()
    assert executor.kv_committed_bytes == 0
    assert resident_bytes() - before < 100 << 20


def test_without_a_second_thread_memory_is_what_was_used():
    executor = build(threads=1)
    assert executor.kv_committed_bytes == executor.page_bytes
    executor.execute(step(sequence(0, TOKENS[:16], (7,))))
    assert executor.kv_committed_bytes == 8 * executor.page_bytes


def test_idle_time_leaves_keys_and_values_as_they_are():
    pages = (4, 9, 2, 11, 30)
    alone = build().logits(step(sequence(0, TOKENS, pages)))
    executor = build(threads=2)
    executor.logits(step(sequence(0, TOKENS[:60], pages, n=0)))
    time.sleep(0.1)
    np.testing.assert_array_equal(executor.logits(step(sequence(0, TOKENS[60:], pages, start=60))), alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {}, {"kv_int8": True}])
def test_pages_go_out_and_come_back_to_other_places(options, isa):
    """What a page holds is all that its tokens need: read from one executor, written to another, the logits agree."""
    source, target = build(isa=isa, **options), build(isa=isa, threads=2, **options)
    source.logits(step(sequence(0, TOKENS[:64], (4, 9, 2, 11), n=0)))
    expected = source.logits(step(sequence(0, TOKENS[64:], (4, 9, 2, 11, 30), start=64)))
    data = bytearray(4 * source.page_bytes)
    source.read_pages(array("i", [4, 9, 2, 11]), data)
    target.write_pages(array("i", [40, 1, 7, 3]), data)
    np.testing.assert_array_equal(target.logits(step(sequence(0, TOKENS[64:], (40, 1, 7, 3, 8), start=64))), expected)
    again = bytearray(source.page_bytes)
    target.read_pages(array("i", [7]), again)
    assert again == data[2 * source.page_bytes : 3 * source.page_bytes]


def test_pages_outside_the_pool_and_buffers_of_another_size_are_refused():
    executor = build()
    page = bytearray(executor.page_bytes)
    for wrong in (0, SPEC.num_pages + 1, -1):
        with pytest.raises(IndexError):
            executor.read_pages(array("i", [wrong]), page)
        with pytest.raises(IndexError):
            executor.write_pages(array("i", [wrong]), page)
    for pages, data in (([1, 2], page), ([1], page[:-1]), ([], page)):
        with pytest.raises(ValueError, match="size"):
            executor.write_pages(array("i", pages), data)
        with pytest.raises(ValueError, match="size"):
            executor.read_pages(array("i", pages), data)
    executor.close()
    with pytest.raises(ConfigError, match="closed"):
        executor.read_pages(array("i", [1]), page)
