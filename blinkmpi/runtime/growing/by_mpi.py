"""``grow`` among ranks that MPI's launcher has started: MPI starts more (``Spawn``) and makes one group (``Merge``).

Both wait without a deadline, for a program that never calls MPI for ever. So they are called in a thread, which is
given up at the deadline. What was begun cannot be called back, so the old communicator is dead then. It lives where MPI
says on each rank that it cannot start the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ...errors import BlinkError, CannotGrow, CollectiveTimeout, PeerLost
from ...transport.liveness import Peers
from ...transport.network.bounded import Rendezvous
from ...transport.network.job_numbers import highest, next_numbers, note, own_number, started_later
from ...util.text import ranks_text
from ...util.together import OverBuffers
from ..bootstrap import Options, check_timeout, first_deadline, is_time
from ..dispatch import Dispatcher
from ..entering import enter
from ..in_thread import InThread
from ..process_exit import end_job_at_exit, end_job_on_error
from ..ranks.mpi import DEAD, MpiRanks, free
from .wanted import check_growable, check_launcher, command_of, encoded, number_of, options_of, shared

STARTING = "MPI to start them"  # the first step
LOOK_S = 0.2  # between looks after the ranks that are there
Made = tuple[MPI.Intracomm, Dispatcher]


class Meeting:
    """The steps by which ranks that are there and ranks that join get one communicator of MPI's; in a thread.

    Args:
        find: gives MPI's communicator between the two sides; it may start the others.
        joins: whether this rank is a new one.
        told: what the new ranks take over, on the others.

    Attributes:
        step: what this rank waits for, in words.
    """

    def __init__(self, find: Callable[[], MPI.Intercomm], *, joins: bool, told: bytes = b"") -> None:
        self.step = STARTING
        self._find, self._joins, self._told = find, joins, told

    def run(self) -> tuple[MPI.Intracomm, Options]:
        """The communicator, in which the new ranks come last, and the arguments of ours."""
        between = self._find()
        old, new = (between.remote_size, between.size) if self._joins else (between.size, between.remote_size)
        started = f"the {new} that MPI has started to call blinkmpi.Communicator.join()"
        self.step = "the ranks that were there" if self._joins else started
        comm = between.Merge(high=self._joins)
        self.step = "all to tell who they are"
        told = np.empty((old + new, 2), np.int64)
        comm.Allgather(np.array([own_number(), highest()], np.int64), told)
        note(comm, next_numbers([(int(number), int(high)) for number, high in told]))
        options = options_of(OverBuffers(comm).bcast_bytes(self._told, 0))
        between.Disconnect()  # else Open MPI 5.0.11 crashes in MPI_Finalize
        return comm, options


def grown_by_mpi(dispatcher: Dispatcher, n: object, command: Sequence[str] | None, timeout_s: float | None) -> Made:
    """MPI's communicator of these ranks and ``n`` new ones, and what makes the calls there.

    Raises:
        ArgumentError, CannotGrow, MismatchError, RemoteError: on every rank; the old communicator lives.
        CollectiveTimeout, PeerLost: then it is dead.
    """
    context, sequence = dispatcher.context, dispatcher.sequence
    sequence.check_alive()
    deadline = timeout_s if timeout_s is not None and is_time(timeout_s) else context.timeout_s

    def asked() -> tuple[int, list[str]]:
        if timeout_s is not None:
            check_timeout(timeout_s)
        check_launcher()
        check_growable(context)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CannotGrow("grow(): MPI was started without THREAD_MULTIPLE, which waiting under a deadline needs")
        return number_of(n), command_of(command)

    def started() -> MPI.Intercomm:
        place = MPI.Info.Create({"wdir": os.getcwd()})
        try:
            return context.mpi.private.Spawn(argv[0], argv[1:], new, place)
        finally:
            place.Free()

    new, argv = enter(sequence, f"grow({n})", asked, deadline)
    until = time.monotonic() + deadline
    meeting = Meeting(started, joins=False, told=encoded(shared(context, context.n + new)))
    work = InThread(meeting.run, "blinkmpi-grow")
    try:
        comm, options = _waited(work, meeting, f"grow({new})", until, deadline, context.host.peers)
    except MPI.Exception as error:  # on every rank
        raise CannotGrow(
            f"grow({new}): MPI cannot start {argv}: {error}. Not every launcher can: Open MPI's mpirun and MPICH's "
            "mpiexec do, where they have room (mpirun --oversubscribe)"
        ) from error
    except BaseException as error:
        sequence.die(error if isinstance(error, BlinkError) else PeerLost(f"left by {error!r} in grow()"))
        if isinstance(error, DEAD):
            end_job_at_exit(str(error))
        raise
    try:
        return comm, _opened(comm, options, f"grow({new})", until)
    except DEAD as error:
        sequence.die(error)
        raise


def joined_by_mpi(timeout_s: float | None) -> Made | None:
    """The communicator that this process was started for, on a new rank; None on one that was not started by others.

    Raises:
        CollectiveTimeout, BlinkError: as on the ranks that were there.
    """
    if not started_later() or MPI.Comm.Get_parent() == MPI.COMM_NULL:  # or it has joined
        return None
    deadline = first_deadline(timeout_s)
    until = time.monotonic() + deadline
    meeting = Meeting(MPI.Comm.Get_parent, joins=True)
    what = "Communicator.join()"
    try:
        comm, options = _waited(InThread(meeting.run, "blinkmpi-grow"), meeting, what, until, deadline)
    except DEAD as error:
        end_job_at_exit(str(error))
        raise
    return comm, _opened(comm, options, what, until)


def _waited(
    work: InThread[tuple[MPI.Intracomm, Options]],
    meeting: Meeting,
    what: str,
    until: float,
    deadline_s: float,
    peers: Peers | None = None,
) -> tuple[MPI.Intracomm, Options]:
    """What the meeting gives.

    Args:
        peers: the ranks that were there, as far as this one sees them.

    Raises:
        CollectiveTimeout, PeerLost: if a rank does not come, or dies. MPI's Exception: if it cannot start the others.
    """
    looked = time.monotonic()
    while not work.ended():
        now = time.monotonic()
        if now - looked > LOOK_S:
            looked = now
            if peers is not None and (gone := peers.lost()):
                raise PeerLost(f"{what}: {ranks_text(gone)} died meanwhile; {peers.remedy}", gone)
        if now > until:
            raise CollectiveTimeout(
                f"{what}: rank {MPI.COMM_WORLD.rank} has waited {deadline_s:.1f} s for {meeting.step}; raise timeout=, "
                "or look at the output of these processes"
            )
    try:
        return work.result()
    except MPI.Exception as error:
        if meeting.step == STARTING:
            raise
        raise PeerLost(f"{what}: a rank was lost as this one waited for {meeting.step}: {error}") from error


def _opened(comm: MPI.Intracomm, options: Options, what: str, until: float) -> Dispatcher:
    """Open ours on MPI's communicator; who fails frees that."""

    def ranks(rendezvous: Rendezvous) -> MpiRanks:
        rendezvous.what, rendezvous.timeout_s = what, max(until - time.monotonic(), 1.0)
        return MpiRanks(comm, rendezvous)

    end_job_on_error(comm)
    try:
        return Dispatcher(ranks, options)
    except BaseException as error:
        free(comm, error)
        raise
