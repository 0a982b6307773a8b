"""A program as one CPU rank executes it: addresses in the shared window instead of channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanError
from ...program.call import Call
from ...program.in_place import sent_before
from ...program.ir import ONE_SHOT, Program, Stage
from ...program.partition import NodePart, ShotMessages, messages_of, part_of
from ...program.reduction import accumulator_of, dtype_of
from ..control_pages import CONTROL, HEADS, LINE
from ..events import TracedProgram
from ..network.endpoints import Endpoint, Endpoints, tag_of
from ..recorder import Recorder, Tally
from . import native
from .channel_layout import ChannelLayout
from .native_rows import rows_of
from .numpy_executor import NumpyStage
from .shared_window import MESSAGE_BYTES, SharedWindow, WindowLayout
from .shots import NodeShots
from .single_copy import ExportedChunks, Helper, exported_channels, in_long_chunks
from .traffic import BLOCKS, traffic_of, traffic_of_blocks

if TYPE_CHECKING:
    from ...program.blocks import BlockMoves
    from .block_memory import BlockMemory

ExecutorName = Literal["c", "numpy"]
NUMPY_SHIFT = 16  # where malloc puts a large array in its page: glibc's memcpy is slow across other distances
# Results of calls on more memory than this are written past the caches. From trials on one machine, whose last-level
# cache is larger, but has to hold what other ranks and programs use, too.
CACHE_BYTES = 32 << 20


@dataclass
class HostProgram:
    """What executes a program on one rank. It keeps no program, which may be large, but can ask for it again."""

    make: Callable[[], Program]  # the whole job's program
    executor: ExecutorName
    rows: NDArray[np.int64]  # the rank's stages as executor.c has them
    struct: native.CallStruct  # a call of the program, without buffers and number
    endpoints: Endpoints  # ends of channels between nodes
    steps: list[NumpyStage]  # the rank's stages, where NumPy executes them
    exports: tuple[bool, bool]  # whether others read this rank's send, its receive buffer
    cma: bool  # whether some rank's buffer is read by others
    trees: int  # how many trees it has, for the log
    chunk_bytes: int
    depth: int
    tally: Tally  # what a call adds to the counters
    timing: NDArray[np.int64]  # times of the rows in a traced call
    sends: NDArray[np.int64]  # the messages that the first rank of a node sends in one shot
    make_through_slots: Callable[[], Program] | None = None  # for a call in which some rank's buffer cannot be read
    through_slots: HostProgram | None = None  # that program
    aside: bool = False  # whether a call in place must send copies, because it would overwrite what was not sent

    def said(self, scheme: str) -> str:
        """How it moves a call's data, for the log."""
        if scheme == BLOCKS:
            return f"blocks, {'long ones by cma' if self.cma else 'one shot'}, {self.executor} executor"
        if self.struct.one_shot:
            return f"one shot, {self.executor} executor"
        slots = "chunks by cma" if self.cma else f"x {self.depth} slots"
        return f"{scheme}, {self.trees} trees, {self.chunk_bytes} B {slots}, {self.executor} executor"


def tell(struct: native.CallStruct, shots: NodeShots | None, sent: ShotMessages | None) -> NDArray[np.int64]:
    """Tell the C executor what to send other nodes in one shot: nothing but headers if ``sent`` is None."""
    if shots is None or not struct.one_shot:
        return np.zeros(0, np.int64)
    sends = shots.sends(sent.messages if sent is not None else {})
    struct.nodes, struct.sends = shots.address, sends.ctypes.data
    return sends


def nothing_to_move(
    window: SharedWindow, recorder: Recorder, collective: str, shots: NodeShots | None = None
) -> HostProgram:
    """What C executes of a call without data: the ranks meet and compare what they announce, and that is all."""
    struct = native.CallStruct()
    struct.one_shot = 1
    place(struct, window)
    sends = tell(struct, shots, None)
    empty = Program(Call("barrier", window.pages.n, (0,), ""), ONE_SHOT, 1, 1, (), ())
    tally, nothing = recorder.tally({("collective", collective): (0, 1)} if collective else {}), np.zeros(0, np.int64)
    _count(struct, tally, nothing, recorder, TracedProgram(collective, ()))
    return HostProgram(
        lambda: empty, "c", nothing, struct, Endpoints([]), [], (False, False), False, 0, 0, 1, tally, nothing, sends
    )


