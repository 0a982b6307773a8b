"""A job's trace: the events of each rank's calls, in one file of Chrome's trace event format.

A rank of the job is a process of the trace; its rows are its calls, its waits, and a row for each tree. A slice is a
chunk that the rank moved along the tree, and arrows lead from the chunk's sender to its receivers. Ranks write when a
communicator ends: freed, dead, or at the end of the process, also by SIGTERM, with which launchers end the other ranks
of a job in which one has died. Nothing is sent for it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ..errors import TraceError
from ..util import chrome_trace
from ..util.text import plural
from ..util.together import Comm, bcast, from_root, together
from .events import CALL, CHUNK, ENTER, EventRing, TracedProgram

ABOUT = "blinkmpi: a process for each rank; rows for its calls, its waits, and each tree"
CALLS, WAITS, TREES = 0, 1, 2  # rows of a communicator; tree k has row TREES + k
ROWS = 1_000_000  # from one communicator of a process to the next
MARGIN_US = 0.0005  # by which an arrow lies inside of its slices


@dataclass(frozen=True)
class Identity:
    """What one trace has in common: the job's name, when it began, in ns of the epoch, and this process's number."""

    job: str
    origin_ns: int
    process: int


class _Process:
    """This process in traces: who it is, by file, and what is to be written at its end."""

    def __init__(self) -> None:
        self.identities: dict[str, Identity] = {}
        self.communicators = 0
        self.open: list[CallTrace] = []
        self.writing = threading.Lock()
        self.pid = 0


_HERE = _Process()


def open_trace(
    comm: Comm, node: Comm, path: str, ring: EventRing, *, process: int, say: Callable[[str], None]
) -> CallTrace:
    """Begin to trace a communicator; collective. The first of a job makes the file, in place of an older job's.

    Args:
        node: the ranks of this machine.
        process: this process's number in the job.
        say: see :class:`CallTrace`.

    Raises:
        TraceError: on every rank, if the file cannot be written.
    """

    def begin() -> tuple[str, int, str]:
        known = _HERE.identities.get(path) or Identity(uuid4().hex[:12], time.time_ns(), process)
        if path not in _HERE.identities:
            chrome_trace.create(path, known.job, ABOUT)
        return known.job, known.origin_ns, f"{process}.{_HERE.communicators}"

    def begin_here() -> int:
        if node.rank == 0 and chrome_trace.job_of(path) != job and path not in _HERE.identities:
            chrome_trace.create(path, job, ABOUT)  # a machine that does not see rank 0's file
        return time.time_ns() - time.monotonic_ns()

    job, origin_ns, label = from_root(comm, begin, tuple[str, int, str], error=TraceError)
    own = together(comm, begin_here, error=TraceError)
    clock_ns = bcast(node, own, int)
    identity = _HERE.identities.setdefault(path, Identity(job, origin_ns, process))
    return CallTrace(path, ring, identity, label, clock_ns=clock_ns, rank=comm.rank, n=comm.size, say=say)


class CallTrace:
    """What one communicator's rank adds to its job's trace.

    Args:
        label: the communicator's name, the same on all its ranks.
        clock_ns: wall-clock time less monotonic time, the same for all ranks of a machine.
        rank, n: of this communicator.
        say: told of what went wrong at the end, where nobody can catch an error.
    """

    def __init__(
        self,
        path: str,
        ring: EventRing,
        identity: Identity,
        label: str,
        *,
        clock_ns: int,
        rank: int,
        n: int,
        say: Callable[[str], None],
    ) -> None:
        self.path, self._ring, self._identity, self._label = path, ring, identity, label
        self._rank, self._n, self._say = rank, n, say
        self._clock_ns = clock_ns - identity.origin_ns
        self._number = _HERE.communicators
        self._written = False
        _HERE.communicators += 1
        if _HERE.pid != os.getpid():
            _HERE.pid, _HERE.open = os.getpid(), []
            atexit.register(write_all)
            _write_at_sigterm()
        _HERE.open.append(self)

    def write(self) -> None:
        """Add this rank's events to the file, once. What goes wrong is said: the calls themselves were right."""
        with _HERE.writing:
            self._write()

    def _write(self) -> None:
        if self._written or os.getpid() != _HERE.pid:
            return
        self._written = True
        if self in _HERE.open:
            _HERE.open.remove(self)
        try:
            found = chrome_trace.add(self.path, self._identity.job, self.events(), ABOUT)
        except TraceError as error:
            self._say(f"rank {self._rank}: {error}. Its events are lost")
            return
        if str(found) != self.path:
            self._say(f"BLINKMPI_TRACE={self.path!r} is another job's by now; this job's events are in {str(found)!r}")
        if self._ring.dropped and self._rank == 0:
            kept = plural(len(self._ring.events()), "event")
            self._say(f"{self.path!r} has the last {kept} of each rank; {self._ring.dropped} earlier ones of rank 0 "
                      "were dropped (BLINKMPI_TRACE_EVENTS)")  # fmt: skip

    def events(self) -> Iterator[str]:
        """This rank's part of the file, by line."""
        process, base = self._identity.process, self._number * ROWS
        where = f"rank {self._rank} of {self._n} in communicator {self._label}: "
        prefix = where if self._number else ""
        events = self._ring.events().tolist()
        known = self._ring.programs
        trees = sorted({known[e[3]].rows[e[4]].tree for e in events if e[6] == CHUNK})
        rows = {base + CALLS: f"{prefix}calls", base + WAITS: f"{prefix}waits"}
        rows |= {base + TREES + tree: f"{prefix}tree {tree}" for tree in trees}
        yield from chrome_trace.names_texts(process, f"rank {process} ({os.uname().nodename}, {os.getpid()})", rows)
        counts: dict[str, object] = {"events": len(events), "dropped": self._ring.dropped}
        yield chrome_trace.named_text("blinkmpi", process, base, counts)
        texts: dict[tuple[int, int], str] = {}
        for start, end, seq, number, row, other, kind in events:
            program = known[number]
            at, us = (start + self._clock_ns) / 1000, (end - start) / 1000
            if kind == CHUNK:
                args = texts.get((number, row))
                if args is None:
                    args = texts[number, row] = _about(program, row)
                does = program.rows[row]
                tid = base + TREES + does.tree
                left = f'{{"call":{seq},"chunk":{other},{args}}}'
                yield chrome_trace.slice_text(f"{does.way} {other}", process, tid, at, us, left)
                for _, channel in does.ins:
                    label = f"{self._label}.{seq}.{channel}.{other}.{self._rank}"
                    yield chrome_trace.arrow_text("f", label, process, tid, at + MARGIN_US)
                for readers, channel in does.outs:
                    for reader in readers:
                        label = f"{self._label}.{seq}.{channel}.{other}.{reader}"
                        yield chrome_trace.arrow_text("s", label, process, tid, at + us - MARGIN_US)
            elif kind == CALL:
                args = json.dumps({"call": seq, "what": program.text})
                name = program.text.partition("(")[0]
                yield chrome_trace.slice_text(name, process, base + CALLS, at, us, args)
            else:
                whom = "other nodes" if other == self._rank else f"rank {other}" if other >= 0 else "a rank"
                text = f"wait for {whom} to enter" if kind == ENTER else f"wait for {whom}"
                tree = f',"tree":{program.rows[row].tree},"way":"{program.rows[row].way}"' if row >= 0 else ""
                yield chrome_trace.slice_text(text, process, base + WAITS, at, us, f'{{"call":{seq}{tree}}}')


