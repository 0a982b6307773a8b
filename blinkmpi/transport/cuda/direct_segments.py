"""The segment of the vector that each GPU moves in a call by the protocol ``direct``. Pure; all ranks agree."""

from typing import NamedTuple

from ...program.call import BLOCKED, Call
from ...program.reduction import dtype_of


class Segment(NamedTuple):
    """Where a rank's segment comes from and goes to; masks are by rank. As ``struct DirectArguments`` has it."""

    src_mask: int
    dst_mask: int
    src_at: int  # bytes before it in the sources' send buffers
    dst_at: int  # and in the targets' receive buffers
    nbytes: int


def segment(call: Call, rank: int) -> Segment:
    """What a rank moves of a call: an equal part of the vector, or its own block.

    Broadcast and Reduce divide the vector among all ranks but the root, whose link would be the bottleneck otherwise.
    Of two ranks the root of a Reduce has all of it: what it loads crosses the link once, nothing goes the other way.
    """
    n, item = call.n, dtype_of(call.dtype).itemsize
    everyone, me = (1 << n) - 1, 1 << rank
    kind, root = call.collective, max(call.root, 0)
    if kind == "allreduce":
        begin, size = _part(call.total * item, n, rank)
        return Segment(everyone, everyone, begin, begin, size)
    if kind == "reduce_scatter":
        start, count = call.block(rank)
        return Segment(everyone, me, start * item, 0, count * item)
    start, count = call.block(rank)
    if kind == "allgather":
        return Segment(me, everyone, 0, start * item, count * item)
    if kind == "gather":
        return Segment(me, 1 << root, 0, start * item, count * item)
    if kind == "scatter":
        return Segment(1 << root, me, start * item, 0, count * item)
    if n <= 2 and kind == "reduce":
        return Segment(everyone, me, 0, 0, call.total * item) if rank == root else Segment(0, 0, 0, 0, 0)
    if n == 1 or rank == root:
        return Segment(0, 0, 0, 0, 0)
    begin, size = _part(call.total * item, n - 1, rank - (rank > root))
    if kind == "broadcast":
        return Segment(1 << root, everyone & ~(1 << root), begin, begin, size)
    return Segment(everyone, 1 << root, begin, begin, size)


def longest_segment(call: Call) -> int:
    """Bytes of the longest segment of all ranks."""
    if call.collective in BLOCKED:
        return max(call.counts) * dtype_of(call.dtype).itemsize
    return _part(call.nbytes, max(call.n - (call.collective != "allreduce"), 1), 0)[1]


def in_blocks(call: Call) -> Call:
    """The first half of an allreduce by ``rs_ag``: a reduce-scatter of nearly equal blocks, aligned to 128 bytes."""
    (count,), line = call.counts, 128 // dtype_of(call.dtype).itemsize
    each = -(-count // (call.n * line)) * line
    counts = [min(each, max(count - r * each, 0)) for r in range(call.n)]
    return Call("reduce_scatter", call.n, tuple(counts), call.dtype, call.op)


def spread(blocks: Call, rank: int) -> Segment:
    """The second half: a rank's block of the result goes to the same offset in all other receive buffers."""
    (start, count), item = blocks.block(rank), dtype_of(blocks.dtype).itemsize
    return Segment(1 << rank, ((1 << blocks.n) - 1) & ~(1 << rank), start * item, start * item, count * item)


def _part(nbytes: int, parts: int, index: int) -> tuple[int, int]:
    """(begin, bytes) of one of ``parts`` nearly equal parts, each but the last a multiple of 128 bytes."""
    each = -(-nbytes // (parts * 128)) * 128
    begin = min(index * each, nbytes)
    return begin, min(each, nbytes - begin)
