"""Which bytes of a one-hop call each GPU carries: by ``direct``, and by packets. Pure, and the same on every rank."""

from __future__ import annotations

import math

from ...errors import ArgumentError
from ...numerics import dtype_of
from ...program import Call
from .arena import BOX_BYTES

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


def packet_streams(call: Call, rank: int) -> tuple[int, int, int, int, int]:
    """(bytes of a stream, send stride, receive stride, send mask, receive mask) of a call by packets."""
    n, item = call.n, dtype_of(call.dtype).itemsize
    others, everyone = ((1 << n) - 1) & ~(1 << rank), (1 << n) - 1
    kind, root = call.collective, max(call.root, 0)
    nbytes = call.counts[0] * item
    at_root = rank == root
    if kind == "allreduce":
        return nbytes, 0, 0, others, everyone
    if kind == "allgather":
        return nbytes, 0, nbytes, others, everyone
    if kind == "reduce_scatter":
        if len(set(call.counts)) > 1:
            raise ArgumentError("packets carry equal blocks only; use slots for uneven ones")
        return nbytes, nbytes, 0, others, everyone
    if kind == "broadcast":
        return nbytes, 0, 0, others if at_root else 0, 0 if at_root else 1 << root
    if kind == "scatter":
        return nbytes, nbytes, 0, others if at_root else 0, 1 << root
    if kind == "gather":
        return nbytes, 0, nbytes, 0 if at_root else 1 << root, everyone if at_root else 0
    return nbytes, 0, 0, 0 if at_root else 1 << root, everyone if at_root else 0


def fits_packets(call: Call, *, two_shot: bool) -> bool:
    """Whether a call is short enough for packets, and of the kind that takes two shots."""
    units = -(-call.counts[0] * dtype_of(call.dtype).itemsize // 16)
    if two_shot:
        return call.collective == "allreduce" and 32 * -(-units // call.n) <= BOX_BYTES
    return 32 * units <= BOX_BYTES


def by_packets(call: Call) -> bool:
    """Whether packets can carry a call."""
    return call.collective != "reduce_scatter" or len(set(call.counts)) == 1
