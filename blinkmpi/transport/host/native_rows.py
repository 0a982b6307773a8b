"""The stages of a rank as executor.c reads them: rows of 64-bit integers (its ``enum row`` says which).

A stage whose values are read from its rank's own buffers (see single_copy.py) has no slots to fill. If it has nothing
else to do, its row only waits until its readers have read; if it has, another row waits.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ...program.ir import Program, Stage
from ..control_pages import CONTROL, RECV_WORD, SEND_WORD
from .channel_layout import ChannelLayout
from .native import DONE_CHUNKS
from .shared_window import SharedWindow
from .single_copy import ExportedChunks


@dataclass
class Rows:
    """Rows of all stages of a rank, one after another."""

    words: list[int] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)  # of each row
    counters: list[int] = field(default_factory=list)  # where in ``words`` it counts
    waits: list[bool] = field(default_factory=list)  # whether the row only waits for readers


def rows_of(
    program: Program,
    layout: ChannelLayout,
    window: SharedWindow,
    exported: Mapping[int, ExportedChunks],
    itemsize: int,
    after: Mapping[Stage, tuple[int, ...]],
) -> Rows:
    """The rows of this rank's stages; channels in ``exported`` are read from their writers' buffers.

    Args:
        after: the channels of this rank on whose chunks a stage waits (:func:`...program.in_place.sent_before`).
    """
    rows = Rows()
    for stage, waits in row_order(program, window.pages.rank, exported):
        if not waits:
            _row(rows, stage, program, layout, window, exported, itemsize, after.get(stage, ()))
            continue
        ours = [c for c in stage.outs if c in exported]
        head = [stage.count, -1, -1, 0, 0, 0, 0, 0, len(ours), 0, program.chunk_of(stage), 0]
        _add(rows, stage, [*head, *(w for c in ours for w in (0, 0, *_tails(c, layout, window)))], waits=True)
    return rows


def row_order(program: Program, rank: int, exported: Collection[int]) -> Iterator[tuple[Stage, bool]]:
    """The rows of a rank, in order: their stages, and whether they only wait for readers."""

    def turn(stage: Stage) -> int:
        """Ranks that read one another's buffers each begin with the neighbour's, and copy their own block last."""
        source = program.channels[stage.ins[0]].writer if stage.ins else rank
        return (source - rank - 1) % program.call.n

    stages = program.of(rank)
    for stage in sorted(stages, key=turn) if exported and not program.call.op else stages:
        ours = [c for c in stage.outs if c in exported]
        if len(ours) < len(stage.outs) or stage.store is not None:
            yield stage, False
        if ours:
            yield stage, True


def _row(
    rows: Rows,
    stage: Stage,
    program: Program,
    layout: ChannelLayout,
    window: SharedWindow,
    exported: Mapping[int, ExportedChunks],
    itemsize: int,
    after: tuple[int, ...],
) -> None:
    """The row that does a stage's work."""
    address, rank = window.pages.address, window.pages.rank
    heads = [address + 8 * layout.heads[c] for c in stage.outs if c in exported]
    slots = [c for c in stage.outs if c not in exported]
    row = [stage.count, *(-1 if at is None else at * itemsize for at in (stage.local, stage.store)), int(stage.final)]
    row += [int(program.channels[slots[0]].wide), layout.strides[slots[0]]] if slots else [0, 0]
    row += [len(stage.fold), len(stage.ins) + len(after), len(slots), 0]
    row += [program.chunk_of(stage), len(heads), *stage.fold]
    for c in stage.ins:
        head, tail = address + 8 * layout.heads[c], address + 8 * layout.tails[c][rank]
        if c in exported:
            writer, (buffer, offset) = program.channels[c].writer, exported[c]
            word = address + writer * CONTROL + 8 * (SEND_WORD if buffer == "send" else RECV_WORD)
            row += [0 if buffer == "send" else head, 0, tail, writer, word, offset * itemsize]
        else:
            # in one shot the announcement says that the slot is full
            flag = 0 if program.one_shot else head
            row += [flag, address + layout.slots[c], tail, -1, int(program.channels[c].wide), layout.strides[c]]
    for c in after:
        row += [address + 8 * layout.heads[c], address + 8 * min(layout.tails[c].values()), 0, -1, 0, 0]
    row += heads
    for c in slots:
        row += [address + 8 * layout.heads[c], address + layout.slots[c], *_tails(c, layout, window)]
    _add(rows, stage, row, waits=False)


def _tails(channel: int, layout: ChannelLayout, window: SharedWindow) -> list[int]:
    """How many readers a channel has, and the addresses of their tails."""
    tails = layout.tails[channel].values()
    return [len(tails), *(window.pages.address + 8 * tail for tail in tails)]


def _add(rows: Rows, stage: Stage, row: list[int], *, waits: bool) -> None:
    rows.counters.append(len(rows.words) + DONE_CHUNKS)
    rows.words += row
    rows.stages.append(stage)
    rows.waits.append(waits)
