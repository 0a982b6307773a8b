"""``Ranks``: the exchanges by which a communicator is made, and what ends it, under MPI or over a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...transport.host.transport import HostTransport
from ...transport.network.bounded import Bounded
from ...util.settings import Settings
from ..bootstrap import Options

INSTEAD = "start the job with mpirun or srun, and use Communicator"  # where MPI has not started the ranks
NO_MPI = f"and MPI did not start these processes; pass arrays and operations that blinkmpi has, or {INSTEAD}"


class Ranks(Protocol):
    """The ranks of a communicator, on channels that nothing else uses."""

    @property
    def together(self) -> Bounded:
        """All of them."""

    @property
    def process(self) -> int:
        """This process's number in its job, which is its rank in the communicator that all began with."""

    @property
    def remedy(self) -> str:
        """What the user can do when one of them is lost, in words."""

    def introduce(self) -> None:
        """Tell each other who the processes are; collective, and before anything else."""

    def of_node(self, options: Options, settings: Settings) -> tuple[Bounded, tuple[int, int]]:
        """Those that share memory with this one, as far as the user lets them; its place on its machine; collective."""

    def of_nodes(self, firsts: Sequence[int]) -> Bounded:
        """Those of this one's node, where it is known of each rank which is the first of its node; collective."""

    def give_up(self, error: BaseException) -> None:
        """Give back what is there, because a communicator cannot be made; collective, unless a rank is missing."""

    def abandon(self, error: BaseException) -> None:
        """A rank is missing while the others part: see to it that this process can end."""

    def leave(
        self, host: HostTransport, timeout_s: float, open_mpi_call: Callable[[], str], settings: Settings
    ) -> None:
        """At Python's end, in a process whose communicator is dead: see to it that this process can end.

        Args:
            timeout_s: how long the others may take to leave, too.
            open_mpi_call: gives a collective of MPI's own that has begun and not ended; else empty.
        """

    def close(self) -> None:
        """Part; collective."""
