"""Results in the rank's own block of what it sends, as C launches such calls, on a GPU that is none."""

from functools import partial

import pytest
from mpi4py import MPI

from blinkmpi.errors import ArgumentError
from tests.harness import mpi
from tests.mpi.launch.test_launches import COUNT, STREAM, gpu_job, made_by_c, pytestmark  # noqa: F401

torch = pytest.importorskip("torch")


@mpi(ranks=(2,), timeout=60)
def test_results_in_the_own_block(comm: MPI.Intracomm) -> None:
    """C makes the calls that overlap as one did that Python has read, wherever they lie, and no other."""
    n, rank = comm.size, comm.rank
    with gpu_job(comm) as (ours, _):
        many = [torch.zeros(n * COUNT) for _ in range(3)]

        def scattered(x: torch.Tensor, first: int) -> None:
            ours.Reduce_scatter_block(x, x[first : first + COUNT], "sum", stream=STREAM)

        for x in (*many[:2], many[0]):
            scattered(x, rank * COUNT)
        for x in many:
            assert made_by_c(ours, partial(scattered, x, rank * COUNT))
        for _ in range(2):
            ours.Reduce_scatter_block(many[0], many[1][:COUNT], "sum", stream=STREAM)
        with pytest.raises(ArgumentError, match="overlap"):
            scattered(many[0], 9)


@mpi(ranks=(2,), timeout=60)
def test_blocks_in_place(comm: MPI.Intracomm) -> None:
    """An Allgather in place is C's on every rank, also where the block that it sends does not begin its array."""
    with gpu_job(comm) as (ours, _):
        many = [torch.zeros(comm.size * COUNT) for _ in range(3)]
        for x in (*many[:2], many[0]):
            ours.Allgather(MPI.IN_PLACE, x, stream=STREAM)
        for x in many:
            assert made_by_c(ours, partial(ours.Allgather, MPI.IN_PLACE, x, stream=STREAM))
