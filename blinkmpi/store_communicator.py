"""``StoreCommunicator``: our collectives among processes that MPI did not start, such as those of ``torchrun``.

They run on one node and share a key-value store, over which they meet; calls then go through shared memory, or between
GPUs, as a Communicator's do. mpi4py is still needed, for its datatypes, operations and requests; each process is an MPI
of its own, and nothing is sent by MPI.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from mpi4py import MPI

from .errors import ArgumentError
from .lang.algorithms import Algorithm
from .planned import Planned
from .planning.plan import Plan
from .runtime.bootstrap import Options, check_timeout
from .runtime.dispatch import Dispatcher
from .runtime.ranks.interface import INSTEAD
from .runtime.ranks.store import StoreRanks
from .topology.model import Topology
from .transport.network.store import Store

METHODS = ("set", "get", "check", "add")  # of a store


class StoreCommunicator(Planned):
    """A communicator of ``size`` processes of one node; each makes one, with a rank of its own.

    Processes may make several with one store. Those of one size are told apart by their number, so their processes must
    make them in one order, and groups of one size but of different processes need a ``name`` each, or a store each (as
    torch's ``PrefixStore`` makes them).

    Args:
        store: has the methods ``set``, ``get``, ``check`` and ``add`` of torch's stores, and perhaps ``delete_key``.
        name: of these processes, where other groups of as many use the store.
        topology, plan, timeout, strict, deterministic, executor, algo, max_ctas, stream, wire, algorithms:
            as for a Communicator.

    Raises:
        TopologyError: on every rank, if the processes do not run on one node.
        BlinkError: on every rank, if any rank cannot take part.
    """

    _made_by = "blinkmpi.StoreCommunicator(store, rank, size)"

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        name: str = "",
        topology: Topology | str | None = None,
        plan: Plan | str | None = None,
        timeout: float | None = None,
        strict: bool = False,
        deterministic: bool = False,
        executor: str | None = None,
        algo: str | None = None,
        max_ctas: int | None = None,
        stream: str | None = None,
        wire: str | None = None,
        algorithms: Sequence[Algorithm] = (),
    ) -> None:
        _check_store(store)
        if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
            raise ArgumentError(f"StoreCommunicator(rank={rank!r}, size={size!r}): expected integers, 0 <= rank < size")
        options = Options(
            topology, plan, timeout, strict, deterministic, executor, algo, max_ctas, stream,
            algorithms=tuple(algorithms), wire=wire,
        )  # fmt: skip
        self._take(rank, size, Dispatcher(partial(StoreRanks, store, rank, size, name), options))

    def _take(self, rank: int, size: int, made: Dispatcher) -> None:
        self.rank, self.size, self._blink = rank, size, made

    @classmethod
    def _with(cls, rank: int, size: int, made: Dispatcher) -> StoreCommunicator:
        """One whose calls are made by what there is."""
        new = StoreCommunicator.__new__(StoreCommunicator)
        new._take(rank, size, made)
        return new

    def Get_rank(self) -> int:
        """This process, as mpi4py has it."""
        return self.rank

    def Get_size(self) -> int:
        """How many there are, as mpi4py has it."""
        return self.size

    def shrink(self, exclude: Collection[int] = (), *, timeout: float | None = None) -> StoreCommunicator:
        """The communicator of the processes that are left; called by all of these, and freed as any other.

        After a :class:`PeerLost` or CollectiveTimeout it goes on without the processes that have died, and, at the
        deadline, without those that are stopped; this communicator is given back then. Trees are packed anew into what
        is left of the machine. While none has failed, ``exclude`` leaves out ranks, and this communicator lives on.

        Args:
            exclude: ranks that live and are to go; they do not call it.
            timeout: seconds that the ranks have to come (default: the communicator's).

        Raises:
            ArgumentError: for an ``exclude`` that cannot be, on this rank.
            CannotShrink: where the work on a process's GPU has failed; in one without which the others have gone on.
            CollectiveTimeout: if a process that runs does not come. Then, as after the others, it may be called again.
        """
        from .runtime.shrinking.by_store import shrunk_by_store
        from .runtime.shrinking.meeting import excluded

        without = excluded(exclude, self.rank, self.size)
        if timeout is not None:
            check_timeout(timeout)
        dispatcher = self._dispatcher()
        ranks = dispatcher.context.ranks
        assert isinstance(ranks, StoreRanks), "it was made with them"
        rest, made = shrunk_by_store(dispatcher, ranks, without, timeout)
        if dispatcher.sequence.dead is not None:
            self._blink = None
        return self._with(rest.index(self.rank), len(rest), made)

    def grow(self, n: int, *, timeout: float | None = None) -> StoreCommunicator:
        """A communicator with ``n`` new processes, which call :meth:`join`; collective. This one is given back.

        The processes that are there keep their ranks; the new ones come behind them, in the order in which they asked.
        The machine is probed, and trees are packed anew. CPU ranks only.

        Args:
            n: how many are to come. Nothing is started here: that is the program's, or its agent's.
            timeout: seconds that all this may take (default: the communicator's).

        Raises:
            ArgumentError, CannotGrow: on every rank: for arguments that cannot be, GPUs, and a machine or plan that the
                user has named.
            CollectiveTimeout, RemoteError: if fewer ask, the first on rank 0, the other elsewhere. PeerLost: if a new
                process dies meanwhile. This communicator lives, and it may be called again.
        """
        from .runtime.growing.by_store import grown_by_store

        dispatcher = self._dispatcher()
        ranks = dispatcher.context.ranks
        assert isinstance(ranks, StoreRanks), "it was made with them"
        made = grown_by_store(dispatcher, ranks, n, timeout)
        new = self._with(self.rank, made.context.n, made)
        self.Free()
        return new

    @staticmethod
    def join(store: Store, *, name: str = "", timeout: float | None = None) -> StoreCommunicator:
        """The communicator of processes that :meth:`grow`, for a process that comes to them; waits until they do.

        It takes over the arguments of the communicator that grows.

        Args:
            store: theirs.
            name: with which they made their communicator.
            timeout: seconds that they have to let it in (default: ``BLINKMPI_TIMEOUT``).

        Raises:
            CollectiveTimeout: if they do not. BlinkError: what kept a rank from opening it, as on the others.
        """
        from .runtime.growing.by_store import joined_by_store

        _check_store(store)
        if timeout is not None:
            check_timeout(timeout)
        return StoreCommunicator._with(*joined_by_store(store, name, timeout))

    def Free(self) -> None:
        """Give everything back; collective, unless the communicator is dead (then local). Safe to call twice."""
        dispatcher, self._blink = self._blink, None
        if dispatcher is not None:
            dispatcher.close()

    def free(self) -> None:
        """As :meth:`Free`."""
        self.Free()

    if not TYPE_CHECKING:  # which would take every name for one that is there

        def __getattr__(self, name: str) -> NoReturn:
            """Say what else there is, where MPI's communicators have more."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(MPI.Intracomm, name):
                text = f"a StoreCommunicator has no {name}(), because MPI did not start its processes; {INSTEAD}"
            raise AttributeError(text)


def _check_store(store: object) -> None:
    """Raise ArgumentError for what is no store."""
    missing = [method for method in METHODS if not callable(getattr(store, method, None))]
    if missing:
        raise ArgumentError(
            f"StoreCommunicator({store!r}, ...): it has no method {missing[0]}(); pass a store such as torch's TCPStore"
        )
