"""Jobs that lose ranks: those that are left go on by ``shrink``, with right results, or are told why they cannot.

This file is also the program of a rank: ``python tests/mpi/test_shrink.py CASE [ARGUMENT...]``.
"""

import gc
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import CollectiveTimeout, PeerLost
from blinkmpi.runtime.shrinking import by_mpi
from tests.harness import NEVER_S, Outcome, mpi, wait_until
from tests.lossy import COUNT, make_calls
from tests.mpi.faults import attempt, fault_tolerance, finish, run_case, said, say, start_case, stop_until

pytestmark = pytest.mark.usefixtures("nothing_left_in_shared_memory")
start = partial(start_case, __file__)
SHORT_S = 1.5  # a deadline that passes


def job(case: str, *arguments: str, n: int = 4, options: tuple[str, ...] | None = None) -> Outcome:
    """A job that a launcher starts which lets it outlive a rank, or with other options of mpirun."""
    with start(case, *arguments, n=n, options=fault_tolerance() if options is None else options) as running:
        return finish(running)


def went_on(outcome: Outcome, sizes: dict[int, list[int]]) -> None:
    """These ranks made all calls, in communicators of these sizes, and the job ended in order."""
    assert said(outcome, "sizes") == sizes, outcome.output
    assert said(outcome, "wrong") == dict.fromkeys(sizes, 0), outcome.output
    assert outcome.rc == 0, outcome.output


# ---------------------------------------------------------------- killed in a call


@pytest.mark.parametrize("how", ["c", "numpy", "mpi", pytest.param("nodes", marks=pytest.mark.long)])
def test_the_others_of_a_killed_rank_go_on(how: str) -> None:
    outcome = job("lossy", how, "2:10")
    went_on(outcome, {0: [4, 3], 1: [4, 3], 3: [4, 3]})
    assert said(outcome, "lost") == {r: [[2]] for r in (0, 1, 3)}


def test_ranks_that_are_lost_one_after_another() -> None:
    """Rank 0, which plans, is the first."""
    outcome = job("lossy", "c", "0:10", "3:20")
    went_on(outcome, {1: [4, 3, 2], 2: [4, 3, 2]})
    assert said(outcome, "lost") == {r: [[0], [2]] for r in (1, 2)}


def test_ranks_that_are_lost_at_once() -> None:
    outcome = job("lossy", "c", "1:10", "3:10", n=5)
    went_on(outcome, {0: [5, 3], 2: [5, 3], 4: [5, 3]})


def test_the_last_rank_goes_on_alone() -> None:
    went_on(job("lossy", "c", "0:10", n=2), {1: [2, 1]})


def case_lossy(how: str, *victims: str) -> None:
    """Make calls; who is a victim (``RANK:STEP``) is killed at its step; the others shrink."""
    world = MPI.COMM_WORLD
    if how == "nodes":
        os.environ["BLINKMPI_NODES"] = "2+2"
    algo, executor = ("allreduce:mpi" if how == "mpi" else None), (how if how in ("c", "numpy") else None)
    comm = blinkmpi.Communicator(world, timeout=NEVER_S, algo=algo, executor=executor)
    dies = dict(tuple(map(int, victim.split(":"))) for victim in victims)
    comm, found = make_calls(comm, dies.get(world.rank))
    say(**found)
    comm.Free()


# ---------------------------------------------------------------- killed during shrink


@pytest.mark.parametrize("at", ["comes", "shrinks", "opens", pytest.param("agrees", marks=pytest.mark.long)])
def test_a_rank_that_is_killed_while_the_others_shrink(at: str) -> None:
    """The others shrink again, in the same call."""
    outcome = job("lossy_amid", at)
    went_on(outcome, {0: [4, 2], 3: [4, 2]})


def case_lossy_amid(at: str) -> None:
    """Rank 2 is killed in a call, rank 1 as it shrinks."""
    if MPI.COMM_WORLD.rank == 1:
        name = {"comes": "meet", "shrinks": "_part", "opens": "Dispatcher", "agrees": "_agreed"}[at]
        place: Any = by_mpi if hasattr(by_mpi, name) else by_mpi.MpiShrinking

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(place, name, die)
    case_lossy("c", "2:10")


# ---------------------------------------------------------------- stopped


@pytest.mark.parametrize("ulfm", [True, False])
def test_a_stopped_rank_is_counted_out_and_refused_when_it_wakes(ulfm: bool, tmp_path: Path) -> None:
    outcome = job("stopped", str(tmp_path), options=fault_tolerance() if ulfm else ())
    others = (0, 1, 3)
    assert {r: said(outcome, "sizes").get(r) for r in others} == dict.fromkeys(others, 3), outcome.output
    assert said(outcome, "error")[2] == "CannotShrink", outcome.output
    assert "ranks 0-1, 3 went on without rank 2" in said(outcome, "text")[2]
    assert outcome.rc == 0, outcome.output


def for_ever(call: Callable[[], object]) -> None:
    """Make a call again and again."""
    while True:
        call()


