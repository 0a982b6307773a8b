"""The Communicator: an mpi4py communicator whose collectives run on our plans.

It keeps mpi4py's signatures and meaning and adds keyword-only ``timeout=``.
What it does not accelerate (object methods, point-to-point, v-variants, derived
datatypes, calls across nodes) is MPI's own, on a duplicate that it owns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from .errors import ArgumentError, BlinkError, BufferTypeError
from .planning.plan import Plan
from .program.memory import DeviceArray
from .runtime import arguments as calls
from .runtime.bootstrap import Options
from .runtime.buffers import NAMES, on_device
from .runtime.cuda_context import CudaContext
from .runtime.dispatch import Engine
from .runtime.inspection import Answers
from .runtime.mpi_fallback import Job
from .runtime.process_exit import end_job_on_error
from .runtime.requests import Persistent
from .topology import Topology

BCAST = Job("broadcast", calls.broadcast, MPI.Intracomm.Ibcast)
REDUCE = Job("reduce", calls.reduce, MPI.Intracomm.Ireduce)
ALLREDUCE = Job("allreduce", calls.allreduce, MPI.Intracomm.Iallreduce)
GATHER = Job("gather", calls.gather, MPI.Intracomm.Igather)
SCATTER = Job("scatter", calls.scatter, MPI.Intracomm.Iscatter)
ALLGATHER = Job("allgather", calls.allgather, MPI.Intracomm.Iallgather)
REDUCE_SCATTER_BLOCK = Job("reduce_scatter", calls.reduce_scatter_block, MPI.Intracomm.Ireduce_scatter_block)
BARRIER = Job("barrier", calls.barrier, MPI.Intracomm.Ibarrier)


class Communicator(Answers, MPI.Intracomm):
    """A communicator of all ranks of ``comm`` (which is duplicated), with blinkmpi's collectives.

    Args:
        comm: the user's communicator, usually ``MPI.COMM_WORLD``.
        topology: the machine to plan for (a Topology, a catalogue name or a file) instead of the one found.
        plan: a Plan, or the file of one, instead of packing.
        timeout: seconds without progress after which a call fails on every rank (default 60, ``BLINKMPI_TIMEOUT``).
        strict: a fallback to a slower protocol is an error.
        deterministic: keep our order of summation at every size (small vectors then do not go to MPI).
        executor: ``auto``, ``c`` or ``numpy``: what executes programs on CPU ranks.
        algo: overrides of the selection table, as in ``BLINKMPI_ALGO``.

    Raises:
        BlinkError: on every rank, if any rank cannot take part.
    """

    _blink: Engine | None = None

    def __new__(cls, comm: MPI.Intracomm | None = None, **_: Any) -> Communicator:
        """Duplicate ``comm``; without one (as mpi4py itself calls it) make an empty, uninitialised object."""
        if comm is None:
            return super().__new__(cls)
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ArgumentError(f"Communicator({comm!r}): expected an intracommunicator, such as MPI.COMM_WORLD")
        return super().__new__(cls, MPI.Intracomm(comm).Dup())

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
    ) -> None:
        if comm is None:
            raise ArgumentError("Communicator() needs a communicator; pass MPI.COMM_WORLD")
        end_job_on_error(comm)
        options = Options(topology, plan, timeout, strict, deterministic, executor, algo)
        try:
            self._blink = Engine(self, options)
        except BaseException:
            super().Free()
            raise

    # ---- collectives (MPI 4.1, chapter 6)

    def Bcast(self, buf: Any, root: int = 0, *, stream: Any = None, timeout: float | None = None) -> None:
        """Send the root's buffer to all."""
        self._block(BCAST, (buf, root), timeout, stream)

    def Ibcast(self, buf: Any, root: int = 0, *, stream: Any = None, timeout: float | None = None) -> MPI.Request:
        """Non-blocking :meth:`Bcast`."""
        return self._start(BCAST.of(buf, root), timeout, stream)

    def Reduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | str = MPI.SUM,
        root: int = 0,
        *,
        stream: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Fold all buffers into the root's."""
        self._block(REDUCE, (sendbuf, recvbuf, op, root), timeout, stream)

    def Ireduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | str = MPI.SUM,
        root: int = 0,
        *,
        stream: Any = None,
        timeout: float | None = None,
    ) -> MPI.Request:
        """Non-blocking :meth:`Reduce`."""
        return self._start(REDUCE.of(sendbuf, recvbuf, op, root), timeout, stream)

    def Allreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | str = MPI.SUM,
        *,
        stream: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Fold all buffers into everybody's."""
        self._block(ALLREDUCE, (sendbuf, recvbuf, op), timeout, stream)

    def Iallreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | str = MPI.SUM,
        *,
        stream: Any = None,
        timeout: float | None = None,
    ) -> MPI.Request:
        """Non-blocking :meth:`Allreduce`."""
        return self._start(ALLREDUCE.of(sendbuf, recvbuf, op), timeout, stream)

    def Gather(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: float | None = None
    ) -> None:
        """Collect everybody's block at the root."""
        self._block(GATHER, (sendbuf, recvbuf, root), timeout, stream)

    def Igather(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: float | None = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Gather`."""
        return self._start(GATHER.of(sendbuf, recvbuf, root), timeout, stream)

    def Scatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: float | None = None
    ) -> None:
        """Give each rank its block of the root's buffer."""
        self._block(SCATTER, (sendbuf, recvbuf, root), timeout, stream)

    def Iscatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: float | None = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Scatter`."""
        return self._start(SCATTER.of(sendbuf, recvbuf, root), timeout, stream)

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, timeout: float | None = None) -> None:
        """Collect everybody's block everywhere."""
        self._block(ALLGATHER, (sendbuf, recvbuf), timeout, stream)

    def Iallgather(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, timeout: float | None = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Allgather`."""
        return self._start(ALLGATHER.of(sendbuf, recvbuf), timeout, stream)

    def Reduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | str = MPI.SUM,
        *,
        stream: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Fold all buffers, give each rank one of ``size`` equal blocks.

        In place the result lies at the front of ``recvbuf``; what lies behind it stays (on GPUs, it has no meaning).
        """
        self._block(REDUCE_SCATTER_BLOCK, (sendbuf, recvbuf, op), timeout, stream)

    def Ireduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op | str = MPI.SUM,
        *,
        stream: Any = None,
        timeout: float | None = None,
    ) -> MPI.Request:
        """Non-blocking :meth:`Reduce_scatter_block`."""
        return self._start(REDUCE_SCATTER_BLOCK.of(sendbuf, recvbuf, op), timeout, stream)

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Any = None,
        op: MPI.Op | str = MPI.SUM,
        *,
        stream: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Fold all buffers, give rank i a block of ``recvcounts[i]`` elements (None: as its receive buffer).

        In place as :meth:`Reduce_scatter_block`.
        """
        self._block(self._reduce_scatter(), (sendbuf, recvbuf, recvcounts, op), timeout, stream)

    def Ireduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Any = None,
        op: MPI.Op | str = MPI.SUM,
        *,
        stream: Any = None,
        timeout: float | None = None,
    ) -> MPI.Request:
        """Non-blocking :meth:`Reduce_scatter`."""
        return self._start(self._reduce_scatter().of(sendbuf, recvbuf, recvcounts, op), timeout, stream)

    def _reduce_scatter(self) -> Job:
        return Job("reduce_scatter", self._prepare_reduce_scatter, MPI.Intracomm.Ireduce_scatter)

    def _prepare_reduce_scatter(
        self, rank: int, n: int, sendbuf: Any, recvbuf: Any, recvcounts: Any, op: Any
    ) -> calls.Prepared:
        return calls.reduce_scatter(rank, n, sendbuf, recvbuf, recvcounts, op, self._engine().exchange)

    def Barrier(self, *, timeout: float | None = None) -> None:
        """Return when everybody has come."""
        self._block(BARRIER, (), timeout)

    def Ibarrier(self, *, timeout: float | None = None) -> MPI.Request:
        """Non-blocking :meth:`Barrier`."""
        return self._start(BARRIER.of(), timeout)

    # ---- persistent calls (MPI 4.1, section 6.13): on GPU memory ours, with the least to do at Start

    def Allreduce_init(  # type: ignore[override]
        self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None
    ) -> Persistent | MPI.Prequest:
        """An :meth:`Allreduce` that ``Start`` begins and ``Wait`` completes, any number of times."""
        mpi = partial(super().Allreduce_init, sendbuf, recvbuf, op, info)
        return self._persist(ALLREDUCE.of(sendbuf, recvbuf, op), stream, mpi)

    def Bcast_init(  # type: ignore[override]
        self, buf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None
    ) -> Persistent | MPI.Prequest:
        """As :meth:`Allreduce_init`, for :meth:`Bcast`."""
        return self._persist(BCAST.of(buf, root), stream, partial(super().Bcast_init, buf, root, info))

    def Allgather_init(  # type: ignore[override]
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None
    ) -> Persistent | MPI.Prequest:
        """As :meth:`Allreduce_init`, for :meth:`Allgather`."""
        return self._persist(
            ALLGATHER.of(sendbuf, recvbuf), stream, partial(super().Allgather_init, sendbuf, recvbuf, info)
        )

    def Reduce_scatter_block_init(  # type: ignore[override]
        self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None
    ) -> Persistent | MPI.Prequest:
        """As :meth:`Allreduce_init`, for :meth:`Reduce_scatter_block`."""
        mpi = partial(super().Reduce_scatter_block_init, sendbuf, recvbuf, op, info)
        return self._persist(REDUCE_SCATTER_BLOCK.of(sendbuf, recvbuf, op), stream, mpi)

    # ---- registered buffers on GPUs

    def cuda_context(self) -> CudaContext:
        """What runs calls on GPU memory; for measurements.

        Raises:
            DeviceError: if not every rank has a GPU.
        """
        return self._engine().cuda_context()

    def empty(self, shape: Any, dtype: Any = "float32") -> Any:
        """A CuPy array that all ranks reach, so that long vectors move without a copy on the way; collective.

        Its memory lives until :meth:`deregister` or :meth:`Free`.

        Raises:
            BlinkError: on every rank, if there are no GPUs or no memory.
        """
        count = math.prod(shape) if isinstance(shape, list | tuple) else int(shape)
        label = NAMES.get(np.dtype(dtype)) if not isinstance(dtype, str) else dtype
        return self.cuda_context().empty(count, label or str(dtype)).reshape(shape)

    def register(self, array: Any) -> None:
        """Make a GPU array reachable by all ranks; collective: every rank brings one. Keeps it alive."""
        self.cuda_context().register(self._device(array))

    def deregister(self, array: Any) -> None:
        """Undo :meth:`register` or :meth:`empty`; collective, when the work on it is done."""
        self.cuda_context().deregister(self._device(array))

    # ---- communicators from this one

    def Dup(self, info: MPI.Info | None = None) -> Communicator:
        """A duplicate, with its own plan and transport."""
        return cast(Communicator, self._adopt(super().Dup(info)))

    def Clone(self) -> Communicator:
        """As :meth:`Dup`."""
        return cast(Communicator, self._adopt(super().Clone()))

    def Idup(self, info: MPI.Info | None = None) -> tuple[Communicator, MPI.Request]:
        """As :meth:`Dup`; complete when it returns, because opening the transport needs all ranks."""
        comm, request = super().Idup(info)
        request.Wait()
        return cast(Communicator, self._adopt(comm)), request

    def Dup_with_info(self, info: MPI.Info) -> Communicator:
        """As :meth:`Dup`."""
        return cast(Communicator, self._adopt(super().Dup_with_info(info)))

    def Idup_with_info(self, info: MPI.Info) -> tuple[Communicator, MPI.Request]:
        """As :meth:`Idup`."""
        return self.Idup(info)

    def Split(self, color: int = 0, key: int = 0) -> MPI.Intracomm:
        """One communicator per colour; COMM_NULL (of mpi4py) for ``MPI.UNDEFINED``."""
        return self._adopt(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Intracomm:
        """One communicator per kind of neighbourhood."""
        return self._adopt(super().Split_type(split_type, key, info))

    def Create(self, group: MPI.Group) -> MPI.Intracomm:
        """The communicator of a group; called by all ranks."""
        return self._adopt(super().Create(group))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> MPI.Intracomm:
        """The communicator of a group; called by its members."""
        return self._adopt(super().Create_group(group, tag))

    def Free(self) -> None:
        """Give everything back; collective, unless the communicator is dead (then local)."""
        if self._initialised():
            engine, self._blink = self._blink, None
            if engine is None:  # freed before
                return
            engine.close()
            if engine.dead is not None:
                return
        super().Free()

    def free(self) -> None:
        """As :meth:`Free`, but nothing for a communicator that is freed already."""
        if self != MPI.COMM_NULL:
            self.Free()

    def __enter__(self) -> Communicator:
        """Use as a context manager: ``with Communicator(MPI.COMM_WORLD) as comm``."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        """Free; after an error only locally, since the peers may be elsewhere."""
        engine = self.__dict__.get("_blink")
        if engine is not None and error is not None and engine.dead is None:
            engine.dead = error if isinstance(error, BlinkError) else BlinkError(f"left by {error!r}")
        self.free()

    # ---- inside

    def _initialised(self) -> bool:
        """Whether this is more than a plain communicator (mpi4py makes such objects without calling __init__)."""
        return "_blink" in self.__dict__

    def _engine(self) -> Engine:
        engine: Engine | None = self.__dict__.get("_blink")
        if engine is None:
            state = "freed" if self._initialised() else "not initialised"
            raise ArgumentError(f"this communicator is {state}; make one with blinkmpi.Communicator(comm)")
        return engine

    def _adopt(self, comm: MPI.Comm) -> MPI.Intracomm:
        """Turn a fresh communicator of some of our ranks into one of our type; COMM_NULL stays as it is."""
        if comm == MPI.COMM_NULL or not self._initialised():
            return cast(MPI.Intracomm, comm)
        mine, theirs = self.Get_group(), comm.Get_group()
        ranks = MPI.Group.Translate_ranks(theirs, list(range(comm.size)), mine)
        mine.Free()
        theirs.Free()
        child = MPI.Intracomm.__new__(Communicator, comm)
        try:
            child._blink = Engine(child, *self._engine().child(list(ranks)))
        except BaseException:
            child.Free()
            raise
        return child

    def _block(self, job: Job, args: tuple[Any, ...], timeout: float | None, stream: Any = None) -> None:
        if self._blink is not None:
            self._blink.block(job, args, timeout, stream)
        elif self._initialised():
            self._engine()  # which says that it is freed
        else:
            job.of(*args).mpi(self).Wait()

    def _start(self, job: Job, timeout: float | None, stream: Any = None) -> MPI.Request:
        return self._engine().start(job, timeout, stream) if self._initialised() else job.mpi(self)

    def _persist(self, job: Job, stream: Any, mpi: Callable[[], MPI.Prequest]) -> Persistent | MPI.Prequest:
        """A persistent call: ours on GPU memory, MPI's own on the host's."""
        held = self._engine().persist(job, stream) if self._initialised() else None
        return mpi() if held is None else held

    def _device(self, array: Any) -> DeviceArray:
        buffer = on_device(array, "array", writable=False)
        if buffer is None:
            raise BufferTypeError(f"{type(array).__name__} is no array in GPU memory; pass a CuPy array")
        return cast(DeviceArray, buffer.array)
