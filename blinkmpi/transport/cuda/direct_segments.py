"""Which bytes of a one-hop call each GPU carries by ``direct``. Pure, and the same on every rank."""

from __future__ import annotations

import math

from ...program.call import Call
from ...program.reduction import dtype_of

Segment = tuple[int, int, int, int, int]  # source mask, target mask, bytes before it in each, its bytes


def segment(call: Call, rank: int) -> Segment:
    """What a rank carries of a call by ``direct``: every rank an equal part of the vector, its own block, or a piece.

    Broadcast and Reduce cut the vector among all but the root, whose link would be the narrow place otherwise.
    """
    n, item = call.n, dtype_of(call.dtype).itemsize
    everyone, me = (1 << n) - 1, 1 << rank
    kind, root = call.collective, max(call.root, 0)
    if kind == "allreduce":
        begin, size = _part(call.total * item, n, rank)
        return everyone, everyone, begin, begin, size
    if kind == "reduce_scatter":
        start, count = call.block(rank)
        return everyone, me, start * item, 0, count * item
    start, count = call.block(rank)
    if kind == "allgather":
        return me, everyone, 0, start * item, count * item
    if kind == "gather":
        return me, 1 << root, 0, start * item, count * item
    if kind == "scatter":
        return 1 << root, me, start * item, 0, count * item
    if n == 1:
        return (1, 1, 0, 0, call.total * item) if kind == "reduce" else (0, 0, 0, 0, 0)
    if rank == root:
        return 0, 0, 0, 0, 0
    begin, size = _part(call.total * item, n - 1, rank - (rank > root))
    if kind == "broadcast":
        return 1 << root, everyone & ~(1 << root), begin, begin, size
    return everyone, 1 << root, begin, begin, size


def in_blocks(call: Call) -> Call:
    """The first half of an allreduce: a reduce-scatter of nearly equal blocks that begin on lines of 128 bytes."""
    (count,), line = call.counts, 128 // dtype_of(call.dtype).itemsize
    each = -(-count // (call.n * line)) * line
    counts = tuple(min(each, max(count - r * each, 0)) for r in range(call.n))
    return Call("reduce_scatter", call.n, counts, call.dtype, call.op)


def spread(blocks: Call, rank: int) -> Segment:
    """The second half: a rank's block of the result, from its receive buffer to the same place in all others'."""
    start, count = blocks.block(rank)
    begin, size = (x * dtype_of(blocks.dtype).itemsize for x in (start, count))
    return 1 << rank, ((1 << blocks.n) - 1) & ~(1 << rank), begin, begin, size


def _part(nbytes: int, parts: int, index: int) -> tuple[int, int]:
    """(begin, bytes) of one of ``parts`` nearly equal parts, each but the last a multiple of 128 bytes."""
    each = math.ceil(nbytes / parts / 128) * 128
    begin = min(index * each, nbytes)
    return begin, min(each, nbytes - begin)
