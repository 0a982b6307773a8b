"""A program with its addresses, ready to be executed by a rank; and a call of it on buffers that are known."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..buffers import Spot
from ..program import Lane, Program
from . import native
from .cma import Lent
from .ends import Ends
from .parts import Far
from .records import Rows
from .runner import NumpyLane
from .slots import SlotStyle
from .window import Places
from .words import fingerprint

RunnerName = Literal["c", "numpy"]


@dataclass
class Loaded:
    """A program, as far as it is this node's, as one rank executes it."""

    program: Program
    lanes: tuple[Lane, ...]
    places: Places
    rows: Rows
    code: NDArray[np.int64]  # the rows as runner.c has them
    job: native.Job
    far: dict[int, Far]  # channels to other nodes
    code_at: int = 0
    lends: tuple[bool, bool] = (False, False)  # whether others read this rank's send, its receive buffer
    lent: dict[int, Lent] = field(default_factory=dict)  # channels that are read from their writers' buffers
    by_slots: Loaded | None = None  # for a call in which some rank's buffer cannot be read
    base: int = 0
    slots: SlotStyle = field(default_factory=SlotStyle)
    steps: list[NumpyLane] = field(default_factory=list)
    ends: Ends = field(default_factory=Ends)  # of channels between nodes
    runner: RunnerName = "numpy"

    def progress(self) -> list[tuple[Lane, int, bool]]:
        """What is under way: (lane, chunks done, whether it only waits for readers)."""
        if self.runner == "numpy":
            return [(step.lane, step.k, False) for step in self.steps]
        done = [int(self.code[at]) for at in self.rows.counters]
        return list(zip(self.rows.lanes, done, self.rows.waits, strict=True))


class Repeat:
    """A call that the C runner executes again and again on the same buffers: nothing is prepared any more.

    Args:
        text: what the ranks compare.
        print_at: addresses of rank 0's fingerprints in calls of even and of odd number.
        slice_s: how long C may wait without any progress.
    """

    def __init__(
        self, loaded: Loaded, text: str, send: Spot | None, recv: Spot | None, print_at: Sequence[int], slice_s: float
    ) -> None:
        self.loaded = loaded
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
