"""The memory plan never lets two buffers that are alive at once overlap."""

from hypothesis import given
from hypothesis import strategies as st

from pinnate.executor.native.instructions import Buffer, Gather, PagedAttention, buffers_of
from pinnate.executor.native.lowering import lower
from pinnate.executor.native.plan import ALIGNMENT, Lifetime, lifetimes_of, place, plan_arena
from tests.unit.executor.native_helpers import llama_graph

lifetimes = st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 12)).map(
    lambda t: Lifetime(t[0], t[1], t[1] + t[2])
)


def overlaps(offsets, lives):
    pairs = [(i, j) for i in range(len(lives)) for j in range(i)]
    return [
        (i, j)
        for i, j in pairs
        if lives[i].meets(lives[j])
        and offsets[i] < offsets[j] + lives[j].size
        and offsets[j] < offsets[i] + lives[i].size
    ]


@given(st.lists(lifetimes, max_size=40))
def test_buffers_alive_at_once_never_overlap(lives):
    offsets, total = place(lives)
    assert not overlaps(offsets, lives)
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert all(offset + life.size <= total for offset, life in zip(offsets, lives, strict=True))
    busiest = max((sum(x.size for x in lives if x.first <= t <= x.last) for t in range(43)), default=0)
    assert total >= busiest


@given(st.lists(lifetimes, min_size=1, max_size=40))
def test_memory_is_used_again(lives):
    """One buffer at a time needs the room of the largest alone."""
    in_turn = [Lifetime(life.size, i, i) for i, life in enumerate(lives)]
    largest = max(life.size for life in lives)
    assert place(in_turn)[1] < largest + ALIGNMENT


def test_the_plan_of_a_model():
    program = lower(llama_graph(layers=6), act_is_f32=False)
    rows = {"tokens": 100, "logits": 7}
    lives = lifetimes_of(program, rows, 2)
    plan = plan_arena(program, rows, 2)
    order = list(lives)
    assert not overlaps([plan.offsets[b] for b in order], [lives[b] for b in order])
    more_layers = plan_arena(lower(llama_graph(layers=12), act_is_f32=False), rows, 2)
    assert more_layers.size == plan.size


def test_buffers_of_a_stretch_between_two_attentions_are_alive_at_once():
    program = lower(llama_graph(layers=3), act_is_f32=False)
    lives = lifetimes_of(program, {"tokens": 10, "logits": 3}, 2)
    stretch: set[Buffer] = set()
    lengths = []
    for instruction in program.instructions:
        if isinstance(instruction, PagedAttention | Gather):
            lengths.append(len(stretch))
            stretch = set()
            continue
        stretch |= set(buffers_of(instruction))
        assert all(lives[a].meets(lives[b]) for a in stretch for b in stretch)
    assert len(lengths) == 4
    assert min(lengths) >= 4


def test_what_a_gather_reads_lives_through_the_logits_part():
    program = lower(llama_graph(), act_is_f32=False)
    lives = lifetimes_of(program, {"tokens": 10, "logits": 3}, 2)
    residual = program.instructions[0].out
    assert all(lives[residual].meets(life) for life in lives.values())
    assert lives[program.logits].size == 3 * program.logits.cols * 4