def case_stopped(box: str) -> None:
    world = MPI.COMM_WORLD
    here, refused = [Path(box) / f"shrunk-{r}" for r in (0, 1, 3)], Path(box) / "refused"
    comm = blinkmpi.Communicator(world, timeout=SHORT_S)
    vector = np.ones(COUNT)
    comm.Allreduce(MPI.IN_PLACE, vector)
    if world.rank == 2:
        stop_until(here)
    with pytest.raises((CollectiveTimeout, PeerLost)):
        for_ever(partial(comm.Allreduce, MPI.IN_PLACE, vector))
    if world.rank == 2:
        attempt(comm.shrink)
        refused.touch()
        return
    comm = comm.shrink()
    vector[:] = 1
    comm.Allreduce(MPI.IN_PLACE, vector)
    assert (vector == comm.size).all()
    say(sizes=comm.size)
    comm.Free()
    here[(0, 1, 3).index(world.rank)].touch()
    wait_until(refused.exists, "rank 2 is awake")  # a rank that ends while it is stopped ends the job


def test_a_rank_that_runs_and_does_not_come_is_named() -> None:
    """And when it comes, they go on together."""
    outcome = job("late", n=3)
    assert said(outcome, "error") == dict.fromkeys((0, 1), "CollectiveTimeout"), outcome.output
    assert all("rank 2 (process" in text and "exclude=" in text for text in said(outcome, "text").values())
    assert said(outcome, "total") == dict.fromkeys(range(3), 3)
    assert outcome.rc == 0, outcome.output


def case_late() -> None:
    world = MPI.COMM_WORLD
    comm = blinkmpi.Communicator(world, timeout=NEVER_S)
    comm.Barrier()
    if world.rank < 2:
        attempt(partial(comm.shrink, timeout=SHORT_S))
    world.Barrier()
    comm = comm.shrink()
    say(total=comm.allreduce(1))
    comm.Free()


# ---------------------------------------------------------------- on purpose


@mpi(ranks=(3,), long=(4,))
def test_ranks_that_go_are_left_out_and_the_old_communicator_lives_on(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        if comm.rank != 1:
            rest = ours.shrink(exclude=[1])
            x = np.full(1000, float(comm.rank))
            rest.Allreduce(MPI.IN_PLACE, x)
            assert (x == comm.size * (comm.size - 1) / 2 - 1).all()
            assert rest.machine.n == comm.size - 1
            rest.Free()
        y = np.ones(1000)
        ours.Allreduce(MPI.IN_PLACE, y)
        assert (y == comm.size).all()


@mpi(ranks=(2,))
def test_what_cannot_be_excluded_is_refused(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        for wrong, text in (([comm.rank], "excludes itself"), ([7], "expected a rank"), ("1", "expected ranks")):
            with pytest.raises(blinkmpi.ArgumentError, match=text):
                ours.shrink(exclude=wrong)  # type: ignore[arg-type]
        with pytest.raises(blinkmpi.ArgumentError, match="timeout"):
            ours.shrink(timeout=-1)
        ours.Barrier()


def test_without_fault_tolerance_nobody_goes_on_after_a_death() -> None:
    """Where the launcher spares the others, MPI's Shrink would wait for ever."""
    fault_tolerance()
    outcome = job("spared", n=3, options=("--enable-recovery", "--continuous"))
    assert {r: said(outcome, "error").get(r) for r in (0, 1)} == dict.fromkeys((0, 1), "CannotShrink"), outcome.output
    assert all("mpirun --with-ft ulfm" in said(outcome, "text")[r] for r in (0, 1))


def case_spared() -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S)
    comm.Barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost, match=r"start the job again\b(?!, or)") as caught:
        comm.Barrier()
    assert caught.value.ranks == (2,)
    attempt(comm.shrink)


def test_many_shrinks_leave_nothing_behind() -> None:
    outcome = job("many", n=3)
    assert outcome.rc == 0, outcome.output
    assert said(outcome, "grown") == {r: [0, 0, 0] for r in range(3)}, outcome.output


def case_many() -> None:
    """Shrink again and again, though nobody is lost, and now and then on purpose."""
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S)
    gc.disable()

    def held() -> list[int]:
        files = len(os.listdir("/proc/self/fd"))  # none waits for Python's collector, as mappings do
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = len({line.split()[4] for line in maps if "/dev/shm" in line or "memfd" in line})
        return [files, threading.active_count(), shared]

    before: list[int] = []
    for i in range(50):
        if i == 10:  # MPI and Python have what they keep
            before = held()
        vector = np.ones(COUNT)
        comm.Allreduce(MPI.IN_PLACE, vector)
        assert (vector == comm.size).all()
        if comm.rank and i % 10 == 0:
            with comm.shrink(exclude=[0]) as rest:
                assert rest.allreduce(1) == comm.size - 1
        comm = comm.shrink()
    after = held()
    say(grown=[max(0, a - b) for a, b in zip(after, before, strict=True)])
    comm.Free()


if __name__ == "__main__":
    run_case(globals())
