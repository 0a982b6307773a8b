"""The cases of the conformance suite as calls of a communicator, the same on host memory and on GPUs."""

from typing import Any

import numpy as np
from mpi4py import MPI

import blinkmpi
from blinkmpi.program.reduction import dtype_of
from tests.conformance import Array, Case


def call(comm: blinkmpi.Communicator, case: Case, send: Any, recv: Any) -> Any:
    """Make the call of ``case`` as a user would; returns what this rank received."""
    rank, root = comm.rank, case.root
    source: Any = MPI.IN_PLACE if case.in_place else send
    kind = case.collective
    if kind == "broadcast":
        comm.Bcast(send if rank == root else recv, root)
        return None if rank == root else recv
    if kind == "reduce":
        comm.Reduce(source if rank == root else send, recv, case.op, root)
    elif kind == "allreduce":
        comm.Allreduce(source, recv, case.op)
    elif kind == "gather":
        comm.Gather(source if rank == root else send, recv, root)
    elif kind == "scatter":
        comm.Scatter(send if rank == root else None, MPI.IN_PLACE if case.in_place and rank == root else recv, root)
        if case.in_place and rank == root:
            return send[rank * case.count : (rank + 1) * case.count]
    elif kind == "allgather":
        comm.Allgather(source, recv)
    elif kind == "reduce_scatter_block":
        comm.Reduce_scatter_block(source, recv, case.op)
    else:
        comm.Reduce_scatter(source, recv, list(case.counts()), case.op)
    return recv


def before(case: Case, mine: Array, want: Array | None, rank: int) -> Array | None:
    """What the receive array holds before the call: poison, or the input if in place."""
    if want is None:
        return None
    recv = np.empty(want.size, dtype_of(case.dtype))
    recv.view(np.uint8)[:] = 0xA5
    if case.in_place:
        if case.collective in ("allreduce", "reduce"):
            recv[:] = mine
        elif case.collective.startswith("reduce_scatter"):
            recv = mine.copy()
        elif case.collective in ("allgather", "gather"):
            recv[rank * case.count : (rank + 1) * case.count] = mine
    return recv
