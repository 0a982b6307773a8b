"""The conformance suite on GPUs: real ranks, peers mapped by CUDA IPC, every road.

One mpirun per size and collective, cases looped inside; a failure names its case. Skipped where there are fewer GPUs.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.numerics import dtype_of
from blinkmpi.topology import machine, modify
from blinkmpi.transport.cuda.device import cupy, device_count
from tests.conformance import COLLECTIVES, Array, Case, cases, expected, inputs, mistakes
from tests.harness import mpi

SIZES = tuple(n for n in (1, 2, 3, 4, 8) if n <= device_count()) or (1,)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="needs a GPU")]
ROADS = ("oneshot", "twoshot", "direct", "slots")
DGX1 = {2: "0,3", 3: "0,3,4", 4: "1,4,5,6", 8: "0,1,2,3,4,5,6,7"}


class Buffers:
    """GPU memory of a test, registered or not, at an offset of ``skew`` elements from where an allocation begins."""

    def __init__(self, comm: blinkmpi.Communicator, nbytes: int, *, registered: bool) -> None:
        self.cp = cupy()
        make = comm.empty if registered else self.cp.empty
        self.pools = [make((nbytes,), "uint8") for _ in range(2)]

    def take(self, which: int, data: Array, skew: int) -> Any:
        """The data on the GPU."""
        start = skew * data.itemsize
        view = self.pools[which][start : start + data.nbytes].view(data.dtype)
        view[...] = self.cp.asarray(data)
        return view


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


def host_buffers(case: Case, mine: Array, want: Array | None, rank: int) -> Array | None:
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


def run_all(comm: blinkmpi.Communicator, chosen: list[Case], *, registered: bool, skew: int = 0) -> None:
    """Run cases; raise on the first that is wrong, naming it."""
    buffers = Buffers(comm, 40 << 20, registered=registered)
    for case in chosen:
        sends = inputs(case)
        want = expected(case, sends, comm.rank)
        start = host_buffers(case, sends[comm.rank], want, comm.rank)
        send = buffers.take(0, sends[comm.rank], skew)
        recv = None if start is None else buffers.take(1, start, skew)
        got = call(comm, case, send, recv)
        where = f"{case}, {'registered' if registered else 'plain'} buffers, skew {skew}"
        if got is not None and want is not None:
            host = got.get()
            wrong = mistakes(case, sends, host[: want.size], want, comm.rank)
            assert wrong == 0, f"{where}: rank {comm.rank}: {wrong} of {want.size} elements wrong"
        assert send.get().tobytes() == sends[comm.rank].tobytes(), f"{where}: rank {comm.rank}: send buffer changed"
        if case.collective == "allreduce" and got is not None:
            prints = comm.allgather(hashlib.sha256(got.get().tobytes()).hexdigest())
            assert len(set(prints)) == 1, f"{where}: ranks differ in their bits"


def fits(case: Case, road: str) -> bool:
    """Whether a road carries a case (packets: short vectors, blocks of one length)."""
    nbytes = case.count * dtype_of(case.dtype).itemsize
    if road == "oneshot":
        return nbytes <= 64 << 10 and case.collective != "reduce_scatter"
    if road == "twoshot":
        return case.collective == "allreduce" and nbytes <= 128 << 10
    return True


@pytest.mark.parametrize("collective", COLLECTIVES)
@mpi(ranks=SIZES, timeout=240)
def test_collective(comm: MPI.Intracomm, collective: str) -> None:
    full, some = list(cases(collective, comm.size)), list(cases(collective, comm.size, full=False))
    name = "reduce_scatter" if collective.startswith("reduce_scatter") else collective
    with blinkmpi.Communicator(comm) as ours:
        assert ours.gpu is not None, "no GPUs"
        run_all(ours, full, registered=False)
        run_all(ours, some, registered=True)
        run_all(ours, some, registered=True, skew=1)
        run_all(ours, some, registered=False, skew=3)
    if comm.size == 1:
        return
    for road in ROADS:
        chosen = [c for c in some if fits(c, road)]
        with blinkmpi.Communicator(comm, algo=f"{name}:onehop/{road}") as ours:
            run_all(ours, chosen, registered=road == "direct")
    for scheme in ("chain", "trees"):
        with blinkmpi.Communicator(comm) as ours:
            if scheme not in ours.plans.schemes(name, 0):
                continue
        with blinkmpi.Communicator(comm, algo=f"{name}:{scheme}") as ours:
            run_all(ours, some, registered=False)
    with blinkmpi.Communicator(comm, topology=modify(machine("dgx-1v"), gpus=DGX1[comm.size])) as ours:
        run_all(ours, some, registered=False)
