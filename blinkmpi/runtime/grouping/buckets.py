"""Which calls of a group go together, and where their buffers' parts lie in a bucket. Pure; all ranks agree.

A bucket is memory of our own that stands for the buffers of many calls. Without blocks it has the buffers' parts one
after another. With a block for each rank, its block r has block r of every buffer, one after another: to the collective
that is one block.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

# By collective: whether its send buffer, and its receive buffer, have a block for each rank.
BLOCKS = {
    "broadcast": (False, False),
    "reduce": (False, False),
    "allreduce": (False, False),
    "gather": (False, True),
    "scatter": (True, False),
    "allgather": (False, True),
    "reduce_scatter": (True, False),
    "alltoall": (True, True),
}


class Piece(NamedTuple):
    """A contiguous part of a buffer and its place in a bucket, in bytes."""

    buffer: int  # which of the calls' buffers
    offset: int
    nbytes: int
    place: int


class BucketLayout(NamedTuple):
    """Where the parts of some buffers lie in a bucket, in bytes.

    Attributes:
        lengths: of each buffer, or of one of its blocks.
        places: of each in the bucket, or in a block of it.
        stride: of a block of the bucket.
        blocks: how many there are, of the bucket and of each buffer.
    """

    lengths: tuple[int, ...]
    places: tuple[int, ...]
    stride: int
    blocks: int

    @property
    def nbytes(self) -> int:
        """Of the bucket."""
        return self.stride * self.blocks

    def pieces(self) -> tuple[Piece, ...]:
        """What is copied between buffers and bucket; empty buffers have none."""
        return tuple(
            Piece(i, block * length, length, block * self.stride + place)
            for block in range(self.blocks)
            for i, (length, place) in enumerate(zip(self.lengths, self.places, strict=True))
            if length
        )


def layout(lengths: Sequence[int], blocks: int, aligned: int) -> BucketLayout:
    """Lay out buffers in their order.

    Args:
        lengths: in bytes, of each buffer or of one of its blocks.
        blocks: of each buffer; 1 for none.
        aligned: bytes that divide every place.
    """
    places, at = [], 0
    for length in lengths:
        places.append(at)
        at += -(-length // aligned) * aligned
    return BucketLayout(tuple(lengths), tuple(places), at, blocks)


class Item(NamedTuple):
    """A call of a group.

    Attributes:
        kind: what calls of one launch have in common; None: this one is made by itself, after all before it and before
            all behind it.
        nbytes: of its largest buffer.
    """

    kind: Hashable
    nbytes: int


def together(items: Sequence[Item], alone: int, most: int) -> list[tuple[int, ...]]:
    """Which calls of a group make a launch; launches are in the order of their first calls.

    Args:
        alone: bytes from which a call is a launch of its own, because copying it would take longer than that saves.
        most: bytes of all calls of a launch.
    """
    launches: list[list[int]] = []
    begun: dict[Hashable, tuple[list[int], int]] = {}
    for i, item in enumerate(items):
        if item.kind is None:
            begun.clear()
        found, nbytes = begun.get(item.kind, (None, 0))
        single = item.kind is None or item.nbytes >= alone
        if single or found is None or nbytes + item.nbytes > most:
            found, nbytes = [], 0
            launches.append(found)
        found.append(i)
        if not single:
            begun[item.kind] = (found, nbytes + item.nbytes)
    return [tuple(launch) for launch in launches]


class UsedMemory(NamedTuple):
    """Memory that a call uses: an address, bytes, and whether it is written."""

    at: int
    nbytes: int
    written: bool


def conflict(spans: Sequence[Sequence[UsedMemory]]) -> tuple[int, int] | None:
    """The indices of two calls of which one writes what the other reads or writes; None if there are none.

    Args:
        spans: for each call, the memory that it uses.
    """
    ordered = sorted((s.at, s.at + s.nbytes, s.written, i) for i, some in enumerate(spans) for s in some if s.nbytes)
    open_ends: list[tuple[int, bool, int]] = []  # of what may still overlap with what comes: end, written, call
    for begin, end, written, i in ordered:
        open_ends = [other for other in open_ends if other[0] > begin]
        for _, wrote, j in open_ends:
            if j != i and (written or wrote):
                return min(i, j), max(i, j)
        if not any(e >= end and w >= written and j == i for e, w, j in open_ends):
            open_ends.append((end, written, i))
    return None


def runs(values: Sequence[int]) -> str:
    """Numbers as people read them: what is repeated once, with how often."""
    counted = [(value, len(list(equal))) for value, equal in groupby(values)]
    return " + ".join(f"{count} times {value}" if count > 1 else str(value) for value, count in counted)


def numbered(values: Sequence[int]) -> str:
    """Ascending numbers as people read them: ``0-3, 7``."""
    rows = groupby(enumerate(values), lambda pair: pair[1] - pair[0])
    ends = [(first := next(row)[1], max((value for _, value in row), default=first)) for _, row in rows]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
