"""Which files go first, against a model that searches through all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pinnate.kvcache.tiers.disk_index import DiskIndex, FileId

LIMIT = 10
moves = st.lists(
    st.tuples(st.sampled_from("armf"), st.sampled_from("xy"), st.integers(0, 6), st.integers(0, 6), st.integers(1, 4)),
    max_size=40,
)


@given(moves)
def test_order_sizes_and_limits(steps: list[tuple[str, str, int, int, int]]) -> None:
    index = DiskIndex(LIMIT)
    model: list[tuple[FileId, int]] = []  # oldest first
    for move, folder, key, parent, size in steps:
        file = FileId(folder, str(key), str(parent))
        held = [entry for entry in model if entry[0][:2] == file[:2]]
        if move == "a":
            for gone in index.make_room(size):
                parents = {(f.folder, f.parent) for f, _ in model}
                leaves = [f for f, _ in model if (f.folder, f.key) not in parents]
                assert gone == (leaves[0] if leaves else model[0][0])
                model = [entry for entry in model if entry[0] != gone]
            assert sum(s for _, s in model) + size <= LIMIT
            model = [entry for entry in model if entry[0][:2] != file[:2]] + [(file, size)]
            index.add(file, size)
        elif move == "r":
            removed = index.remove(folder, str(key))
            assert removed == (held[0][0] if held else None)
            model = [entry for entry in model if entry not in held]
        elif move == "m":
            index.touch(folder, str(key))
            model = [entry for entry in model if entry not in held] + held
        elif size == 4:
            index.remove_folder(folder)
            model = [entry for entry in model if entry[0].folder != folder]
        assert index.num_bytes == sum(s for _, s in model)
        assert len(index) == len(model)
        assert all((f.folder, f.key) in index for f, _ in model)
        for name in "xy":
            assert index.count(name) == sum(f.folder == name for f, _ in model)


def test_pages_that_continue_a_page_go_before_it() -> None:
    index = DiskIndex(3)
    for key, parent in (("1", "0"), ("2", "1"), ("3", "2")):
        index.add(FileId("x", key, parent), 1)
    assert index.make_room(2) == [FileId("x", "3", "2"), FileId("x", "2", "1")]


def test_names_that_form_a_circle_go_too() -> None:
    index = DiskIndex(2)
    index.add(FileId("x", "1", "2"), 1)
    index.add(FileId("x", "2", "1"), 1)
    assert index.make_room(2) == [FileId("x", "1", "2"), FileId("x", "2", "1")]
