"""MPI's collectives under a deadline: what the ranks tell each other while a communicator is made, changed or freed.

MPI's blocking collectives wait for ever. Here each is begun without blocking and polled (:mod:`.bounded`). ``Dup`` is
MPI's ``Idup``. MPI has no such form of ``Split`` and its like, so a barrier with a deadline comes before them: then all
ranks are there, and only one that dies that very moment could make them wait.
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

FAILED = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
SHORT = 56  # bytes of a rank that go with their length
BegunDup = tuple[MPI.Intracomm, MPI.Request]
TAGS = 32768  # that any MPI has
ABANDONED: list[object] = []  # requests that were given up, and their memory, which MPI may still write
_made: dict[str, int] = {}  # communicators of the same ranks that this process has made


class BoundedComm(Bounded):
    """A communicator of MPI.

    Args:
        comm: used for nothing else at the same time.
        among: as for :class:`Bounded`.
    """

    def __init__(self, comm: MPI.Intracomm, rendezvous: Rendezvous, *, among: Sequence[int] = ()) -> None:
        self.comm, self.world = comm, world_ranks(comm)
        key = hashlib.blake2b(repr((self.world, *among)).encode(), digest_size=8).hexdigest()
        _made[key] = _made.get(key, 0) + 1
        super().__init__(comm.rank, comm.size, rendezvous, f"{key}.{_made[key]}", among)

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
        receive, send = self.comm.Irecv(recvbuf, source, recvtag), self.comm.Isend(sendbuf, dest, sendtag)
        for request, peer in ((receive, source), (send, dest)):
            self.wait(request, (receive, send, sendbuf, recvbuf), peers=[peer])

    def _do(self, name: str, *arguments: Any) -> None:
        self.wait(getattr(self.comm, name)(*arguments), arguments)

    def processes(self) -> dict[int, JobProcess]:
        """Who the other ranks are: from the first exchange, or from their launcher."""
        if any(world not in KNOWN for world in self.world):
            learn_from_launcher()
        pairs = enumerate(self.world)
        return {r: KNOWN[world] for r, world in pairs if world in KNOWN and r != self.rank}

    def _poll(self, begun: Begun) -> None:
        try:
            super()._poll(begun)
        except MPI.Exception as error:
            if error.Get_error_class() not in FAILED:
                raise
            lost = f"{self.rendezvous.what}: {self._words(self._ended())}{error}; start the job again"
            raise PeerLost(lost) from error

    def _abandon(self, begun: Begun, memory: object, error: BaseException) -> BaseException:
        ABANDONED.append((begun, memory))
        return error


def introduce(comm: BoundedComm) -> None:
    """Tell each other who the processes are; collective."""
    found = zip(comm.world, allgather(comm, own(), JobProcess), strict=True)
    learn({world: process for world, process in found if world >= 0})


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """The ranks in COMM_WORLD of those of ``comm``; below 0 for a process that was started later."""
    mine, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found = [int(r) for r in MPI.Group.Translate_ranks(mine, list(range(comm.size)), world)]
    mine.Free()
    world.Free()
    return found


def duplicate(comm: MPI.Intracomm, rendezvous: Rendezvous, begun: BegunDup | None = None) -> MPI.Intracomm:
    """A duplicate of a communicator of the user's, made when all its ranks have come; nothing else is sent on it.

    Args:
        begun: the duplicate and its request, where that was begun before.
    """
    return BoundedComm(comm, rendezvous).Dup(begun)


def meet(private: MPI.Intracomm, ranks: list[int], rendezvous: Rendezvous, tag: int) -> None:
    """Return when all of ``ranks``, this one among them, have come; the others of the communicator take no part.

    Everybody hears from everybody, so that each knows who is missing.

    Args:
        private: has no other messages between these ranks now.
        tag: tells apart what the same ranks do in several threads, or begin in other orders.
    """
    tag %= TAGS
    comm = BoundedComm(private, rendezvous, among=ranks)
    comm.come()
    others, kept = [r for r in ranks if r != comm.rank], np.zeros((len(ranks), 2), np.uint8)
    requests = [comm.comm.Irecv(kept[i, :1], r, tag) for i, r in enumerate(others)]
    requests += [comm.comm.Isend(kept[i, 1:], r, tag) for i, r in enumerate(others)]
    for request, r in zip(requests, others * 2, strict=True):
        comm.wait(request, (requests, kept), peers=[r])
