"""Ranks that MPI has not started, each an MPI of its own; they share a key-value store and the memory of one node.

Nothing of MPI's connects them. So what is MPI's own in a call is refused here, and no rank ends another: a process that
fails ends alone, and its peers notice it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence

from ...errors import SHRINK, ArgumentError, SettingsError, TopologyError
from ...planning.selection import parse_algo
from ...topology.live import this_process
from ...transport.host.transport import HostTransport
from ...transport.network.bounded import Bounded, Rendezvous
from ...transport.network.store import Known, Store, StoreComm
from ...util.launcher import launched_rank
from ...util.settings import Settings
from ...util.singleton import remove_segment
from ...util.text import whole_number
from ...util.together import gathered
from ..bootstrap import Options
from .interface import INSTEAD
from .mpi import DEAD


class StoreRanks:
    """The ranks of a StoreCommunicator.

    Args:
        name, known: see :class:`StoreComm`.
        what: that makes them, in words.
        asked_at: the name under which processes ask to join them; ``name``, where it is not another one.
    """

    def __init__(
        self, store: Store, rank: int, size: int, name: str, rendezvous: Rendezvous, known: Known | None = None,
        *, what: str = "StoreCommunicator()", asked_at: str | None = None,
    ) -> None:  # fmt: skip
        rendezvous.what = what
        self.asked_at = name if asked_at is None else asked_at
        if launched_rank(os.environ) is None:  # nobody connects to this process by MPI, and it may be killed
            remove_segment(os.getpid())
        self.store = store
        self.together = StoreComm(store, rank, size, rendezvous, name=name, known=known or {})

    def left(self, rest: Sequence[int], timeout_s: float, rendezvous: Rendezvous) -> StoreRanks:
        """Those of them that are left, this one among them, numbered from 0; they have ``timeout_s`` to come."""
        known = {new: self.together.known[old] for new, old in enumerate(rest) if old != self.together.rank}
        key = hashlib.blake2b(f"{self.together.unique} {list(rest)}".encode(), digest_size=8).hexdigest()
        rendezvous.timeout_s = timeout_s
        return StoreRanks(
            self.store, list(rest).index(self.together.rank), len(rest), key, rendezvous, known,
            what="shrink()", asked_at=self.asked_at,
        )  # fmt: skip

    @property
    def process(self) -> int:
        """The rank among those of this store."""
        return self.together.rank

    @property
    def remedy(self) -> str:
        """Going on with the others."""
        return SHRINK

    def introduce(self) -> None:
        """Tell each other who the processes are."""
        self.together.introduce()

    def of_node(self, options: Options, settings: Settings) -> tuple[Bounded, tuple[int, int]]:
        """All ranks, which must share memory.

        Raises:
            TopologyError: on every rank, if they do not. SettingsError: likewise, for what needs MPI.
        """

        together = self.together

        def own() -> tuple[str, str, tuple[int, int]]:
            check_settings(options, settings)
            process = this_process()
            return process.place, process.host, local_place(together.rank, together.size)

        found = gathered(together, own, tuple[str, str, tuple[int, int]])
        memory, host, _ = found[0]
        for rank, (place, there, _) in enumerate(found):
            if place != memory:
                raise TopologyError(
                    f"rank {rank} on {there} shares no memory with rank 0 on {host} (boot id, or device of /dev/shm): "
                    f"a StoreCommunicator is for the processes of one node; {INSTEAD}"
                )
        return together, found[together.rank][2]

    def of_nodes(self, firsts: Sequence[int]) -> Bounded:
        """All ranks, which share memory."""
        return self.together

    def give_up(self, error: BaseException) -> None:
        """Leave the store, unless some rank is missing."""
        if not isinstance(error, DEAD):
            self.together.close()

    def abandon(self, error: BaseException) -> None:
        """This process can end: it waits for no other."""

    def leave(
        self, host: HostTransport, timeout_s: float, open_mpi_call: Callable[[], str], settings: Settings
    ) -> None:
        """This process can end: it waits for no other, and has said in shared memory that it leaves."""

    def close(self) -> None:
        """Leave the store."""
        self.together.close()


def check_settings(options: Options, settings: Settings) -> None:
    """Raise SettingsError for what only MPI could do."""
    if settings.nodes:
        nodes = "+".join(map(str, settings.nodes))
        raise SettingsError(
            f"BLINKMPI_NODES={nodes}: virtual nodes send each other messages of MPI, which did not start these "
            f"processes; unset it, or {INSTEAD}"
        )
    for collective, schemes in parse_algo(options.algo if options.algo is not None else settings.algo).items():
        if "mpi" in schemes:
            raise SettingsError(
                f"BLINKMPI_ALGO={collective}:mpi: MPI did not start these processes, so it has no collective of them; "
                f"name another scheme, or {INSTEAD}"
            )


def local_place(rank: int, size: int) -> tuple[int, int]:
    """A process's number on its machine, and how many there are: the launcher's, as torchrun tells them, or its rank.

    Raises:
        ArgumentError: if the variables contradict each other.
    """
    numbers = [whole_number(os.environ.get(name, "")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if numbers[0] is None or numbers[1] is None:
        return rank, size
    if numbers[0] >= numbers[1]:
        raise ArgumentError(
            f"LOCAL_RANK={numbers[0]} and LOCAL_WORLD_SIZE={numbers[1]}: expected a rank below the size; correct them, "
            "or unset both"
        )
    return numbers[0], numbers[1]
