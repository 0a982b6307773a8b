"""Control pages: what every rank of a job tells the others, in memory that the ranks of a node share.

``CONTROL`` bytes a rank, one after another; the first rank of a node writes those of ranks on other nodes, from the
messages of :mod:`.network.messages`::

    line 0            number of the call that this rank has announced, number of the last that it has finished; where
                      its send and receive buffers lie in calls of even and of odd number, for those who read them; of
                      such calls, too, what it says of the lengths of its blocks
    line 1            heartbeat, in ns of the monotonic clock
    line 2            process id, its start time in ticks (so that a reused id is noticed), 1 once it has left for good,
                      2 once it has dropped the communicator, 4 once it has come to shrink(), 5 once it goes on in the
                      communicator that this has given
    line 3            abort word (rank 0's counts): 1 + the rank that aborted, 0 while all is well; the call of whose
                      wait this rank has warned last, and when, in ns of the monotonic clock; for a process that is no
                      rank (``blinkmpi top``): a number that marks such pages, how many ranks the job has, where this
                      rank's counters lie and how many bytes they have
    lines 4..51       three records of 1 KiB (fingerprint, length, body): announcements of calls of even and of odd
                      number, then the error with which the rank aborted
    heads             one line per channel that this rank writes: chunks written
    tails             one line per channel that this rank reads: chunks read

Each word has one writer and only grows, so nothing is ever reset. A line is 64 bytes. On x86-64 plain loads and stores
of a word keep their order; elsewhere the Python side calls ``fence`` (MPI's ``Win.Sync``) around them.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .counters import MAGIC

LINE = 64
WORDS = LINE // 8
SEND_WORD, RECV_WORD = 2, 3  # of line 0: where the buffers lie in even calls; in odd calls, 2 words behind
HEADS = TAILS = 512
SEQ_BITS = 24  # a flag is (number of the call << SEQ_BITS) + chunks
SOON_NS = 1_000_000  # behind the last call: nobody has given up by then
LATE_LOOKS = 4  # for other nodes' aborts, where one comes later: MPI over TCP reads them up to 2 looks after the data
RECORDS = 4  # the line of the first record
RECORD = 1024
BODY = RECORD - 16  # bytes of a record's body
INTRODUCTION = 3  # word of line 3
LEFT_WORD = 2 * WORDS + 2  # the third word of line 2: one of the next line's, once a rank takes part in no call
LEFT, DROPPED, RESTS, SHRINKS, WENT_ON = 1, 2, 3, 4, 5
STATES_OF = {LEFT: "left", WENT_ON: "went on"}  # else a rank that takes no part has dropped the communicator
FLAGS = LINE * (RECORDS + 3 * RECORD // LINE)  # where the heads begin; what lies before them every call needs
CONTROL = FLAGS + LINE * (HEADS + TAILS)


class PagePlaces:
    """Where things lie in the control pages of ``n`` ranks, of which those ``here`` are of the node of ``rank``."""

    def __init__(self, n: int, rank: int, here: tuple[int, ...]) -> None:
        self.n, self.rank, self.here = n, rank, here

    def head(self, rank: int, channel: int) -> int:
        """Index in ``words`` of the head of ``rank``'s ``channel``-th written channel."""
        return (rank * CONTROL + FLAGS) // 8 + WORDS * channel

    def tail(self, rank: int, channel: int) -> int:
        """Index in ``words`` of the tail of ``rank``'s ``channel``-th read channel."""
        return self.head(rank, HEADS + channel)

    def record(self, rank: int, seq: int) -> int:
        """Offset in ``bytes`` of ``rank``'s record of call ``seq``."""
        return rank * CONTROL + RECORDS * LINE + (seq % 2) * RECORD

    def error_record(self, rank: int) -> int:
        """Offset in ``bytes`` of the record with the error with which ``rank`` aborted."""
        return self.record(rank, 0) + 2 * RECORD


