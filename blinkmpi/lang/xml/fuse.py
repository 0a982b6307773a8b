"""From one sequence of moves to thread blocks of MSCCL's XML: fuse, share out, and add the dependencies.

The sequence is a run of the file (:mod:`.export`): each message is sent right before it is received. A step that
receives is fused with a later one that sends the same value on, which moves that message forward; only as far as on
each connection messages are received in the order in which they are sent, and no more than two are under way. So the
sequence stays a run of the file, for connections of two slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed

from ..flow import Goal
from .file import READS, WRITES, Place, XmlBlock, XmlGpu, XmlStep
from .values import Key

UNDER_WAY = 2  # messages on a connection; every executor holds as many
FUSED = {"r": "rcs", "rrc": "rrcs"}
Keys = Callable[[int, str, int], Key]
Pair = tuple[int, int, int, int]  # rank, channel, the rank that it receives from, the one that it sends to


@dataclass(slots=True)
class Move:
    """A step before it has a thread block."""

    rank: int
    type: str
    src: Place | None
    dst: Place | None
    count: int
    channel: int
    send: int = -1
    recv: int = -1


@dataclass(slots=True)
class _BlockDraft:
    """A thread block in the making; ``waits`` are (block, index of its move), by move."""

    send: int
    recv: int
    channel: int
    moves: list[Move] = field(default_factory=list)
    waits: list[list[tuple[int, int]]] = field(default_factory=list)


def gpus_of(moves: Sequence[Move], goal: Goal, key: Keys) -> tuple[XmlGpu, ...]:
    """Every rank's thread blocks for a sequence of moves.

    Args:
        key: from (rank, buffer, chunk) to a place, to see which accesses meet.
    """
    sequence = _compact(_fused(moves), goal.n)
    pairs = {(m.rank, m.channel, m.recv): m.send for m in sequence if m.send >= 0 and m.recv >= 0}
    found = []
    for rank in range(goal.n):
        own = [m for m in sequence if m.rank == rank]
        blocks = _shared_out(own, {(c, recv): send for (r, c, recv), send in pairs.items() if r == rank})
        _depend(own, blocks, rank, key)
        cells = [p[1] + m.count for m in own for p in (m.src, m.dst) if p is not None and p[0] == "s"]
        found.append(XmlGpu(goal.given[rank], len(goal.wanted[rank]), max(cells, default=0), _finished(blocks)))
    return tuple(found)


# ---------------------------------------------------------------- fuse


def _fused(moves: Sequence[Move]) -> list[Move]:
    """Join what receives a value with what sends it on."""
    when = _in_order(moves, dict(_choose(moves)))
    made = {
        into: changed(moves[into], type=FUSED[moves[into].type], send=moves[out].send) for out, into in when.items()
    }
    sequence = [made.get(i, move) for i, move in enumerate(moves) if i not in when]
    read: list[set[tuple[str, int]]] = [set() for _ in range(1 + max((m.rank for m in moves), default=0))]
    for move in sequence:
        for place in (move.src, move.dst if move.type == "re" else None):
            if place is not None:
                read[move.rank] |= {(place[0], place[1] + c) for c in range(move.count)}
    for move in sequence:
        buffer, chunk = move.dst or ("", 0)
        cells = ((buffer, chunk + c) for c in range(move.count))
        if move.type == "rrcs" and buffer == "s" and read[move.rank].isdisjoint(cells):
            move.type, move.dst = "rrs", None
    return sequence


def _choose(moves: Sequence[Move]) -> list[tuple[int, int]]:
    """(move that sends, move that receives what it sends), where one thread block can have both."""
    last: dict[tuple[int, Place, int], int] = {}  # who wrote a place last
    found: dict[Pair, list[tuple[int, int]]] = {}
    for i, move in enumerate(moves):
        if move.type == "s" and move.src is not None:
            writer = last.get((move.rank, move.src, move.count))
            if writer is not None and moves[writer].type in FUSED and moves[writer].channel == move.channel:
                found.setdefault((move.rank, move.channel, moves[writer].recv, move.send), []).append((i, writer))
        if move.dst is not None:
            last[move.rank, move.dst, move.count] = i
    receives: set[tuple[int, int, int]] = set()
    sends: set[tuple[int, int, int]] = set()
    chosen: dict[int, int] = {}
    for (rank, channel, recv, send), couples in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        if (rank, channel, recv) in receives or (rank, channel, send) in sends:
            continue
        receives.add((rank, channel, recv))
        sends.add((rank, channel, send))
        for out, into in couples:
            chosen.setdefault(into, out)
    return [(out, into) for into, out in chosen.items()]


def _in_order(moves: Sequence[Move], when: dict[int, int]) -> dict[int, int]:
    """Those of the couples whose message neither passes another one nor fills its connection, sent as early as this.

    A long message goes in pieces. It may be sent on early only where all who pass it on work at the same time: they
    follow each other in the sequence, each on a rank of its own.
    """
    kept: dict[int, int] = {}
    sent: dict[tuple[int, int, int], list[int]] = {}  # on each connection, in the order in which they are received
    passed: dict[int, set[int]] = {}  # a move that receives: the ranks that have worked on its message at its time
    for i, move in enumerate(moves):
        if move.type != "s":
            continue
        out = sent.setdefault((move.rank, move.send, move.channel), [])
        early = when.get(i, i)
        before = [k for k in out[-UNDER_WAY:] if k + 1 > early]  # received after that
        under_way = sum(moves[k].count for k in before) + move.count
        together = early == i - 1 and not before and move.send not in passed[early]
        if early < i and ((out and early < kept.get(out[-1], out[-1])) or (under_way > UNDER_WAY and not together)):
            early = i
        if early < i:
            kept[i] = early
        passed[i + 1] = {move.rank, move.send} | (passed[i - 1] if early == i - 1 else set())
        out.append(i)
    return kept


def _compact(moves: Sequence[Move], n: int) -> list[Move]:
    """Number the chunks of scratch anew, without those that nobody uses."""
    used: list[set[int]] = [set() for _ in range(n)]
    for move in moves:
        for place in (move.src, move.dst):
            if place is not None and place[0] == "s":
                used[move.rank] |= set(range(place[1], place[1] + move.count))
    numbers = [{chunk: i for i, chunk in enumerate(sorted(of))} for of in used]

    def moved(rank: int, place: Place | None) -> Place | None:
        return ("s", numbers[rank][place[1]]) if place is not None and place[0] == "s" else place

    return [changed(m, src=moved(m.rank, m.src), dst=moved(m.rank, m.dst)) for m in moves]


# ---------------------------------------------------------------- thread blocks


def _shared_out(own: Sequence[Move], pairs: dict[tuple[int, int], int]) -> list[_BlockDraft]:
    """One thread block for each connection, or for two that are fused; what is local goes with its last message."""
    senders = {(channel, send): recv for (channel, recv), send in pairs.items()}
    blocks: dict[tuple[int, int, int], _BlockDraft] = {}
    home: dict[Place, tuple[int, int, int]] = {}
    for move in own:
        if move.recv >= 0:
            name = (move.channel, pairs.get((move.channel, move.recv), -1), move.recv)
        elif move.send >= 0:
            name = (move.channel, move.send, senders.get((move.channel, move.send), -1))
        else:
            name = home.get(move.dst, (move.channel, -1, -1)) if move.dst is not None else (move.channel, -1, -1)
        if move.dst is not None:
            home[move.dst] = name
        blocks.setdefault(name, _BlockDraft(name[1], name[2], name[0])).moves.append(move)
    return [blocks[name] for name in sorted(blocks)]


def _depend(own: Sequence[Move], blocks: Sequence[_BlockDraft], rank: int, key: Keys) -> None:
    """Find what each move must wait for in other thread blocks: who wrote what it reads or writes, who reads it."""
    number = {id(move): (b, i) for b, block in enumerate(blocks) for i, move in enumerate(block.moves)}
    writer: dict[Key, tuple[int, int]] = {}
    readers: dict[Key, dict[int, int]] = {}
    knows: list[dict[int, int]] = [{} for _ in blocks]  # how far each has seen the others
    seen: dict[tuple[int, int], dict[int, int]] = {}
    for move in own:
        b, i = number[id(move)]
        reads, writes = _accessed(move, rank, key)
        before: dict[int, int] = {}
        for place in (*reads, *writes):
            if place in writer:
                _later(before, *writer[place])
        for place in writes:
            for other, at in readers.get(place, {}).items():
                _later(before, other, at)
        waits = []
        for other, at in sorted(before.items()):
            if other != b and knows[b].get(other, -1) < at:
                waits.append((other, at))
        for other, at in waits:
            for third, far in (*seen[other, at].items(), (other, at)):
                _later(knows[b], third, far)
        seen[b, i] = dict(knows[b])
        blocks[b].waits.append(waits)
        for place in writes:
            writer[place] = (b, i)
            readers.pop(place, None)
        for place in reads:
            readers.setdefault(place, {})[b] = i


def _later(far: dict[int, int], block: int, at: int) -> None:
    far[block] = max(far.get(block, -1), at)


def _accessed(move: Move, rank: int, key: Keys) -> tuple[list[Key], list[Key]]:
    src = [] if move.src is None else [key(rank, move.src[0], move.src[1] + c) for c in range(move.count)]
    dst = [] if move.dst is None else [key(rank, move.dst[0], move.dst[1] + c) for c in range(move.count)]
    return src + (dst if move.type == "re" else []), dst


def _finished(blocks: Sequence[_BlockDraft]) -> tuple[XmlBlock, ...]:
    """Steps with their numbers; whoever waits for several steps has a nop for each but the last."""
    numbers: dict[tuple[int, int], int] = {}
    for b, block in enumerate(blocks):
        step = 0
        for i, waits in enumerate(block.waits):
            step += max(0, len(waits) - 1)
            numbers[b, i] = step
            step += 1
    awaited = {pair for block in blocks for waits in block.waits for pair in waits}
    found = []
    for b, block in enumerate(blocks):
        steps: list[XmlStep] = []
        for i, (move, waits) in enumerate(zip(block.moves, block.waits, strict=True)):
            named = [(other, numbers[other, at]) for other, at in waits]
            steps += [XmlStep("nop", depid=other, deps=at) for other, at in named[:-1]]
            other, at = named[-1] if named else (-1, -1)
            steps.append(XmlStep(
                move.type, _kept(move.src, move.type in READS), _kept(move.dst, move.type in WRITES), move.count,
                other, at, (b, i) in awaited,
            ))  # fmt: skip
        found.append(XmlBlock(block.send, block.recv, block.channel, tuple(steps)))
    return tuple(found)


def _kept(place: Place | None, there: bool) -> Place | None:
    assert (place is not None) == there, "a move has the places that its type needs"
    return place
