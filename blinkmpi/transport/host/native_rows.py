"""The stages of a rank as executor.c reads them: rows of 64-bit integers (its ``struct cursor`` says which).

A stage whose values are read from its rank's own buffers (see cma.py) has no
slots to fill. If it has nothing else to do, its row only waits until its
readers have read; if it has, another row waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...program.ir import Program, Stage
from .shared_window import CONTROL, Places, SharedWindow
from .single_copy import Lent

COUNTER = 9  # where in a row the chunks done are counted
SEND_WORD, RECV_WORD = 2, 3  # of a rank's line: where its buffers are, for two calls by turns


@dataclass
class Rows:
    """Rows of all stages of a rank, one after another."""

    words: list[int] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)  # of each row
    counters: list[int] = field(default_factory=list)  # where in ``words`` it counts
    waits: list[bool] = field(default_factory=list)  # whether the row only waits for readers


def rows_of(program: Program, places: Places, window: SharedWindow, lent: Mapping[int, Lent], itemsize: int) -> Rows:
    """The rows of ``window.rank``'s stages; channels in ``lent`` are read from their writers' buffers."""
    rows = Rows()

    def turn(stage: Stage) -> int:
        """Of those who read one another's buffers, each begins with its neighbour's, and copies its own last."""
        source = program.channels[stage.ins[0]].writer if stage.ins else window.rank
        return (source - window.rank - 1) % program.call.n

    stages = program.of(window.rank)
    for stage in sorted(stages, key=turn) if lent and not program.call.op else stages:
        ours = [c for c in stage.outs if c in lent]
        if len(ours) < len(stage.outs) or stage.store is not None:
            _row(rows, stage, program, places, window, lent, itemsize)
        if ours:
            head = [stage.count, -1, -1, 0, 0, 0, 0, 0, len(ours), 0, program.chunk_of(stage), 0]
            _add(rows, stage, [*head, *(w for c in ours for w in (0, 0, *_tails(c, places, window)))], waits=True)
    return rows


def _row(
    rows: Rows,
    stage: Stage,
    program: Program,
    places: Places,
    window: SharedWindow,
    lent: Mapping[int, Lent],
    itemsize: int,
) -> None:
    """The row that does a stage's work."""
    address = window.address
    partial_in = any(program.channels[c].partial for c in stage.ins)
    partial_out = any(program.channels[c].partial for c in stage.outs)
    heads = [address + 8 * places.heads[c] for c in stage.outs if c in lent]
    slots = [c for c in stage.outs if c not in lent]
    row = [stage.count, *(-1 if at is None else at * itemsize for at in (stage.local, stage.store)), int(stage.final)]
    row += [int(partial_in), int(partial_out), len(stage.fold), len(stage.ins), len(slots), 0]
    row += [program.chunk_of(stage), len(heads), *stage.fold]
    for c in stage.ins:
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
    _add(rows, stage, row, waits=False)


def _tails(channel: int, places: Places, window: SharedWindow) -> list[int]:
    """How many readers a channel has, and the addresses of their tails."""
    tails = places.tails[channel].values()
    return [len(tails), *(window.address + 8 * tail for tail in tails)]


def _add(rows: Rows, stage: Stage, row: list[int], *, waits: bool) -> None:
    rows.counters.append(len(rows.words) + COUNTER)
    rows.words += row
    rows.stages.append(stage)
    rows.waits.append(waits)
