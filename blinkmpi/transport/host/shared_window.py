"""The memory that the CPU ranks of a node share: control pages of every rank of the job, a slot arena of each here.

Behind the control pages (:mod:`..control_pages`) lie the counters (:mod:`..counters`) of the ranks here, then their
arenas: the slots of the channels that a rank writes, or that come to it from another node. Behind each arena lie the
slots of calls in one shot (``program/one_shot.py``), and behind all of them the messages of these calls, if there are
several nodes: those that this node sends, then those that it receives of each other node, of even and of odd calls.
"""

import atexit
import contextlib
import mmap
import os
import platform

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ...errors import TopologyError
from ...util.settings import LEAST_BUFFER_BYTES
from ...util.shared_memory import SHM, shared_memory
from ...util.text import plural, size_text
from ...util.together import Comm, allgather, gathered
from ..control_pages import CONTROL, LINE, ControlPages
from ..counters import LINE_BYTES, lines_for

PAGE = 4096
SKEW = 3328  # arenas begin at different places of a page, none where a large NumPy array begins
ARENA_BYTES = 8 << 20
ONE_SHOT_BYTES = 208 << 10  # a rank, behind its arena: slots that are filled before a call is announced, of 512 peers
MESSAGE_BYTES = 1088 << 10  # of messages that a node sends in one call of one shot, and of those that it receives
MIN_ARENA_BYTES = LEAST_BUFFER_BYTES


