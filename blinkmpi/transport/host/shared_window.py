"""The memory that the ranks of a node share: control pages of every rank of the job, and a slot arena of each here.

Control pages, ``CONTROL`` bytes a rank, one after another; those of ranks on other nodes are written by :mod:`.net`::

    line 0            numbers of the call that this rank has entered, and of the last that it has finished
    line 1            sign of life, in ns of the monotonic clock
    line 2            process id, its start time in ticks (so that a reused id is noticed), 1 once it has left for good
    line 3            abort word (rank 0's counts): 1 + the rank that gave up, 0 while all is well
    lines 4..51       three records of 1 KiB (fingerprint, length, text): two calls by turns, then the last words
    heads             one line per channel that this rank writes: chunks written
    tails             one line per channel that this rank reads: chunks read

Behind them the arenas: the slots of the channels that a rank writes, or that come to it from another node.

Each word has one writer and only grows, so nothing is ever reset. A line is 64
bytes. On x86-64 plain loads and stores of a word keep their order; elsewhere
the NumPy side calls ``fence`` (MPI's ``Win.Sync``) around them.
"""

from __future__ import annotations

import atexit
import os
import platform
import time
from collections.abc import Callable, Collection

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ...errors import PlanError, TopologyError
from ...program.ir import Program

LINE = 64
WORDS = LINE // 8
HEADS = TAILS = 512
RECORDS = 4  # the line of the first record
RECORD = 1024
CONTROL = LINE * (RECORDS + 3 * RECORD // LINE + HEADS + TAILS)
PAGE = 4096
SKEW = 3328  # arenas begin at different places of a page, none where a large NumPy array begins
ARENA_BYTES = 8 << 20
MIN_ARENA_BYTES = 256 << 10
SHM = "/dev/shm"

Words = NDArray[np.uint64]


class SharedWindow:
    """One MPI shared-memory window a node, cut into control pages and arenas. It lives until :meth:`close`.

    Args:
        comm: all ranks.
        node: those of them that share memory with this one, in their order.
        arena_bytes: slots per rank, the same for all; made smaller if some /dev/shm has less room.

    Raises:
        TopologyError: on every rank, if /dev/shm cannot hold even the smallest window.
    """

    def __init__(self, comm: MPI.Intracomm, node: MPI.Intracomm, arena_bytes: int = ARENA_BYTES) -> None:
        self.n, self.rank = comm.size, comm.rank
        self.here: tuple[int, ...] = tuple(node.allgather(comm.rank))
        free = os.statvfs(SHM) if os.path.isdir(SHM) else None
        room = comm.allreduce(free.f_bavail * free.f_frsize if free else 1 << 62, op=MPI.MIN)
        pages = self.n * CONTROL
        fit = ((int(room * 0.8) - pages) // len(self.here) - SKEW) // PAGE * PAGE
        self.arena_bytes = min((arena_bytes + PAGE - 1) // PAGE * PAGE, comm.allreduce(fit, op=MPI.MIN))
        self.shrunk = self.arena_bytes < arena_bytes
        if self.arena_bytes < MIN_ARENA_BYTES:
            raise TopologyError(
                f"{SHM} has {room >> 20} MiB free; {len(self.here)} ranks need at least "
                f"{pages + len(self.here) * (MIN_ARENA_BYTES + SKEW) >> 20} MiB of shared memory: enlarge it on every "
                "node (docker run --shm-size=1g, mount -o remount,size=1G /dev/shm)"
            )
        each, first = self.arena_bytes + SKEW, (pages + PAGE - 1) // PAGE * PAGE
        self._arenas: dict[int, int] = {r: first + i * each + SKEW for i, r in enumerate(self.here)}
        size = first + len(self.here) * each
        self._win: MPI.Win | None = MPI.Win.Allocate_shared(size if node.rank == 0 else 0, 1, comm=node)
        self._win.Lock_all(MPI.MODE_NOCHECK)
        self.bytes: NDArray[np.uint8] = np.asarray(self._win.Shared_query(0)[0], np.uint8)
        self.words: Words = self.bytes.view(np.uint64)
        self.address = self.bytes.ctypes.data
        for at, length in [
            *((r * CONTROL, CONTROL) for r in ((self.rank,) if node.rank else self._mirrored())),
            (self._arenas[self.rank], self.arena_bytes),
        ]:
            self.bytes[at : at + length] = 0  # first touch: the pages exist from here on
        self.seqs, self.done = self.column(0), self.column(1)
        self.beats = self.column(WORDS)
        self.pids, self.starts, self.lefts = (self.column(2 * WORDS + i) for i in range(3))
        self.abort = self.words[3 * WORDS : 3 * WORDS + 1]
        self.pids[self.rank], self.starts[self.rank] = os.getpid(), start_time(os.getpid()) or 0
        x86 = platform.machine() in ("x86_64", "AMD64")
        self.fence: Callable[[], None] | None = None if x86 else self._win.Sync
        self._win.Sync()
        node.Barrier()
        self._win.Sync()
        # another PID namespace shows other processes, or none, under a peer's id
        peers = zip(self.pids, self.starts, strict=True)
        self._visible = [
            r in self.here and start_time(int(pid)) == int(start) != 0 for r, (pid, start) in enumerate(peers)
        ]
        self.gone: set[int] = set()  # ranks of other nodes that MPI knows to have failed
        atexit.register(self.leave)

    def _mirrored(self) -> list[int]:
        """The ranks whose pages the first rank of a node looks after: itself, and those of other nodes."""
        return [r for r in range(self.n) if r == self.rank or r not in self.here]

    def column(self, word: int) -> Words:
        """This word of every rank's control pages."""
        return self.words[word : self.n * CONTROL // 8 : CONTROL // 8]

    def head(self, rank: int, channel: int) -> int:
        """Index in ``words`` of the head of ``rank``'s ``channel``-th written channel."""
        return rank * CONTROL // 8 + WORDS * (RECORDS + 3 * RECORD // LINE + channel)

    def tail(self, rank: int, channel: int) -> int:
        """Index in ``words`` of the tail of ``rank``'s ``channel``-th read channel."""
        return self.head(rank, HEADS + channel)

    def arena(self, rank: int) -> int:
        """Offset in ``bytes`` of the arena of ``rank``, one of ``here``."""
        return self._arenas[rank]

    def record(self, rank: int, seq: int) -> int:
        """Offset in ``bytes`` of the record of call ``seq`` of ``rank``."""
        return rank * CONTROL + RECORDS * LINE + (seq % 2) * RECORD

    def last_words(self, rank: int) -> int:
        """Offset in ``bytes`` of the record in which ``rank`` says why it gave up."""
        return self.record(rank, 0) + 2 * RECORD

    def write(self, at: int, text: bytes) -> None:
        """Write a record's text."""
        body = text[: RECORD - 16]
        self.words[at // 8 + 1] = len(body)
        self.bytes[at + 16 : at + 16 + len(body)] = np.frombuffer(body, np.uint8)

    def read(self, at: int) -> bytes:
        """A record's text."""
        length = int(self.words[at // 8 + 1])
        return bytes(self.bytes[at + 16 : at + 16 + length])

    def beat(self) -> None:
        """Give a sign of life."""
        self.beats[self.rank] = time.monotonic_ns()

    def leave(self) -> None:
        """Say that this process takes part in no call any more. Python's end says so, too."""
        if not MPI.Is_finalized():  # MPI may have unmapped the memory
            self.lefts[self.rank] = 1

    def life(self, rank: int) -> str:
        """The process of ``rank``: ``running``, ``stopped``, ``left``, ``gone``, or ``""`` if it cannot be seen."""
        if self.lefts[rank]:
            return "left"
        if rank in self.gone:
            return "gone"
        if not self._visible[rank]:
            return ""
        pid = int(self.pids[rank])
        state = process_state(pid)
        if state is None or state in "ZX" or start_time(pid) != int(self.starts[rank]):
            return "gone"
        return "stopped" if state in "Tt" else "running"

    def close(self) -> None:
        """Free the window; collective. Safe to call twice."""
        if self._win is not None:
            win, self._win = self._win, None
            atexit.unregister(self.leave)
            del self.bytes, self.words, self.seqs, self.done, self.beats, self.pids, self.starts, self.lefts, self.abort
            win.Unlock_all()
            win.Free()


class Places:
    """Where each channel of a program has its flags and slots; the same on every rank of a node.

    Args:
        shift: bytes by which slots lie past a multiple of the line.
        lent: channels that have no slots.

    Raises:
        PlanError: if a rank would need more flags or slots than it has.
    """

    def __init__(
        self,
        program: Program,
        window: SharedWindow,
        itemsize: int,
        acc_itemsize: int,
        shift: int,
        lent: Collection[int] = (),
    ) -> None:
        n = window.n
        written, read, used = [0] * n, [0] * n, [shift] * n
        self.heads: list[int] = []
        self.tails: list[dict[int, int]] = []
        self.slots: list[int] = []
        self.strides: list[int] = []
        for c, channel in enumerate(program.channels):
            w = channel.writer
            stride = (program.chunk * (acc_itemsize if channel.partial else itemsize) + LINE - 1) // LINE * LINE
            self.heads.append(window.head(w, written[w]))
            self.slots.append(window.arena(w) + used[w])
            self.strides.append(stride)
            self.tails.append({r: window.tail(r, read[r]) for r in channel.readers})
            written[w] += 1
            used[w] += 0 if c in lent else stride * program.depth
            for r in channel.readers:
                read[r] += 1
        if max(written, default=0) > HEADS or max(read, default=0) > TAILS:
            raise PlanError(f"a rank would write {max(written)} and read {max(read)} channels; at most {HEADS} fit: "
                            "use a scheme with fewer trees")  # fmt: skip
        if max(used, default=0) > window.arena_bytes:
            raise PlanError(f"slots need {max(used)} bytes of a rank, the arena has {window.arena_bytes}: "
                            "lower with a smaller budget_bytes")  # fmt: skip


def cache_bytes() -> int:
    """Size of the last-level cache, as the system tells it; 32 MiB where it does not."""
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or 32 << 20
    except (ValueError, OSError):
        return 32 << 20


def process_state(pid: int) -> str | None:
    """The state letter of /proc/PID/stat, or None if there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else None


def start_time(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks since boot, or None if there is no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
