"""Where things lie in the memory that every rank maps of every other, and which user buffers are mapped too.

An arena is one allocation: a head (``struct Arena`` in ``common.cuh``), flags of
channels, boxes for packets, boxes for packets in lines, slots of channels. A program's channels are placed
by the same rule on every rank, so nobody has to tell anybody where they are.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ...errors import ArgumentError, DeviceError
from ...program.ir import Program, Stage
from .device import Gpu

MAX_RANKS = 16  # as the head of the arena has lines
LINE = 128
HEAD_BYTES = 64 << 10
MAX_CTAS = 256  # of a call by ``direct``
FLAG_BYTES = 1 << 20
BOX_BYTES = 256 << 10  # of one source's packets, in one stage of one set: half of it is data
LINES_BYTES = 40 << 20  # for all boxes of packets in lines of 128 bytes
SETS, STAGES = 2, 2
ARENA_BYTES = 104 << 20
HOST_SHARE = 4  # CTAs for a byte by the host path, of those for one by NVLink
HOST_BYTES = 64 << 20  # of slots in host memory, for all ranks
NET_BYTES, NET_FLAG_BYTES = 127 << 20, 1 << 20  # of a rank: for slots of channels to other nodes, and for their flags
MAX_REGIONS = 1024
OFFSET_BITS = 48


BOXES_AT = HEAD_BYTES + FLAG_BYTES


def lines_at(n: int) -> int:
    """Where boxes for packets in lines begin in an arena of ``n`` ranks."""
    return BOXES_AT + SETS * STAGES * n * BOX_BYTES


def line_box_bytes(n: int) -> int:
    """Bytes of one source's lines, in one stage of one set."""
    return LINES_BYTES // (SETS * STAGES * n) // LINE * LINE


def slots_at(n: int) -> int:
    """Where slots begin in an arena of ``n`` ranks."""
    return lines_at(n) + LINES_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """A channel: offsets of slots and head flags in the reader's arena, of tail flags in the writer's.

    With ``hosted`` the slots lie in host memory that all ranks share; with ``far`` slots and flags lie in two places
    of the rank's own, where messages to and from another node find them: see :class:`~.far.Port`.
    """

    writer: int
    reader: int
    slots: int
    heads: int
    tails: int
    slot_bytes: int
    hosted: bool = False
    far: bool = False


def most_stages(program: Program) -> int:
    """Stages of the rank that has the most: the fewest CTAs with which a program runs."""
    return max(Counter(stage.rank for stage in program.stages).values(), default=0)