class SharedWindow:
    """One piece of shared memory a node. It lives until :meth:`close`.

    Args:
        comm: all ranks.
        node: those of them that share memory with this one, in their order.
        arena_bytes: slots per rank, the same for all; made smaller if some /dev/shm has less room.

    Raises:
        TopologyError: on every rank, if some /dev/shm cannot hold even the smallest window.
    """

    def __init__(self, comm: Comm, node: Comm, arena_bytes: int = ARENA_BYTES) -> None:
        self._comm, self._node = comm, node
        self._here: tuple[int, ...] = tuple(allgather(node, comm.rank, int))
        self.firsts = allgather(comm, self._here[0], int)  # of each rank, the first rank of its node
        self.nodes = sorted(set(self.firsts))
        self.one_shot_bytes = ONE_SHOT_BYTES if len(self.nodes) == 1 else 2 * MESSAGE_BYTES  # for the longest message
        self._message_bytes = 4 * MESSAGE_BYTES if len(self.nodes) > 1 else 0
        self._process = os.getpid()
        self._counter_bytes = -(-lines_for(comm.size) * LINE_BYTES // PAGE) * PAGE  # of a rank
        wanted = -(-arena_bytes // PAGE) * PAGE
        self.arena_bytes = max(min(wanted, *gathered(comm, self._fit, int, error=TopologyError)), MIN_ARENA_BYTES)
        while (memory := self._reserved()) is None:
            if self.arena_bytes == MIN_ARENA_BYTES:
                raise TopologyError(self._no_room())
            self.arena_bytes = max(self.arena_bytes // 2 // PAGE * PAGE, MIN_ARENA_BYTES)
        self.shrunk = self.arena_bytes < arena_bytes
        self._memory: mmap.mmap | None = memory
        self.bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self._fences = None if platform.machine() in ("x86_64", "AMD64") else MPI.Win.Allocate(8, comm=MPI.COMM_SELF)
        if self._fences:
            self._fences.Lock_all(MPI.MODE_NOCHECK)
        fence = self._fences.Sync if self._fences else None
        self.pages = ControlPages(self.bytes, comm.size, comm.rank, self._here, fence)
        at, size = self._counters[comm.rank], self._counter_bytes
        self.counters = self.bytes[at : at + size]  # this rank's
        self.pages.introduce(at, size)
        if fence:
            fence()
        node.Barrier()
        if fence:
            fence()
        self.pages.see()
        atexit.register(self.leave)

    def _fit(self) -> int:
        """The largest arena for which a quarter of what /dev/shm has left is enough: others open communicators, too."""
        pages = self._comm.size * CONTROL + len(self._here) * self._counter_bytes + self._message_bytes
        return ((free_bytes() // 4 - pages) // len(self._here) - SKEW - self.one_shot_bytes) // PAGE * PAGE

    def _reserved(self) -> mmap.mmap | None:
        """Memory for arenas of ``arena_bytes``, reserved on every node; None on all ranks if some node has no room."""
        comm, here = self._comm, self._here
        counters, each = -(-comm.size * CONTROL // PAGE) * PAGE, self.arena_bytes + self.one_shot_bytes + SKEW
        self._counters = {r: counters + i * self._counter_bytes for i, r in enumerate(here)}
        first = counters + len(here) * self._counter_bytes
        self._arenas: dict[int, int] = {r: first + i * each + SKEW for i, r in enumerate(here)}
        # the first rank of a node also looks after the pages of the ranks on other nodes
        mine = [comm.rank] if self._node.rank else [r for r in range(comm.size) if r == comm.rank or r not in here]
        parts = [
            *((r * CONTROL, CONTROL) for r in mine),
            (self._arenas[comm.rank], self.arena_bytes + self.one_shot_bytes),
        ]
        parts.append((self._counters[comm.rank], self._counter_bytes))
        self._messages = first + len(here) * each
        parts.append((self._messages, 0 if self._node.rank else self._message_bytes))
        own: list[mmap.mmap] = []

        def reserve() -> bool:
            memory = shared_memory(self._node, self._messages + self._message_bytes, parts)
            own.extend([memory] if memory is not None else [])
            return memory is not None

        if all(gathered(comm, reserve, bool)):
            return own[0]
        for memory in own:
            memory.close()
        return None

    def _no_room(self) -> str:
        """What to say of the node that has least to spare; collective."""
        slots = MIN_ARENA_BYTES + self.one_shot_bytes + SKEW
        need = self._comm.size * CONTROL + len(self._here) * (self._counter_bytes + slots) + self._message_bytes
        room = free_bytes() - need, need, len(self._here), MPI.Get_processor_name()
        rooms = allgather(self._comm, room, tuple[int, int, int, str])
        spare, need, ranks, host = min(rooms)
        return (
            f"{SHM} on {host} has {size_text(spare + need)} free; a communicator of {plural(ranks, 'rank')} there "
            f"needs at least {size_text(need)} of it: free communicators that are no longer used, or enlarge it "
            "(docker run --shm-size=1g, mount -o remount,size=1G /dev/shm)"
        )

    def arena(self, rank: int) -> int:
        """Offset in ``bytes`` of the arena of ``rank``, a rank of this node."""
        return self._arenas[rank]

    def one_shot(self, rank: int) -> int:
        """Offset in ``bytes`` of the slots of ``rank`` for calls of one shot, which no other call uses."""
        return self._arenas[rank] + self.arena_bytes

    def sent(self) -> int:
        """Offset in ``bytes`` of what this node sends in even calls of one shot; of odd ones MESSAGE_BYTES behind."""
        return self._messages

    @property
    def longest_message(self) -> int:
        """Bytes of the longest message of a call in one shot that a node takes from another one."""
        return MESSAGE_BYTES // max(len(self.nodes) - 1, 1) // LINE * LINE

    def received(self, first: int) -> int:
        """Offset in ``bytes`` of the message of an even call of one shot from the node whose first rank is ``first``.

        That of an odd one is MESSAGE_BYTES behind it.
        """
        others = [other for other in self.nodes if other != self._here[0]]
        return self._messages + 2 * MESSAGE_BYTES + others.index(first) * self.longest_message

    def leave(self) -> None:
        """Say that this process takes part in no call any more. Python's end says so, too, but not a child's."""
        if os.getpid() == self._process:
            self.pages.lefts[self.pages.rank] = 1

    def close(self) -> None:
        """Free the window; collective. Safe to call twice."""
        if self._memory is not None:
            memory, self._memory = self._memory, None
            atexit.unregister(self.leave)
            del self.bytes, self.counters, self.pages
            if self._fences:
                self._fences.Unlock_all()
                self._fences.Free()
            self._node.Barrier()  # nobody looks at the pages of the others any more
            memory.madvise(mmap.MADV_REMOVE)  # gives the memory back though this or another rank may still have a view
            with contextlib.suppress(BufferError):  # the addresses go with the last view
                memory.close()


def free_bytes() -> int:
    """What /dev/shm has left."""
    found = os.statvfs(SHM)
    return int(found.f_bavail * found.f_frsize)