def _about(program: TracedProgram, row: int) -> str:
    """The arguments that all chunks of a row have, as JSON without braces."""
    does = program.rows[row]
    said: dict[str, Any] = {"tree": does.tree, "bytes": min(does.chunk_bytes, does.nbytes)}
    sources = [rank for ranks, _ in does.ins for rank in ranks]
    targets = [rank for ranks, _ in does.outs for rank in ranks]
    said |= ({"from": sources} if sources else {}) | ({"to": targets} if targets else {})
    return json.dumps(said)[1:-1]


def write_all() -> None:
    """Write what is left, at the end of the process."""
    for trace in [*_HERE.open]:
        trace.write()
    with _HERE.writing:  # whoever else writes has done so
        pass


def _write_at_sigterm() -> None:
    """Write before SIGTERM ends this process, unless the program has a handler of its own for signals.

    The main thread may wait in a call of MPI for ever, and run no handler of Python; so a thread waits for the signal's
    number, which Python writes into a pipe at once.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:  # an event loop's
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
        return
    signal.signal(signal.SIGTERM, _leave_to_thread)
    threading.Thread(target=_end_at, args=(reader, os.getpid()), name="blinkmpi-trace", daemon=True).start()


def _leave_to_thread(_number: int, _frame: object) -> None:
    """End a child that has been forked, where the thread is not."""
    if os.getpid() != _HERE.pid:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _end_at(reader: int, process: int) -> None:
    """Wait for SIGTERM, write, and let it end this process. A thread's whole life."""
    while os.read(reader, 1) != bytes([signal.SIGTERM]):
        pass
    if os.getpid() == process:
        write_all()
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # Python's own may be set by the main thread alone
        os.kill(process, signal.SIGTERM)
