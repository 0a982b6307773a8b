"""The ranks plan for a call when it is first made, whatever the others do in it."""

import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import (
    ArgumentError,
    BlinkError,
    CollectiveTimeout,
    MismatchError,
    PeerLost,
    RemoteError,
    SettingsError,
)
from blinkmpi.planning.on_demand import PlanOnDemand
from tests.harness import PATIENCE_S, ROOT, mpi, run_command
from tests.mpi.faults import stop_until


def parts(comm: blinkmpi.Communicator) -> list[tuple[str, int]]:
    return [part for part in comm.context.planned.parts if part[0] != "barrier"]


@mpi(ranks=(1, 2, 4), timeout=60)
def test_a_first_call_plans_and_later_ones_do_not(comm: MPI.Intracomm) -> None:
    n, x = comm.size, np.arange(5000.0)
    with blinkmpi.Communicator(comm) as ours:
        assert not parts(ours), "opening plans for no call"
        for root in (n - 1, 0):
            for _ in range(2):
                vector = x + comm.rank
                ours.Bcast(vector, root=root)
                assert (vector == x + root).all()
        total = np.empty_like(x)
        ours.Allreduce(x, total)
        assert (total == n * x).all()
        assert parts(ours) == list(dict.fromkeys([("broadcast", n - 1), ("broadcast", 0), ("allreduce", -1)]))
        assert all(other == ours.plans for other in comm.allgather(ours.plans)), "the same plan on every rank"


@mpi(ranks=(2, 3), timeout=60)
def test_explain_plans_on_its_rank_alone(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        if comm.rank == 0:
            assert "runs as" in ours.explain("reduce", 1 << 20, root=1)
        assert not parts(ours)
        plan = ours.plan("reduce", root=1)
        assert plan.schemes("reduce", 1)
        assert parts(ours) == [("reduce", 1)]
        for wrong, error in ((("reduce", 9), ArgumentError), (("gossip", 0), SettingsError)):
            with pytest.raises(error if comm.rank == 1 else RemoteError):
                ours.plan(*(wrong if comm.rank == 1 else ("reduce", 0)))
        with pytest.raises(MismatchError):
            ours.plan("gather", root=comm.rank % 2)


@mpi(ranks=(2, 3), timeout=60)
def test_a_first_call_that_a_rank_refuses(comm: MPI.Intracomm) -> None:
    """It fails on all, plans for nothing, and the next one is right."""
    x = np.ones(1000)
    with blinkmpi.Communicator(comm) as ours:
        with pytest.raises(BlinkError):
            ours.Allreduce("no buffer" if comm.rank == 1 else x, np.empty_like(x))
        assert not parts(ours)
        total = np.empty_like(x)
        ours.Allreduce(x, total)
        assert (total == comm.size).all()


@mpi(ranks=(2, 3), timeout=60)
def test_a_first_call_that_a_rank_leaves_to_mpi(comm: MPI.Intracomm) -> None:
    """One rank's types are MPI's alone: all go there, and plan when a call is ours."""
    x, pairs = np.ones(1000), MPI.DOUBLE.Create_vector(500, 1, 2).Commit()
    with blinkmpi.Communicator(comm) as ours:
        for begin in (ours.Bcast, lambda *a, **k: ours.Ibcast(*a, **k).Wait()):
            spread = np.full(1000, comm.rank, float)
            begin([spread, 1, pairs] if comm.rank else spread[:500].copy(), root=0)
            assert comm.rank == 0 or (spread[::2] == 0).all()
        assert not parts(ours)
        ours.Bcast(x, root=0)
        assert parts(ours) == [("broadcast", 0)]
    pairs.Free()


@mpi(ranks=(2,), timeout=60)
def test_first_calls_that_differ(comm: MPI.Intracomm) -> None:
    x = np.ones(1000)
    with blinkmpi.Communicator(comm) as ours:
        with pytest.raises(MismatchError, match="to be planned first"):
            ours.Bcast(x, root=0) if comm.rank else ours.Reduce(x, np.empty_like(x), root=0)
        with pytest.raises(MismatchError):
            ours.Bcast(x[: 1000 - comm.rank], root=0)


@mpi(ranks=(2, 4), timeout=60)
def test_first_calls_that_are_not_blocking(comm: MPI.Intracomm) -> None:
    n, x = comm.size, np.arange(20_000.0)
    with blinkmpi.Communicator(comm) as ours:
        total, every, one = np.empty_like(x), np.empty(n * x.size), x + comm.rank
        requests = [ours.Iallreduce(x, total), ours.Iallgather(x, every), ours.Ibcast(one, root=n - 1)]
        late = np.empty_like(x)
        ours.Reduce(x, late, root=1)  # behind them
        MPI.Request.Waitall(requests)
        assert (total == n * x).all()
        assert (every.reshape(n, -1) == x).all()
        assert (one == x + n - 1).all()
        assert comm.rank != 1 or (late == n * x).all()


@mpi(ranks=(2, 3), timeout=60)
def test_planning_that_fails_or_takes_long(comm: MPI.Intracomm) -> None:
    """An error of rank 0 is one on every rank, and the communicator lives; a slow plan outlives a short timeout."""
    x, real = np.ones(1000), PlanOnDemand._made

    def broken(self: PlanOnDemand, part: Any, *, alone: bool = False) -> Any:
        raise MemoryError("no room")

    def slow(self: PlanOnDemand, part: Any, *, alone: bool = False) -> Any:
        time.sleep(1.5)
        return real(self, part, alone=alone)

    with blinkmpi.Communicator(comm, timeout=1.0) as ours:
        failing = pytest.raises(RemoteError if comm.rank else MemoryError, match="no room")
        with mock.patch.object(PlanOnDemand, "_made", broken), failing:
            ours.Bcast(x)
        with mock.patch.object(PlanOnDemand, "_made", slow):
            ours.Bcast(x)
        assert parts(ours) == [("broadcast", 0)]


@mpi(ranks=(2, 3), timeout=60)
def test_a_rank_that_is_stopped_while_they_plan(comm: MPI.Intracomm) -> None:
    """The call's own deadline holds for it, not the communicator's; the others do not wait until it goes on."""
    ours, real = blinkmpi.Communicator(comm), PlanOnDemand.add
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else "")

    def stopped(self: PlanOnDemand, collective: str, root: int) -> None:
        if comm.rank == comm.size - 1:
            stop_until([Path(folder, str(r)) for r in range(comm.size - 1)])
        real(self, collective, root)

    began = time.monotonic()
    with mock.patch.object(PlanOnDemand, "add", stopped), pytest.raises((CollectiveTimeout, PeerLost)) as raised:
        ours.Allreduce(np.ones(1000), np.empty(1000), timeout=0.5)
    if comm.rank != comm.size - 1:
        assert raised.type is CollectiveTimeout
        assert time.monotonic() - began < 0.5 + PATIENCE_S
        Path(folder, str(comm.rank)).touch()
    with pytest.raises(PeerLost):
        ours.Barrier()
    comm.Barrier()
    ours.Free()
    if comm.rank == 0:
        shutil.rmtree(folder)


