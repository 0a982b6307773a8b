"""A program with its addresses, ready to be executed by a rank; and a call of it on buffers that are known."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...program.ir import Program, Stage
from ...program.memory import Spot
from ...program.partition import Far, part_of
from ...program.reduction import accumulator_of, dtype_of
from ..announcement import fingerprint
from ..network.endpoints import Ends, ends_of
from . import native
from .native_rows import Rows, rows_of
from .numpy_executor import NumpyStage
from .shared_window import Places, SharedWindow, cache_bytes
from .single_copy import Helper, Lent, in_long_chunks, lent_channels

ExecutorName = Literal["c", "numpy"]
NUMPY_SHIFT = 16  # where malloc puts a large array in its page: glibc's memcpy is slow across other distances
CACHE_BYTES = cache_bytes()  # vectors that the caches cannot hold anyway are written past them


@dataclass
class Loaded:
    """A program, as far as it is this node's, as one rank executes it."""

    whole: Program  # as it was planned
    program: Program  # as far as it is this node's
    stages: tuple[Stage, ...]
    places: Places
    rows: Rows
    code: NDArray[np.int64]  # the rows as executor.c has them
    job: native.Job
    far: dict[int, Far]  # channels to other nodes
    code_at: int = 0
    lends: tuple[bool, bool] = (False, False)  # whether others read this rank's send, its receive buffer
    lent: dict[int, Lent] = field(default_factory=dict)  # channels that are read from their writers' buffers
    by_slots: Loaded | None = None  # for a call in which some rank's buffer cannot be read
    base: int = 0
    steps: list[NumpyStage] = field(default_factory=list)
    ends: Ends = field(default_factory=Ends)  # of channels between nodes
    executor: ExecutorName = "numpy"

    def progress(self) -> list[tuple[Stage, int, bool]]:
        """What is under way: (stage, chunks done, whether it only waits for readers)."""
        if self.executor == "numpy":
            return [(step.stage, step.k, False) for step in self.steps]
        done = [int(self.code[at]) for at in self.rows.counters]
        return list(zip(self.rows.stages, done, self.rows.waits, strict=True))


def load(
    whole: Program, window: SharedWindow, executor: native.Native | None, helper: Helper, *, by_cma: bool
) -> Loaded:
    """Resolve a program's channels to addresses in ``window``; its job does not know yet where the window's words are.

    Args:
        executor: the C executor; without it NumPy runs everything.
        by_cma: whether what lies in its writer's buffer is read from there.
    """
    part = part_of(whole, window.here)
    program, call = part.program, part.program.call
    item, acc = dtype_of(call.dtype).itemsize, accumulator_of(call.dtype).itemsize
    stages = program.of(window.rank)
    codes = native.codes(call.dtype, call.op) if executor else None
    lent = lent_channels(program) if by_cma and (codes or not call.op) else {}  # the same on every rank
    program = in_long_chunks(program, lent, item)
    places = Places(program, window, item, acc, 0 if executor else NUMPY_SHIFT, lent)
    rows = rows_of(program, places, window, lent, item)
    code = np.array(rows.words, np.int64)
    loaded = Loaded(whole, program, stages, places, rows, code, native.Job(), part.far, code.ctypes.data, lent=lent)
    widened = item != acc and any(program.channels[c].partial for stage in stages for c in (*stage.ins, *stage.outs))
    if executor and (codes or not (widened or any(len(stage.fold) > 1 or stage.final for stage in stages))):
        loaded.executor = "c"
    else:
        loaded.steps = [NumpyStage(stage, program, places, window, window.rank) for stage in stages]
    loaded.ends = ends_of(part, places, window)
    job = loaded.job
    job.dtype, job.op = codes or (0, 0)
    job.stages, job.item, job.acc, job.chunk, job.depth = len(rows.stages), item, acc, program.chunk, program.depth
    job.divide = call.n if call.op == "avg" else 0
    job.stream = 2 * call.n * call.total * item > CACHE_BYTES  # all ranks' buffers
    job.cma, job.helper = bool(lent), helper.address(program, lent)
    ours = {at.buffer for c, at in lent.items() if program.channels[c].writer == window.rank}
    loaded.lends = "send" in ours, "recv" in ours
    return loaded


class Repeat:
    """A call that the C executor executes again and again on the same buffers: nothing is prepared any more.

    Args:
        run: of the C executor: takes ``at`` and the number of the call.
        text: what the ranks compare.
        print_at: addresses of rank 0's fingerprints in calls of even and of odd number.
        slice_s: how long C may wait without any progress.
    """

    def __init__(
        self,
        run: Callable[[int, int], int],
        loaded: Loaded,
        text: str,
        send: Spot | None,
        recv: Spot | None,
        print_at: Sequence[int],
        slice_s: float,
    ) -> None:
        self.run, self.loaded = run, loaded
        lengths = [spot.nbytes if lends and spot else 0 for lends, spot in zip(loaded.lends, (send, recv), strict=True)]
        self._call = native.Again(
            ctypes.addressof(loaded.job),
            loaded.code_at,
            send.address if send else 0,
            recv.address if recv else 0,
            *lengths,
            bool(loaded.lent),
            *print_at,
            fingerprint(text),
            int(slice_s * 1e9),
        )
        self.at = ctypes.addressof(self._call)
