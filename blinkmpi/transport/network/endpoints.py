"""Endpoints of channels that lead to other nodes, and how far they are in a call (Blink section 3.5).

To the executors of a rank, in C, in NumPy or on a GPU, a channel between nodes looks like any other: slots and two
flags in the rank's reach. The writer's end sends each chunk that the executor has written, and frees its slot when
MPI has taken it; the reader's end receives into free slots and raises the head. Chunks of a channel travel in order
under the channel's number as tag, so they need no header.

A GPU has an end for each of its groups of threads, dozens in all, so a look at the flags of all of them is one step of
NumPy, and one at all open messages one call of MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanError

if TYPE_CHECKING:  # programs of one node may have no MPI
    from mpi4py import MPI

FIRST_CHANNEL = 16  # tag of channel 0; those below are other messages'


def tag_of(channel: int) -> int:
    """The tag of a channel's messages.

    Raises:
        PlanError: if this MPI has no such tag.
    """
    from mpi4py import MPI

    most = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    if most is not None and FIRST_CHANNEL + channel > most:
        raise PlanError(
            f"channel {channel} between nodes: this MPI's tags end at {most}; choose a scheme with fewer trees "
            "(BLINKMPI_ALGO)"
        )
    return FIRST_CHANNEL + channel


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a channel between nodes.

    Of the channel's chunks it carries every ``stride``-th, from number ``first`` on.
    """

    sends: bool
    peer: int
    tag: int
    flags: NDArray[np.uint64]
    head: int  # places among the flags
    tail: int
    slots: Sequence[Any]  # buffers as MPI takes them, of a chunk's bytes each
    chunk: int  # bytes of a chunk, and of all
    total: int
    first: int = 0
    stride: int = 1

    @property
    def chunks(self) -> int:
        """Chunks of a call."""
        return max(0, -(-(-(-self.total // self.chunk) - self.first) // self.stride))

    def chunk_at(self, i: int) -> Any:
        """Where the ``i``-th of them lies."""
        left = self.total - (self.first + i * self.stride) * self.chunk
        slot = self.slots[i % len(self.slots)]
        return slot if left >= self.chunk else slot[:left]


class Endpoints:
    """All endpoints of a rank in a program, in the current call; their flags lie in one array."""

    def __init__(self, endpoints: Iterable[Endpoint] = ()) -> None:
        self.all = tuple(endpoints)
        self._flags = self.all[0].flags if self.all else np.empty(0, np.uint64)
        self._watched = np.array([x.head if x.sends else x.tail for x in self.all], np.intp)
        self._room = np.array([0 if x.sends else len(x.slots) for x in self.all], np.int64)
        self._chunks = np.array([x.chunks for x in self.all], np.int64)
        self._base, self._left = 0, 0
        self._begun = np.zeros(len(self.all), np.int64)  # chunks sent, or with a receive under way
        self._done = [0] * len(self.all)
        self._ahead: list[set[int]] = [set() for _ in self.all]  # done, while one before them is not
        self._open: list[MPI.Request] = []
        self._chunk_of: list[tuple[int, int]] = []  # endpoint and chunk of each open message

    def start(self, base: int) -> None:
        """Begin a call, whose flags count from ``base``."""
        self._base, self._left = base, int(self._chunks.sum())
        self._begun[:] = 0
        self._done = [0] * len(self.all)

    @property
    def finished(self) -> bool:
        """Whether all chunks of the call have been sent and received."""
        return not self._left

    def progress(self, comm: MPI.Intracomm, fence: Callable[[], None] | None) -> bool:
        """Send and receive the chunks that can be now; returns whether anything moved."""
        if not self._left:
            return False
        moved = bool(self._open) and self._finish(fence)
        flags = (self._flags[self._watched] - np.uint64(self._base)).view(np.int64)  # of an older call: below 0
        until = np.minimum(np.maximum(flags, 0) + self._room, self._chunks)
        for i in np.flatnonzero(until > self._begun).tolist():
            x, end = self.all[i], int(until[i])
            start = comm.Isend if x.sends else comm.Irecv
            for k in range(int(self._begun[i]), end):
                self._open.append(start(x.chunk_at(k), x.peer, x.tag))
                self._chunk_of.append((i, k))
            self._begun[i] = end
            moved = True
        return moved

    def _finish(self, fence: Callable[[], None] | None) -> bool:
        """Raise the flags of messages that have completed; returns whether there were any."""
        found = self._open[0].Testsome(self._open)  # of their class
        if not found:
            return False
        if fence:
            fence()
        gone = set(found)
        for j in gone:
            i, k = self._chunk_of[j]
            self._ahead[i].add(k)
        for i in {self._chunk_of[j][0] for j in gone}:
            x, ahead = self.all[i], self._ahead[i]
            while self._done[i] in ahead:
                ahead.remove(self._done[i])
                self._done[i] += 1
            self._flags[x.tail if x.sends else x.head] = self._base + self._done[i]
        self._left -= len(gone)
        self._open = [request for j, request in enumerate(self._open) if j not in gone]
        self._chunk_of = [chunk for j, chunk in enumerate(self._chunk_of) if j not in gone]
        return True