class ControlPages(PagePlaces):
    """The control pages of all ranks, as this rank maps them.

    Args:
        memory: the shared memory, which begins with the pages.
        here: the ranks of this node.
        fence: orders loads and stores of this thread where the machine does not; None where it does.
    """

    def __init__(
        self, memory: NDArray[np.uint8], n: int, rank: int, here: tuple[int, ...], fence: Callable[[], None] | None
    ) -> None:
        super().__init__(n, rank, here)
        self.fence = fence
        self.bytes, self.words = memory, memory.view(np.uint64)
        self.address = memory.ctypes.data
        self.announced, self.finished = self.column(0), self.column(1)
        self.heartbeats = self.column(WORDS)
        self.pids, self.starts, self.lefts = (self.column(2 * WORDS + i) for i in range(3))
        self.abort = self.words[3 * WORDS : 3 * WORDS + 1]
        self.warned, self.warned_at = self.column(3 * WORDS + 1), self.column(3 * WORDS + 2)
        self.gone: set[int] = set()  # ranks of other nodes that MPI knows to have failed
        self.visible = [False] * n

    def introduce(self, counters: int, counter_bytes: int) -> None:
        """Write down which process this is, and where its counters lie."""
        self.pids[self.rank], self.starts[self.rank] = os.getpid(), own_start(os.getpid())
        at = self.rank * CONTROL // 8 + 3 * WORDS + INTRODUCTION
        self.words[at + 1 : at + 4] = self.n, counters, counter_bytes
        self.words[at] = MAGIC

    def see(self, known: Sequence[bool] | None = None) -> None:
        """Note whose process can be seen: another PID namespace shows other processes, or none, under a peer's id.

        Args:
            known: of each rank, where that was found out before.
        """
        peers = zip(self.pids, self.starts, strict=True)
        self.visible = list(known) if known is not None else [
            r in self.here and start_time(int(pid)) == int(start) != 0 for r, (pid, start) in enumerate(peers)
        ]  # fmt: skip

    def column(self, word: int) -> NDArray[np.uint64]:
        """This word of every rank's pages."""
        return self.words[word : self.n * CONTROL // 8 : CONTROL // 8]

    def fingerprints(self, seq: int) -> list[int]:
        """Every rank's fingerprint of call ``seq``."""
        found: list[int] = self.column(self.record(0, seq) // 8).tolist()
        return found

    def write(self, at: int, body: bytes, fingerprint: int = 0) -> None:
        """Write a record."""
        self.words[at // 8] = fingerprint
        self.words[at // 8 + 1] = len(body)
        self.bytes[at + 16 : at + 16 + len(body)] = np.frombuffer(body, np.uint8)

    def read(self, at: int) -> bytes:
        """A record's body."""
        length = min(int(self.words[at // 8 + 1]), BODY)
        return bytes(self.bytes[at + 16 : at + 16 + length])

    def beat(self) -> None:
        """Give a sign of life."""
        self.heartbeats[self.rank] = time.monotonic_ns()

    def shrinks(self, come: bool) -> None:
        """Say that this rank has come to ``shrink``, or that it has given that up."""
        self.lefts[self.rank] = SHRINKS if come else 0

    def comes_to_shrink(self, rank: int) -> bool:
        """Whether a rank says so."""
        return int(self.lefts[rank]) == SHRINKS

    def state(self, rank: int) -> str:
        """The process of ``rank``: ``running``, ``stopped``, ``blocked``, ``gone``, or ``""`` (not seen).

        ``left`` where Python has ended there, ``dropped`` where it has no such communicator any more, ``went on`` where
        it has another one, which :meth:`Communicator.shrink` has given.
        """
        left = int(self.lefts[rank])
        if left and left != SHRINKS:
            return STATES_OF.get(left, "dropped")
        if rank in self.gone:
            return "gone"
        if not self.visible[rank]:
            return ""
        pid = int(self.pids[rank])
        state = process_state(pid)
        if state is None or state in "ZX" or start_time(pid) != int(self.starts[rank]):
            return "gone"
        return "stopped" if state in "Tt" else "blocked" if state == "D" else "running"


def process_state(pid: int) -> str | None:
    """The state letter of /proc/PID/stat, or None if there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else None


def start_time(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks since boot, or None if there is no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


@cache
def own_start(pid: int) -> int:
    """When this process started."""
    return start_time(pid) or 0


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
