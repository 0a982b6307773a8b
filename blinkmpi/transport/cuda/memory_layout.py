"""The layout of symmetric memory, which every rank of a node maps of every other, and of registered buffers.

Each rank allocates symmetric memory once: a header (``struct SymmetricHeader`` in ``layout.cuh``), flags of channels,
LL buffers of both codecs, slots of channels. The places of a program's channels follow from the program by the same
rule on every rank, so ranks exchange no addresses.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...errors import ArgumentError, DeviceError
from ...program.in_place import sent_before
from ...program.ir import Program, Stage

MAX_RANKS = 16  # of a node: the header has a line for each
MAX_CTAS = 256  # of a call by ``direct``
LINE = 128
HEAD_BYTES = 64 << 10
GIVEN_UP_AT = 136  # in the header: not 0 when a kernel of this rank gave up
ANNOUNCED_AT = 256  # in the header: a line for each peer's announcements
# Of how many last calls a line has the announcement. A peer that waits for nobody, as a sender may, can be ahead of the
# rank that compares: of two ranks by two calls (it has sent the next one's data, and announced the one after), of more
# ranks by more, through each other.
ANNOUNCED = 8
FLAG_BYTES = 1 << 20
SETS, SHOTS = 2, 2  # of LL buffers: two sets that take turns, each with buffers for both shots
LL16_BUFFER_BYTES = 256 << 10  # of one source's packets, in one shot of one set: half of it is data
LL128_BYTES = 40 << 20  # for all LL128 buffers of a rank
SYMMETRIC_BYTES = 104 << 20
ROOM = 32  # multiprocessors that are left to others: as many CTAs as NCCL's kernels have
HOST_SHARE = 4  # CTAs for a byte by the host path, for each one by NVLink
HOST_BYTES = 64 << 20  # of slots in host memory, for all ranks
NETWORK_BYTES = 127 << 20  # of a rank: for slots of network channels
NETWORK_FLAG_BYTES = 1 << 20  # for their flags
LL16_AT = HEAD_BYTES + FLAG_BYTES
MESSAGE_CTAS = 32  # of all messages that wait at once, as ROOM leaves them
MESSAGE_CHUNK = 64 << 10  # bytes of one, at most
MESSAGE_LANE = 16 << 10  # bytes of a message from which it has another lane
MESSAGE_DEPTH = 8  # slots of a lane
MESSAGE_FLAGS = 4  # lines of a lane beside its slots
BLOCK_CTAS = 96  # of a call of blocks
BLOCK_LANE = 16 << 10  # bytes of a block from which it has another lane
BLOCK_DEPTH = 4  # slots of a lane
BLOCK_LINES = 2  # for each other rank: the lengths that it announces, and the number of its calls with this one


def ll128_at(n: int) -> int:
    """Where LL128 buffers begin in the symmetric memory of ``n`` ranks."""
    return LL16_AT + SETS * SHOTS * n * LL16_BUFFER_BYTES


def ll128_buffer_bytes(n: int) -> int:
    """Bytes of one source's lines, in one shot of one set."""
    return LL128_BYTES // (SETS * SHOTS * n) // LINE * LINE


