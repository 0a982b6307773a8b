"""MPI's collectives under a deadline: what the ranks tell each other while a communicator is made, changed or freed.

MPI's blocking collectives wait for ever. Here each is begun without blocking and polled (:mod:`.bounded`). ``Dup`` is
MPI's ``Idup``. MPI has no such form of ``Split`` and its like, so some of the ranks are :class:`Members`. Where MPI has
to say which ranks share memory, a barrier with a deadline comes before its split: then all ranks are there, and only
one that stops that very moment could make them wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ...errors import PeerLost
from ...util.together import MOST_GATHERED, MOST_SENT, allgather, check_lengths, cut
from ..processes import KNOWN, JobProcess, learn, learn_from_launcher, own
from .bounded import Begun, Bounded, Rendezvous
from .job_numbers import numbers_of, of_world

FAILED = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
SHORT = 56  # bytes of a rank that go with their length
BegunDup = tuple[MPI.Intracomm, MPI.Request]
TAGS = 32768  # that any MPI has
ABANDONED: list[object] = []  # requests that were given up, and their memory, which MPI may still write
_made: dict[str, int] = {}  # communicators of the same ranks that this process has made


def ends_soon(request: MPI.Request, memory: object, looks: int) -> bool:
    """Whether a request ends within so many looks, which take no clock; ``memory`` is kept if they are interrupted."""
    try:
        return any(request.Test() for _ in range(looks))
    except BaseException:
        ABANDONED.append((request, memory))
        raise


class BoundedComm(Bounded):
    """A communicator of MPI.

    Args:
        comm: used for nothing else at the same time.
        among, name: as for :class:`Bounded`; without a name every rank has to make as many of the same ranks.
    """

    def __init__(
        self, comm: MPI.Intracomm, rendezvous: Rendezvous, *, among: Sequence[int] = (), name: str = ""
    ) -> None:
        everybody, ranks = numbers_of(comm), among or range(comm.size)
        self.comm, self.numbers = comm, [everybody[r] for r in ranks]
        key = hashlib.blake2b(repr((everybody, *among)).encode(), digest_size=8).hexdigest()
        if not name:
            _made[key] = _made.get(key, 0) + 1
            name = f"{key}.{_made[key]}"
        super().__init__(ranks.index(comm.rank), rendezvous, name, ranks)

    def allgather_bytes(self, body: bytes, /) -> list[bytes]:
        """Everybody's bytes, in rank order; short ones go with their lengths."""
        mine, theirs = np.zeros(8 + SHORT, np.uint8), np.empty((self.size, 8 + SHORT), np.uint8)
        mine[:8].view(np.int64)[0] = len(body)
        mine[8 : 8 + len(body)] = np.frombuffer(body[:SHORT], np.uint8)
        self._do("Iallgather", mine, theirs)
        counts: list[int] = theirs[:, :8].copy().view(np.int64)[:, 0].tolist()
        check_lengths(counts, MOST_GATHERED)
        if max(counts) <= SHORT:
            return [row[8 : 8 + count].tobytes() for row, count in zip(theirs, counts, strict=True)]
        found = np.empty(sum(counts), np.uint8)
        self._do("Iallgatherv", np.frombuffer(body, np.uint8), [found, counts])
        return cut(found, counts)

    def bcast_bytes(self, body: bytes, root: int, /) -> bytes:
        """The root's bytes."""
        length = np.array([len(body)], np.int64)
        self._do("Ibcast", length, root)
        check_lengths([int(length[0])], MOST_SENT, root)
        found = np.frombuffer(body, np.uint8) if self.rank == root else np.empty(int(length[0]), np.uint8)
        self._do("Ibcast", found, root)
        return body if self.rank == root else found.tobytes()

    def Barrier(self) -> None:
        """Return when all have come."""
        self._do("Ibarrier")

    def Dup(self, begun: BegunDup | None = None) -> MPI.Intracomm:
        """A duplicate, for messages; ``begun``: which MPI is making."""
        comm, request = begun or self.comm.Idup()
        self.wait(request, comm)
        return MPI.Intracomm(comm)

    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int, /) -> None:
        """Send one buffer and receive another."""
        receive = self.comm.Irecv(recvbuf, self.among[source], recvtag)
        send = self.comm.Isend(sendbuf, self.among[dest], sendtag)
        for request, peer in ((receive, source), (send, dest)):
            self.wait(request, (receive, send, sendbuf, recvbuf), peers=[peer])

    def _do(self, name: str, *arguments: Any) -> None:
        self.wait(getattr(self.comm, name)(*arguments), arguments)

    def processes(self) -> dict[int, JobProcess]:
        """Who the other ranks are: from the first exchange, or from their launcher."""
        if any(number not in KNOWN for number in self.numbers):
            learn_from_launcher(of_world)
        pairs = [(r, number) for r, number in enumerate(self.numbers) if number is not None and r != self.rank]
        return {r: KNOWN[number] for r, number in pairs if number in KNOWN}

    def _poll(self, begun: Begun) -> None:
        try:
            super()._poll(begun)
        except MPI.Exception as error:
            if error.Get_error_class() not in FAILED:
                raise
            ended = self._ended()
            text = f"{self.rendezvous.what}: {self._words(ended)}{error}; {self.rendezvous.remedy}"
            raise PeerLost(text, [self.among[r] for r in ended]) from error

    def _abandon(self, begun: Begun, memory: object, error: BaseException) -> BaseException:
        ABANDONED.append((begun, memory))
        return error


