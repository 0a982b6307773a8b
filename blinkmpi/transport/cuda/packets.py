"""The GPU protocols of low latency (LL16 and LL128 packets, in one or two shots): who sends what to whom.

Pure; all ranks agree. The kernels are ``kernels/ll16.cuh``, ``ll128.cuh`` and ``packets.cu``.

In ``one_shot`` a rank sends its stream to every rank that needs it. In
``two_shot`` each owner gets a slice of the vector from all ranks, reduces it,
and sends it to all that want it: two steps, but no link carries a whole vector
for every rank.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ...errors import ArgumentError
from ...program.call import Call
from ...program.reduction import dtype_of
from .memory_layout import LINE, LL16_AT, LL16_BUFFER_BYTES, ll128_at, ll128_buffer_bytes

PACK_BYTES = 16  # what one thread sends of a stream at a time
TWO_SHOTS = ("allreduce", "reduce", "broadcast")  # the collectives that ``two_shot`` can do


@dataclass(frozen=True, slots=True)
class Codec:
    """How packs and flags share an LL buffer: of ``group`` positions side by side, ``data`` carry a pack each."""

    name: str  # of the struct in kernels/
    group: int
    data: int
    position_bytes: int

    def positions(self, packs: int) -> int:
        """Positions, and so threads, that some packs take."""
        return -(-packs // self.data) * self.group


LL16 = Codec("LL16", 1, 1, 2 * PACK_BYTES)
LL128 = Codec("LL128", LINE // PACK_BYTES, LINE // PACK_BYTES - 1, PACK_BYTES)


@dataclass(frozen=True, slots=True)
class PacketProtocol:
    """A codec and an algorithm."""

    codec: Codec
    two_shot: bool


PROTOCOLS = {
    "ll16_one_shot": PacketProtocol(LL16, two_shot=False),
    "ll16_two_shot": PacketProtocol(LL16, two_shot=True),
    "ll128_one_shot": PacketProtocol(LL128, two_shot=False),
    "ll128_two_shot": PacketProtocol(LL128, two_shot=True),
}


def ll_buffers(codec: Codec, n: int) -> tuple[int, int]:
    """Where a codec's LL buffers begin in symmetric memory, and the bytes of one: for a source, in a shot of a set."""
    return (ll128_at(n), ll128_buffer_bytes(n)) if codec is LL128 else (LL16_AT, LL16_BUFFER_BYTES)


class PacketStreams(NamedTuple):
    """What one rank sends and receives; masks are by rank. As ``struct PacketArguments`` of exchange.cuh has it."""

    nbytes: int  # of a stream
    send_stride: int  # bytes between the streams for two peers; 0: all get the same
    recv_stride: int  # between the streams of two sources; 0: they are reduced
    send_mask: int
    recv_mask: int
    owners: int = 0  # of slices, in two_shot
    out_mask: int = 0
    in_mask: int = 0
    keep: bool = True  # whether the reduced slice belongs into the receive buffer


def streams(call: Call, rank: int, *, two_shot: bool = False) -> PacketStreams:
    """What a rank sends and receives in a call.

    Raises:
        ArgumentError: for blocks of several lengths, a scan, or a collective that ``two_shot`` cannot do.
    """
    n = call.n
    nbytes = call.counts[0] * dtype_of(call.dtype).itemsize
    everyone, me, root = (1 << n) - 1, 1 << rank, 1 << max(call.root, 0)
    others, at_root, kind = everyone & ~me, rank == max(call.root, 0), call.collective
    if two_shot and kind not in TWO_SHOTS:
        raise ArgumentError(f"{kind} takes one shot; two are for {', '.join(TWO_SHOTS)}")
    if kind in ("scan", "exscan") or not call.even:
        raise ArgumentError(f"{kind}: packets carry equal blocks only, and no scans; use slots for uneven ones")
    if two_shot:
        owners = everyone if kind == "allreduce" else everyone & ~root
        if kind == "allreduce":
            return PacketStreams(nbytes, 0, 0, others, everyone, owners, others, others)
        if kind == "reduce":
            if at_root:
                return PacketStreams(nbytes, 0, 0, owners, 0, owners, 0, owners, keep=False)
            return PacketStreams(nbytes, 0, 0, owners & ~me, everyone, owners, root, 0, keep=False)
        if at_root:
            return PacketStreams(nbytes, 0, 0, owners, 0, owners)
        return PacketStreams(nbytes, 0, 0, 0, root, owners, owners & ~me, owners & ~me)
    if kind == "allreduce":
        return PacketStreams(nbytes, 0, 0, others, everyone)
    if kind == "allgather":
        return PacketStreams(nbytes, 0, nbytes, others, everyone)
    if kind == "reduce_scatter":
        return PacketStreams(nbytes, nbytes, 0, others, everyone)
    if kind == "broadcast":
        return PacketStreams(nbytes, 0, 0, others if at_root else 0, 0 if at_root else root)
    if kind == "scatter":
        return PacketStreams(nbytes, nbytes, 0, others if at_root else 0, root)
    if kind == "alltoall":
        return PacketStreams(nbytes, nbytes, nbytes, others, everyone)
    stride = nbytes if kind == "gather" else 0
    return PacketStreams(nbytes, 0, stride, 0 if at_root else root, everyone if at_root else 0)


def longest_slice(call: Call, *, two_shot: bool) -> int:
    """The most packs that one rank sends to another in a shot."""
    packs = -(-call.counts[0] * dtype_of(call.dtype).itemsize // PACK_BYTES)
    owners = call.n - (call.collective != "allreduce") if two_shot else 1
    return -(-packs // max(owners, 1))


def fits(call: Call, protocol: str) -> bool:
    """Whether a protocol over packets can carry a call: its collective and blocks, and the size of LL buffers."""
    codec, two_shot = PROTOCOLS[protocol].codec, PROTOCOLS[protocol].two_shot
    if call.collective in ("scan", "exscan") or not call.even:
        return False
    single_owner = call.n <= 2 and call.collective != "allreduce"  # which one_shot reaches as well
    if two_shot and (call.collective not in TWO_SHOTS or single_owner):
        return False
    positions = codec.positions(longest_slice(call, two_shot=two_shot))
    return codec.position_bytes * positions <= ll_buffers(codec, call.n)[1]
