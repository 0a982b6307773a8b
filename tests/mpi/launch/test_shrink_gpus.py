"""``shrink`` of ranks with GPUs, the host's part: what each rank unmaps and frees, and when. Kernels run nowhere.

This file is also the program of a rank: ``python tests/mpi/launch/test_shrink_gpus.py CASE``.
"""

import os
import signal
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
from mpi4py import MPI

import blinkmpi
from benchmarks.fake.gpu import FakeGpu, fake_gpus
from blinkmpi.errors import CannotShrink, PeerLost
from tests.harness import NEVER_S, Outcome
from tests.mpi.faults import attempt, fault_tolerance, finish, run_case, said, say, start_case

N = 3
start = partial(start_case, __file__, n=N)


def job(case: str) -> Outcome:
    """A job that a launcher starts which lets it outlive a rank."""
    with start(case, options=fault_tolerance()) as running:
        return finish(running)


def counted() -> Counter[str]:
    """How often each rank unmaps the memory of others, and frees its own; counted from now on."""
    found: Counter[str] = Counter()

    def counts(name: str) -> Any:
        def call(self: FakeGpu, at: int) -> None:
            found[name] += 1

        return call

    FakeGpu.shut, FakeGpu.free = counts("unmapped"), counts("freed")  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("case", ["all", "killed"])
def test_those_that_are_left_give_up_the_others_memory_and_go_on(case: str) -> None:
    outcome = job(case)
    left = range(N if case == "all" else N - 1)
    assert outcome.rc == 0, outcome.output
    assert said(outcome, "sizes") == {r: [N, len(left)] for r in left}, outcome.output
    assert said(outcome, "unmapped") == dict.fromkeys(left, N - 1)
    assert all(freed >= 3 for freed in said(outcome, "freed").values()), "memory, table and clocks"


def case_all() -> None:
    case_killed(killed=False)


def case_killed(killed: bool = True) -> None:
    import torch

    with fake_gpus():
        comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S)
        x = torch.ones(1000)
        comm.Allreduce(MPI.IN_PLACE, x, stream=5)
        comm.Barrier()
        if killed and comm.rank == N - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if killed:
            with pytest.raises(PeerLost, match=r"comm\.shrink\(\)"):
                comm.Barrier()
        found = counted()
        new = comm.shrink()
        say(sizes=[N, new.size], **found)
        assert new.context.gpus is not None
        new.Allreduce(MPI.IN_PLACE, x, stream=5)
        new.Free()


def test_a_gpu_whose_work_has_failed_or_does_not_end_is_an_error_on_all() -> None:
    for case, text in (("failed", "has failed: CUDA error 700"), ("endless", "has not ended in 1.0 s")):
        outcome = job(case)
        assert said(outcome, "error") == dict.fromkeys(range(N), CannotShrink.__name__), outcome.output
        assert all("rank 1 failed" in each and text in each for each in said(outcome, "text").values()), outcome.output
        assert outcome.rc == 0, outcome.output


def case_failed() -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error 700")

    case_endless(fails)


def case_endless(work: Any = None) -> None:
    with fake_gpus():
        comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S)
        comm.Barrier()
        if comm.rank == 1:
            comm.context.cuda().gpu.runtime.deviceSynchronize = work or partial(time.sleep, 5)
        attempt(partial(comm.shrink, timeout=1.0))
        MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    run_case(globals())