class Members(BoundedComm):
    """Some ranks of a communicator of MPI, numbered from 0; the others take no part.

    Everybody hears from everybody, so that each knows who is missing.

    Args:
        comm: has no other messages with this tag between these ranks.
        among: they, this one among them, in the same order on each.
    """

    def __init__(self, comm: MPI.Intracomm, rendezvous: Rendezvous, among: Sequence[int], tag: int) -> None:
        super().__init__(comm, rendezvous, among=among)
        self._tag = tag % TAGS

    def allgather_bytes(self, body: bytes, /) -> list[bytes]:
        """Everybody's bytes, in rank order."""
        return self._hear(body, MOST_GATHERED)

    def bcast_bytes(self, body: bytes, root: int, /) -> bytes:
        """The root's bytes."""
        return self._hear(body if self.rank == root else b"", MOST_SENT)[root]

    def Barrier(self) -> None:
        """Return when all have come."""
        self._hear_bytes(b"", [0] * self.size)

    def Dup(self, begun: BegunDup | None = None) -> MPI.Intracomm:
        """A communicator of these ranks alone."""
        self.Barrier()
        everybody = self.comm.Get_group()
        group = everybody.Incl(self.among)
        made = self.comm.Create_group(group, self._tag)
        group.Free()
        everybody.Free()
        return MPI.Intracomm(made)

    def _hear(self, body: bytes, most: int) -> list[bytes]:
        told = self._hear_bytes(np.int64(len(body)).tobytes(), [8] * self.size)
        counts = [int(np.frombuffer(each, np.int64)[0]) for each in told]
        check_lengths(counts, most)
        return self._hear_bytes(body, counts)

    def _hear_bytes(self, body: bytes, counts: Sequence[int]) -> list[bytes]:
        """Everybody's bytes, of which each has told the number."""
        mine, theirs = np.frombuffer(body, np.uint8), [np.empty(count, np.uint8) for count in counts]
        others = [r for r in range(self.size) if r != self.rank]
        self.come()
        requests = [self.comm.Irecv(theirs[r], self.among[r], self._tag) for r in others]
        requests += [self.comm.Isend(mine, self.among[r], self._tag) for r in others]
        for request, r in zip(requests, others * 2, strict=True):
            self.wait(request, (requests, mine, theirs), peers=[r])
        self.rendezvous.met = True
        return [body if r == self.rank else each.tobytes() for r, each in enumerate(theirs)]


def introduce(comm: BoundedComm) -> None:
    """Tell each other who the processes are; collective."""
    found = zip(comm.numbers, allgather(comm, own(), JobProcess), strict=True)
    learn({number: process for number, process in found if number is not None})


def duplicate(comm: MPI.Intracomm, rendezvous: Rendezvous, begun: BegunDup | None = None) -> MPI.Intracomm:
    """A duplicate of a communicator of the user's, made when all its ranks have come; nothing else is sent on it.

    Args:
        begun: the duplicate and its request, where that was begun before.
    """
    return BoundedComm(comm, rendezvous).Dup(begun)
