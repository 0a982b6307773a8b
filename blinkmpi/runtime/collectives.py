"""mpi4py's collectives that we implement: for each the function that checks its arguments, and MPI's own method."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from mpi4py.MPI import Intracomm

from ..errors import BlinkError, BufferTypeError
from ..program.call import Call
from ..transport.announcement import COUNT, Called
from . import arguments, block_arguments
from .arguments import NeedsNumbers, Prepared
from .buffers import DelegatedToMPI, detached, flat, hold, in_place, mpi_op
from .cuda.buffers import lies_on_device


class CollectiveMethod(NamedTuple):
    """A collective as mpi4py spells it."""

    name: str
    prepare: Callable[..., Prepared | NeedsNumbers]  # (rank, size, *arguments): checks them; may raise DelegatedToMPI
    mpi: Callable[..., MPI.Request]  # (communicator, *arguments): MPI's own non-blocking collective
    exchanges: bool = False  # ``prepare`` also takes a function that exchanges a number with the other ranks
    needs_numbers: bool = False  # whether ``prepare`` gives a call whose ranks must first tell each other lengths
    grouped: bool = False  # whether its argument is a launch of a group
    buffers: int = 0b11  # which of its arguments are buffers, a bit each, for C (arguments.h)

    def repeats(self, args: tuple[Any, ...]) -> bool:
        """Whether calls of the same arguments are the same: the ranks tell each other nothing before."""
        return not self.needs_numbers and not (self.exchanges and args[2] is None)


@dataclass(frozen=True, slots=True)
class Invocation:
    """A collective and the arguments with which the user called it."""

    method: CollectiveMethod
    args: tuple[Any, ...]
    own: tuple[MPI.Datatype, ...] = ()  # datatypes to free when MPI is done with them
    on_host: bool = False  # whether its buffers are known to lie in host memory

    @property
    def name(self) -> str:
        """The collective."""
        return self.method.name

    def held(self) -> Invocation:
        """With arguments for later, when MPI reads them in another thread."""
        held = [hold(arg) for arg in self.args]
        own = tuple(datatype for _, datatypes in held for datatype in datatypes)
        return Invocation(self.method, tuple(arg for arg, _ in held), own)

    def unowned(self) -> Invocation:
        """With the addresses of arrays in place of the arrays, which it does not keep alive."""
        args = tuple(_unowned(a) if type(a) is np.ndarray else a for a in self.args)
        return Invocation(self.method, args, on_host=True)

    def free(self) -> None:
        """Free what :meth:`held` made."""
        for datatype in self.own:
            datatype.Free()

    def begin(self, comm: MPI.Intracomm) -> MPI.Request:
        """Begin MPI's own collective on ``comm``."""
        for arg in () if self.on_host else self.args:
            if lies_on_device(arg):
                raise BufferTypeError(
                    f"{self.name} with these arguments is MPI's alone, and this MPI would crash on GPU memory; "
                    "pass NumPy copies, or an operation and types that blinkmpi has"
                )
        return self.method.mpi(comm, *(mpi_op(a) if isinstance(a, str) else detached(a) for a in self.args))


@lru_cache(maxsize=4096)
def describe(call: Call) -> str:
    """A call as people read it."""
    return call.text


def announced(call: Call) -> Called:
    """A call as ranks compare it, with its count apart from the rest, if it has one."""
    text = describe(call)
    if call.name or not call.dtype or not call.even:
        return Called(text)
    return Called(text.replace(f"({call.counts[0]} x ", f"({COUNT} x ", 1), call.counts[0])


def _unowned(array: np.ndarray[Any, Any]) -> list[Any]:
    return [MPI.memory.fromaddress(array.ctypes.data, array.nbytes), MPI._typedict[array.dtype.char]]


def _iexscan(comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> MPI.Request:
    """MPI's own; mpi4py demands a receive buffer of rank 0, too, which MPI leaves as it is."""
    if recvbuf is None and comm.rank == 0:
        sendbuf, recvbuf = MPI.IN_PLACE, np.array(sendbuf) if isinstance(sendbuf, np.ndarray) else sendbuf
    return comm.Iexscan(sendbuf, recvbuf, op)


def _ialltoallv(comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any) -> MPI.Request:
    """MPI's own, of a copy where it is in place: Open MPI 5's then gives other ranks' blocks where some are empty."""
    if in_place(sendbuf):
        first, *others = recvbuf if isinstance(recvbuf, list | tuple) else [recvbuf]
        with contextlib.suppress(BlinkError, DelegatedToMPI):  # MPI.BOTTOM and its like show no memory
            sendbuf = [flat(first, "recvbuf", writable=False).copy(), *others]
    return comm.Ialltoallv(sendbuf, recvbuf)


def _no_custom(comm: MPI.Intracomm, *args: Any) -> MPI.Request:
    raise BufferTypeError("Custom() is no collective of MPI's, and these arguments are MPI's alone; pass contiguous "
                          "arrays of types that blinkmpi has, and an operation that it has")  # fmt: skip


BCAST = CollectiveMethod("broadcast", arguments.broadcast, Intracomm.Ibcast, buffers=0b1)
REDUCE = CollectiveMethod("reduce", arguments.reduce, Intracomm.Ireduce)
ALLREDUCE = CollectiveMethod("allreduce", arguments.allreduce, Intracomm.Iallreduce)
GATHER = CollectiveMethod("gather", arguments.gather, Intracomm.Igather)
SCATTER = CollectiveMethod("scatter", arguments.scatter, Intracomm.Iscatter)
ALLGATHER = CollectiveMethod("allgather", arguments.allgather, Intracomm.Iallgather)
REDUCE_SCATTER = CollectiveMethod("reduce_scatter", arguments.reduce_scatter, Intracomm.Ireduce_scatter, exchanges=True)
BLOCKS = CollectiveMethod("reduce_scatter", arguments.reduce_scatter_block, Intracomm.Ireduce_scatter_block)
GATHERV = CollectiveMethod("gatherv", block_arguments.gatherv, Intracomm.Igatherv, needs_numbers=True)
SCATTERV = CollectiveMethod("scatterv", block_arguments.scatterv, Intracomm.Iscatterv, needs_numbers=True)
ALLGATHERV = CollectiveMethod("allgather", block_arguments.allgatherv, Intracomm.Iallgatherv)
ALLTOALL = CollectiveMethod("alltoall", block_arguments.alltoall, Intracomm.Ialltoall)
ALLTOALLV = CollectiveMethod("alltoallv", block_arguments.alltoallv, _ialltoallv, needs_numbers=True)
SCAN = CollectiveMethod("scan", arguments.scan, Intracomm.Iscan)
EXSCAN = CollectiveMethod("exscan", arguments.exscan, _iexscan)
CUSTOM = CollectiveMethod("custom", block_arguments.custom, _no_custom, buffers=0b110)
CUSTOM_OF_SOME = CUSTOM._replace(needs_numbers=True)  # some ranks have no part
BARRIER = CollectiveMethod("barrier", arguments.barrier, Intracomm.Ibarrier)
