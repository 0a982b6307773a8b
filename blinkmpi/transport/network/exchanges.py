"""MPI's collectives under a deadline: what the ranks tell each other while a communicator is made, changed or freed.

MPI's blocking collectives wait for ever. Here each is begun without blocking and polled; meanwhile the process looks
after the others. ``Dup`` is MPI's ``Idup``. MPI has no such form of ``Split`` and its like, so a barrier with a
deadline comes before them: then all ranks are there, and only one that dies that very moment could make them wait.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from ...errors import CollectiveTimeout, PeerLost
from ...util.text import ranks_text
from ..announcement import some
from ..processes import KNOWN, WORDS, JobProcess, learn, learn_from_launcher, own, state
from ..python_stacks import ASK_SECONDS, CAME_TO, ask, close_service, open_service
from ..slow_waits import SlowWaits, stacks_of

LOOK_SECONDS = 0.2  # how often a wait looks after the others
SPIN_SECONDS = 0.05  # a wait polls without sleeping for so long
GONE_SECONDS = 1.0  # after which a process that has ended counts as lost, if its part is still owed
WORK_SECONDS = 30.0  # that a rank may be at work between two exchanges of one rendezvous, whatever timeout= says
FAILED = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
REMEMBERED = 256  # communicators whose exchanges a process can be asked about
MEET_TAG = 1  # on a communicator that has no other messages between these ranks
ABANDONED: list[object] = []  # requests that were given up, and their memory, which MPI may still write
_made: dict[str, int] = {}  # communicators of the same ranks that this process has made


class Rendezvous:
    """What is being done by some exchanges, and how long the ranks may take: shared by the communicators that do it.

    A rank must come to the first exchange within ``timeout_s``. Then all are known to be there, and one that runs may
    compile or plan for ``WORK_SECONDS``, though ``timeout_s`` is less; one that is stopped may not.
    """

    def __init__(self, what: str, timeout_s: float, slow: SlowWaits) -> None:
        self.what, self.timeout_s, self.slow = what, timeout_s, slow
        self.give_up: Callable[[BaseException], object] = lambda _: None  # told of what ended an exchange
        self.check: Callable[[], object] = lambda: None  # raises what has ended it on another rank
        self.met = False  # whether all have come to the first exchange

    @contextmanager
    def doing(self, what: str, timeout_s: float) -> Iterator[None]:
        """While the ranks, which have met, do this: who is stopped meanwhile has ``timeout_s`` to go on."""
        before = self.what, self.timeout_s, self.met
        self.what, self.timeout_s, self.met = what, timeout_s, True
        try:
            yield
        finally:
            self.what, self.timeout_s, self.met = before


class BoundedComm:
    """A communicator of MPI whose collectives raise CollectiveTimeout or PeerLost, for :mod:`...util.together`.

    Args:
        comm: used for nothing else at the same time.
        among: the ranks that make this object, in the same order on each; without it all do.
    """

    def __init__(self, comm: MPI.Intracomm, rendezvous: Rendezvous, *, among: Sequence[int] = ()) -> None:
        self.comm, self.rendezvous = comm, rendezvous
        self.rank, self.size = comm.rank, comm.size
        self.world = world_ranks(comm)
        self._among = among or range(self.size)
        key = hashlib.blake2b(repr((self.world, *among)).encode(), digest_size=8).hexdigest()
        _made[key] = _made.get(key, 0) + 1
        self._name, self._turn = f"{key}.{_made[key]}", 0
        self._peers: list[int] | None = None
        self._answers = False

    def allgather(self, sendobj: Any, /) -> list[Any]:
        """Everybody's object, in rank order."""
        body = np.frombuffer(MPI.pickle.dumps(sendobj), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self._do("Iallgather", np.array([body.size], np.int64), lengths)
        counts = lengths.tolist()
        found = np.empty(sum(counts), np.uint8)
        self._do("Iallgatherv", body, [found, counts])
        ends = np.cumsum(lengths).tolist()
        return [MPI.pickle.loads(found[end - n : end].tobytes()) for end, n in zip(ends, counts, strict=True)]

    def bcast(self, obj: Any, root: int, /) -> Any:
        """The root's object."""
        body = np.frombuffer(MPI.pickle.dumps(obj), np.uint8) if self.rank == root else None
        length = np.array([0 if body is None else body.size], np.int64)
        self._do("Ibcast", length, root)
        if body is None:
            body = np.empty(int(length[0]), np.uint8)
        self._do("Ibcast", body, root)
        return obj if self.rank == root else MPI.pickle.loads(body.tobytes())

    def Barrier(self) -> None:
        """Return when all have come."""
        self._do("Ibarrier")

    def Dup(self) -> MPI.Intracomm:
        """A duplicate, for messages."""
        comm, request = self.comm.Idup()
        self.wait(request, comm)
        return MPI.Intracomm(comm)

    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int, /) -> None:
        """Send one buffer and receive another."""
        receive, send = self.comm.Irecv(recvbuf, source, recvtag), self.comm.Isend(sendbuf, dest, sendtag)
        for request, peer in ((receive, source), (send, dest)):
            self.wait(request, (receive, send, sendbuf, recvbuf), peers=[peer])

    def _do(self, name: str, *arguments: Any) -> None:
        self.wait(getattr(self.comm, name)(*arguments), arguments)

    # ---- waiting

    def wait(self, request: MPI.Request, memory: object, *, peers: list[int] | None = None) -> None:
        """Wait for a request; ``memory`` is kept if it is given up.

        Args:
            peers: who is waited for; None in a collective, in which every rank is.

        Raises:
            CollectiveTimeout, PeerLost: after which the communicator must not be used, nor freed.
        """
        self._peers = peers
        if peers is None:
            self.come()
        try:
            self._poll(request)
        except MPI.Exception as error:
            ABANDONED.append((request, memory))
            if error.Get_error_class() not in FAILED:
                raise
            lost = PeerLost(f"{self.rendezvous.what}: {self._words(self._ended())}{error}; start the job again")
            self.rendezvous.give_up(lost)
            raise lost from error
        except BaseException as error:
            ABANDONED.append((request, memory))
            self.rendezvous.give_up(error)
            raise
        self.rendezvous.met = self.rendezvous.met or peers is None
        if self._answers:  # while it waited; who has given up goes on answering
            self._answers = False
            close_service()

    def come(self) -> None:
        """Note, for those who ask, that this rank has come to the next exchange."""
        self._turn += 1
        CAME_TO.pop(self._name, None)  # the newest is the last
        CAME_TO[self._name] = self._turn
        if len(CAME_TO) > REMEMBERED:
            del CAME_TO[next(iter(CAME_TO))]

    def _poll(self, request: MPI.Request) -> None:
        since = looked = time.monotonic()
        polls, gone_since, slow = 0, 0.0, False
        while not request.Test():
            polls += 1
            if polls % 64 and not slow:
                os.sched_yield()
                continue
            now = time.monotonic()
            slow = now - since > SPIN_SECONDS
            if slow:
                time.sleep(1e-4 if now - since < 1 else 1e-3)
            if now - looked < min(LOOK_SECONDS, self.rendezvous.timeout_s):
                continue
            looked = now
            ended = self._ended()
            gone_since = (gone_since or now) if ended else 0.0
            self._look(now - since, ended if gone_since and now - gone_since > GONE_SECONDS else [])

    def _look(self, waited_s: float, gone: list[int]) -> None:
        """Warn, or raise, as it is time."""
        if not self._answers:
            self._answers = True
            open_service()
        rendezvous = self.rendezvous
        rendezvous.check()
        if gone:
            raise PeerLost(f"{rendezvous.what}: {self._words(gone)}start the job again")
        late = waited_s >= rendezvous.timeout_s
        if late and rendezvous.met and waited_s < WORK_SECONDS and not self._stopped():
            late = False
        if late:
            missing = self.missing()
            text = f"{rendezvous.what}: rank {self.rank} waited {waited_s:.1f} s; {self._words(missing)}"
            raise CollectiveTimeout(
                f"{text}look at that process; if it is only slow, raise timeout= (BLINKMPI_TIMEOUT). No communicator "
                "can be made of these ranks any more: start the job again"
            )
        if rendezvous.slow.due((self._name, self._turn), waited_s) and self.rank == self._speaker():
            missing = self.missing()
            text = f"{rendezvous.what}: rank {self.rank} has waited {waited_s:.0f} s; {self._words(missing)}"
            text = f"{text}it goes on waiting{stacks_of(missing, self.processes())}"
            rendezvous.slow.say(text, rendezvous.timeout_s)

    # ---- the others

    def processes(self) -> dict[int, JobProcess]:
        """Who the other ranks are, as far as that is known."""
        if any(world not in KNOWN for world in self.world):
            learn_from_launcher()
        pairs = enumerate(self.world)
        return {r: KNOWN[world] for r, world in pairs if world in KNOWN and r != self.rank}

    def _ended(self) -> list[int]:
        return [r for r, process in self.processes().items() if state(process) == "gone"]

    def _stopped(self) -> bool:
        return any(state(process) == "stopped" for process in self.processes().values())

    def missing(self) -> list[int]:
        """The ranks that have not come to this exchange, or cannot be asked, as far as that shows within seconds."""
        if self._peers is not None:
            return self._peers
        known, until = self.processes(), time.monotonic() + 2 * ASK_SECONDS
        others = [r for r in self._among if r != self.rank]
        found = [r for r in others if time.monotonic() < until and not self._has_come(known.get(r))]
        seen = [r for r in found if state(known.get(r))]
        return seen or found

    def _speaker(self) -> int:
        """The rank that warns: the lowest one here that waits, as far as they can be asked."""
        known = self.processes()
        lower = sorted(r for r in self._among if r < self.rank)
        return next((r for r in lower if self._has_come(known.get(r))), self.rank)

    def _has_come(self, process: JobProcess | None) -> bool:
        """Whether a process says that it has come to this exchange."""
        if process is None or state(process) != "running":
            return False
        answer = ask(process)
        return not isinstance(answer, str) and answer.came_to.get(self._name, 0) >= self._turn

    def _words(self, ranks: list[int]) -> str:
        known = self.processes()
        by = {r: known.get(r) for r in ranks}
        found = [f"rank {r} ({p or 'not known yet'}) {WORDS[state(p)]}" for r, p in by.items()]
        unknown = [r for r, p in by.items() if p is None]
        if len(unknown) == len(ranks) and ranks:
            return f"{ranks_text(ranks)} may be missing, and cannot be seen from here; "
        return f"{some(found)}, and {'have' if len(ranks) > 1 else 'has'} not come; " if ranks else "all have come; "


