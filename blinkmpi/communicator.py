"""The Communicator: an mpi4py communicator whose collectives run on our plans.

It keeps mpi4py's signatures and meaning and adds keyword-only ``timeout=`` and ``stream=``. What it does not accelerate
(object methods, point-to-point, Alltoallw, derived datatypes) is MPI's own, on a duplicate that it owns, and guarded:
GPU memory reaches an MPI only where that takes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from mpi4py import MPI

from .collectives import Args, Collectives, Seconds
from .errors import ArgumentError, CannotShrink, PeerLost
from .guarded import GuardedIntracomm
from .lang.algorithms import Algorithm
from .planned import Planned
from .planning.plan import Plan
from .runtime import collectives as mpi
from .runtime.bootstrap import Options, check_timeout, is_time
from .runtime.buffers import mpi_op
from .runtime.children import Child
from .runtime.collectives import CollectiveMethod, Invocation
from .runtime.dispatch import Dispatcher
from .runtime.entering import enter_group
from .runtime.process_exit import end_job_at_exit, end_job_on_error, in_child
from .runtime.ranks.mpi import DEAD, MpiRanks, copy_of, free
from .runtime.requests import KeptPrequest
from .topology.model import Topology

if TYPE_CHECKING:
    from .runtime.shrinking.by_mpi import MpiShrinking

PERSISTENT = {
    mpi.ALLREDUCE: "Allreduce_init",
    mpi.BCAST: "Bcast_init",
    mpi.ALLGATHER: "Allgather_init",
    mpi.BLOCKS: "Reduce_scatter_block_init",
}


class Communicator(Planned, GuardedIntracomm):
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
        wire: ``operand`` (``BLINKMPI_WIRE``): partial results of 8- and 16-bit floats are rounded to their type on each
            hop, which spares bytes; by default they travel as float32 and are rounded once (``accumulator``).
        algorithms: of this many ranks, which calls of their sizes take, on either memory (:mod:`blinkmpi.lang`).

    Raises:
        BlinkError: on every rank, if any rank cannot take part.
    """

    _made_by = "blinkmpi.Communicator(comm)"
    _child: Child | None = None  # until it opens, what one knows that was made from another one
    _shrinking: MpiShrinking | None = None  # while shrink() has begun and not ended
    _ready: Dispatcher | None = None  # its dispatcher, while calls are under way behind whose first it has opened

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
        wire: str | None = None,
        algorithms: Sequence[Algorithm] = (),
    ) -> None:
        if comm is None:
            raise ArgumentError("Communicator() needs a communicator; pass MPI.COMM_WORLD")
        options = Options(
            topology, plan, timeout, strict, deterministic, executor, algo, max_ctas, stream,
            algorithms=tuple(algorithms), wire=wire,
        )  # fmt: skip
        try:
            self._blink = Dispatcher(partial(MpiRanks, self), options)
        except BaseException as error:
            free(self, error)
            raise

    # ---- making calls: MPI's own, where mpi4py has made the object without calling __init__

    def _call(self, method: CollectiveMethod, args: Args, timeout: Seconds, stream: Any) -> None:
        blink = self._blink
        if blink is not None:
            blink.make(method, args, stream, timeout)
        elif self._initialised():  # opens it, or says that it is freed
            self._opened(timeout).make(method, args, stream, timeout)
        else:
            Invocation(method, args).begin(self).Wait()

    def _start(self, method: CollectiveMethod, args: Args, timeout: Seconds, stream: Any) -> MPI.Request:
        blink = self._blink
        if blink is not None:
            return blink.begin(method, args, timeout, stream)
        if not self._initialised():
            return Invocation(method, args).begin(self)
        child = self._unopened()
        if child is None or not child.may_wait(args):
            return super()._start(method, args, timeout, stream)
        return self._start_unopened(child, method, args, timeout, stream)

    def _start_unopened(
        self, child: Child, method: CollectiveMethod, args: Args, timeout: Seconds, stream: Any
    ) -> MPI.Request:
        """Begin the first call of a communicator, which a thread opens behind those before."""
        if self._ready is None and child.begun is None and child.dead is None:
            child.begun = child.comm.Idup()

        def work() -> None:
            self._open(child, timeout).begin(method, args, timeout, stream).Wait()

        return child.thread.begin(work, lambda _: None)

    def _persist(self, method: CollectiveMethod, args: Args, info: MPI.Info, stream: Any) -> MPI.Prequest:
        """A persistent call: ours on GPU memory, MPI's own on the host's."""
        if (child := self._unopened()) is not None:
            child.check_alive()
        ours = self._initialised() and (child is None or not child.may_wait(args))
        held = self._dispatcher().persist(method, args, stream) if ours else None
        if held is not None:
            return held
        own: Callable[..., MPI.Prequest] = getattr(super(Collectives, self), PERSISTENT[method])
        request = own(*(mpi_op(arg) if isinstance(arg, str) else arg for arg in args), info=info)
        return KeptPrequest(request, args)

    # ---- communicators from this one

    def Dup(self, info: MPI.Info | None = None) -> Communicator:
        """A duplicate, which opens at its first call of ours, as all communicators do that are made from this one."""
        return cast(Communicator, self._made("Dup()", MPI.Intracomm.Dup, info))

    def Idup(self, info: MPI.Info | None = None) -> tuple[Communicator, MPI.Request]:
        """As :meth:`Dup`; complete when it returns, because all ranks meet before."""
        self._enter("Idup()")
        comm, request = super().Idup(info)
        request.Wait()
        return cast(Communicator, self._adopt("Idup()", comm)), request

    Idup_with_info = Idup

    def Clone(self) -> Communicator:
        """As :meth:`Dup`."""
        return cast(Communicator, self._made("Clone()", MPI.Intracomm.Clone))

    def Dup_with_info(self, info: MPI.Info) -> Communicator:
        """As :meth:`Dup`."""
        return cast(Communicator, self._made("Dup_with_info()", MPI.Intracomm.Dup_with_info, info))

    def Split(self, color: int = 0, key: int = 0) -> MPI.Intracomm:
        """One communicator per colour; COMM_NULL (of mpi4py) for ``MPI.UNDEFINED``."""
        return self._made("Split()", MPI.Intracomm.Split, color, key)

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Intracomm:
        """One communicator per kind of neighbourhood."""
        return self._made("Split_type()", MPI.Intracomm.Split_type, split_type, key, info)

    def Create(self, group: MPI.Group) -> MPI.Intracomm:
        """The communicator of a group; called by all ranks."""
        return self._made("Create()", MPI.Intracomm.Create, group)

    def Create_group(self, group: MPI.Group, tag: int = 0) -> MPI.Intracomm:
        """The communicator of a group; called by its members."""
        if (child := self._unopened()) is not None:  # which others cannot open with those that call this
            child.check_alive()
        elif self._initialised():
            enter_group(self._dispatcher().sequence, "Create_group()", group, tag)
        return self._adopt("Create_group()", super().Create_group(group, tag))

    def shrink(self, exclude: Collection[int] = (), *, timeout: float | None = None) -> Communicator:
        """The communicator of the ranks that are left; called by all of these, and freed as any other.

        After a :class:`PeerLost` or CollectiveTimeout it goes on without the processes that have died, and, at the
        deadline, without those that are stopped; this communicator is given back then. Trees are packed anew into what
        is left of the machine. While all ranks live and none has failed, it is ``Create_group`` of the ranks that are
        not in ``exclude``, also on GPUs, and this communicator lives on.

        Args:
            exclude: ranks that live and are to go; they do not call it.
            timeout: seconds that the ranks have to come (default: the communicator's).

        Raises:
            ArgumentError: for an ``exclude`` that cannot be, on this rank.
            CannotShrink: where the launcher is not Open MPI's ``mpirun --with-ft ulfm`` and a process has died; where
                the work on a rank's GPU has failed, or the GPUs are of several nodes; on a rank without which the
                others have gone on.
            CollectiveTimeout: if a rank that runs does not come. Then, as after the others, it may be called again.
        """
        from .runtime.shrinking.by_mpi import MpiShrinking
        from .runtime.shrinking.meeting import excluded

        rank, n = self.rank, self.size
        without = excluded(exclude, rank, n)
        child = self._unopened()
        dead = child.dead if child is not None else self._dispatcher().sequence.dead
        if without and dead is None:
            return self._without(without)
        if child is not None:
            raise CannotShrink(
                f"shrink(): this communicator of {child.made_by} has made no call yet; shrink the one that it was made "
                "from, and make it again"
            )
        if timeout is not None:
            check_timeout(timeout)
        self._shrinking = self._shrinking or MpiShrinking(self._dispatcher())
        comm, made = self._shrinking.run(without, timeout)
        self._blink, self._shrinking = None, None
        return Communicator._with(comm, made)

    def grow(self, n: int, command: Sequence[str] | None = None, *, timeout: float | None = None) -> Communicator:
        """A communicator with ``n`` new ranks, which MPI starts; collective. This one is given back.

        The ranks that are there keep their numbers; the new ones come behind them. These run ``command``, which calls
        :meth:`join`. The machine is probed, and trees are packed anew. CPU ranks only.

        Args:
            n: how many are to come.
            command: words of a command line (default: this program's own), the same on every rank; rank 0's counts.
            timeout: seconds that all this may take (default: the communicator's).

        Raises:
            ArgumentError, CannotGrow: on every rank, and this communicator lives: for arguments that cannot be, GPUs, a
                machine or plan that the user has named, and launchers that start no further ranks.
            CollectiveTimeout: if the new ranks do not call :meth:`join`. PeerLost: if a rank dies. This one is dead
                then, and the job ends with this process.
        """
        from .runtime.growing.by_mpi import grown_by_mpi

        new = Communicator._with(*grown_by_mpi(self._dispatcher(), n, command, timeout))
        self.Free()
        return new

    @staticmethod
    def join(*, timeout: float | None = None) -> Communicator | None:
        """The communicator that this process was started for by :meth:`grow`; None in one that others did not start.

        It takes over the arguments of the communicator that grows. A process may join once; then this gives None.

        Args:
            timeout: seconds that the ranks have which are there (default: ``BLINKMPI_TIMEOUT``).

        Raises:
            CollectiveTimeout, PeerLost: if they do not come, as where no :meth:`grow` has started this process.
            BlinkError: what kept a rank from opening it, as on the ranks that are there.
        """
        from .runtime.growing.by_mpi import joined_by_mpi

        if timeout is not None:
            check_timeout(timeout)
        made = joined_by_mpi(timeout)
        return None if made is None else Communicator._with(*made)

    @staticmethod
    def _with(comm: MPI.Intracomm, made: Dispatcher) -> Communicator:
        """One of MPI's communicator, and of what makes the calls there."""
        new = MPI.Intracomm.__new__(Communicator, comm)
        new._blink, new._child = made, None
        return new

    def _without(self, ranks: frozenset[int]) -> Communicator:
        everybody = self.Get_group()
        rest = everybody.Excl(sorted(ranks))
        try:
            return cast(Communicator, self.Create_group(rest))
        finally:
            rest.Free()
            everybody.Free()

    def Free(self) -> None:
        """Give everything back; collective, unless the communicator is dead (then local)."""
        self._end(super().Free)

    def Disconnect(self) -> None:
        """As :meth:`Free`; MPI then also waits for what is under way on it."""
        self._end(super().Disconnect)

    def Revoke(self) -> None:
        """End it for all ranks (ULFM): whoever waits in one of its calls raises, and so does every later call."""
        super().Revoke()
        if (child := self._unopened()) is not None:
            child.dead = PeerLost(f"rank {self.rank} revoked it")
        elif self._initialised():
            self._dispatcher().sequence.die(PeerLost(f"rank {self.rank} revoked it"))

    def free(self) -> None:
        """As :meth:`Free`, but nothing for a communicator that is freed already."""
        if self != MPI.COMM_NULL:
            self.Free()

    def __del__(self) -> None:
        """Give back what this process alone can; MPI's own communicators stay until MPI ends, as mpi4py's do."""
        child, blink = self._child, self._blink or self._ready
        if (child is None and blink is None) or sys.is_finalizing() or in_child():
            return
        if child is not None:
            child.thread.end()
        if blink is not None:
            blink.drop()

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            "a communicator belongs to its processes, and cannot be pickled or copied; make another one by Dup(), or "
            "blinkmpi.Communicator(MPI.COMM_WORLD) where it is needed"
        )

    def _end(self, own: Callable[[], None]) -> None:
        """Give back what is ours, then what is MPI's, by ``own``; after MPI's end only what is this process's."""
        if self._child is not None:
            self._child.thread.close()
        if (child := self._unopened()) is not None:
            self._child = None
            if child.dead is not None:
                return
        elif self._initialised():
            dispatcher, self._blink = self._blink, None
            if dispatcher is not None and MPI.Is_finalized():
                dispatcher.sequence.die(PeerLost("MPI was finalised"))
            elif dispatcher is not None:
                dispatcher.close()
            if dispatcher is None or dispatcher.sequence.dead is not None:  # freed before, or dead
                return
        own()

    def _enter(self, what: str) -> None:
        if self._blink is not None:
            self._blink.sequence.meet(what)
        elif self._initialised():
            self._dispatcher().sequence.meet(what)

    def _made(self, what: str, make: Callable[..., MPI.Comm], *args: Any) -> MPI.Intracomm:
        """A communicator of some of our ranks that MPI makes, once all have come; ``make`` is mpi4py's own method."""
        self._enter(what)
        return self._adopt(what, make(self, *args))

    def _adopt(self, what: str, comm: MPI.Comm) -> MPI.Intracomm:
        """Turn a fresh communicator of some of our ranks into one of our type; COMM_NULL stays as it is."""
        if not comm:
            return cast(MPI.Intracomm, comm)
        if self._blink is not None:
            parent = self._blink.context.parent
        elif not self._initialised():
            own = cast(MPI.Intracomm, comm)
            return own if isinstance(own, GuardedIntracomm) else GuardedIntracomm(own)
        else:
            unopened = self._unopened()
            parent = self.context.parent if unopened is None else unopened.as_parent
        child = MPI.Intracomm.__new__(Communicator, comm)
        child._blink, child._child = None, Child(parent, MPI.Intracomm(comm), what)
        return child

    def _dispatcher(self) -> Dispatcher:
        return self._opened(None) if self._child is not None else super()._dispatcher()

    def _opened(self, timeout: Seconds) -> Dispatcher:
        """The dispatcher of a communicator that was made from another one, which the first call opens; collective."""
        child = self._child
        if child is None:
            return super()._dispatcher()
        child.thread.close()  # which may be opening it
        dispatcher = self._open(child, timeout)
        self._blink, self._child, self._ready = dispatcher, None, None
        return dispatcher

    def _open(self, child: Child, timeout: Seconds) -> Dispatcher:
        """Open it for a call with this deadline; in the user's thread, or in that of calls that do not block."""
        child.check_alive()
        if self._ready is None:
            child.timeout_s = timeout if is_time(timeout) else None
            try:
                takes = child.begun is None and child.may_take
                left = child.parent.spares.take(child, child.timeout_s) if takes else None
                if isinstance(left, Dispatcher):
                    left.serve(child)
                    self._ready = left
                else:
                    self._ready = Dispatcher(partial(MpiRanks, self, begun=child.begun), child.options, child)
            except BaseException as error:
                child.begun = None
                if isinstance(error, DEAD):
                    end_job_at_exit(str(error))
                if isinstance(error, DEAD) or not isinstance(error, Exception):  # or an interrupt, amid an exchange
                    child.dead = error
                raise
        return self._ready

    def _unopened(self) -> Child | None:
        child = self._child
        if child is None or self._ready is None or child.thread.busy:
            return child
        self._opened(None)
        return None
