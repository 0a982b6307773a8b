"""The collectives of a communicator, with mpi4py's signatures and keyword-only ``timeout=`` and ``stream=``."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from .errors import ArgumentError
from .runtime import collectives as mpi
from .runtime.collectives import CollectiveMethod
from .runtime.dispatch import Dispatcher

Op = MPI.Op | str
Args = tuple[Any, ...]
Seconds = float | None
SUM, NO_INFO = MPI.SUM, MPI.INFO_NULL


class Collectives:
    """The collectives of what has a dispatcher.

    Below, n is the number of ranks and m a number of elements, the same on all ranks. Buffers are mpi4py's: arrays of
    any shape whose elements are contiguous, on the host or on GPUs, or its buffer specifications; ``sendbuf`` may be
    ``MPI.IN_PLACE``. ``op`` is an ``MPI.Op`` or a name (``"sum"``, ``"avg"``). ``timeout`` is in seconds without
    progress, ``stream`` one of CuPy or torch, or its address; the call is then only put there.

    Raises:
        ArgumentError, BufferTypeError: before data moves, where the arguments are wrong; the other ranks get a
            RemoteError (on GPUs a MismatchError).
        MismatchError: on every rank, if the ranks make different calls.
        CollectiveTimeout, PeerLost: on every rank, if one does not come, or is gone.
        DeviceError: on GPUs, by the call that waits, or by a later one.
        FallbackError: where ``strict=True`` and only MPI can make the call.
    """

    _blink: Dispatcher | None = None
    _made_by = ""  # how another object of the class is made

    # ---- collectives (MPI 4.1, chapter 6)

    def Bcast(self, buf: Any, root: int = 0, *, stream: Any = None, timeout: Seconds = None) -> None:
        """Send the root's m elements to all, in the same buffer."""
        self._call(mpi.BCAST, (buf, root), timeout, stream)

    def Ibcast(self, buf: Any, root: int = 0, *, stream: Any = None, timeout: Seconds = None) -> MPI.Request:
        """Non-blocking :meth:`Bcast`."""
        return self._start(mpi.BCAST, (buf, root), timeout, stream)

    def Reduce(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0, *, stream: Any = None, timeout: Seconds = None
    ) -> None:
        """Reduce everybody's m elements into the m of the root's ``recvbuf``; elsewhere that is not read."""
        self._call(mpi.REDUCE, (sendbuf, recvbuf, op, root), timeout, stream)

    def Ireduce(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0, *, stream: Any = None, timeout: Seconds = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Reduce`."""
        return self._start(mpi.REDUCE, (sendbuf, recvbuf, op, root), timeout, stream)

    def Allreduce(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, *, stream: Any = None, timeout: Seconds = None
    ) -> None:
        """Reduce everybody's m elements into the m of every ``recvbuf``: the same bits on all ranks."""
        self._call(mpi.ALLREDUCE, (sendbuf, recvbuf, op), timeout, stream)

    def Iallreduce(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, *, stream: Any = None, timeout: Seconds = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Allreduce`."""
        return self._start(mpi.ALLREDUCE, (sendbuf, recvbuf, op), timeout, stream)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: Seconds = None) -> None:
        """Collect everybody's m elements in the n m of the root's ``recvbuf``, those of rank i from i m on."""
        self._call(mpi.GATHER, (sendbuf, recvbuf, root), timeout, stream)

    def Igather(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: Seconds = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Gather`."""
        return self._start(mpi.GATHER, (sendbuf, recvbuf, root), timeout, stream)

    def Scatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: Seconds = None
    ) -> None:
        """Give rank i the m elements from i m on of the root's n m."""
        self._call(mpi.SCATTER, (sendbuf, recvbuf, root), timeout, stream)

    def Iscatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: Seconds = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Scatter`."""
        return self._start(mpi.SCATTER, (sendbuf, recvbuf, root), timeout, stream)

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, timeout: Seconds = None) -> None:
        """Collect everybody's m elements in the n m of every ``recvbuf``, those of rank i from i m on."""
        self._call(mpi.ALLGATHER, (sendbuf, recvbuf), timeout, stream)

    def Iallgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, timeout: Seconds = None) -> MPI.Request:
        """Non-blocking :meth:`Allgather`."""
        return self._start(mpi.ALLGATHER, (sendbuf, recvbuf), timeout, stream)

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, *, stream: Any = None, timeout: Seconds = None
    ) -> None:
        """Reduce everybody's n m elements, and give rank i the m from i m on.

        In place the result lies at the front of ``recvbuf``; what lies behind it stays (on GPUs, it has no meaning).
        """
        self._call(mpi.BLOCKS, (sendbuf, recvbuf, op), timeout, stream)

    def Ireduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, *, stream: Any = None, timeout: Seconds = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Reduce_scatter_block`."""
        return self._start(mpi.BLOCKS, (sendbuf, recvbuf, op), timeout, stream)

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Any = None,
        op: Op = SUM,
        *,
        stream: Any = None,
        timeout: Seconds = None,
    ) -> None:
        """As :meth:`Reduce_scatter_block`, but rank i gets ``recvcounts[i]`` elements (None: as its receive buffer)."""
        self._call(mpi.REDUCE_SCATTER, (sendbuf, recvbuf, recvcounts, op), timeout, stream)

    def Ireduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Any = None,
        op: Op = SUM,
        *,
        stream: Any = None,
        timeout: Seconds = None,
    ) -> MPI.Request:
        """Non-blocking :meth:`Reduce_scatter`."""
        return self._start(mpi.REDUCE_SCATTER, (sendbuf, recvbuf, recvcounts, op), timeout, stream)

    def Gatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: Seconds = None
    ) -> None:
        """As :meth:`Gather`, of blocks that may differ in length and lie anywhere in ``recvbuf``.

        ``[array, counts, displacements, type]`` names them, as in mpi4py; what lies between them stays.
        """
        self._call(mpi.GATHERV, (sendbuf, recvbuf, root), timeout, stream)

    def Igatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: Seconds = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Gatherv`."""
        return self._start(mpi.GATHERV, (sendbuf, recvbuf, root), timeout, stream)

    def Scatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: Seconds = None
    ) -> None:
        """As :meth:`Scatter`, of blocks as in :meth:`Gatherv`."""
        self._call(mpi.SCATTERV, (sendbuf, recvbuf, root), timeout, stream)

    def Iscatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, timeout: Seconds = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Scatterv`."""
        return self._start(mpi.SCATTERV, (sendbuf, recvbuf, root), timeout, stream)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, timeout: Seconds = None) -> None:
        """As :meth:`Allgather`, of blocks as in :meth:`Gatherv`."""
        self._call(mpi.ALLGATHERV, (sendbuf, recvbuf), timeout, stream)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, timeout: Seconds = None) -> MPI.Request:
        """Non-blocking :meth:`Allgatherv`."""
        return self._start(mpi.ALLGATHERV, (sendbuf, recvbuf), timeout, stream)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, timeout: Seconds = None) -> None:
        """Send rank i the m of the n m elements from i m on, and receive m from each rank, in order."""
        self._call(mpi.ALLTOALL, (sendbuf, recvbuf), timeout, stream)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, timeout: Seconds = None) -> MPI.Request:
        """Non-blocking :meth:`Alltoall`."""
        return self._start(mpi.ALLTOALL, (sendbuf, recvbuf), timeout, stream)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, timeout: Seconds = None) -> None:
        """As :meth:`Alltoall`, of blocks as in :meth:`Gatherv`.

        Lengths may be in GPU memory: ``[x, counts]`` sends ``counts[r]`` elements to rank r, one block behind another.
        ``[y, told]`` receives the blocks likewise, and into ``told`` their lengths; with ``[y, (told, places)]`` that
        of rank r begins at element ``places[r]``. All of them are int64 arrays of n elements, read and written in the
        order of the stream. A block that does not lie in its buffer is an ArgumentError of a later call, or of
        ``check()``; nothing is written then.
        """
        self._call(mpi.ALLTOALLV, (sendbuf, recvbuf), timeout, stream)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, timeout: Seconds = None) -> MPI.Request:
        """Non-blocking :meth:`Alltoallv`."""
        return self._start(mpi.ALLTOALLV, (sendbuf, recvbuf), timeout, stream)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, *, stream: Any = None, timeout: Seconds = None) -> None:
        """Reduce the m elements of all ranks up to one's own, this one included."""
        self._call(mpi.SCAN, (sendbuf, recvbuf, op), timeout, stream)

    def Iscan(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, *, stream: Any = None, timeout: Seconds = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Scan`."""
        return self._start(mpi.SCAN, (sendbuf, recvbuf, op), timeout, stream)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Op = SUM, *, stream: Any = None, timeout: Seconds = None) -> None:
        """Reduce the m elements of all ranks before one's own; the first rank's ``recvbuf`` is left alone."""
        self._call(mpi.EXSCAN, (sendbuf, recvbuf, op), timeout, stream)

    def Iexscan(
        self, sendbuf: Any, recvbuf: Any, op: Op = SUM, *, stream: Any = None, timeout: Seconds = None
    ) -> MPI.Request:
        """Non-blocking :meth:`Exscan`."""
        return self._start(mpi.EXSCAN, (sendbuf, recvbuf, op), timeout, stream)

    def Barrier(self, *, timeout: Seconds = None) -> None:
        """Return when everybody has come."""
        self._call(mpi.BARRIER, (), timeout, None)

    def Ibarrier(self, *, timeout: Seconds = None) -> MPI.Request:
        """Non-blocking :meth:`Barrier`."""
        return self._start(mpi.BARRIER, (), timeout, None)

    # ---- persistent calls (MPI 4.1, section 6.13): on GPU memory ours, with the least to do at Start

    def Allreduce_init(
        self, sendbuf: Any, recvbuf: Any, op: Any = SUM, info: MPI.Info = NO_INFO, *, stream: Any = None
    ) -> MPI.Prequest:
        """An :meth:`Allreduce` that ``Start`` begins and ``Wait`` completes, any number of times."""
        return self._persist(mpi.ALLREDUCE, (sendbuf, recvbuf, op), info, stream)

    def Bcast_init(self, buf: Any, root: int = 0, info: MPI.Info = NO_INFO, *, stream: Any = None) -> MPI.Prequest:
        """As :meth:`Allreduce_init`, for :meth:`Bcast`."""
        return self._persist(mpi.BCAST, (buf, root), info, stream)

    def Allgather_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = NO_INFO, *, stream: Any = None
    ) -> MPI.Prequest:
        """As :meth:`Allreduce_init`, for :meth:`Allgather`."""
        return self._persist(mpi.ALLGATHER, (sendbuf, recvbuf), info, stream)

    def Reduce_scatter_block_init(
        self, sendbuf: Any, recvbuf: Any, op: Any = SUM, info: MPI.Info = NO_INFO, *, stream: Any = None
    ) -> MPI.Prequest:
        """As :meth:`Allreduce_init`, for :meth:`Reduce_scatter_block`."""
        return self._persist(mpi.BLOCKS, (sendbuf, recvbuf, op), info, stream)

    # ---- three ways to make a call

    def _call(self, method: CollectiveMethod, args: Args, timeout: Seconds, stream: Any) -> None:
        self._dispatcher().make(method, args, stream, timeout)

    def _start(self, method: CollectiveMethod, args: Args, timeout: Seconds, stream: Any) -> MPI.Request:
        return self._dispatcher().begin(method, args, timeout, stream)

    def _persist(self, method: CollectiveMethod, args: Args, info: MPI.Info, stream: Any) -> MPI.Prequest:
        held = self._dispatcher().persist(method, args, stream)
        assert held is not None, "MPI has such calls on host memory, and then this is not called"
        return held

    def _initialised(self) -> bool:
        """Whether this has, or had, a dispatcher (mpi4py makes objects without calling __init__)."""
        return "_blink" in self.__dict__

    def _dispatcher(self) -> Dispatcher:
        dispatcher: Dispatcher | None = self.__dict__.get("_blink")
        if dispatcher is None:
            state = "freed" if self._initialised() else "not initialised"
            raise ArgumentError(f"this communicator is {state}; make one with {self._made_by}")
        return dispatcher


def dispatcher_of(comm: Collectives) -> Dispatcher:
    """What makes a communicator's calls; ArgumentError if it is freed."""
    return comm._dispatcher()


def open_dispatcher(comm: Collectives) -> Dispatcher | None:
    """As :func:`dispatcher_of`; None if it is freed."""
    return comm._blink
