"""``shrink`` among ranks that MPI's launcher has started.

Where a process has died, ULFM's ``Shrink`` makes the communicator of those that are left, and ``Iagree`` says whether
all of them could open it. Both need ``mpirun --with-ft ulfm``. Where all processes live, and some are stopped or to go,
``Create_group`` does, which needs no such launcher. Open MPI 5.0.11 knows ``Ishrink``, too, but that fails with an
internal error, so ``Shrink`` is called in a thread: like all that is waited for, it is under the deadline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
from mpi4py import MPI

from ...errors import CannotShrink, CollectiveTimeout, PeerLost, RemoteError
from ...transport.network.bounded import Rendezvous
from ...transport.network.exchanges import ABANDONED, FAILED, BegunDup, Members
from ...util.launcher import outlives_ranks
from ...util.lru import LRU
from ...util.text import ranks_text
from ..children import SETS, Child, Spares
from ..dispatch import Dispatcher
from ..in_thread import MOMENT_S, InThread
from ..process_exit import end_job_if_stopped, job_goes_on
from ..ranks.mpi import MpiRanks
from .leaving_gpus import check_gpus, leaving
from .meeting import Meeting, check_not_left_behind, enter, meet

MADE, NOT_LOST = 1, 2  # bits of what the ranks agree on: all have opened it; none failed but for a rank that was lost
TAG = 0x5412  # tag of the survivors' messages on the old communicator
Made = tuple[MPI.Intracomm, Dispatcher]


def _begun(work: Callable[[], MPI.Comm]) -> InThread[MPI.Comm]:
    return InThread(work, "blinkmpi-shrink")


class MpiShrinking:
    """The way of one communicator to that of the ranks that are left. It may be tried again, with the same object."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._context = dispatcher, dispatcher.context
        self._base = self._context.mpi.public  # a communicator of the survivors so far
        self._ranks = tuple(range(self._context.n))  # those of the base, by their old numbers
        self._lost: PeerLost | None = None  # the error, if a rank was lost while the base was opened
        self._shrinks: InThread[MPI.Comm] | None = None  # MPI's Shrink of the base, which has not ended
        self._outlives = outlives_ranks(os.environ)

    def run(self, without: frozenset[int], timeout_s: float | None) -> Made:
        """Make the communicator of the ranks that are left but ``without``, open it, and give back the old one.

        Raises:
            CannotShrink, CollectiveTimeout: then it may be called again. BlinkError: what kept a rank from opening it.
        """
        context = self._context
        check_gpus(context.gpus)
        check_not_left_behind(context.host.peers)
        deadline = context.timeout_s if timeout_s is None else timeout_s
        enter(self._dispatcher.sequence, deadline)
        if self._outlives:
            context.mpi.public.Revoke()  # ranks that wait for a message must come, too: end their waits
        found, made = self._opened(without, deadline)
        self._leave(found)
        return self._base, made

    def _opened(self, without: frozenset[int], deadline_s: float) -> tuple[Meeting, Dispatcher]:
        """Who has come, and what makes the calls of those that are left: the base's."""
        while True:  # each time at least one more is lost
            found = meet(self._context.host.peers, without, deadline_s)
            before, failed = len(self._ranks), self._lost
            self._part(found, deadline_s)
            if failed is not None and len(self._ranks) == before:
                raise failed
            made = self._open(deadline_s)
            if made is not None:
                return found, made

    # ---- the communicator of MPI's

    def _part(self, found: Meeting, deadline_s: float) -> None:
        """Make the base that of those that are left."""
        host, first = self._context.host, self._base is self._context.mpi.public
        gone, alive = ([r for r in some if r in self._ranks] for some in (found.gone, found.alive))
        if gone and not self._outlives:
            raise CannotShrink(
                f"shrink(): {ranks_text(gone)} died, and this launcher lets no job go on then; start the job by Open "
                "MPI's mpirun --with-ft ulfm"
            )
        unseen = len(host.pages.here) < host.n  # MPI knows who is gone
        if gone or self._lost is not None or (self._outlives and (unseen or (first and not alive))):
            self._shrink(alive, deadline_s)
        elif first or alive:
            old = self._context.mpi.private if first else self._base
            at = [self._ranks.index(r) for r in found.rest]
            group = Members(old, Rendezvous("shrink()", deadline_s, self._context.slow), at, TAG)
            self._take(self._await(_begun(group.Dup), "MPI's Create_group", deadline_s))

    def _shrink(self, alive: list[int], deadline_s: float) -> None:
        """Take what MPI's Shrink makes, for which all must come that live."""
        host = self._context.host
        if alive:
            kill = " ".join(str(int(host.pages.pids[r])) for r in alive)
            raise CannotShrink(
                f"shrink(): a process has died, and MPI waits for others that live: {host.peers.states(alive)}; end "
                f"these, too (kill -KILL {kill}), and call shrink() again"
            )
        self._shrinks = self._shrinks or _begun(self._base.Shrink)
        try:
            self._take(self._await(self._shrinks, "MPI's Shrink", deadline_s))
        finally:
            self._shrinks = None if self._shrinks.ended() else self._shrinks
        self._lost = None

    def _take(self, comm: MPI.Intracomm) -> None:
        mine, base = comm.Get_group(), self._base.Get_group()
        at = MPI.Group.Translate_ranks(mine, list(range(mine.size)), base)
        mine.Free()
        base.Free()
        self._base, self._ranks = comm, tuple(self._ranks[i] for i in at)

    def _await(self, work: InThread[MPI.Comm], what: str, deadline_s: float) -> MPI.Intracomm:
        since = time.monotonic()
        while not work.ended():
            if time.monotonic() - since > deadline_s:
                raise self._late(what, deadline_s)
        try:
            return MPI.Intracomm(work.result())
        except MPI.Exception as error:
            raise PeerLost(f"shrink(): {what}: {error}; call it again", self._context.host.peers.lost()) from error

    def _late(self, what: str, deadline_s: float) -> CollectiveTimeout:
        others = [r for r in self._ranks if r != self._context.rank]
        return CollectiveTimeout(
            f"shrink(): rank {self._context.rank} has waited {deadline_s:.1f} s for {what}: "
            f"{self._context.host.peers.states(others)}; call it again on every rank that lives, or raise timeout="
        )

    # ---- a communicator of ours

    def _open(self, deadline_s: float) -> Dispatcher | None:
        """Open one on all ranks of the base; None, on all of them, if another one is lost meanwhile."""
        old, comm = self._context, self._base
        made: Dispatcher | None = None
        error: Exception | None = None
        spares = Spares()
        spares.discard()  # nothing is kept for later communicators of the same ranks
        settings = msgspec.structs.replace(old.settings, nodes=(), topo_file="", graph_file="")  # of the old ranks
        parent = replace(old.parent, file=None, plans=LRU(SETS), spares=spares, settings=settings)
        child = Child(parent, comm, "shrink()")
        child.timeout_s = deadline_s
        try:
            begun = self._begun(deadline_s) if self._outlives else None
            meet: Callable[[Rendezvous], MpiRanks] = partial(MpiRanks, comm, begun=begun)
            meet = meet if old.gpus is None else leaving(old.gpus, meet, deadline_s)
            made = Dispatcher(meet, child.options, child)
        except Exception as raised:
            error = raised
        mine = MADE | NOT_LOST if made is not None else NOT_LOST if isinstance(error, PeerLost) else 0
        agreed = 0
        try:
            agreed = self._agreed(mine, deadline_s)
        finally:
            if made is not None and not agreed & MADE:
                made.sequence.die(PeerLost("another rank could not open it"))
                made.leave_behind()
        if agreed & MADE:
            return made
        if agreed & NOT_LOST:
            self._lost = error if isinstance(error, PeerLost) else PeerLost("shrink(): another rank lost a third one")
            comm.Revoke()
            return None
        raise error or RemoteError("shrink(): another rank could not open the new communicator; its error says why")

    def _begun(self, deadline_s: float) -> BegunDup:
        """A duplicate of the base, made by Shrink, too: where a process dies amid ``Idup``, Open MPI 5.0.11 may crash.

        Raises:
            PeerLost: on every rank, if one is lost meanwhile.
        """
        made = self._await(_begun(self._base.Shrink), "MPI's second Shrink", deadline_s)
        if made.size < self._base.size:
            raise PeerLost("shrink(): another rank was lost as the new communicator opened; call it again")
        return made, MPI.REQUEST_NULL

    def _agreed(self, mine: int, deadline_s: float) -> int:
        """The bits that all ranks set; NOT_LOST alone if one is lost."""
        if not self._outlives:
            return mine & MADE  # a lost rank ends the job anyway
        flag, since = np.array([mine], np.int32), time.monotonic()
        try:
            request = self._base.Iagree(flag)
            while not request.Test():
                if time.monotonic() - since > deadline_s:
                    ABANDONED.append((request, flag))
                    raise self._late("the others to agree", deadline_s)
                time.sleep(MOMENT_S / 10)
        except MPI.Exception as error:
            if error.Get_error_class() not in FAILED:
                raise
            return NOT_LOST  # on every rank: one has died
        return int(flag[0])

    def _leave(self, found: Meeting) -> None:
        """Give back the old communicator; this process, and its job, go on."""
        processes = self._context.together.processes()
        stopped = [processes[r] for r in found.alive if r in processes]
        if self._outlives:
            job_goes_on(lost=len(self._ranks) + len(found.alive) < self._context.n)
        end_job_if_stopped(stopped)
        self._dispatcher.leave_behind()