def introduce(comm: BoundedComm) -> None:
    """Tell each other who the processes are; collective."""
    found = zip(comm.world, comm.allgather(own()), strict=True)
    learn({world: process for world, process in found if world >= 0})


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """The ranks in COMM_WORLD of those of ``comm``; below 0 for a process that was started later."""
    mine, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found = [int(r) for r in MPI.Group.Translate_ranks(mine, list(range(comm.size)), world)]
    mine.Free()
    world.Free()
    return found


def duplicate(comm: MPI.Intracomm, rendezvous: Rendezvous) -> MPI.Intracomm:
    """A duplicate of a communicator of the user's, made when all its ranks have come; nothing else is sent on it."""
    return BoundedComm(comm, rendezvous).Dup()


def meet(private: MPI.Intracomm, ranks: list[int], rendezvous: Rendezvous) -> None:
    """Return when all of ``ranks``, this one among them, have come; the others of the communicator take no part.

    Everybody hears from everybody, so that each knows who is missing.
    """
    comm = BoundedComm(private, rendezvous, among=ranks)
    comm.come()
    others, kept = [r for r in ranks if r != comm.rank], np.zeros((len(ranks), 2), np.uint8)
    requests = [comm.comm.Irecv(kept[i, :1], r, MEET_TAG) for i, r in enumerate(others)]
    requests += [comm.comm.Isend(kept[i, 1:], r, MEET_TAG) for i, r in enumerate(others)]
    for request, r in zip(requests, others * 2, strict=True):
        comm.wait(request, (requests, kept), peers=[r])