def of_blocks(
    moves: BlockMoves, memory: BlockMemory, window: SharedWindow, helper: Helper, recorder: Recorder
) -> HostProgram:
    """What C executes of a call of blocks, but for their places."""
    struct = native.CallStruct()
    rank, n = window.pages.rank, window.pages.n
    moved = sum(nbytes for places in (moves.sends, moves.receives) for _, nbytes in places)
    struct.one_shot, struct.item, struct.acc, struct.chunk, struct.depth = 1, 1, 1, moved, 1
    struct.stages = 2 * n  # rows, of a trace
    struct.nontemporal = not moves.in_place and 2 * n * moves.nbytes > CACHE_BYTES
    place(struct, window)
    cma = any(memory.protocol(moves, nbytes) == "cma" for _, nbytes in (*moves.sends, *moves.receives))
    if memory.gains_by_help(moves):
        struct.helper = helper.started()
    traffic = traffic_of_blocks(moves, rank, partial(memory.protocol, moves))
    tally, timing = recorder.tally(traffic.moved, traffic.times), np.zeros(native.TIMING * 2 * n, np.int64)
    _count(struct, tally, timing, recorder, TracedProgram(moves.text, traffic.rows))
    none = Program(Call("barrier", n, (0,), ""), BLOCKS, 1, 1, (), ())
    nothing = np.zeros(0, np.int64)
    return HostProgram(
        lambda: none, "c", nothing, struct, Endpoints([]), [], (False, False), cma, 0, 0, 1, tally,
        timing, nothing,
    )  # fmt: skip


def _count(
    struct: native.CallStruct, tally: Tally, timing: NDArray[np.int64], recorder: Recorder, traced: TracedProgram
) -> None:
    """Tell the C executor what a call adds to the counters, and where it records a traced one."""
    struct.tally, struct.tallies = tally.words.ctypes.data, len(tally.words) // 3
    struct.times, struct.timed, struct.timing = tally.times.ctypes.data, len(tally.times) // 2, timing.ctypes.data
    struct.trace, struct.program = recorder.address, recorder.add(traced)


def load(
    make: Callable[[], Program],
    window: SharedWindow,
    library: native.Native | None,
    helper: Helper,
    recorder: Recorder,
    shots: NodeShots | None,
    *,
    cma: bool,
) -> HostProgram:
    """Resolve a program's channels to addresses in ``window``.

    Args:
        make: gives the program.
        library: the C executor; without it NumPy executes everything.
        shots: the messages of calls in one shot, if there are several nodes.
        cma: whether what lies in its writer's buffer is read from there.

    Raises:
        NoRoom: if the window has no room for it.
    """
    resolved = resolve(make(), window, library, cma=cma)
    part, program, call, rank = resolved.part, resolved.program, resolved.program.call, window.pages.rank
    layout = resolved.layout
    window.need(layout.written[rank], layout.read[rank], layout.used[rank], one_shot=bool(program.one_shot))
    item, acc = dtype_of(call.dtype).itemsize, accumulator_of(call.dtype).itemsize
    stages, codes, exported = program.of(rank), resolved.codes, resolved.exported
    after = resolved.after or {}
    rows = rows_of(program, resolved.layout, window, exported, item, after)
    rounds = any(program.channels[c].wide for stage in stages for c in (*stage.ins, *stage.outs))
    folds = any(len(stage.fold) > 1 or stage.final for stage in (program.stages if program.one_shot else stages))
    in_c = library is not None and (codes is not None or not (folds or (item != acc and rounds)))
    struct = native.CallStruct()
    struct.dtype, struct.op = codes or (0, 0)
    struct.stages, struct.item, struct.acc = len(rows.stages), item, acc
    struct.chunk, struct.depth = program.chunk, program.depth
    struct.divide = call.n if call.op == "avg" else 0
    struct.nontemporal = past_caches(call)
    struct.one_shot = program.one_shot
    struct.cma, struct.helper = bool(exported), helper.address(program, exported)
    place(struct, window)
    sends = tell(struct, shots, resolved.sent)
    done_by = [*zip(rows.stages, rows.waits, strict=True)] if in_c else [(stage, False) for stage in stages]
    traffic = traffic_of(part, program, rank, exported, done_by)
    tally = recorder.tally(traffic.moved, traffic.times)
    timing = np.zeros(native.TIMING * len(done_by), np.int64)
    _count(struct, tally, timing, recorder, TracedProgram(call.text, traffic.rows))
    mine = {at.buffer for c, at in exported.items() if program.channels[c].writer == rank}
    return HostProgram(
        make,
        "c" if in_c else "numpy",
        np.array(rows.words, np.int64),
        struct,
        endpoints_of(part, resolved.layout, window),
        [] if in_c else [NumpyStage(stage, program, resolved.layout, window, after.get(stage, ())) for stage in stages],
        ("send" in mine, "recv" in mine),
        bool(exported),
        len({channel.tree for channel in program.channels}),
        program.chunk * item,
        program.depth,
        tally,
        timing,
        sends,
        aside=resolved.after is None,
    )


def past_caches(call: Call) -> bool:
    """Whether results are written past the caches: where these cannot hold the buffers of all ranks anyway.

    What the system copies from another process never is. In place a block has just been read, so it lies in them.
    """
    return not call.in_place and 2 * call.n * call.nbytes > CACHE_BYTES


@dataclass
class Resolved:
    """A program of this node's ranks, with the places of its channels."""

    part: NodePart
    program: Program
    layout: ChannelLayout
    codes: tuple[int, int] | None  # of type and operation, as executor.c numbers them
    exported: dict[int, ExportedChunks]  # channels that are read from their writers' buffers
    after: dict[Stage, tuple[int, ...]] | None  # :func:`.sent_before` of this rank, in a call in place
    sent: ShotMessages | None = None  # what the nodes send one another in one shot


