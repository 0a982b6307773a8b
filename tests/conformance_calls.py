"""The cases of the conformance suite as calls of a communicator, the same on host memory and on GPUs."""

import sys
from typing import Any

import numpy as np
from mpi4py import MPI

import blinkmpi
from blinkmpi.program.reduction import dtype_of
from tests.conformance import GAP, Array, Case

POISON = 0xA5


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
    elif kind == "reduce_scatter":
        comm.Reduce_scatter(source, recv, list(case.counts()), case.op)
    elif kind == "alltoall":
        comm.Alltoall(source, recv)
    elif kind == "scan":
        comm.Scan(source, recv, case.op)
    elif kind == "exscan":
        comm.Exscan(source, send if case.in_place and rank == 0 else recv, case.op)
    else:
        return _variant(comm, case, send, recv)
    return recv


def places(counts: tuple[int, ...]) -> list[int]:
    """Where blocks of these lengths begin in an array with gaps: those of the last ranks first."""
    return [sum(counts[r + 1 :]) + GAP * (len(counts) - r) for r in range(len(counts))]


def _variant(comm: blinkmpi.Communicator, case: Case, send: Any, recv: Any) -> Any:
    """A call of blocks in another order, with gaps; ``recv`` and what is returned are in the order of ranks."""
    rank, root, kind = comm.rank, case.root, case.collective
    counts = {"alltoallv": tuple(case.row(r)[rank] for r in range(case.n))}.get(kind, case.counts())
    there, source = [(slice(at, at + k)) for at, k in zip(places(counts), counts, strict=True)], send
    if kind == "scatterv" and rank != root:
        comm.Scatterv(None, recv, root)
        return recv
    if kind == "gatherv" and rank != root:
        comm.Gatherv(send, None, root)
        return None
    array, raw = _poisoned(send, sum(counts) + GAP * (case.n + 1))
    spread = [array, (list(counts), places(counts))]
    if kind == "scatterv":
        _move(send, array, there, back=False)
        comm.Scatterv(spread, MPI.IN_PLACE if case.in_place else recv, root)
        return array[there[rank]] if case.in_place else recv
    if case.in_place:
        if kind == "alltoallv":
            _move(send, array, there, back=False)
        else:
            array[there[rank]] = send
        source = MPI.IN_PLACE
    if kind == "alltoallv":
        comm.Alltoallv(source if case.in_place else [send, list(case.row(rank))], spread)
    elif kind == "gatherv":
        comm.Gatherv(source, spread, root)
    else:
        comm.Allgatherv(source, spread)
    width = dtype_of(case.dtype).itemsize
    ends = [0, *sorted(edge for part in there for edge in (part.start, part.stop)), len(raw) // width]
    for start, stop in zip(ends[::2], ends[1::2], strict=True):
        assert (raw[start * width : stop * width] == POISON).all(), f"{case}: rank {rank}: a gap was written"
    _move(recv, array, there, back=True)
    return recv


def _poisoned(like: Any, size: int) -> tuple[Any, Any]:
    """An array of the same kind and type, and its bytes, which are all POISON."""
    if isinstance(like, np.ndarray):
        raw = np.full(size * like.itemsize, POISON, np.uint8)
        return raw.view(like.dtype), raw
    if hasattr(like, "get"):
        raw = sys.modules["cupy"].full(size * like.itemsize, POISON, "uint8")
        return raw.view(like.dtype), raw
    raw = sys.modules["torch"].full(
        (size * like.itemsize,), POISON, dtype=sys.modules["torch"].uint8, device=like.device
    )
    return raw.view(like.dtype), raw


def _move(packed: Any, array: Any, there: list[slice], *, back: bool) -> None:
    at = 0
    for part in there:
        length = part.stop - part.start
        if back:
            packed[at : at + length] = array[part]
        else:
            array[part] = packed[at : at + length]
        at += length


def before(case: Case, mine: Array, want: Array | None, rank: int) -> Array | None:
    """What the receive array holds before the call: poison, or the input if in place."""
    if want is None:
        return None
    recv = np.empty(want.size, dtype_of(case.dtype))
    recv.view(np.uint8)[:] = POISON
    if case.in_place:
        if case.collective in ("allreduce", "reduce", "alltoall", "scan", "exscan"):
            recv[:] = mine
        elif case.collective.startswith("reduce_scatter"):
            recv = mine.copy()
        elif case.collective in ("allgather", "gather"):
            recv[rank * case.count : (rank + 1) * case.count] = mine
    return recv
