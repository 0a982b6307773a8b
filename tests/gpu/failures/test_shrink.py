"""Ranks with GPUs that lose one: those that are left go on by ``shrink``, on their GPUs, with right results.

This file is also the program of a rank: ``python tests/gpu/failures/test_shrink.py CASE [ARGUMENT...]``.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import DeviceError
from blinkmpi.runtime.cuda.context import CudaContext
from blinkmpi.transport.cuda.device import cupy
from tests.gpu.helpers import GPUS, at_least, sizes
from tests.harness import NEVER_S, Outcome, mpi
from tests.lossy import CALLS, make_calls
from tests.mpi.faults import attempt, fault_tolerance, finish, run_case, said, say, start_case
from tests.store.folder_store import FolderStore

N = max(2, min(4, GPUS))
SHRINKS = 8
MIB = 1 << 20
LENGTHS = {"packets": 100, "lines": 1 << 18, "slots": 3 << 20, "direct": 3 << 20, "stream": 1 << 18}  # elements

pytestmark = [pytest.mark.gpu, at_least(2)]
start = partial(start_case, __file__, n=N)


def job(case: str, *arguments: str) -> Outcome:
    """A job that a launcher starts which lets it outlive a rank."""
    with start(case, *arguments, options=fault_tolerance()) as running:
        return finish(running)


def went_on(outcome: Outcome, by_rank: dict[int, list[int]]) -> None:
    """These ranks made all calls on GPUs, in communicators of these sizes, and the job ended in order."""
    assert said(outcome, "sizes") == by_rank, outcome.output
    assert said(outcome, "wrong") == dict.fromkeys(by_rank, 0), outcome.output
    assert said(outcome, "gpus") == dict.fromkeys(by_rank, True), outcome.output
    assert outcome.rc == 0, outcome.output


@pytest.mark.parametrize("way", LENGTHS)
def test_the_others_of_a_killed_rank_go_on(way: str) -> None:
    went_on(job("lossy", way, f"{N - 1}:10"), {r: [N, N - 1] for r in range(N - 1)})


@at_least(3)
def test_ranks_that_are_lost_one_after_another() -> None:
    """Rank 0, which plans, is the first."""
    went_on(job("lossy", "slots", "0:10", f"{N - 1}:20"), {r: [N, N - 1, N - 2] for r in range(1, N - 1)})


def case_lossy(way: str, *victims: str) -> None:
    """Make calls; who is a victim (``RANK:STEP``) is killed at its step; the others shrink."""
    cp, rank = cupy(), MPI.COMM_WORLD.rank
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S)
    dies = dict(tuple(map(int, victim.split(":"))) for victim in victims)

    def vector_for(comm: Any) -> Any:
        return (comm.empty if way == "direct" else cp.empty)(LENGTHS[way], "float32")

    stream = cp.cuda.Stream(non_blocking=True) if way == "stream" else None
    with stream or cp.cuda.Stream.null:
        comm, found = make_calls(comm, dies.get(rank), vector_for, stream)
    say(**found, gpus=comm.context.gpus is not None)
    comm.Free()


def test_processes_that_share_a_store_go_on(tmp_path: Path) -> None:
    went_on(job("by_store", str(tmp_path)), {r: [N, N - 1] for r in range(N - 1)})


def case_by_store(folder: str) -> None:
    cp, world = cupy(), MPI.COMM_WORLD
    comm = blinkmpi.StoreCommunicator(FolderStore(Path(folder)), world.rank, world.size, timeout=NEVER_S)
    made = make_calls(comm, 10 if world.rank == N - 1 else None, lambda _: cp.empty(1 << 18, "float32"))
    say(**made[1], gpus=made[0].context.gpus is not None)
    made[0].Free()


def test_a_gpu_whose_work_has_failed_ends_the_shrink_of_all() -> None:
    outcome = job("broken")
    assert said(outcome, "error") == dict.fromkeys(range(N), "CannotShrink"), outcome.output
    assert all("rank 0 failed" in text and "has failed" in text for text in said(outcome, "text").values())


def case_broken() -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S)
    comm.Allreduce(MPI.IN_PLACE, cupy().ones(100, "float32"))
    if comm.rank == 0:

        def failed(_: CudaContext) -> None:
            raise DeviceError("the work on GPU 0 has failed: cudaErrorIllegalAddress; end this process")

        CudaContext.give_up = failed  # type: ignore[method-assign]
    attempt(comm.shrink)
    MPI.COMM_WORLD.Barrier()


@mpi(ranks=sizes(2, 3, 4), timeout=90)
def test_ranks_that_go_are_left_out_and_the_old_communicator_lives_on(comm: MPI.Intracomm) -> None:
    cp, n = cupy(), comm.size
    with blinkmpi.Communicator(comm) as ours:
        x = cp.full(CALLS, comm.rank, "float32")
        if comm.rank:
            rest = ours.shrink(exclude=[0])
            assert rest.context.gpus is not None
            assert rest.machine.n == n - 1
            rest.Allreduce(MPI.IN_PLACE, x)
            assert (x == n * (n - 1) / 2).all()
            rest.Free()
        x[:] = 1
        ours.Allreduce(MPI.IN_PLACE, x)
        assert (x == n).all()


@mpi(ranks=sizes(2, 4), timeout=120)
def test_shrinks_give_their_memory_back(comm: MPI.Intracomm) -> None:
    """And what the user has in registered buffers stays as it is."""
    cp = cupy()
    ours = blinkmpi.Communicator(comm, timeout=NEVER_S)
    kept = ours.empty(1000, "float32")
    kept[:] = 7
    left = []
    for _ in range(SHRINKS):
        x = cp.ones(LENGTHS["slots"], "float32")
        ours.Allreduce(MPI.IN_PLACE, x)
        assert (x == comm.size).all()
        ours = ours.shrink()
        comm.Barrier()
        left.append(cp.cuda.runtime.memGetInfo()[0])
        comm.Barrier()
    ours.Free()
    assert (kept == 7).all()
    assert left[1] - left[-1] < 64 * MIB, left


if __name__ == "__main__":
    run_case(globals())
