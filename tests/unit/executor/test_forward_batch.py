"""The arrays of a step, checked against the definition token by token."""

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinnate.core.batch import Sample, ScheduledSequence, SchedulerOutput
from pinnate.core.sampling import SamplingParams
from pinnate.executor.forward_batch import SAMPLE_DTYPE, SampledRows, build_forward_batch, step_result


def ints(*values: int) -> array:
    return array("i", values)


def sample(position: int, index: int = 0, seed: int = 5, **params) -> Sample:
    return Sample(SamplingParams(**params), seed, index, position)


@st.composite
def steps(draw):
    page_size = draw(st.sampled_from([1, 4, 16]))
    sequences = []
    for seq_id in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 40))
        tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
        needed = -(-(start + len(tokens)) // page_size)
        pages = draw(st.lists(st.integers(1, 500), min_size=needed, max_size=needed + 2))
        samples = (sample(start + len(tokens)),) * draw(st.integers(0, 3))
        sequences.append(ScheduledSequence(seq_id, start, ints(*tokens), ints(*pages), samples))
    return SchedulerOutput(tuple(sequences)), page_size


@settings(max_examples=60, deadline=None)
@given(steps())
def test_arrays_equal_the_definition_token_by_token(step):
    output, page_size = step
    batch = build_forward_batch(output, page_size)
    tokens, positions, slots, rows = [], [], [], []
    for s, seq in enumerate(output.sequences):
        assert batch.seq_starts[s] == len(tokens)
        assert batch.contexts[s] == seq.start + len(seq.token_ids)
        for i, token in enumerate(seq.token_ids):
            position = seq.start + i
            tokens.append(token)
            positions.append(position)
            slots.append(seq.page_table[position // page_size] * page_size + position % page_size)
        if seq.samples:
            rows.append(len(tokens) - 1)
        own = batch.page_indices[batch.page_offsets[s] : batch.page_offsets[s + 1]]
        assert own.tolist() == seq.page_table.tolist()
    assert batch.tokens.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.logit_rows.tolist() == rows
    assert batch.seq_starts[-1] == len(tokens)
    assert len(batch.samples) == sum(len(s.samples) for s in output.sequences)
    for name in (
        "tokens",
        "positions",
        "slots",
        "seq_starts",
        "contexts",
        "page_offsets",
        "page_indices",
        "logit_rows",
    ):
        assert getattr(batch, name).dtype == np.int32
        assert getattr(batch, name).flags.c_contiguous


def test_samples_of_one_sequence_share_their_logits_row():
    first = ScheduledSequence(0, 0, ints(1, 2), ints(3), (sample(2, 0), sample(2, 1)))
    second = ScheduledSequence(1, 5, ints(9), ints(4), (sample(6, 0, seed=-7),))
    batch = build_forward_batch(SchedulerOutput((first, second)), 16)
    assert batch.logit_rows.tolist() == [1, 2]
    assert batch.samples["row"].tolist() == [0, 0, 1]
    assert batch.samples["index"].tolist() == [0, 0, 0]
    assert batch.samples["position"].tolist() == [2, 2, 6]
    assert batch.samples["seed"].tolist() == [5, 6, -7]


def test_scores_come_before_samples_and_share_the_last_row():
    seq = ScheduledSequence(7, 0, ints(1, 2, 3), ints(3), (sample(3, logprobs=1),), score=ints(2, 3, 8), score_top=2)
    batch = build_forward_batch(SchedulerOutput((seq,)), 16)
    assert batch.logit_rows.tolist() == [0, 1, 2]
    assert batch.samples["row"].tolist() == [0, 1, 2, 2]
    assert batch.samples["target"].tolist() == [2, 3, 8, -1]
    assert batch.samples["num_top"].tolist() == [2, 2, 2, 1]
    assert batch.samples["top_start"].tolist() == [0, 2, 4, 6]
    assert batch.num_top == 7


def test_chosen_tokens_are_reported_beside_each_score():
    seq = ScheduledSequence(7, 0, ints(1, 2), ints(3), (sample(2),), score=ints(2, 3), score_top=1, score_ids=(8, 9))
    output = SchedulerOutput((seq,))
    batch = build_forward_batch(output, 16)
    assert batch.samples["row"].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.samples["target"].tolist() == [2, 8, 9, 3, 8, 9, -1]
    assert batch.samples["num_top"].tolist() == [1, 0, 0, 1, 0, 0, -1]
    tokens = np.array([2, 8, 9, 3, 8, 9, 40], np.int32)
    rows = SampledRows(
        tokens, -tokens.astype(np.float32), np.ones(7, np.int32), np.array([5, 6], np.int32), np.zeros(2, np.float32)
    )
    result = step_result(output, batch, rows)
    assert result.token_ids == [40]
    assert [(s.token_id, s.top, s.chosen) for s in result.scores[7]] == [
        (2, [(5, 0.0)], [(8, -8.0), (9, -9.0)]),
        (3, [(6, 0.0)], [(8, -8.0), (9, -9.0)]),
    ]


def test_history_bias_and_bans_are_ranges_of_flat_arrays():
    params = SamplingParams(frequency_penalty=0.5, logit_bias={4: 1.5, 9: -2.0})
    rows = (
        Sample(SamplingParams(), 0, 0, 3),
        Sample(params, 0, 1, 3, token_ids=ints(1, 2, 3), num_prompt_tokens=2, banned=(6,)),
    )
    batch = build_forward_batch(SchedulerOutput((ScheduledSequence(0, 0, ints(1, 2, 3), ints(1), rows),)), 16)
    plain, biased = batch.samples
    assert (plain["prompt_len"], plain["output_len"], plain["bias_len"]) == (0, 0, 0)
    start = biased["history_start"]
    assert batch.history[start : start + 3].tolist() == [1, 2, 3]
    assert (biased["prompt_len"], biased["output_len"], biased["bias_len"]) == (2, 1, 3)
    assert batch.bias_ids[biased["bias_start"] :].tolist() == [4, 9, 6]
    assert batch.bias[biased["bias_start"] :].tolist() == [1.5, -2.0, -np.inf]


def test_a_reported_token_is_not_drawn_and_takes_no_bias():
    params = SamplingParams(logit_bias={4: 1.5}, logprobs=2)
    rows = (Sample(params, 0, 0, 3, target=7, num_top=40), Sample(params, 0, 0, 3, target=8, num_top=0))
    batch = build_forward_batch(SchedulerOutput((ScheduledSequence(0, 0, ints(1, 2, 3), ints(1), rows),)), 16)
    assert batch.logit_rows.tolist() == [2]
    assert batch.samples["target"].tolist() == [7, 8]
    assert batch.samples["num_top"].tolist() == [40, 0]
    assert batch.samples["bias_len"].tolist() == [0, 0]
    assert batch.num_top == 40


def test_extreme_parameters_fit_the_record():
    params = SamplingParams(temperature=1e300, top_k=10**12, repetition_penalty=1e-300)
    seq = ScheduledSequence(0, 0, ints(1), ints(1), (Sample(params, 2**63 - 1, 127, 2**31),))
    record = build_forward_batch(SchedulerOutput((seq,)), 16).samples[0]
    assert np.isfinite(record["temperature"])
    assert record["repetition"] > 0
    assert record["top_k"] == 2**31 - 1
    assert record["seed"] == 2**63 - 1 + 127 - 2**64
    assert SAMPLE_DTYPE.itemsize == 88


def test_nothing_borrows_the_sequences_arrays():
    tokens, pages, history = ints(1), ints(2), ints(1)
    drawn = Sample(SamplingParams(presence_penalty=1.0), 0, 0, 1, token_ids=history, num_prompt_tokens=1)
    batch = build_forward_batch(SchedulerOutput((ScheduledSequence(0, 0, tokens, pages, (drawn,)),)), 16)
    tokens.append(4)  # raises BufferError where a view is still alive
    pages.append(4)
    history.append(4)
    assert batch.tokens.tolist() == [1]


@pytest.mark.parametrize(
    ("sequences", "match"),
    [
        ((), "at least one"),
        ((ScheduledSequence(3, 0, ints(), ints(1)),), "sequence 3 has no tokens"),
        ((ScheduledSequence(4, 15, ints(1, 2), ints(1)),), "sequence 4: 1 pages for 17 tokens"),
        ((ScheduledSequence(5, 0, ints(1), ints(1), score=ints(1, 2)),), "2 scores for 1 tokens"),
    ],
)
def test_malformed_steps_are_refused(sequences, match):
    with pytest.raises(ValueError, match=match):
        build_forward_batch(SchedulerOutput(sequences), 16)


def test_step_result_orders_samples_and_scores():
    first = ScheduledSequence(10, 0, ints(1, 2), ints(1), (sample(2, logprobs=0), sample(2, 1)), score=ints(2))
    second = ScheduledSequence(11, 0, ints(3), ints(2), (sample(1, logprobs=2),))
    chunk = ScheduledSequence(12, 0, ints(3), ints(3))
    output = SchedulerOutput((first, second, chunk))
    batch = build_forward_batch(output, 16)
    rows = SampledRows(
        np.array([2, 40, 41, 42], np.int32),
        np.array([-1.0, -2.0, 0.0, -3.0], np.float32),
        np.array([5, 1, 0, 2], np.int32),
        np.array([43, -1], np.int32),
        np.array([-0.5, 0.0], np.float32),
    )
    result = step_result(output, batch, rows)
    assert result.token_ids == [40, 41, 42]
    assert [entry and (entry.token_id, entry.rank) for entry in result.logprobs] == [(40, 1), None, (42, 2)]
    assert result.logprobs[2].top == [(43, -0.5)]  # a vocabulary of one: the second place is empty
    assert [(s.token_id, s.logprob, s.rank) for s in result.scores[10]] == [(2, -1.0, 5)]
    assert list(result.scores) == [10]


def test_step_result_without_logprobs():
    output = SchedulerOutput((ScheduledSequence(1, 0, ints(1), ints(1), (sample(1), sample(1, 1))),))
    batch = build_forward_batch(output, 16)
    empty = np.zeros(0, np.int32)
    rows = SampledRows(
        np.array([3, 4], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), empty, np.zeros(0, np.float32)
    )
    result = step_result(output, batch, rows)
    assert (result.token_ids, result.logprobs, result.scores) == ([3, 4], [None, None], {})


def test_windowed_groups_have_pages_and_slots_of_their_own():
    def tables(*pages):
        return tuple(ints(*table) for table in pages)

    first = ScheduledSequence(1, 5, ints(7, 8, 9), ints(1, 2), window_tables=tables((0, 11), (0, 12)))
    second = ScheduledSequence(2, 0, ints(3), ints(4), window_tables=tables((13,), (14,)))
    batch = build_forward_batch(SchedulerOutput((first, second)), 4)
    assert batch.page_offsets.tolist() == [0, 2, 3]
    assert batch.page_indices.reshape(3, -1).tolist() == [[1, 2, 4], [0, 11, 13], [0, 12, 14]]
    assert batch.slots.reshape(3, -1).tolist() == [[9, 10, 11, 16], [45, 46, 47, 52], [49, 50, 51, 56]]


def test_window_tables_of_another_length_are_refused():
    bad = ScheduledSequence(1, 0, ints(7), ints(1, 2), window_tables=(ints(3),))
    with pytest.raises(ValueError, match="differ in length"):
        build_forward_batch(SchedulerOutput((bad,)), 4)
