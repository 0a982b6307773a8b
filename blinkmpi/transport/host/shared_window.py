"""The memory that the CPU ranks of a node share: control pages of every rank of the job, a slot arena of each here.

Behind the control pages (:mod:`..control_pages`) lie the arenas: the slots of the channels that a rank writes, or that
come to it from another node.
"""

import atexit
import os
import platform
from collections.abc import Callable

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ...errors import TopologyError
from ..control_pages import CONTROL, ControlPages

PAGE = 4096
SKEW = 3328  # arenas begin at different places of a page, none where a large NumPy array begins
ARENA_BYTES = 8 << 20
MIN_ARENA_BYTES = 256 << 10
SHM = "/dev/shm"


class SharedWindow:
    """One MPI shared-memory window a node. It lives until :meth:`close`.

    Args:
        comm: all ranks.
        node: those of them that share memory with this one, in their order.
        arena_bytes: slots per rank, the same for all; made smaller if some /dev/shm has less room.

    Raises:
        TopologyError: on every rank, if /dev/shm cannot hold even the smallest window.
    """

    def __init__(self, comm: MPI.Intracomm, node: MPI.Intracomm, arena_bytes: int = ARENA_BYTES) -> None:
        here: tuple[int, ...] = tuple(node.allgather(comm.rank))
        free = os.statvfs(SHM) if os.path.isdir(SHM) else None
        room = comm.allreduce(free.f_bavail * free.f_frsize if free else 1 << 62, op=MPI.MIN)
        pages = comm.size * CONTROL
        fit = ((int(room * 0.8) - pages) // len(here) - SKEW) // PAGE * PAGE
        self.arena_bytes = min((arena_bytes + PAGE - 1) // PAGE * PAGE, comm.allreduce(fit, op=MPI.MIN))
        self.shrunk = self.arena_bytes < arena_bytes
        if self.arena_bytes < MIN_ARENA_BYTES:
            raise TopologyError(
                f"{SHM} has {room >> 20} MiB free; {len(here)} ranks need at least "
                f"{pages + len(here) * (MIN_ARENA_BYTES + SKEW) >> 20} MiB of shared memory: enlarge it on every "
                "node (docker run --shm-size=1g, mount -o remount,size=1G /dev/shm)"
            )
        each, first = self.arena_bytes + SKEW, (pages + PAGE - 1) // PAGE * PAGE
        self._arenas: dict[int, int] = {r: first + i * each + SKEW for i, r in enumerate(here)}
        size = first + len(here) * each
        self._win: MPI.Win | None = MPI.Win.Allocate_shared(size if node.rank == 0 else 0, 1, comm=node)
        self._win.Lock_all(MPI.MODE_NOCHECK)
        self.bytes: NDArray[np.uint8] = np.asarray(self._win.Shared_query(0)[0], np.uint8)
        x86 = platform.machine() in ("x86_64", "AMD64")
        fence: Callable[[], None] | None = None if x86 else self._win.Sync
        # the first rank of a node also looks after the pages of the ranks on other nodes
        mine = [comm.rank] if node.rank else [r for r in range(comm.size) if r == comm.rank or r not in here]
        for at, length in [*((r * CONTROL, CONTROL) for r in mine), (self._arenas[comm.rank], self.arena_bytes)]:
            self.bytes[at : at + length] = 0  # first touch: the memory exists from here on
        self.pages = ControlPages(self.bytes, comm.size, comm.rank, here, fence)
        self.pages.introduce()
        self._win.Sync()
        node.Barrier()
        self._win.Sync()
        self.pages.see()
        atexit.register(self.leave)

    def arena(self, rank: int) -> int:
        """Offset in ``bytes`` of the arena of ``rank``, a rank of this node."""
        return self._arenas[rank]

    def leave(self) -> None:
        """Say that this process takes part in no call any more. Python's end says so, too."""
        if not MPI.Is_finalized():  # MPI may have unmapped the memory
            self.pages.lefts[self.pages.rank] = 1

    def close(self) -> None:
        """Free the window; collective. Safe to call twice."""
        if self._win is not None:
            win, self._win = self._win, None
            atexit.unregister(self.leave)
            del self.bytes, self.pages
            win.Unlock_all()
            win.Free()


def cache_bytes() -> int:
    """Size of the last-level cache, as the system tells it; 32 MiB where it does not."""
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or 32 << 20
    except (ValueError, OSError):
        return 32 << 20
