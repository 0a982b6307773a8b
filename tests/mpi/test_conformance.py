"""The conformance suite on the host transport: real ranks, real shared memory.

One mpirun per size and collective, cases looped inside; a failure names its case.
"""

import hashlib

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.topology import machine, modify
from blinkmpi.topology.model import Device, Link, Topology
from tests.conformance import COLLECTIVES, PLANNED, Case, cases, expected, inputs, mistakes, same
from tests.conformance_calls import before, call
from tests.harness import mpi

SMALL = 1000
REPEATS = 2  # calls of even and of odd number have different records
OURS = ";".join(f"{c}:^mpi" for c in dict.fromkeys(PLANNED.get(c, c) for c in COLLECTIVES))


def run_all(comm: blinkmpi.Communicator, chosen: list[Case]) -> None:
    """Run cases; raise on the first that is wrong, naming it."""
    for case in chosen:
        sends = inputs(case)
        want = expected(case, comm.rank)
        first = None
        for _ in range(REPEATS if case.count > SMALL else 1):
            send, recv = sends[comm.rank].copy(), before(case, sends[comm.rank], want, comm.rank)
            got = call(comm, case, send, recv)
            if got is not None and want is not None and (first is None or not same(got[: want.size], first)):
                first = got[: want.size]
                wrong = mistakes(case, first, want, comm.rank)
                assert wrong == 0, f"{case}: rank {comm.rank}: {wrong} of {want.size} elements wrong"
            assert same(send, sends[comm.rank]), f"{case}: rank {comm.rank}: the send buffer was changed"
            if case.in_place and case.collective.startswith("reduce_scatter") and got is not None and want is not None:
                behind = same(got[want.size :], send[want.size :])
                assert behind, f"{case}: rank {comm.rank}: what lies behind the result was changed"
            if case.collective == "allreduce" and got is not None:
                prints = comm.allgather(hashlib.sha256(got.tobytes()).hexdigest())
                assert len(set(prints)) == 1, f"{case}: ranks differ in their bits"


@pytest.mark.parametrize("collective", COLLECTIVES)
@mpi(ranks=(1, 2, 3), long=(4, 8), timeout=150)
def test_collective(comm: MPI.Intracomm, collective: str) -> None:
    full, some = list(cases(collective, comm.size)), list(cases(collective, comm.size, full=False))
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        run_all(ours, full)
    with blinkmpi.Communicator(comm, algo=OURS, executor="numpy") as ours:
        run_all(ours, some)
    with blinkmpi.Communicator(comm) as ours:  # small vectors go to MPI's own collectives
        run_all(ours, some)
    if comm.size > 1:
        gpus = {2: "0,3", 3: "0,3,4", 4: "1,4,5,6", 8: "0,1,2,3,4,5,6,7"}[comm.size]
        emulated = modify(machine("dgx-1v"), gpus=gpus)
        for executor in ("auto", "numpy"):
            with blinkmpi.Communicator(comm, topology=emulated, executor=executor) as ours:
                run_all(ours, some)
        name = PLANNED.get(collective, collective)
        for scheme in ours_schemes(comm, name):
            with blinkmpi.Communicator(comm, algo=f"{name}:{scheme}") as ours:
                run_all(ours, some)


@mpi(ranks=(3,), long=(4,), timeout=90)
def test_trees_to_a_root_that_differ_from_those_from_it(comm: MPI.Intracomm) -> None:
    """A ring of links that lead one way."""
    n = comm.size
    links = tuple(Link(r, (r + 1) % n, "nvlink", 1, 25_000) for r in range(n))
    ring = Topology("ring", tuple(Device("gpu", 0, r) for r in range(n)), (), links)
    for executor in ("auto", "numpy"):
        with blinkmpi.Communicator(comm, topology=ring, executor=executor) as ours:
            assert ours.plan("allreduce").rule("allreduce", 1 << 20).scheme == "pairs"
            ours.Barrier()
            for collective in ("allreduce", "scan", "alltoall", "reduce"):
                run_all(ours, list(cases(collective, n, full=False)))


def ours_schemes(comm: MPI.Intracomm, collective: str) -> tuple[str, ...]:
    """Every scheme that shared memory offers for a collective."""
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        return ours.plan(collective).schemes(collective, 0)
