"""Results in the rank's own block of what it sends, as C launches such calls, on a GPU that is none."""

from functools import partial
from typing import Any

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
    """They are C's on every rank, also where the block that is sent, or received, does not begin its array."""
    n, root = comm.size, comm.size - 1
    here = comm.rank == root
    with gpu_job(comm) as (ours, driver):
        for dtype in (torch.float32, torch.bfloat16):
            many = [torch.zeros(n * COUNT, dtype=dtype) for _ in range(3)]
            few = [torch.zeros(COUNT, dtype=dtype) for _ in range(3)]

            def gather(i: int, many: Any = many, few: Any = few) -> None:
                ours.Gather(*((MPI.IN_PLACE, many[i]) if here else (few[i], None)), root, stream=STREAM)

            def scatter(i: int, many: Any = many, few: Any = few) -> None:
                ours.Scatter(*((many[i], MPI.IN_PLACE) if here else (None, few[i])), root, stream=STREAM)

            def allgather(i: int, many: Any = many) -> None:
                ours.Allgather(MPI.IN_PLACE, many[i], stream=STREAM)

            for call in (allgather, gather, scatter):
                for i in (0, 1, 0):
                    call(i)
                for i in range(3):
                    assert made_by_c(ours, partial(call, i)), (call, i)
                    at = many[i].data_ptr() if here or call is allgather else few[i].data_ptr()
                    own = at + comm.rank * few[i].nbytes if call is allgather else at
                    *_, words = driver.last()
                    assert {at, own} <= set(words), (call, i)
