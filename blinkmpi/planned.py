"""What a communicator of ours has besides its collectives, whatever has brought its ranks together.

It registers buffers on GPUs, and says what its job is, how calls run on it, and why.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .collectives import SUM, Collectives
from .errors import ArgumentError, BlinkError
from .lang.algorithms import Algorithm
from .planning.plan import Plan
from .runtime import collectives as mpi
from .runtime import entering
from .runtime.children import Child
from .runtime.context import Context
from .runtime.cuda.buffers import device_array
from .runtime.dispatch import Dispatcher
from .runtime.grouping.group import Group
from .runtime.outlook import ChildOutlook, Outlook
from .topology.model import Topology
from .util.together import allgather

if TYPE_CHECKING:
    from .planning.diff import PlanDifference
    from .runtime.cuda.context import CudaContext
    from .transport.cuda.device import Gpu
    from .transport.cuda.memory.pool import MemoryPool
    from .transport.stats import Stats

T = TypeVar("T")


class Planned(Collectives):
    """A communicator whose collectives run on our plans."""

    def _unopened(self) -> Child | None:
        """What is known of it before it opens, if it was made from another one."""
        return None

    # ---- collectives of the user's own

    def Custom(
        self, algorithm: Algorithm, sendbuf: Any, recvbuf: Any, op: Any = SUM, *, timeout: float | None = None
    ) -> None:
        """Run a collective that MPI does not have, made by ``lang.custom``; collective.

        Args:
            algorithm: the same on all ranks, for as many ranks.
            sendbuf, recvbuf: as many equal chunks as this rank gives and gets; None for none. Never in place. What the
                algorithm does not want in ``recvbuf`` stays.
            op: where chunks are folded.

        Raises:
            ArgumentError, BufferTypeError: on every rank, for arguments that do not fit on one, and for GPU arrays.
        """
        some = False
        if isinstance(algorithm, Algorithm):
            self.context.customs[algorithm.identity] = algorithm
            goal = algorithm.flow.goal
            some = not all(given or made for given, made in zip(goal.given, goal.wanted, strict=True))
        method = mpi.CUSTOM_OF_SOME if some else mpi.CUSTOM
        self._call(method, (algorithm, sendbuf, recvbuf, op), timeout, None)

    # ---- many small calls as one

    def grouped(self, *, stream: Any = None, timeout: float | None = None) -> Group:
        """Make the collectives called within ``with comm.grouped():`` together when it ends, in any order of their own.

        Calls of one collective, element type, operation and root are one call of the vector of all their elements;
        long ones are calls by themselves. Their results are there when the ``with`` ends (or on their stream). No call
        may write what another one reads or writes. Groups within groups are one. An exception out of the ``with``
        forgets its calls; none of them has been sent.

        Args:
            stream, timeout: of calls that name none.

        Raises:
            ArgumentError, BufferTypeError: at the end, for what is wrong with a call; none is made on any rank.
            MismatchError: on every rank, if the groups differ, before data moves.
        """
        return Group(self._dispatcher, stream, timeout)

    # ---- registered buffers on GPUs

    def empty(self, shape: Any, dtype: Any = "float32") -> Any:
        """A CuPy array that all ranks reach, so that long vectors move without a copy on the way; collective.

        Its memory lives until :meth:`deregister` or :meth:`Free`.

        Args:
            shape: of the array, the same number of bytes on all ranks.
            dtype: of its elements.

        Raises:
            DeviceError: on every rank, without GPUs or memory.
        """
        gpus, _ = self._registering("empty()", lambda: None)
        return gpus.empty(shape, dtype)

    def register(self, array: Any) -> None:
        """Make a GPU array reachable by all ranks; collective: every rank brings one. Keeps it alive.

        Raises:
            DeviceError: for memory that cannot be shared; the other ranks get a RemoteError, and none keeps anything.
        """
        gpus, device = self._registering("register()", lambda: device_array(array))
        gpus.register(device)

    def deregister(self, array: Any) -> None:
        """Undo :meth:`register` or :meth:`empty`; collective, when the work on it is done."""
        gpus, device = self._registering("deregister()", lambda: device_array(array))
        gpus.deregister(device)

    def memory_pool(self, nbytes: int | None = None) -> MemoryPool:
        """Make a pool of GPU memory that all ranks have mapped; collective. Without an argument, the one there is.

        Arrays are made in it at any time by each rank for itself, inside :meth:`cupy_memory` or
        :func:`blinkmpi.torch.memory`, and are registered from their making. It lives until its ``close`` or
        :meth:`Free`; what lies in it then goes on as memory of its rank alone.

        Args:
            nbytes: of this rank; the ranks' may differ.

        Raises:
            ArgumentError: on every rank, if there is one already; without an argument, if there is none.
            DeviceError: if a rank has no GPU, room or C compiler; the others raise a RemoteError.
        """
        from .runtime.cuda.memory import make_pool, pool_of

        if nbytes is None and self._unopened() is not None:
            return pool_of(None)
        dispatcher = self._dispatcher()
        dispatcher.sequence.check_alive()
        gpus = self.context.cuda()
        if nbytes is None:
            return pool_of(gpus)
        return make_pool(gpus, nbytes, lambda what: _together(dispatcher, what, lambda: None))

    def cupy_memory(self) -> AbstractContextManager[None]:
        """A block within which the CuPy arrays that this thread makes lie in the :meth:`memory_pool`. Local.

        Raises:
            ArgumentError: if there is no pool.
        """
        pool = self.memory_pool()
        from .transport.cuda.memory.for_cupy import cupy_memory

        return cupy_memory(pool)

    def _registering(self, what: str, read: Callable[[], T]) -> tuple[CudaContext, T]:
        """Where buffers are registered, and what ``read`` gives, if it does on all ranks; calls are then bound anew.

        DeviceError without GPUs.
        """
        self._dispatcher().sequence.check_alive()
        return self.context.cuda(), _together(self._dispatcher(), what, read)

    # ---- what this job is, and how calls run on it

    def _outlook(self) -> Outlook:
        """How calls will be made. Local.

        ArgumentError on GPUs before the first call, where memory has to be opened to know it.
        """
        child = self._unopened()
        if child is None:
            return self.context
        if child.parent.gpu is not None:
            raise ArgumentError(
                f"this communicator of {child.made_by} has made no call yet, and how calls on GPUs run is not known "
                "before; call Barrier() on all its ranks"
            )
        return ChildOutlook(child)

    @property
    def context(self) -> Context:
        """What its calls run on, for benchmarks and tests (``runtime.inspection`` asks it)."""
        return self._dispatcher().context

    @property
    def machine(self) -> Topology:
        """The machine of this job, as found or as given; of its GPUs, if every rank has one."""
        child = self._unopened()
        return self.context.main.machine if child is None else child.main_machine

    @property
    def plans(self) -> Plan:
        """The packings and the selection table of the calls so far; rank 0 plans for one when it is first made."""
        child = self._unopened()
        return self.context.main.plans if child is None else child.plan

    @property
    def gpu(self) -> Gpu | None:
        """This rank's GPU, if every rank has one."""
        if (child := self._unopened()) is not None:
            return child.parent.gpu
        return self.context.gpus.gpu if self.context.gpus else None

    @property
    def strict(self) -> bool:
        """Whether a fallback to something slower is an error."""
        child = self._unopened()
        return self.context.options.strict if child is None else child.options.strict

    @property
    def executor(self) -> str:
        """What executes our programs on the ranks of this job, and what was found out about it."""
        child = self._unopened()
        return self.context.executor if child is None else child.parent.executor

    def check(self) -> None:
        """Raise what went wrong on this rank since the last call, in calls on streams and in replays of graphs. Local.

        A graph's replay is no call of ours: after a loop of replays, and a synchronisation, this tells whether all is
        well. Meanwhile what goes wrong is logged within two seconds.
        """
        child = self._unopened()
        self._dispatcher().check() if child is None else child.check_alive()

    def plan(self, collective: str, root: int = 0) -> Plan:
        """Plan for a collective (and root) now, and not in its first call; collective.

        Returns:
            What is planned so far.
        """
        return entering.plan(self._dispatcher().sequence, collective, root)

    def replan(self) -> tuple[PlanDifference, ...]:
        """Probe and plan again, and go on with the new plan; collective.

        Returns:
            What differs, as ``blinkmpi plan --diff`` prints it.
        """
        return self._dispatcher().replan()

    def explain(
        self, collective: str, nbytes: int = 1 << 20, *, dtype: str = "float32", op: Any = "sum", root: int = 0
    ) -> str:
        """Say which scheme a call takes, why, how fast it could be, and what was rejected. Local.

        Args:
            collective: by MPI's name or nccl-tests': ``allreduce``, ``Allreduce``, ``all_reduce``.
            nbytes: of the call's largest buffer.
            dtype: by NumPy's name, or ``bfloat16``.
            op: an ``MPI.Op`` or a name.
            root: of a rooted collective.
        """
        from .runtime import inspection

        return inspection.explain(self._outlook(), collective, nbytes, dtype=dtype, op=op, root=root)

    def plan_line(self, collective: str, root: int = 0) -> str:
        """The packing that large vectors take, in one line: trees, rate, bound."""
        from .runtime import inspection

        return inspection.plan_text(self._outlook(), collective, root)

    def stats(self) -> Stats:
        """What this rank's calls have moved: bytes and times by link, tree and protocol, waits by peer. Local."""
        from .runtime import inspection

        if (child := self._unopened()) is not None:
            return inspection.no_stats(child)
        dispatcher = self._dispatcher()
        if dispatcher.cuda is not None:
            dispatcher.cuda.history.started.flush()
        return inspection.stats(self.context)

    def gather_stats(self) -> tuple[Stats, ...]:
        """The :meth:`stats` of every rank, in rank order; collective."""
        entering.enter(self._dispatcher().sequence, "gather_stats()", lambda: None)
        from .transport.stats import Stats

        return tuple(allgather(self.context.together, self.stats(), Stats))

    # ---- the end

    @abstractmethod
    def free(self) -> None:
        """Give everything back, if that is not done; collective, unless the communicator is dead (then local)."""

    def __enter__(self) -> Self:
        """Use as a context manager, which frees at its end."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        """Free; after an error only locally, since the peers may be elsewhere."""
        child = self._unopened()
        if child is not None and error is not None and child.dead is None:
            child.dead = error
        dispatcher = self.__dict__.get("_blink")
        if dispatcher is not None and error is not None and dispatcher.sequence.dead is None:
            dispatcher.sequence.dead = error if isinstance(error, BlinkError) else BlinkError(f"left by {error!r}")
        self.free()


def _together(dispatcher: Dispatcher, what: str, read: Callable[[], T]) -> T:
    """What ``read`` gives when all ranks are about to do ``what``, for which every call is to be bound anew."""
    dispatcher.sequence.check_alive()
    dispatcher.binder.forget()
    return entering.enter(dispatcher.sequence, what, read)
