"""Calls by packets that carry their own flags: their formats, and who sends what to whom. Pure, as all of a plan is.

In one shot a rank sends its stream to everyone who needs it. In two, each
owner gets a slice of the vector from all, folds it, and gives it to all who
want it: two steps, but no link carries a whole vector for every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ArgumentError
from ...program.call import Call
from ...program.reduction import dtype_of
from .memory_layout import BOX_BYTES, LINE, line_box_bytes

UNIT = 16  # bytes that one thread sends of a stream
LINE_UNITS = 7  # of a line; the eighth is its flag
TWO_SHOTS = ("allreduce", "reduce", "broadcast")  # what takes them


@dataclass(frozen=True, slots=True)
class Packets:
    """How a protocol carries a call: in ``lines`` of 128 bytes or in packets of 16, in two shots or in one."""

    lines: bool
    two_shot: bool


PROTOCOLS = {
    "ll16_one_shot": Packets(lines=False, two_shot=False),
    "ll16_two_shot": Packets(lines=False, two_shot=True),
    "ll128_one_shot": Packets(lines=True, two_shot=False),
    "ll128_two_shot": Packets(lines=True, two_shot=True),
}


@dataclass(frozen=True, slots=True)
class Streams:
    """What one rank sends and takes; masks are by rank. As ``struct Packets`` of packets.cu has it."""

    nbytes: int  # of a stream
    send_stride: int  # bytes between the streams for two peers; 0: all get the same
    recv_stride: int  # between the streams of two sources; 0: they are folded
    send_mask: int
    recv_mask: int
    owners: int = 0  # of slices, in two shots
    out_mask: int = 0
    in_mask: int = 0
    keep: bool = True  # whether what is folded belongs into the receive buffer


def streams(call: Call, rank: int, *, two_shot: bool = False) -> Streams:
    """What a rank sends and takes in a call.

    Raises:
        ArgumentError: for a reduce-scatter of uneven blocks, or two shots of what takes one.
    """
    n = call.n
    nbytes = call.counts[0] * dtype_of(call.dtype).itemsize
    everyone, me, root = (1 << n) - 1, 1 << rank, 1 << max(call.root, 0)
    others, at_root, kind = everyone & ~me, rank == max(call.root, 0), call.collective
    if two_shot and kind not in TWO_SHOTS:
        raise ArgumentError(f"{kind} takes one shot; two are for {', '.join(TWO_SHOTS)}")
    if two_shot:
        owners = everyone if kind == "allreduce" else everyone & ~root
        if kind == "allreduce":
            return Streams(nbytes, 0, 0, others, everyone, owners, others, others)
        if kind == "reduce":
            if at_root:
                return Streams(nbytes, 0, 0, owners, 0, owners, 0, owners, keep=False)
            return Streams(nbytes, 0, 0, owners & ~me, everyone, owners, root, 0, keep=False)
        if at_root:
            return Streams(nbytes, 0, 0, owners, 0, owners)
        return Streams(nbytes, 0, 0, 0, root, owners, owners & ~me, owners & ~me)
    if kind == "allreduce":
        return Streams(nbytes, 0, 0, others, everyone)
    if kind == "allgather":
        return Streams(nbytes, 0, nbytes, others, everyone)
    if kind == "reduce_scatter":
        if len(set(call.counts)) > 1:
            raise ArgumentError("packets carry equal blocks only; use slots for uneven ones")
        return Streams(nbytes, nbytes, 0, others, everyone)
    if kind == "broadcast":
        return Streams(nbytes, 0, 0, others if at_root else 0, 0 if at_root else root)
    if kind == "scatter":
        return Streams(nbytes, nbytes, 0, others if at_root else 0, root)
    stride = nbytes if kind == "gather" else 0
    return Streams(nbytes, 0, stride, 0 if at_root else root, everyone if at_root else 0)


def longest_slice(call: Call, *, two_shot: bool) -> int:
    """Units of 16 bytes that one rank may send to one other in one shot."""
    units = -(-call.counts[0] * dtype_of(call.dtype).itemsize // UNIT)
    owners = call.n - (call.collective != "allreduce") if two_shot else 1
    return -(-units // max(owners, 1))


def places(units: int, packets: Packets) -> int:
    """Threads that a slice takes: in a line, every eighth carries the flag."""
    return -(-units // LINE_UNITS) * (LINE // UNIT) if packets.lines else units


def fits(call: Call, protocol: str) -> bool:
    """Whether a protocol of packets can carry a call: one of a kind that it knows, and short enough for the boxes."""
    packets = PROTOCOLS[protocol]
    if call.collective == "reduce_scatter" and len(set(call.counts)) > 1:
        return False
    alone = call.n <= 2 and call.collective != "allreduce"  # one owner at most, which a shot reaches
    if packets.two_shot and (call.collective not in TWO_SHOTS or alone):
        return False
    units = longest_slice(call, two_shot=packets.two_shot)
    if packets.lines:
        return UNIT * places(units, packets) <= line_box_bytes(call.n)
    return 2 * UNIT * units <= BOX_BYTES