def message_lanes(n: int) -> int:
    """Lanes of a FIFO: so many that a message in each of them has its CTAs, to and from every other rank at once."""
    return max(1, MESSAGE_CTAS // (2 * max(n - 1, 1)))


def message_bytes(n: int) -> int:
    """Bytes of all FIFOs that end at a rank."""
    return (n - 1) * message_lanes(n) * _lane_bytes(MESSAGE_DEPTH)


def _lane_bytes(depth: int) -> int:
    return MESSAGE_FLAGS * LINE + depth * (MESSAGE_CHUNK + LINE)


def block_lanes(n: int) -> int:
    """Lanes of a block at most: so many that blocks to and from every other rank, and the own one, have their CTAs."""
    return max(1, BLOCK_CTAS // (2 * n - 1))


def block_bytes(n: int) -> int:
    """Bytes of what a rank has for calls of blocks: their FIFOs that end there, and what is announced."""
    return (n - 1) * (block_lanes(n) * _lane_bytes(BLOCK_DEPTH) + BLOCK_LINES * LINE)


def lanes_of_block(nbytes: int, most: int) -> int:
    """Lanes of a block; the kernel has the same rule."""
    return min(max(1, -(-nbytes // BLOCK_LANE)), most)


def lanes_for(nbytes: int, n: int) -> int:
    """Lanes of a message: the same at both ends, which have met nowhere. The kernel has its chunks follow from them."""
    return min(max(1, -(-nbytes // MESSAGE_LANE)), message_lanes(n))


def shape_text(nbytes: int, n: int) -> str:
    """How a message goes, in words."""
    lanes = lanes_for(nbytes, n)
    ahead = min(lanes * MESSAGE_DEPTH * MESSAGE_CHUNK, nbytes)
    return f"in {lanes} of {message_lanes(n)} lanes, {ahead} bytes before anybody receives them"


def slots_at(n: int) -> int:
    """Where slots begin in the symmetric memory of ``n`` ranks."""
    return ll128_at(n) + LL128_BYTES


@dataclass(frozen=True, slots=True)
class ChannelPlace:
    """Where a channel is: slots and head flags in the reader's symmetric memory, tail flags in the writer's.

    With ``in_host_memory`` the slots are in host memory that all ranks share. With ``network`` slots and flags are in
    the rank's own :class:`~.network_channels.NetworkBuffers`, where messages to and from another node find them.
    """

    writer: int
    reader: int
    slots: int
    heads: int
    tails: int
    slot_bytes: int
    in_host_memory: bool = False
    network: bool = False


def default_max_ctas(sms: int) -> int:
    """How many CTAs a kernel may have where the user does not say, on GPUs of so many multiprocessors."""
    return max(sms - ROOM, sms // 2, 1)


def most_stages(program: Program) -> int:
    """Stages of the rank that has the most: the fewest CTAs with which a program runs."""
    return max(Counter(stage.rank for stage in program.stages).values(), default=0)


def groups(program: Program, ctas: int, host_channels: Collection[int] = ()) -> dict[int, int]:
    """CTAs for each tree's stages, in proportion to what they move; no rank has more than ``ctas`` of them.

    A rank with more stages than that has one for each, as if there were as many CTAs. In place, blocks of one length
    have as many CTAs each, so that the one that sends a chunk and the one that stores another in its place go together.

    Args:
        host_channels: those that take the host path: their trees get more CTAs, because each access takes longer.
    """
    spans: dict[int, int] = {}
    chunks: dict[int, int] = {}
    stages: dict[int, dict[int, int]] = {}  # rank -> tree -> stages
    for stage in program.stages:
        spans[stage.tree] = max(spans.get(stage.tree, 0), stage.count)
        chunks[stage.tree] = max(chunks.get(stage.tree, 0), -(-stage.count // program.chunk_of(stage)))
        of = stages.setdefault(stage.rank, {})
        of[stage.tree] = of.get(stage.tree, 0) + 1
    for tree in {program.channels[c].tree for c in host_channels}:
        spans[tree] *= HOST_SHARE
    taken = dict.fromkeys(spans, 1)
    used = {rank: sum(of.values()) for rank, of in stages.items()}
    open_trees = set(spans)
    while open_trees:
        tree = max(open_trees, key=lambda t: (spans[t] / taken[t], -t))
        if taken[tree] < chunks[tree] and all(used[r] + of[tree] <= ctas for r, of in stages.items() if tree in of):
            taken[tree] += 1
            for rank, of in stages.items():
                used[rank] += of.get(tree, 0)
        else:
            open_trees.remove(tree)
    if program.call.in_place:
        fewest: dict[int, int] = {}
        for tree, many in taken.items():
            fewest[spans[tree]] = min(many, fewest.get(spans[tree], many))
        taken = {tree: fewest[spans[tree]] for tree in taken}
    return taken


def place(
    program: Program,
    groups_of: dict[int, int],
    item: int,
    partial: int,
    symmetric_bytes: int,
    host_channels: Collection[int] = (),
    network: Collection[int] = (),
    n: int = 0,
    room: Mapping[int, int] | None = None,
) -> list[ChannelPlace]:
    """ChannelPlace every channel of a program.

    Args:
        item, partial: bytes of an element, of a partial result.
        host_channels: those whose slots are in host memory.
        network: those that lead to other nodes.
        n: ranks of the node, if they are not all of the call.
        room: by tree, elements of a slot, if a chunk of the program may be shorter than one.

    Raises:
        DeviceError: if slots or flags do not fit; ArgumentError: if a channel has several readers.
    """
    n = n or program.call.n
    lines = [[0] * n for _ in range(n)]  # of flags at each rank, by the rank that raises them
    share = HOST_BYTES // n // LINE * LINE  # of host memory
    slots, hosts = [slots_at(n)] * n, [r * share for r in range(n)]
    chunk_of = {
        c: room[stage.tree] if room else program.chunk_of(stage)
        for stage in program.stages
        for c in (*stage.ins, *stage.outs)
    }
    wide = any(channel.wide for channel in program.channels)  # then all that a stage reduces have slots of one size
    networks, network_lines = [0] * n, [0] * n
    places = []
    for c, channel in enumerate(program.channels):
        if len(channel.readers) != 1:
            raise ArgumentError("a GPU's memory does not multicast: plan for a machine of GPUs, not for shared memory")
        (reader,), writer, many = channel.readers, channel.writer, groups_of[channel.tree]
        size = _up(chunk_of[c] * (partial if channel.partial and wide else item))
        if c in network:
            heads = network_lines[reader] * LINE
            places.append(
                ChannelPlace(writer, reader, networks[reader], heads, heads + many * LINE, size, network=True)
            )
            network_lines[reader] += 2 * many
            networks[reader] += many * program.depth * size
            continue
        heads, tails = _flags(lines[reader], writer, many), _flags(lines[writer], reader, many)
        taken = hosts if c in host_channels else slots
        places.append(ChannelPlace(writer, reader, taken[reader], heads, tails, size, c in host_channels))
        taken[reader] += many * program.depth * size
    most, host = max(map(max, lines)) * LINE, max(at - r * share for r, at in enumerate(hosts))
    if max(networks) > NETWORK_BYTES or max(network_lines) * LINE > NETWORK_FLAG_BYTES:
        raise DeviceError(
            f"{program.call.collective} by {program.scheme} needs {max(networks)} bytes of slots and "
            f"{max(network_lines)} lines of flags to other nodes; a rank has {NETWORK_BYTES} and "
            f"{NETWORK_FLAG_BYTES // LINE}: choose smaller chunks"
        )
    if max(slots) > symmetric_bytes or most > FLAG_BYTES // MAX_RANKS or host > share:
        raise DeviceError(
            f"{program.call.collective} by {program.scheme} needs {max(slots)} bytes of slots, {most} of flags, {host} "
            f"on the host; a rank has {symmetric_bytes}, {FLAG_BYTES // MAX_RANKS}, {share}; "
            "choose smaller chunks, fewer trees"
        )
    return places


def laid_out(
    program: Program, ctas: int, item: int, partial: int, symmetric_bytes: int, host_channels: Collection[int] = ()
) -> tuple[dict[int, int], list[ChannelPlace]]:
    """As :func:`groups` and :func:`place`; with fewer CTAs, if slots or flags of so many do not fit.

    Raises:
        DeviceError: if those of one CTA for each stage do not.
    """
    while True:
        groups_of = groups(program, ctas, host_channels)
        try:
            return groups_of, place(program, groups_of, item, partial, symmetric_bytes, host_channels)
        except DeviceError:
            if max(groups_of.values()) == 1:
                raise
            ctas //= 2


def _flags(taken: list[int], by: int, many: int) -> int:
    """Where the flags that rank ``by`` raises begin in some rank's symmetric memory.

    Each rank raises words of its own, because its last flags of a call may land when all others are in the next call.
    Likewise each reader has its own part of the slots in host memory, because it may still read its last chunk when
    the others are in the next call.
    """
    first, taken[by] = taken[by], taken[by] + many
    return HEAD_BYTES + by * (FLAG_BYTES // MAX_RANKS) + first * LINE


def stages_of(program: Program, rank: int, groups_of: dict[int, int]) -> list[tuple[Stage, int, int]]:
    """(stage, CTA in its group, CTAs of the group) of every CTA of a rank."""
    return [(stage, i, groups_of[stage.tree]) for stage in program.of(rank) for i in range(groups_of[stage.tree])]


def sent_first(program: Program, rank: int, groups_of: dict[int, int]) -> dict[Stage, int] | None:
    """Of an alltoall in place: for stages that store, the channel that carries what lies there, chunk by chunk.

    A CTA that stores follows the CTA that sends, round by round: they must be two, of one row each. None: the blocks
    must be copied before the call.
    """
    found = sent_before(program, rank)
    if found is None:
        return None
    sender = {c: stage for stage in program.of(rank) for c in stage.outs}
    rounds = {stage: (program.chunk_of(stage), groups_of[stage.tree]) for stage in program.of(rank)}
    pairs = [(stage, c) for stage, channels in found.items() for c in channels]
    if len(dict(pairs)) < len(pairs) or any(rounds[sender[c]] != rounds[stage] for stage, c in pairs):
        return None
    return dict(pairs)


def _up(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
