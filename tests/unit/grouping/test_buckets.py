"""Which calls of a group go together, and the places of their parts, without ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkmpi.runtime.grouping.buckets import (
    BucketLayout,
    Item,
    Piece,
    UsedMemory,
    conflict,
    layout,
    numbered,
    runs,
    together,
)
from blinkmpi.runtime.grouping.group import is_list

LENGTHS = st.lists(st.integers(0, 100), max_size=12)


def test_places() -> None:
    found = layout((10, 0, 16, 1), 2, 16)
    assert found == BucketLayout((10, 0, 16, 1), (0, 16, 16, 32), 48, 2)
    assert found.nbytes == 96
    assert found.pieces() == (
        Piece(0, 0, 10, 0), Piece(2, 0, 16, 16), Piece(3, 0, 1, 32),
        Piece(0, 10, 10, 48), Piece(2, 16, 16, 64), Piece(3, 1, 1, 80),
    )  # fmt: skip


@given(LENGTHS, st.integers(1, 4), st.sampled_from((1, 4, 16)))
def test_pieces_cover_the_buffers_and_never_overlap(lengths: list[int], blocks: int, aligned: int) -> None:
    """Each byte of each buffer has a place of its own, in the bucket's block of its block."""
    found = layout(lengths, blocks, aligned)
    taken = np.zeros(found.nbytes, int)
    seen = [np.zeros(length * blocks, int) for length in lengths]
    for piece in found.pieces():
        assert piece.nbytes
        assert piece.place % aligned == 0
        taken[piece.place : piece.place + piece.nbytes] += 1
        seen[piece.buffer][piece.offset : piece.offset + piece.nbytes] += 1
        block = piece.offset // lengths[piece.buffer]
        assert block * found.stride <= piece.place < piece.place + piece.nbytes <= (block + 1) * found.stride
    assert taken.max(initial=0) <= 1
    assert all((one == 1).all() for one in seen)
    assert found.stride <= sum(lengths) + aligned * len(lengths)


def test_calls_of_one_kind_go_together() -> None:
    a, b, big = Item("a", 10), Item("b", 10), Item("a", 100)
    assert together([a, a, b, a, b], 100, 1000) == [(0, 1, 3), (2, 4)]
    assert together([a, big, a], 100, 1000) == [(0, 2), (1,)]
    assert together([a] * 5, 100, 25) == [(0, 1), (2, 3), (4,)]
    assert together([a, b, Item(None, 0), a, b], 100, 1000) == [(0,), (1,), (2,), (3,), (4,)]
    assert together([], 100, 1000) == []


@given(st.lists(st.tuples(st.sampled_from("ab") | st.none(), st.integers(0, 40)), max_size=30))
def test_every_call_is_made_once_and_in_order(given: list[tuple[str | None, int]]) -> None:
    items = [Item(*one) for one in given]
    found = together(items, 30, 60)
    assert sorted(itertools.chain(*found)) == list(range(len(items)))
    assert [row[0] for row in found] == sorted(row[0] for row in found)
    for row in found:
        assert list(row) == sorted(row)
        assert len({items[i].kind for i in row}) == 1
        assert len(row) == 1 or sum(items[i].nbytes for i in row) <= 60
        assert len(row) == 1 or max(items[i].nbytes for i in row) < 30
    for fence in (i for i, item in enumerate(items) if item.kind is None):
        assert not any(min(row) < fence < max(row) for row in found)


def test_conflicts() -> None:
    read, write = UsedMemory(100, 10, False), UsedMemory(100, 10, True)
    assert conflict([[read], [read]]) is None
    assert conflict([[read, write]]) is None, "a call in place"
    assert conflict([[read], [write]]) == (0, 1)
    assert conflict([[write], [UsedMemory(109, 1, False)]]) == (0, 1)
    assert conflict([[write], [UsedMemory(110, 1, True)], [UsedMemory(100, 0, True)]]) is None
    assert conflict([[UsedMemory(0, 1000, False)], [UsedMemory(10, 5, False)], [UsedMemory(500, 1, True)]]) == (0, 2)


SPANS = st.lists(
    st.lists(st.builds(UsedMemory, st.integers(0, 40), st.integers(0, 8), st.booleans()), max_size=2), max_size=6
)


@given(SPANS)
def test_conflicts_are_found(spans: list[list[UsedMemory]]) -> None:
    """As by a look at each pair of bytes."""

    def meet(one: UsedMemory, other: UsedMemory) -> bool:
        both = range(max(one.at, other.at), min(one.at + one.nbytes, other.at + other.nbytes))
        return len(both) > 0 and (one.written or other.written)

    pairs = {
        (i, j)
        for (i, some), (j, others) in itertools.combinations(enumerate(spans), 2)
        for one in some
        for other in others
        if meet(one, other)
    }
    found = conflict(spans)
    assert (found in pairs) if pairs else found is None


def test_numbers_in_words() -> None:
    assert runs([4, 4, 4, 7]) == "3 times 4 + 7"
    assert numbered([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert numbered([]) == runs([]) == ""


@pytest.mark.parametrize(("arg", "found"), [
    ([np.zeros(3)], True),
    ([np.zeros(3), np.array([1, 2])], True),
    ([bytearray(3), memoryview(b"abc")], True),
    ([np.zeros(3), 2], False),
    ([np.zeros(3), np.int64(2)], False),
    ([np.zeros(3), np.array(2)], False),
    ([np.zeros(3), (1, 2)], False),
    ((np.zeros(3), np.zeros(3)), False),
    ([], False),
    (np.zeros((2, 2)), False),
])  # fmt: skip
def test_lists_of_buffers_and_specifications_of_one(arg: object, found: bool) -> None:
    assert is_list(arg) is found
