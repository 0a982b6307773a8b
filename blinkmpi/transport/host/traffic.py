"""Bytes that a program moves on one rank, by name of a counter; and what each of its rows does, for the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.ir import Program, Stage
from ...program.partition import NodePart
from ...program.reduction import accumulator_of, dtype_of
from ..counters import Name
from ..events import TracedRow

if TYPE_CHECKING:
    from ...program.blocks import BlockMoves

BLOCKS = "blocks"  # in place of a scheme: calls of blocks take no plan's trees


@dataclass(frozen=True)
class Traffic:
    """(bytes, calls) of each counter in one call; by row, the counters of its working time; the rows for the trace."""

    moved: Mapping[Name, tuple[int, int]]
    times: Sequence[Sequence[Name]]
    rows: Sequence[TracedRow]


def traffic_of(
    part: NodePart, program: Program, rank: int, exported: Mapping[int, object], rows: Sequence[tuple[Stage, bool]]
) -> Traffic:
    """What ``rank`` moves in a call of a program.

    A link leads from the rank that writes a channel to each that reads it, whatever lies between. Of trees and
    protocols, a rank counts what it writes.

    Args:
        part: this node's part; ``program`` is the same with the chunks that are executed.
        exported: channels that are read from their writers' buffers.
        rows: the stage of each row, and whether the row only waits for readers.
    """
    call = program.call
    tree_of = {s.tree: ("tree", call.collective, call.root, program.scheme, s.tree) for s in program.stages}
    moved: Counter[Name] = Counter()

    comes = {c for c, far in part.far.items() if far.comes}  # from other nodes

    def width(channel: int) -> int:
        return int((accumulator_of if program.channels[channel].wide else dtype_of)(call.dtype).itemsize)

    def readers(c: int) -> tuple[int, ...]:
        found = part.far[c].readers if c in part.far else program.channels[c].readers
        return tuple(r for r in found if r != rank) if program.one_shot else found  # a rank's own slot crosses no link

    def writer(c: int) -> int:
        return part.far[c].rank if c in comes else program.channels[c].writer

    def protocol(c: int, reader: int) -> str:
        away = c in comes or (c in part.far and not (program.one_shot and reader in program.channels[c].readers))
        return "network" if away else "cma" if c in exported else "slots"

    for stage in program.of(rank):
        for c in stage.outs:
            for reader in readers(c):
                nbytes = stage.count * width(c)
                moved["link", rank, reader] += nbytes
                moved[tree_of[stage.tree]] += nbytes
                moved["protocol", protocol(c, reader)] += nbytes
        for c in (c for c in stage.ins if not program.one_shot or writer(c) != rank):
            moved["link", writer(c), rank] += stage.count * width(c)
            moved["protocol", "network" if c in comes else protocol(c, rank)] += 0
    moved["collective", call.collective] += call.nbytes

    def row(stage: Stage, waits: bool) -> TracedRow:
        item = dtype_of(call.dtype).itemsize
        ins = () if waits else tuple(((writer(c),), part.numbers[c]) for c in stage.ins)
        outs = tuple((readers(c), part.numbers[c]) for c in stage.outs if (c in exported) == waits)
        chunk = program.chunk_of(stage) * item
        return TracedRow(stage.tree, stage.way, stage.count * item, chunk, ins, outs, works=not waits)

    def times(found: TracedRow) -> list[Name]:
        links: list[Name] = [("link", source, rank) for sources, _ in found.ins for source in sources if source != rank]
        links += [("link", rank, reader) for targets, _ in found.outs for reader in targets]
        return [tree_of[found.tree], *dict.fromkeys(links)] if found.works else []

    found = [row(stage, waits) for stage, waits in rows]
    return Traffic({name: (nbytes, 1) for name, nbytes in moved.items()}, [times(each) for each in found], found)


def names_of_blocks(moves: BlockMoves, rank: int) -> list[Name]:
    """The counters of calls of such blocks, of whatever lengths; in the order of block_kinds.h."""
    call: Name = ("collective", moves.collective)
    tree: Name = ("tree", moves.collective, moves.root, BLOCKS, rank)
    ranks = range(len(moves.sends))  # a rank's own block is not counted
    out: list[Name] = [("link", rank, r) if r != rank else call for r in ranks]
    come: list[Name] = [("link", r, rank) if r != rank else call for r in ranks]
    return [call, tree, ("protocol", "slots"), ("protocol", "cma"), *out, *come]


def traffic_of_blocks(moves: BlockMoves, rank: int, protocol: Callable[[int], str]) -> Traffic:
    """What ``rank`` moves in a call of blocks; its rows are the blocks that come, by rank, then those that go.

    Args:
        protocol: how a block of so many bytes crosses.
    """
    n = len(moves.sends)
    others = tuple(r for r in range(n) if r != rank)
    sends, receives = ([nbytes for _, nbytes in places] for places in (moves.sends, moves.receives))
    tree: Name = ("tree", moves.collective, moves.root, BLOCKS, rank)
    moved: Counter[Name] = Counter({("collective", moves.collective): moves.nbytes})
    for r in others:
        for name in (("link", rank, r), tree, ("protocol", protocol(sends[r]))) if sends[r] else ():
            moved[name] += sends[r]
        for name in (("link", r, rank), ("protocol", protocol(receives[r]))) if receives[r] else ():
            moved[name] += receives[r] if name[0] == "link" else 0
    rows, times = [], []
    for r, nbytes in enumerate(receives):
        channel = r if moves.shared else r * n + rank
        rows.append(TracedRow(r, "down", nbytes, nbytes, (((r,), channel),) if r != rank else (), ()))
        times.append([("link", r, rank)] if nbytes and r != rank else [])
    for r, nbytes in enumerate(sends):
        targets = others if moves.shared and r == rank else (r,) if r != rank else ()
        channel = rank if moves.shared else rank * n + r
        rows.append(TracedRow(rank, "down", nbytes, nbytes, (), ((targets, channel),) if targets else ()))
        times.append([tree, *(("link", rank, t) for t in targets)] if nbytes and targets else [])
    return Traffic({name: (nbytes, 1) for name, nbytes in moved.items()}, times, rows)
