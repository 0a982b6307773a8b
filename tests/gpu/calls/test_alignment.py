"""Buffers of which some ranks' are aligned to 16 bytes and others' are not, in all ways that kernels tell apart."""

import itertools

import pytest
from mpi4py import MPI

import blinkmpi
from tests.conformance import PLANNED, REDUCING, Case
from tests.gpu.helpers import Pools, at_least, run_all, sizes
from tests.harness import mpi

NAMES = ("allreduce", "reduce", "broadcast", "allgather", "gather", "scatter", "reduce_scatter_block")
COUNTS = (3, 131, 5000, 150_001)
ADDED = (("float32", "sum"), ("bfloat16", "sum"))
MOVED = (("int8", ""),)

pytestmark = [pytest.mark.gpu, at_least(2)]


@pytest.mark.parametrize("protocol", ["direct", "slots"])
@mpi(ranks=sizes(2, 3, 4, 8), timeout=200)
def test_buffers_that_lie_differently(comm: MPI.Intracomm, protocol: str) -> None:
    n, rank = comm.size, comm.rank
    skews = {  # of the send buffer and the receive buffer, in elements
        "alike": (3, 3), "one sender": (int(rank == 0), 0), "one receiver": (0, int(rank == n - 1)),
        "results": (0, 1), "all": (rank, 2 * rank + 1),
    }  # fmt: skip
    algo = ";".join(f"{PLANNED.get(name, name)}:onehop/{protocol}" for name in NAMES)
    with blinkmpi.Communicator(comm, algo=algo) as ours:
        pools = Pools(ours, registered=protocol == "direct")
        for name, count in itertools.product(NAMES, COUNTS):
            for (dtype, op), in_place in itertools.product(ADDED if name in REDUCING else MOVED, (False, True)):
                case = Case(name, n, dtype, op, count, in_place and name != "broadcast", n - 1)
                for send, recv in skews.values():
                    run_all(ours, pools, [case], skew=send, recv_skew=recv)
