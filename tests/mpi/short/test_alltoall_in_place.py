"""Alltoall and Alltoallv in place: through slots, with no copy of the input; ranks must agree on it."""

import os
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import MismatchError
from blinkmpi.lang import library
from blinkmpi.planning.planner import make_plan
from blinkmpi.program.call import Call
from blinkmpi.program.in_place import sent_before
from blinkmpi.program.lower import lower
from blinkmpi.topology import machine
from tests.harness import mpi

TYPES = ("int8", "int16", "float32", "complex128")
BLOCKS = (0, 1, 7, 511, 16_387, 70_001)  # elements: whole in one shot, in one chunk, in several that end anywhere


def block(source: int, target: int, count: int, dtype: str) -> np.ndarray:
    """What a rank sends to another."""
    return (np.arange(count) % 89 + 7 * source + 3 * target).astype(dtype)


def exchanged(ours: blinkmpi.Communicator, count: int, dtype: str, *, uneven: bool, gap: int = 0) -> None:
    """Make one call, and compare it with what each rank sent."""
    n, rank = ours.size, ours.rank
    counts = [count + (rank + r) % 3 * uneven for r in range(n)]
    starts = [sum(counts[:r]) + gap * r for r in range(n)]
    data = np.full(starts[-1] + counts[-1] + gap, 99, dtype)
    wanted = data.copy()
    for r, (start, length) in enumerate(zip(starts, counts, strict=True)):
        data[start : start + length] = block(rank, r, length, dtype)
        wanted[start : start + length] = block(r, rank, length, dtype)
    for _ in range(2):  # the second call is found by C, and gives back what was there
        before = data.copy()
        if uneven or gap:
            ours.Alltoallv(MPI.IN_PLACE, [data, (counts, starts)])
        else:
            ours.Alltoall(MPI.IN_PLACE, data)
        assert np.array_equal(data, wanted), (count, dtype, uneven, gap)
        wanted = before


@mpi(ranks=(1, 2, 3, 4), timeout=90)
def test_blocks_of_all_lengths(comm: MPI.Intracomm) -> None:
    for executor in ("auto", "numpy"):
        with blinkmpi.Communicator(comm, executor=executor) as ours:
            for dtype in TYPES:
                for count in BLOCKS if executor == "auto" else BLOCKS[:-1]:
                    exchanged(ours, count, dtype, uneven=False)
                    exchanged(ours, count, dtype, uneven=True)
            exchanged(ours, 501, "float64", uneven=True, gap=5)
            exchanged(ours, 50_001, "float64", uneven=False, gap=5)
            loaded = [p for _, p in ours._dispatcher().binder.programs.values() if p is not None]
            assert loaded
            assert not any(p.cma or p.aside for p in loaded)
    with mock.patch.dict(os.environ, BLINKMPI_CMA_DISABLE="1"), blinkmpi.Communicator(comm) as ours:
        exchanged(ours, 70_001, "float32", uneven=True)


def test_several_paths_between_two_ranks_need_a_copy() -> None:
    """What one of them brings would be stored over what another one still has to send."""
    for name, copied in (("dgx-1v", True), ("dgx-a100", False)):
        plan = make_plan(machine(name), collectives=["alltoall"])
        call = Call("alltoall", 8, (1000,), "float32", in_place=True)
        program = lower(plan.packings[0], call, chunk_bytes=4096, depth=2)
        assert all((sent_before(program, r) is None) == copied for r in range(8)), name


@mpi(ranks=(4,), timeout=60)
def test_an_algorithm(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, algorithms=[library.two_step(comm.size, 2)]) as ours:
        exchanged(ours, 16_387, "float32", uneven=False)
        exchanged(ours, 3, "float32", uneven=False)


@mpi(ranks=(2, 3), timeout=60)
def test_all_ranks_must_say_so(comm: MPI.Intracomm) -> None:
    n = comm.size
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        for count in (2, 50_000):
            data, other = np.arange(n * count, dtype="int32"), np.zeros(n * count, "int32")
            kept = data.copy()
            with pytest.raises(MismatchError, match="in place"):
                ours.Alltoall(data if ours.rank else MPI.IN_PLACE, other if ours.rank else data)
            assert np.array_equal(data, kept)
        exchanged(ours, 5, "int32", uneven=False)
