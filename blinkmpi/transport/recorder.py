"""``Recorder``: what the calls of one rank are counted in (counters), and, in a traced job, recorded in (events)."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from .counters import WORDS, Count, Counters, Name
from .events import EventRing, TracedProgram


class Timed(Protocol):
    """A call whose times were taken in Python."""

    @property
    def busy_ns(self) -> Sequence[int]:
        """By row."""

    @property
    def wait_ns(self) -> Mapping[int, int]:
        """By rank."""

    def finished(self) -> None:
        """Record that it is complete."""


class Tally:
    """What one kind of call adds to the counters each time.

    Args:
        moved: (bytes, calls) by name.
        rows: the names of the lines that the working time of each row goes to.
    """

    def __init__(
        self, recorder: Recorder, moved: Mapping[Name, tuple[int, int]], rows: Sequence[Sequence[Name]] = ()
    ) -> None:
        self._counters, self._wait = recorder.counters, recorder.wait
        counters = recorder.counters
        self._amounts = [(counters.line(name) * WORDS, *amounts) for name, amounts in moved.items()]
        words = [word for name, amounts in moved.items() for word in (counters.address(name), *amounts)]
        self.words = np.array(words, np.int64)  # as executor.c reads them
        times = [word for row, names in enumerate(rows) for name in names for word in (row, counters.clock(name))]
        self.times = np.array(times, np.int64)
        self._rows = rows

    def add(self, timed: Timed | None = None) -> None:
        """Count a call that executor.c has not counted, with its times."""
        words = self._counters.flat
        for at, nbytes, calls in self._amounts:
            words[at] += nbytes
            words[at + 1] += calls
        if timed is not None:
            for names, ns in zip(self._rows, timed.busy_ns, strict=True):
                for name in names:
                    self._counters.add(name, Count(0, 0, ns))
            for rank, ns in timed.wait_ns.items():
                self._counters.add(self._wait(rank), Count(0, 0, ns))
            timed.finished()


class Recorder:
    """The counters of a rank, and its ring of events if the job is traced.

    Args:
        events: how many the ring holds; 0: none are recorded, and no times are measured.
    """

    def __init__(self, counters: Counters, n: int, rank: int, events: int = 0) -> None:
        self.counters = counters
        self.rank = rank
        self.ring = EventRing(events, [counters.clock(self.wait(r)) for r in range(n)]) if events else None

    def wait(self, rank: int) -> Name:
        """The counter of waits for a rank. This rank's own flags are those of its messages between nodes."""
        return ("wait", "network" if rank == self.rank else rank)

    def tally(self, moved: Mapping[Name, tuple[int, int]], rows: Sequence[Sequence[Name]] = ()) -> Tally:
        """The tally of a program."""
        return Tally(self, moved, rows if self.ring else ())

    def completed(self, text: str, protocol: str, nbytes: int, seq: int, began_ns: int) -> None:
        """Count and record a call that has no program; ``text`` begins with its collective."""
        self.counters.add(("collective", text.partition("(")[0]), Count(nbytes, 1, 0))
        if protocol:
            self.counters.add(("protocol", protocol), Count(0, 1, 0))
        if self.ring is not None:
            self.ring.call(text, seq, began_ns, time.monotonic_ns())

    def add(self, program: TracedProgram) -> int:
        """The number of a program in the events; 0 where none are recorded."""
        return self.ring.add(program) if self.ring else 0

    def close(self) -> None:
        """Forget the counters, whose memory ends."""
        del self.counters

    @property
    def address(self) -> int:
        """Where executor.c records; 0: nowhere."""
        return ctypes.addressof(self.ring.struct) if self.ring else 0
