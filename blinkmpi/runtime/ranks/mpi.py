"""Ranks that MPI's launcher has started: duplicates of their communicator, and ending the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from mpi4py import MPI, run

from ...errors import SHRINK, START_AGAIN, CollectiveTimeout, PeerLost
from ...transport.host.transport import HostTransport
from ...transport.network.bounded import Bounded, Rendezvous
from ...transport.network.exchanges import BegunDup, BoundedComm, Members, duplicate, introduce
from ...transport.network.job_numbers import own_number
from ...transport.slow_waits import SlowWaits
from ...util.launcher import outlives_ranks
from ...util.settings import Settings, log
from ..bootstrap import Options, first_deadline, own_settings, virtual_node
from ..process_exit import LOST, UNCAUGHT, end_job_at_exit, in_child

OF_NODE = 0x4E0D  # the tag of what the ranks of a node tell one another
DEAD = (CollectiveTimeout, PeerLost)  # after these errors MPI's objects are not freed


def free(comm: MPI.Intracomm, error: BaseException) -> None:
    """Free what was being made, unless some rank is missing: then MPI still works on it, and the job ends."""
    if isinstance(error, DEAD):
        end_job_at_exit(str(error))
    else:
        comm.Free()


def copy_of(comm: MPI.Intracomm, timeout_s: object, what: str = "Communicator()") -> MPI.Intracomm:
    """A duplicate of a communicator of the user's, for ``what``; its ranks must all come within the deadline."""
    rendezvous = Rendezvous(what, first_deadline(timeout_s), SlowWaits(own_settings()))
    try:
        return duplicate(MPI.Intracomm(comm), rendezvous)
    except DEAD as error:
        end_job_at_exit(str(error))
        raise


class MpiRanks:
    """The ranks of a Communicator.

    ``private`` carries our own messages and the calls that we hand to MPI, in their order; the user's calls that never
    come here run on the Communicator itself, ``public``, at the same time if they like.

    Args:
        comm: the Communicator.
        begun: the duplicate and its request, where that was begun before.
    """

    def __init__(self, comm: MPI.Intracomm, rendezvous: Rendezvous, begun: BegunDup | None = None) -> None:
        self.public = MPI.Intracomm(comm)  # the Communicator's own handle, without its class
        self.private = duplicate(self.public, rendezvous, begun)
        self.together = BoundedComm(self.private, rendezvous)
        self._node: MPI.Intracomm | None = None

    def serve(self, comm: MPI.Intracomm) -> None:
        """Be those of another Communicator, of the same ranks."""
        self.public = MPI.Intracomm(comm)

    @property
    def process(self) -> int:
        """Its number among those of the job; the rank in a world of its own, for one that has not joined it."""
        number = own_number()
        return number if number >= 0 else MPI.COMM_WORLD.rank

    @property
    def remedy(self) -> str:
        """Going on with the others, where the launcher lets the job outlive a rank."""
        return SHRINK if outlives_ranks(os.environ) else START_AGAIN

    def introduce(self) -> None:
        """Tell each other who the processes are."""
        introduce(self.together)

    def of_node(self, options: Options, settings: Settings) -> tuple[Bounded, tuple[int, int]]:
        """The ranks that share memory with this one, as the launcher sees it; a virtual node is a part of them."""
        virtual = virtual_node(self.together.rank, self.together.size, settings)
        self.together.Barrier()  # meet under the deadline first: MPI's splits have none
        node = MPI.Intracomm(self.private.Split_type(MPI.COMM_TYPE_SHARED, key=self.together.rank))
        place = node.rank, node.size
        if virtual is not None:
            whole, node = node, MPI.Intracomm(node.Split(virtual, self.together.rank))
            whole.Free()
        self._node = node
        return BoundedComm(node, self.together.rendezvous), place

    def of_nodes(self, firsts: Sequence[int]) -> Bounded:
        """The ranks of this one's node."""
        if len(set(firsts)) == 1:
            return self.together
        among = [r for r, first in enumerate(firsts) if first == firsts[self.together.rank]]
        return Members(self.private, self.together.rendezvous, among, OF_NODE)

    def give_up(self, error: BaseException) -> None:
        """Free what was being made."""
        if self._node is not None:
            free(self._node, error)
        free(self.private, error)

    def abandon(self, error: BaseException) -> None:
        """End the job with this process."""
        end_job_at_exit(str(error))

    def leave(
        self, host: HostTransport, timeout_s: float, open_mpi_call: Callable[[], str], settings: Settings
    ) -> None:
        """MPI_Finalize waits for every rank and every call, so end the job if one does not come."""
        if UNCAUGHT.is_set() or MPI.Is_finalized() or in_child():
            return  # the job is being ended, has come together already, or is not this process's
        missing = host.leave(timeout_s)
        if host.peers.lost():
            LOST.set()
        left_open = open_mpi_call()
        if not missing and not left_open:
            return
        run.set_abort_status(1)
        if not missing:
            log(settings, "WARN", f"rank {host.rank} ends the job: MPI's own {left_open} was left open")
            return
        if host.rank == min(set(range(host.n)).difference(missing)):
            who = host.peers.states(missing)
            log(settings, "WARN", f"rank {host.rank} ends the job, or MPI_Finalize would wait for ever: {who}")

    def close(self) -> None:
        """Free the duplicates."""
        if self._node is not None:
            self._node.Free()
        self.private.Free()
