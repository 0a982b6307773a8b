"""The events of a traced communicator: a ring of the last ones, which executor.c and this package write.

An event is a chunk that a stage moved, a wait for a peer, a wait for all to enter or leave a call, or a whole call.
Times are nanoseconds of the monotonic clock, which the processes of a machine share.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EVENT = np.dtype(
    [("start", "i8"), ("end", "i8"), ("seq", "i8"), ("program", "i4"), ("row", "i4"), ("number", "i4"), ("kind", "i4")]
)
CHUNK, WAIT, ENTER, CALL = range(4)  # kinds
PROGRAMS = 1024  # known ones, after which those of no event in the ring are forgotten
FIELDS = ("capacity", "written", "events", "waits", "seq", "began", "last", "waiting")


class RingStruct(ctypes.Structure):
    """``trace_t`` of trace.h."""

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]


@dataclass(frozen=True)
class TracedRow:
    """What a stage, or a row of the C executor, does with each chunk.

    ``ins`` and ``outs`` are (other ranks, number of the channel in the whole program).
    """

    tree: int
    way: str
    nbytes: int  # of a whole span, and of a chunk
    chunk_bytes: int
    ins: tuple[tuple[tuple[int, ...], int], ...]
    outs: tuple[tuple[tuple[int, ...], int], ...]
    works: bool = True  # or it only waits for readers


@dataclass(frozen=True)
class TracedProgram:
    """What events of a program mean: the call in words, the rows by number."""

    text: str
    rows: Sequence[TracedRow] = ()


class EventRing:
    """The last ``capacity`` events of one communicator on this rank.

    Args:
        capacity: events; rounded up to a power of two.
        waits: by rank, the address of the counter of ns that this rank waited for it.
    """

    def __init__(self, capacity: int, waits: Sequence[int]) -> None:
        capacity = 1 << (max(capacity, 2) - 1).bit_length()
        self._events = np.zeros(capacity, EVENT)
        self._waits = np.array(waits, np.int64)
        self.struct = RingStruct(capacity, 0, self._events.ctypes.data, self._waits.ctypes.data)
        self.programs: dict[int, TracedProgram] = {}
        self._numbers: dict[str, int] = {}  # of calls without a program
        self._next = 0

    def add(self, program: TracedProgram) -> int:
        """Know a program; its number in events."""
        if len(self.programs) >= PROGRAMS:
            used = set(self.events()["program"].tolist())
            self.programs = {number: known for number, known in self.programs.items() if number in used}
            self._numbers = {text: number for text, number in self._numbers.items() if number in used}
        self._next += 1
        self.programs[self._next] = program
        return self._next

    def call(self, text: str, seq: int, start_ns: int, end_ns: int) -> None:
        """Record a call that has no program."""
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = self.add(TracedProgram(text))
        self.record(CALL, start_ns, end_ns, seq, number)

    def record(
        self, kind: int, start_ns: int, end_ns: int, seq: int, program: int, row: int = -1, number: int = -1
    ) -> None:
        """Record an event."""
        self._events[self.struct.written % len(self._events)] = (start_ns, end_ns, seq, program, row, number, kind)
        self.struct.written += 1

    @property
    def dropped(self) -> int:
        """Events that the ring no longer holds."""
        return max(0, int(self.struct.written) - len(self._events))

    def events(self) -> NDArray[np.void]:
        """What it holds, in order of time of recording."""
        written, room = int(self.struct.written), len(self._events)
        return self._events[:written] if written <= room else np.roll(self._events, -(written % room))
