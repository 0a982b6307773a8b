"""``StepTrace``: the events and times of a call that NumPy executes, as trace.h records those of the C executor."""

import time

from ..control_pages import CONTROL, ControlPages
from ..events import CALL, CHUNK, ENTER, WAIT, EventRing
from .numpy_executor import NumpyStage


class StepTrace:
    """One traced call under way, whose stages are ``steps``."""

    def __init__(self, ring: EventRing, pages: ControlPages, steps: list[NumpyStage], program: int, seq: int) -> None:
        self._ring, self._pages, self._program, self._seq = ring, pages, program, seq
        self._row = {id(stage): row for row, stage in enumerate(steps)}
        self.busy_ns = [0] * len(steps)
        self.wait_ns: dict[int, int] = {}  # by rank
        self._began = self._last = time.monotonic_ns()
        self._lacked: dict[int, int] = {}  # the rank that a row lacked a flag of
        self._late = -1
        self._waiting = False

    def late(self) -> None:
        """Not all ranks have entered the call."""
        latest = int(self._pages.announced.argmin())
        if int(self._pages.announced[latest]) < self._seq:  # or it has come meanwhile
            self._late = latest

    def entered(self) -> None:
        """All have."""
        if self._late >= 0:
            self._waited(ENTER, -1, self._late)

    def lacks(self, stage: NumpyStage, flag: int) -> None:
        """A stage is not ready, for lack of a flag."""
        self._lacked[self._row[id(stage)]] = flag * 8 // CONTROL

    def idle(self) -> None:
        """No stage is ready."""
        self._waiting = True

    def step(self, stage: NumpyStage) -> None:
        """Make a step of a stage that is ready."""
        row, chunk = self._row[id(stage)], stage.k
        if self._waiting:
            self._waited(WAIT, row, self._lacked.get(row, -1))
        self._waiting = False
        start = self._last
        stage.step()
        self._last = time.monotonic_ns()
        self.busy_ns[row] += self._last - start
        self._ring.record(CHUNK, start, self._last, self._seq, self._program, row, chunk)

    def finished(self) -> None:
        """The call is complete."""
        self._ring.record(CALL, self._began, time.monotonic_ns(), self._seq, self._program)

    def _waited(self, kind: int, row: int, rank: int) -> None:
        now = time.monotonic_ns()
        if rank >= 0:
            self.wait_ns[rank] = self.wait_ns.get(rank, 0) + now - self._last
        self._ring.record(kind, self._last, now, self._seq, self._program, row, rank)
        self._last = now
