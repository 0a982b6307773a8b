"""The lanes of a rank as runner.c reads them: rows of 64-bit integers (its ``struct cursor`` says which).

A lane whose values are read from its rank's own buffers (see cma.py) has no
slots to fill. If it has nothing else to do, its row only waits until its
readers have read; if it has, another row waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..program import Lane, Program
from .cma import Lent
from .window import CONTROL, Places, SharedWindow

COUNTER = 9  # where in a row the chunks done are counted
SEND_WORD, RECV_WORD = 2, 3  # of a rank's line: where its buffers are, for two calls by turns


@dataclass
class Rows:
    """Rows of all lanes of a rank, one after another."""

    words: list[int] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)  # of each row
    counters: list[int] = field(default_factory=list)  # where in ``words`` it counts
    waits: list[bool] = field(default_factory=list)  # whether the row only waits for readers


def rows_of(program: Program, places: Places, window: SharedWindow, lent: Mapping[int, Lent], itemsize: int) -> Rows:
    """The rows of ``window.rank``'s lanes; channels in ``lent`` are read from their writers' buffers."""
    rows = Rows()

    def turn(lane: Lane) -> int:
        """Of those who read one another's buffers, each begins with its neighbour's, and copies its own last."""
        source = program.channels[lane.ins[0]].writer if lane.ins else window.rank
        return (source - window.rank - 1) % program.call.n

    lanes = program.of(window.rank)
    for lane in sorted(lanes, key=turn) if lent and not program.call.op else lanes:
        ours = [c for c in lane.outs if c in lent]
        if len(ours) < len(lane.outs) or lane.store is not None:
            _row(rows, lane, program, places, window, lent, itemsize)
        if ours:
            head = [lane.count, -1, -1, 0, 0, 0, 0, 0, len(ours), 0, program.chunk_of(lane), 0]
            _add(rows, lane, [*head, *(w for c in ours for w in (0, 0, *_tails(c, places, window)))], waits=True)
    return rows


def _row(
    rows: Rows,
    lane: Lane,
    program: Program,
    places: Places,
    window: SharedWindow,
    lent: Mapping[int, Lent],
    itemsize: int,
) -> None:
    """The row that does a lane's work."""
    address = window.address
    partial_in = any(program.channels[c].partial for c in lane.ins)
    partial_out = any(program.channels[c].partial for c in lane.outs)
    heads = [address + 8 * places.heads[c] for c in lane.outs if c in lent]
    slots = [c for c in lane.outs if c not in lent]
    row = [lane.count, *(-1 if at is None else at * itemsize for at in (lane.local, lane.store)), int(lane.final)]
    row += [int(partial_in), int(partial_out), len(lane.fold), len(lane.ins), len(slots), 0]
    row += [program.chunk_of(lane), len(heads), *lane.fold]
    for c in lane.ins:
        head, tail = address + 8 * places.heads[c], address + 8 * places.tails[c][window.rank]
        if c in lent:
            writer, (buffer, offset) = program.channels[c].writer, lent[c]
            word = address + writer * CONTROL + 8 * (SEND_WORD if buffer == "send" else RECV_WORD)
            row += [0 if buffer == "send" else head, 0, tail, writer, word, offset * itemsize]
        else:
            row += [head, address + places.slots[c], tail, -1, 0, 0]
    row += heads
    for c in slots:
        row += [address + 8 * places.heads[c], address + places.slots[c], *_tails(c, places, window)]
    _add(rows, lane, row, waits=False)


def _tails(channel: int, places: Places, window: SharedWindow) -> list[int]:
    """How many readers a channel has, and the addresses of their tails."""
    tails = places.tails[channel].values()
    return [len(tails), *(window.address + 8 * tail for tail in tails)]


def _add(rows: Rows, lane: Lane, row: list[int], *, waits: bool) -> None:
    rows.counters.append(len(rows.words) + COUNTER)
    rows.words += row
    rows.lanes.append(lane)
    rows.waits.append(waits)