def resolve(whole: Program, window: WindowLayout, library: native.Native | None, *, cma: bool) -> Resolved:
    """Cut this node's part out of a program and lay out its channels; the same on every rank of the node."""
    part = part_of(whole, window.pages.here)
    call = part.program.call
    item, acc = dtype_of(call.dtype).itemsize, accumulator_of(call.dtype).itemsize
    codes = native.codes(call.dtype, call.op) if library else None
    exported = exported_channels(part.program) if cma and (codes or not call.op) else {}
    program = in_long_chunks(part.program, exported, item)
    sent = messages_of(whole, window.firsts) if program.one_shot and len(window.nodes) > 1 else None
    if sent is not None and not (codes or not call.op):
        raise PlanError(f"between nodes, no {call.dtype} goes in one shot; choose a scheme of trees (BLINKMPI_ALGO)")
    places = _in_messages(part, whole, sent, window) if sent is not None else {}
    layout = ChannelLayout(program, window, item, acc, 0 if library else NUMPY_SHIFT, exported, places)
    after = (None if exported else sent_before(program, window.pages.rank)) if call.in_place else {}
    return Resolved(part, program, layout, codes, exported, after, sent)


def _in_messages(
    part: NodePart, whole: Program, sent: ShotMessages, window: WindowLayout
) -> dict[int, tuple[int, int]]:
    """Where the slots lie, of channels of this node's part, that messages take to other nodes or bring from there."""
    room, here = window.longest_message, window.pages.here
    every = max(map(sent.memory, window.nodes))
    if sent.longest > room or every > MESSAGE_BYTES or sent.near > window.one_shot_bytes // 2:  # the same on every node
        raise PlanError(f"a message between nodes would have {sent.longest} bytes, of {room}, and all of them {every}; "
                        "choose a scheme of trees (BLINKMPI_ALGO)")  # fmt: skip
    if len(whole.channels) > HEADS:
        raise PlanError(f"{len(whole.channels)} channels are too many for one shot between nodes; choose a scheme of "
                        "trees (BLINKMPI_ALGO)")  # fmt: skip
    found: dict[int, tuple[int, int]] = {}
    for c, far in part.far.items():
        writer, at = whole.channels[far.channel].writer, sent.slots[far.channel]
        if writer in here:
            found[c] = window.sent() + at, MESSAGE_BYTES
        else:
            source = window.firsts[writer]
            found[c] = window.received(source) + at - sent.messages[source, here[0]][0], MESSAGE_BYTES
    return found


def fits(program: Program, window: WindowLayout, library: native.Native | None, *, cma: bool) -> bool:
    """Whether the channels of a program find room in the window; the same on every rank."""
    try:
        resolve(program, window, library, cma=cma)
    except PlanError:
        return False
    return True


def place(struct: native.CallStruct, window: SharedWindow) -> None:
    """Tell the C executor where the control pages are."""
    pages = window.pages
    struct.n, struct.rank, struct.stride = pages.n, pages.rank, CONTROL // 8
    struct.calls = pages.address
    for turn in (0, 1):
        setattr(struct, f"records[{turn}]", pages.address + pages.record(0, turn))
    struct.heartbeat = pages.address + pages.rank * CONTROL + LINE
    struct.pids = pages.address + 2 * LINE
    struct.abort = pages.address + 3 * LINE


@dataclass(frozen=True)
class Progress:
    """How far a stage is: what it waits for, if it only waits for readers, and the first chunk that is not done."""

    stage: Stage
    chunk: int
    waits: bool


def progress_of(loaded: HostProgram, resolved: Resolved, window: SharedWindow) -> list[Progress]:
    """How far each of this rank's stages is in the call under way."""
    if loaded.executor == "numpy":
        return [Progress(step.stage, step.k, waits=False) for step in loaded.steps]
    item = dtype_of(resolved.program.call.dtype).itemsize
    rows = rows_of(resolved.program, resolved.layout, window, resolved.exported, item, resolved.after or {})
    done = [int(loaded.rows[at]) for at in rows.counters]
    return [Progress(*each) for each in zip(rows.stages, done, rows.waits, strict=True)]


def endpoints_of(part: NodePart, layout: ChannelLayout, window: SharedWindow) -> Endpoints:
    """The endpoints, in shared memory, of this rank's channels to other nodes."""
    program, rank, found = part.program, window.pages.rank, []
    for stage in () if program.one_shot else program.of(rank):  # in one shot, all slots go in one message
        for c in (*stage.ins, *stage.outs):
            if c not in part.far:
                continue
            kind = (accumulator_of if program.channels[c].wide else dtype_of)(program.call.dtype)
            chunk, total = program.chunk_of(stage) * kind.itemsize, stage.count * kind.itemsize
            starts = [layout.slots[c] + k * layout.strides[c] for k in range(program.depth)]
            slots = [window.bytes[at : at + chunk] for at in starts]
            to, tag = part.far[c].rank, tag_of(part.far[c].channel)
            head, tail = layout.heads[c], layout.tails[c][rank]
            found.append(Endpoint(c in stage.outs, to, tag, window.pages.words, head, tail, slots, chunk, total))
    return Endpoints(found)