def groups(program: Program, ctas: int, hosted: Collection[int] = ()) -> dict[int, int]:
    """CTAs for each tree's stages, in proportion to what they move; no rank has more than ``ctas`` of them.

    Args:
        hosted: channels that take the host path: their trees get more, because each access takes longer.

    Raises:
        DeviceError: if a rank has more stages than that.
    """
    spans: dict[int, int] = {}
    chunks: dict[int, int] = {}
    stages: dict[int, dict[int, int]] = {}  # rank -> tree -> stages
    for stage in program.stages:
        spans[stage.tree] = max(spans.get(stage.tree, 0), stage.count)
        chunks[stage.tree] = max(chunks.get(stage.tree, 0), -(-stage.count // program.chunk_of(stage)))
        of = stages.setdefault(stage.rank, {})
        of[stage.tree] = of.get(stage.tree, 0) + 1
    for tree in {program.channels[c].tree for c in hosted}:
        spans[tree] *= HOST_SHARE
    taken = dict.fromkeys(spans, 1)
    used = {rank: sum(of.values()) for rank, of in stages.items()}
    if used and max(used.values()) > ctas:
        raise DeviceError(
            f"a rank has {max(used.values())} stages in {program.call.collective} by {program.scheme}, the GPU room "
            f"for {ctas} groups of threads; choose a scheme with fewer trees (BLINKMPI_ALGO)"
        )
    open_trees = set(spans)
    while open_trees:
        tree = max(open_trees, key=lambda t: (spans[t] / taken[t], -t))
        if taken[tree] < chunks[tree] and all(used[r] + of.get(tree, 0) <= ctas for r, of in stages.items()):
            taken[tree] += 1
            for rank, of in stages.items():
                used[rank] += of.get(tree, 0)
        else:
            open_trees.remove(tree)
    return taken


def place(
    program: Program,
    groups_of: dict[int, int],
    item: int,
    partial: int,
    arena_bytes: int,
    hosted: Collection[int] = (),
    far: Collection[int] = (),
    n: int = 0,
) -> list[Place]:
    """Place every channel of a program.

    Args:
        item, partial: bytes of an element, of a partial result.
        hosted: channels whose slots lie in host memory.
        far: channels to other nodes.
        n: ranks that share arenas, if they are not all of the call.

    Raises:
        DeviceError: if slots or flags do not fit; ArgumentError: if a channel has several readers.
    """
    n = n or program.call.n
    lines = [[0] * n for _ in range(n)]  # of flags in each arena, by the rank that raises them
    share = HOST_BYTES // n // LINE * LINE  # of host memory
    slots, hosts = [slots_at(n)] * n, [r * share for r in range(n)]
    chunk_of = {c: program.chunk_of(stage) for stage in program.stages for c in (*stage.ins, *stage.outs)}
    nets, net_lines = [0] * n, [0] * n
    places = []
    for c, channel in enumerate(program.channels):
        if len(channel.readers) != 1:
            raise ArgumentError("a GPU's memory does not multicast: plan for a machine of GPUs, not for shared memory")
        (reader,), writer, many = channel.readers, channel.writer, groups_of[channel.tree]
        size = _up(chunk_of[c] * (partial if channel.partial else item))
        if c in far:
            heads = net_lines[reader] * LINE
            places.append(Place(writer, reader, nets[reader], heads, heads + many * LINE, size, far=True))
            net_lines[reader] += 2 * many
            nets[reader] += many * program.depth * size
            continue
        heads, tails = _flags(lines[reader], writer, many), _flags(lines[writer], reader, many)
        taken = hosts if c in hosted else slots
        places.append(Place(writer, reader, taken[reader], heads, tails, size, c in hosted))
        taken[reader] += many * program.depth * size
    most, host = max(map(max, lines)) * LINE, max(at - r * share for r, at in enumerate(hosts))
    if max(nets) > NET_BYTES or max(net_lines) * LINE > NET_FLAG_BYTES:
        raise DeviceError(
            f"{program.call.collective} by {program.scheme} needs {max(nets)} bytes of slots and {max(net_lines)} "
            f"lines of flags to other nodes; a rank has {NET_BYTES} and {NET_FLAG_BYTES // LINE}: choose smaller chunks"
        )
    if max(slots) > arena_bytes or most > FLAG_BYTES // MAX_RANKS or host > share:
        raise DeviceError(
            f"{program.call.collective} by {program.scheme} needs {max(slots)} bytes of slots, {most} of flags, {host} "
            f"on the host; a rank has {arena_bytes}, {FLAG_BYTES // MAX_RANKS}, {share}; "
            "choose smaller chunks, fewer trees"
        )
    return places


def _flags(taken: list[int], by: int, many: int) -> int:
    """Where flags of an arena lie that rank ``by`` raises.

    Each rank raises words of its own, for its last flags of a call may land when all others are in the next call.
    Likewise host memory is a reader's own, who may still read when others, without it, are in the next call.
    """
    first, taken[by] = taken[by], taken[by] + many
    return HEAD_BYTES + by * (FLAG_BYTES // MAX_RANKS) + first * LINE


def stages_of(program: Program, rank: int, groups_of: dict[int, int]) -> list[tuple[Stage, int, int]]:
    """(stage, CTA in its group, CTAs of the group) of every CTA of a rank."""
    return [(stage, i, groups_of[stage.tree]) for stage in program.of(rank) for i in range(groups_of[stage.tree])]


@dataclass
class Region:
    """A registered buffer, and the allocation that holds it, as every rank's maps of it see it.

    ``parts`` are the (begin, end) that users registered of it, as often as they did.
    """

    index: int
    begin: int
    nbytes: int
    peers: tuple[int, ...]  # addresses of the ranks' allocations here; ours among them
    opened: tuple[int, ...]  # those to unmap
    parts: list[tuple[int, int]]


@dataclass
class Regions:
    """What is registered, in the order that all ranks share."""

    gpu: Gpu
    n: int
    table: int  # device memory: [region][MAX_RANKS] addresses
    known: dict[int, Region] = field(default_factory=dict)
    _free: list[int] = field(default_factory=lambda: list(range(MAX_REGIONS - 1, -1, -1)))

    def add(self, begin: int, nbytes: int, part: tuple[int, int], handles: Sequence[bytes], rank: int) -> Region:
        """Map every rank's allocation; called by all, on an idle communicator."""
        if not self._free:
            raise DeviceError(f"{MAX_REGIONS} buffers are registered, which is all there is room for; deregister some")
        opened = tuple(0 if r == rank else self.gpu.open(h) for r, h in enumerate(handles))
        peers = tuple(begin if r == rank else at for r, at in enumerate(opened))
        index = self._free.pop()
        self.gpu.upload(self.table + 8 * MAX_RANKS * index, struct.pack(f"{self.n}Q", *peers))
        region = self.known[index] = Region(index, begin, nbytes, peers, tuple(at for at in opened if at), [part])
        return region

    def ref(self, at: int, nbytes: int) -> int:
        """(region + 1) << 48 | offset of a buffer, or 0 if it is not registered."""
        for region in self.known.values():
            if any(first <= at and at + nbytes <= end for first, end in region.parts):
                return (region.index + 1) << OFFSET_BITS | (at - region.begin)
        return 0

    def seen_at(self, ref: int) -> list[int]:
        """Where every rank's buffer is, seen from here, if all lie as ours does."""
        if not ref:
            return [0] * self.n
        peers, offset = self.known[(ref >> OFFSET_BITS) - 1].peers, ref & (1 << OFFSET_BITS) - 1
        return [at + offset for at in peers]

    def drop(self, region: Region) -> None:
        """Unmap; the exporters free only after all ranks have done so."""
        for at in region.opened:
            self.gpu.shut(at)
        del self.known[region.index]
        self._free.append(region.index)


def _up(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