@mpi(ranks=(2, 3), timeout=60)
def test_an_interrupt_while_rank_0_plans_ends_the_wait_of_all(comm: MPI.Intracomm) -> None:
    def interrupted(self: PlanOnDemand, part: Any, *, alone: bool = False) -> Any:
        time.sleep(0.5)
        raise KeyboardInterrupt

    ours = blinkmpi.Communicator(comm)
    with mock.patch.object(PlanOnDemand, "_made", interrupted):
        began = time.monotonic()
        with pytest.raises(BlinkError if comm.rank else KeyboardInterrupt):
            ours.Bcast(np.ones(1000))
        assert time.monotonic() - began < PATIENCE_S
    with pytest.raises(PeerLost):
        ours.Bcast(np.ones(1000))
    comm.Barrier()
    ours.Free()


@mpi(ranks=(2,), timeout=60)
def test_two_communicators_plan_at_a_time(comm: MPI.Intracomm) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs THREAD_MULTIPLE")
    pair = [blinkmpi.Communicator(comm) for _ in range(2)]
    results = [np.empty(1000) for _ in pair]
    threads = [
        threading.Thread(target=ours.Allreduce, args=(np.ones(1000), result))
        for ours, result in zip(pair, results, strict=True)
    ]
    for thread in threads[:: 1 if comm.rank else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((result == 2).all() for result in results)
    for ours in pair:
        ours.Free()


@pytest.mark.mpi_skip
def test_the_command_explains_what_a_job_of_its_ranks_does(tmp_path: Path) -> None:
    written = tmp_path / "written.py"
    written.write_text("from blinkmpi.lang import library\n\nring = library.ring(3)\n")

    def explained(*words: str, **env: str) -> str:
        argv = [sys.executable, "-m", "blinkmpi", "explain", "--bytes", "64K", *words]
        outcome = run_command(3, argv, timeout=60, env={"PYTHONPATH": str(ROOT), **env}, cwd=ROOT)
        assert outcome.rc == 0, outcome.output
        return outcome.output

    told = explained()
    assert told.count("allreduce of 64 KiB, float32 sum, 3 ranks on cpu:3") == 1
    assert "this job    C executor" in told or "this job    NumPy executor" in told
    assert "runs as     chain" in explained(BLINKMPI_ALGO="allreduce:chain")
    assert "rounded to the call's type" in explained("--dtype", "half", BLINKMPI_WIRE="operand")
    assert "runs as     lang:ring" in explained("--algorithm", str(written))
    assert "this job    C" not in explained("--gpus", "0,1"), "of another machine, and no job's"
