"""The conformance suite on the host transport: real ranks, real shared memory.

One mpirun per size and collective, cases looped inside; a failure names its case.
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
from blinkmpi.transport.slots import FIRST
from tests.conformance import COLLECTIVES, Array, Case, cases, expected, inputs, mistakes
from tests.harness import mpi

SMALL = 1000
OURS = ";".join(
    f"{c}:^mpi" for c in ("broadcast", "reduce", "allreduce", "gather", "scatter", "allgather", "reduce_scatter")
)


def call(comm: blinkmpi.Communicator, case: Case, send: Array, recv: Array | None) -> Array | None:
    """Make the call of ``case`` as a user would; returns what this rank received."""
    rank, root = comm.rank, case.root
    source: Any = MPI.IN_PLACE if case.in_place else send
    kind = case.collective
    if kind == "broadcast":
        buf = send if rank == root else recv
        comm.Bcast(buf, root)
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


def buffers(case: Case, mine: Array, want: Array | None, rank: int) -> tuple[Array, Array | None]:
    """This rank's send and receive arrays; the receive array is poisoned, or holds the input if in place."""
    send = mine.copy()
    if want is None:
        return send, None
    recv = np.empty(want.size, dtype_of(case.dtype))
    recv.view(np.uint8)[:] = 0xA5
    if case.in_place:
        if case.collective in ("allreduce", "reduce"):
            recv[:] = send
        elif case.collective.startswith("reduce_scatter"):
            recv = send.copy()
        elif case.collective in ("allgather", "gather"):
            recv[rank * case.count : (rank + 1) * case.count] = send
    return send, recv


def run_all(comm: blinkmpi.Communicator, chosen: list[Case]) -> None:
    """Run cases; raise on the first that is wrong, naming it."""
    for case in chosen:
        sends = inputs(case)
        want = expected(case, sends, comm.rank)
        first = b""
        for _ in range(len(FIRST) if case.count > SMALL else 1):  # slots written each way
            send, recv = buffers(case, sends[comm.rank], want, comm.rank)
            got = call(comm, case, send, recv)
            if got is not None and want is not None and got.tobytes() != first:
                wrong = mistakes(case, sends, got[: want.size], want, comm.rank)
                assert wrong == 0, f"{case}: rank {comm.rank}: {wrong} of {want.size} elements wrong"
                first = got.tobytes()
            assert send.tobytes() == sends[comm.rank].tobytes(), (
                f"{case}: rank {comm.rank}: the send buffer was changed"
            )
            if case.collective == "allreduce" and got is not None:
                prints = comm.allgather(hashlib.sha256(got.tobytes()).hexdigest())
                assert len(set(prints)) == 1, f"{case}: ranks differ in their bits"


@pytest.mark.parametrize("collective", COLLECTIVES)
@mpi(ranks=(1, 2, 3, 4, 8), timeout=150)
def test_collective(comm: MPI.Intracomm, collective: str) -> None:
    full, some = list(cases(collective, comm.size)), list(cases(collective, comm.size, full=False))
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        run_all(ours, full)
    with blinkmpi.Communicator(comm, algo=OURS, runner="numpy") as ours:
        run_all(ours, some)
    with blinkmpi.Communicator(comm) as ours:  # small vectors go to MPI's own collectives
        run_all(ours, some)
    if comm.size > 1:
        gpus = {2: "0,3", 3: "0,3,4", 4: "1,4,5,6", 8: "0,1,2,3,4,5,6,7"}[comm.size]
        emulated = modify(machine("dgx-1v"), gpus=gpus)
        for runner in ("auto", "numpy"):
            with blinkmpi.Communicator(comm, topology=emulated, runner=runner) as ours:
                run_all(ours, some)
        name = "reduce_scatter" if collective.startswith("reduce_scatter") else collective
        for scheme in ours_schemes(comm, name):
            with blinkmpi.Communicator(comm, algo=f"{name}:{scheme}") as ours:
                run_all(ours, some)


def ours_schemes(comm: MPI.Intracomm, collective: str) -> tuple[str, ...]:
    """Every scheme that shared memory offers for a collective."""
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        return ours.plans.schemes(collective, 0)
