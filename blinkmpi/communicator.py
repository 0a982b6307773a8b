"""The Communicator: an mpi4py communicator whose collectives run on our plans.

It keeps mpi4py's signatures and meaning and adds keyword-only ``timeout=`` and ``stream=``. What it does not accelerate
(object methods, point-to-point, Alltoallw, derived datatypes) is MPI's own, on a duplicate that it owns, and guarded:
GPU memory reaches an MPI only where that takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from mpi4py import MPI

from .collectives import Collectives
from .errors import ArgumentError, BlinkError, PeerLost
from .guarded import GuardedIntracomm
from .planning.diff import PlanDifference
from .planning.plan import Plan
from .runtime import inspection
from .runtime.bootstrap import Options
from .runtime.context import Context, copy_of, free
from .runtime.cuda.buffers import device_array
from .runtime.cuda.context import CudaContext
from .runtime.dispatch import Dispatcher
from .runtime.entering import enter, enter_group, plan
from .runtime.process_exit import end_job_on_error
from .topology import Topology
from .transport.cuda.device import Gpu

T = TypeVar("T")


class Communicator(Collectives, GuardedIntracomm):
    """A communicator of all ranks of ``comm`` (which is duplicated), with blinkmpi's collectives.

    Args:
        comm: the user's communicator, usually ``MPI.COMM_WORLD``.
        topology: the machine to plan for (a Topology, a catalogue name or a file) instead of the one found.
        plan: a Plan, or the file of one, instead of packing.
        timeout: seconds without progress after which a call fails on every rank (default 1800, ``BLINKMPI_TIMEOUT``).
        strict: a fallback to a slower protocol is an error.
        deterministic: keep our order of summation at every size (small vectors then do not go to MPI).
        executor: ``auto``, ``c`` or ``numpy``: what executes programs on CPU ranks.
        algo: overrides of the selection table, as in ``BLINKMPI_ALGO``.
        max_ctas: CTAs of a kernel at most (default: the GPU's multiprocessors but 32, ``BLINKMPI_MAX_CTAS``), which
            leaves room for the model's kernels and for NCCL's.
        stream: ``current``: calls on GPU memory are only put on the current stream of CuPy or torch, as NCCL's and
            torch's own are; by default the host waits for the result, unless a call says ``stream=``.

    Raises:
        BlinkError: on every rank, if any rank cannot take part.
    """

    def __new__(cls, comm: MPI.Intracomm | None = None, *, timeout: float | None = None, **_: Any) -> Communicator:
        """Duplicate ``comm``; without one (as mpi4py itself calls it) make an empty, uninitialised object."""
        if comm is None:
            return super().__new__(cls)
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ArgumentError(f"Communicator({comm!r}): expected an intracommunicator, such as MPI.COMM_WORLD")
        end_job_on_error(comm)
        return super().__new__(cls, copy_of(comm, timeout))

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        topology: Topology | str | None = None,
        plan: Plan | str | None = None,
        timeout: float | None = None,
        strict: bool = False,
        deterministic: bool = False,
        executor: str | None = None,
        algo: str | None = None,
        max_ctas: int | None = None,
        stream: str | None = None,
    ) -> None:
        if comm is None:
            raise ArgumentError("Communicator() needs a communicator; pass MPI.COMM_WORLD")
        options = Options(topology, plan, timeout, strict, deterministic, executor, algo, max_ctas, stream)
        try:
            self._blink = Dispatcher(self, options)
        except BaseException as error:
            free(self, error)
            raise

    # ---- registered buffers on GPUs

    def empty(self, shape: Any, dtype: Any = "float32") -> Any:
        """A CuPy array that all ranks reach, so that long vectors move without a copy on the way; collective.

        Its memory lives until :meth:`deregister` or :meth:`Free`. BlinkError on every rank without GPUs or memory.
        """
        gpus, _ = self._registering("empty()", lambda: None)
        return gpus.empty(shape, dtype)

    def register(self, array: Any) -> None:
        """Make a GPU array reachable by all ranks; collective: every rank brings one. Keeps it alive."""
        gpus, device = self._registering("register()", lambda: device_array(array))
        gpus.register(device)

    def deregister(self, array: Any) -> None:
        """Undo :meth:`register` or :meth:`empty`; collective, when the work on it is done."""
        gpus, device = self._registering("deregister()", lambda: device_array(array))
        gpus.deregister(device)

    def _registering(self, what: str, read: Callable[[], T]) -> tuple[CudaContext, T]:
        """Where buffers are registered, and what ``read`` gives, if it does on all ranks; calls are then bound anew.

        DeviceError without GPUs.
        """
        self._dispatcher().check_alive()
        self._dispatcher().forget()
        cuda = self.context.cuda()
        return cuda, enter(self._dispatcher(), what, read)

    # ---- what this job is, and how calls run on it

    @property
    def context(self) -> Context:
        """What its calls run on, for benchmarks and tests (``runtime.inspection`` asks it)."""
        return self._dispatcher().context

    @property
    def machine(self) -> Topology:
        """The machine of this job, as found or as given: of its GPUs, if every rank has one."""
        return self.context.main.machine

    @property
    def plans(self) -> Plan:
        """The packings and the selection table of the calls so far: rank 0 plans for one when it is first made."""
        return self.context.main.plans

    @property
    def gpu(self) -> Gpu | None:
        """This rank's GPU, if every rank has one."""
        return self.context.gpus.gpu if self.context.gpus else None

    @property
    def strict(self) -> bool:
        """Whether a fallback to something slower is an error."""
        return self.context.options.strict

    @property
    def executor(self) -> str:
        """What executes our programs on the ranks of this job, and what was found out about it."""
        return inspection.executor(self.context)

    def check(self) -> None:
        """Raise what went wrong on this rank since the last call, in calls on streams and in replays of graphs. Local.

        A graph's replay is no call of ours: after a loop of replays, and a synchronisation, this tells whether all is
        well. Meanwhile what goes wrong is logged within two seconds.
        """
        self._dispatcher().check()

    def plan(self, collective: str, root: int = 0) -> Plan:
        """Plan for a collective (and root) now, and not in its first call; collective. Returns what is planned."""
        return plan(self._dispatcher(), collective, root)

    def replan(self) -> tuple[PlanDifference, ...]:
        """Probe and plan again, and go on with the new plan; collective. Returns what differs, as ``plan --diff``."""
        return self._dispatcher().replan()

    def explain(
        self, collective: str, nbytes: int = 1 << 20, *, dtype: str = "float32", op: Any = "sum", root: int = 0
    ) -> str:
        """Say which scheme a call of ``nbytes`` takes, why, how fast it could be, and what was rejected."""
        return inspection.explain(self.context, collective, nbytes, dtype=dtype, op=op, root=root)

    def plan_line(self, collective: str, root: int = 0) -> str:
        """The packing that large vectors take, in one line: trees, rate, bound."""
        return inspection.plan_text(self.context, collective, root)

    # ---- communicators from this one

    def Dup(self, info: MPI.Info | None = None) -> Communicator:
        """A duplicate, with its own plan and transport."""
        return cast(Communicator, self._made("Dup()", super().Dup, info))

    def Idup(self, info: MPI.Info | None = None) -> tuple[Communicator, MPI.Request]:
        """As :meth:`Dup`; complete when it returns, because opening the transport needs all ranks."""
        self._enter("Idup()")
        comm, request = super().Idup(info)
        request.Wait()
        return cast(Communicator, self._adopt(comm)), request

    Idup_with_info = Idup

    def Clone(self) -> Communicator:
        """As :meth:`Dup`."""
        return cast(Communicator, self._made("Clone()", super().Clone))

    def Dup_with_info(self, info: MPI.Info) -> Communicator:
        """As :meth:`Dup`."""
        return cast(Communicator, self._made("Dup_with_info()", super().Dup_with_info, info))

    def Split(self, color: int = 0, key: int = 0) -> MPI.Intracomm:
        """One communicator per colour; COMM_NULL (of mpi4py) for ``MPI.UNDEFINED``."""
        return self._made("Split()", super().Split, color, key)

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Intracomm:
        """One communicator per kind of neighbourhood."""
        return self._made("Split_type()", super().Split_type, split_type, key, info)

    def Create(self, group: MPI.Group) -> MPI.Intracomm:
        """The communicator of a group; called by all ranks."""
        return self._made("Create()", super().Create, group)

    def Create_group(self, group: MPI.Group, tag: int = 0) -> MPI.Intracomm:
        """The communicator of a group; called by its members."""
        if self._initialised():
            enter_group(self._dispatcher(), "Create_group()", group)
        return self._adopt(super().Create_group(group, tag))

    def Free(self) -> None:
        """Give everything back; collective, unless the communicator is dead (then local)."""
        self._end(super().Free)

    def Disconnect(self) -> None:
        """As :meth:`Free`; MPI then also waits for what is under way on it."""
        self._end(super().Disconnect)

    def Revoke(self) -> None:
        """End it for all ranks (ULFM): whoever waits in one of its calls raises, and so does every later call."""
        super().Revoke()
        if self._initialised():
            self._dispatcher().die(PeerLost(f"rank {self.rank} revoked it"))

    def free(self) -> None:
        """As :meth:`Free`, but nothing for a communicator that is freed already."""
        if self != MPI.COMM_NULL:
            self.Free()

    def __enter__(self) -> Communicator:
        """Use as a context manager: ``with Communicator(MPI.COMM_WORLD) as comm``."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        """Free; after an error only locally, since the peers may be elsewhere."""
        dispatcher = self.__dict__.get("_blink")
        if dispatcher is not None and error is not None and dispatcher.dead is None:
            dispatcher.dead = error if isinstance(error, BlinkError) else BlinkError(f"left by {error!r}")
        self.free()

    def _end(self, own: Callable[[], None]) -> None:
        """Give back what is ours, then what is MPI's, by ``own``."""
        if self._initialised():
            dispatcher, self._blink = self._blink, None
            if dispatcher is not None:
                dispatcher.close()
            if dispatcher is None or dispatcher.dead is not None:  # freed before, or dead
                return
        own()

    def _enter(self, what: str) -> None:
        if self._initialised():
            enter(self._dispatcher(), what, lambda: None)

    def _made(self, what: str, make: Callable[..., MPI.Comm], *args: Any) -> MPI.Intracomm:
        """A communicator of some of our ranks that MPI makes, once all have come."""
        self._enter(what)
        return self._adopt(make(*args))

    def _adopt(self, comm: MPI.Comm) -> MPI.Intracomm:
        """Turn a fresh communicator of some of our ranks into one of our type; COMM_NULL stays as it is."""
        if comm == MPI.COMM_NULL or not self._initialised():
            return cast(MPI.Intracomm, comm)
        child = MPI.Intracomm.__new__(Communicator, comm)
        try:
            child._blink = Dispatcher(child, *self.context.child(comm))
        except BaseException as error:
            free(child, error)
            raise
        return child
