"""Alltoall in place: without a copy where packets or slots carry whole blocks, and where blocks must be copied."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import MismatchError
from blinkmpi.lang import library
from blinkmpi.transport.cuda.device import cupy
from tests.gpu.helpers import at_least, sizes
from tests.harness import mpi

RANKS = sizes(2, 3, 4)
BLOCKS = (1, 7, 4099, 65_537, 1_200_001, 9_000_003)  # elements: packets of 16, lines, slots
TIMES = 4
pytestmark = [pytest.mark.gpu, at_least(2)]


class Swapped:
    """A vector of which every rank's block says whose it is, for whom, and where in it; compared on the device."""

    def __init__(self, ours: blinkmpi.Communicator, counts: Any, dtype: str, *, registered: bool) -> None:
        cp, rank = cupy(), ours.rank
        make = ours.empty if registered else cp.empty
        self.x = make((sum(counts[rank]),), dtype)
        places = [cp.arange(k, dtype="int64") % 50 for k in counts[rank]]
        self.sent = cp.concatenate([at + 60 * rank + 7 * r for r, at in enumerate(places)]).astype(dtype)
        self.want = cp.concatenate([at + 60 * r + 7 * rank for r, at in enumerate(places)]).astype(dtype)
        self.wrong = cp.zeros((), "int64")

    def run(self, call: Any, times: int) -> None:
        """The call, and back again by a second one: what came from a rank goes there."""
        for _ in range(times):
            self.x[...] = self.sent
            call()
            self.wrong += cupy().count_nonzero(self.x != self.want)
            call()
            self.wrong += cupy().count_nonzero(self.x != self.sent)


@pytest.mark.parametrize("algo", ["", "alltoall:onehop/slots"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128"])
@mpi(ranks=RANKS, timeout=150)
def test_blocks_of_all_lengths(comm: MPI.Intracomm, dtype: str, algo: str) -> None:
    cp, n = cupy(), comm.size
    most = BLOCKS[-1] // np.dtype(dtype).itemsize
    with blinkmpi.Communicator(comm, algo=algo) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        for count in (c for c in BLOCKS if c <= most):
            for registered in (False, True):
                with stream:
                    it = Swapped(ours, [[count] * n] * n, dtype, registered=registered)
                    it.run(lambda x=it.x: ours.Alltoall(MPI.IN_PLACE, x), 1)
                    it.run(lambda x=it.x: ours.Alltoall(MPI.IN_PLACE, x, stream=stream), TIMES)
                    it.run(lambda x=it.x: ours.Ialltoall(MPI.IN_PLACE, x).Wait(), 1)
                stream.synchronize()
                assert int(it.wrong) == 0, (count, registered)
        assert not any(kernel.aside for kernel in ours._dispatcher().context.cuda()._kernels.values())
        ours.check()


@mpi(ranks=RANKS, timeout=150)
def test_in_a_graph(comm: MPI.Intracomm) -> None:
    """Of ever new calls between the replays: what a graph copies to is not used for anything else."""
    cp, n = cupy(), comm.size
    counts = [[100 + 1000 * ((r + s) % 3) for r in range(n)] for s in range(n)]
    with blinkmpi.Communicator(comm, algorithms=[library.bruck_alltoall(n)]) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        for table in ([[4099] * n] * n, [[2_000_000] * n] * n, counts):
            with stream:
                it = Swapped(ours, table, "float32", registered=False)

                def call(x: Any = it.x, mine: Any = table[comm.rank]) -> None:
                    starts = [sum(mine[:r]) for r in range(n)]
                    ours.Alltoallv(MPI.IN_PLACE, [x, (mine, starts)])

                call()
                stream.synchronize()
                stream.begin_capture()
                call()
                graph = stream.end_capture()
                for i in range(80):
                    other = cp.full((n, 10 + i), comm.rank, "int16")
                    ours.Alltoall(MPI.IN_PLACE, other)
                    filled = [cp.full(5000 + 7 * i, 1, "float32") for _ in range(3)]
                    if i % 20 == 0:
                        it.run(partial(graph.launch, stream), 2)
                    assert all(bool((f == 1).all()) for f in filled), i
            stream.synchronize()
            assert int(it.wrong) == 0
        ours.check()


@mpi(ranks=RANKS, timeout=60)
def test_all_ranks_must_say_so(comm: MPI.Intracomm) -> None:
    cp, n = cupy(), comm.size
    for count in (2, 3_000_000):
        with blinkmpi.Communicator(comm, timeout=20) as ours:
            data, other = cp.arange(n * count, dtype="int32"), cp.zeros(n * count, "int32")
            with pytest.raises(MismatchError):
                ours.Alltoall(data if ours.rank else MPI.IN_PLACE, other if ours.rank else data)
        comm.Barrier()
