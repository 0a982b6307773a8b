"""Jobs that gain ranks by ``grow``: MPI starts them, they ``join``, and calls are right on all; or nobody hangs.

This file is also the program of a rank, of those that come later, too: ``python tests/mpi/test_grow.py CASE ...``.
"""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import PeerLost
from blinkmpi.runtime.growing import by_mpi
from tests.harness import NEVER_S, Outcome, mpi, run_command
from tests.mpi.faults import attempt, fault_tolerance, finish, run_case, said, say, start_case

pytestmark = pytest.mark.usefixtures("nothing_left_in_shared_memory")
start = partial(start_case, __file__)
SHORT_S = 3.0  # a deadline that passes
COUNT = 20_000
CYCLES, WARM = 8, 3  # times that a job grows and shrinks, and after which MPI and Python have what they keep


def job(case: str, *arguments: str, n: int, options: tuple[str, ...] = ()) -> Outcome:
    with start(case, *arguments, n=n, options=options) as running:
        return finish(running)


def right(comm: Any) -> bool:
    """Whether calls of ours and of MPI's own have right results on all ranks."""
    vector = np.full(COUNT, float(comm.rank))
    comm.Allreduce(MPI.IN_PLACE, vector)
    numbers = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([comm.rank]), numbers)
    ours = bool((vector == comm.size * (comm.size - 1) / 2).all()) and numbers.tolist() == list(range(comm.size))
    return ours and comm.allgather(comm.rank) == list(range(comm.size))


def for_ever(call: Callable[[], object]) -> None:
    """Make a call again and again."""
    while True:
        call()


# ---------------------------------------------------------------- more ranks


@pytest.mark.parametrize("n", [1, 2, 3])
def test_old_ranks_keep_their_numbers_and_new_ones_come_behind_them(n: int) -> None:
    outcome = job("more", n=n)
    assert outcome.rc == 0, outcome.output
    assert said(outcome, "right") == dict.fromkeys(range(n + 2), True), outcome.output
    assert said(outcome, "was") == {**{r: r for r in range(n)}, **dict.fromkeys(range(n, n + 2))}
    assert said(outcome, "machine") == dict.fromkeys(range(n + 2), n + 2)
    assert said(outcome, "arguments") == {r: ["numpy", True, NEVER_S] for r in range(n + 2)}
    assert said(outcome, "knows") == dict.fromkeys(range(n + 2), n + 1), "each process is known to the others"


def case_more() -> None:
    """Grow by two, which take over the arguments; a part of the ranks is a communicator, too."""
    comm, was = blinkmpi.Communicator.join(timeout=NEVER_S), None
    if comm is None:
        old = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S, executor="numpy", deterministic=True)
        was = old.rank
        comm = old.grow(2)
        with pytest.raises(blinkmpi.ArgumentError, match="freed"):
            old.Barrier()
    assert blinkmpi.Communicator.join() is None, "a process joins once"
    options = comm.context.options
    arguments = [options.executor, options.deterministic, comm.context.timeout_s]
    with comm.Split(comm.rank % 2, comm.rank) as part:
        found = right(comm) and right(part)
    knows = len(comm.context.together.processes())
    say(rank=comm.rank, right=found, was=was, machine=comm.machine.n, arguments=arguments, knows=knows)
    comm.Free()


@pytest.mark.parametrize("victim", [1, 3])
def test_a_job_that_grew_loses_a_rank_and_grows_again(victim: int) -> None:
    """The rank that is killed was there from the beginning, or has come later."""
    outcome = job("again", str(victim), n=3, options=fault_tolerance())
    ended = 128 + signal.SIGKILL if victim == 3 else 0  # mpirun's, where none is left of those that came together
    assert outcome.rc == ended, outcome.output
    assert said(outcome, "lost") == {r: [victim] for r in range(3)}, outcome.output
    assert said(outcome, "sizes") == {**{r: [4, 3, 4] for r in range(3)}, 3: [4]}, outcome.output
    assert said(outcome, "right") == dict.fromkeys(range(4), True), outcome.output


def case_again(victim: str) -> None:
    """3 -> 4 -> 3 -> 4; ranks say the number that they have at the end."""
    comm = blinkmpi.Communicator.join(timeout=NEVER_S)
    if comm is None:
        comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S).grow(1)
    found, sizes = right(comm), [comm.size]
    if "BLINK_TEST_SECOND" not in os.environ:
        if comm.rank == int(victim):
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            for_ever(partial(comm.Allreduce, MPI.IN_PLACE, np.ones(COUNT)))
        comm = comm.shrink()
        sizes.append(comm.size)
        comm = comm.grow(1, ["env", "BLINK_TEST_SECOND=1", sys.executable, *sys.argv])
        sizes.append(comm.size)
        found = right(comm) and found
        say(rank=comm.rank, lost=list(caught.value.ranks))
    say(rank=comm.rank, sizes=sizes, right=found)
    comm.Free()


def test_many_grows_and_shrinks_leave_nothing_behind() -> None:
    outcome = job("many", n=2)
    assert outcome.rc == 0, outcome.output
    assert said(outcome, "grown") == {r: [0, 0, 0] for r in range(2)}, outcome.output


def case_many() -> None:
    """Grow by one, which leaves in order and ends while the others go on."""
    comm = blinkmpi.Communicator.join(timeout=NEVER_S)
    if comm is not None:
        assert right(comm)
        comm.Free()
        return

    def held() -> list[int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = len({line.split()[4] for line in maps if "/dev/shm" in line or "memfd" in line})
        return [len(os.listdir("/proc/self/fd")), threading.active_count(), shared]

    comm, before = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S), [0, 0, 0]
    for cycle in range(CYCLES):
        comm = comm.grow(1)
        assert right(comm)
        assert comm.size == 3
        rest = comm.shrink(exclude=[2])
        comm.Free()
        comm = rest
        assert right(comm)
        if cycle == WARM:
            before = held()
    say(grown=[max(0, a - b) for a, b in zip(held(), before, strict=True)])
    comm.Free()


# ---------------------------------------------------------------- nobody comes


@pytest.mark.parametrize("what", ["true", "deaf"])
def test_what_does_not_join_is_named_at_the_deadline(what: str) -> None:
    """A program that never calls MPI, for which MPI's Spawn waits for ever, or one that does and does not join."""
    outcome = job("nobody", what, n=2)
    assert said(outcome, "error") == dict.fromkeys(range(2), "CollectiveTimeout"), outcome.output
    step = {"true": "MPI to start them", "deaf": "blinkmpi.Communicator.join()"}[what]
    assert all(step in text for text in said(outcome, "text").values()), outcome.output
    assert said(outcome, "dead") == dict.fromkeys(range(2), "PeerLost"), outcome.output
    assert outcome.rc != 0, "the job is ended: MPI_Finalize would wait"


def case_nobody(what: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S)
    command = ["true"] if what == "true" else [sys.executable, __file__, "deaf"]
    attempt(partial(comm.grow, 1, command, timeout=SHORT_S))
    try:
        comm.Barrier()
    except PeerLost:
        say(dead="PeerLost")


def case_deaf() -> None:
    """MPI's Abort ends the ranks that have started this, and not this process, for which mpirun waits."""
    time.sleep(2 * SHORT_S)


def test_where_mpi_cannot_start_the_program_all_are_told_and_the_communicator_lives(tmp_path: Path) -> None:
    outcome = job("unstarted", str(tmp_path / "program"), n=2)
    assert said(outcome, "error") == dict.fromkeys(range(2), "CannotGrow"), outcome.output
    assert said(outcome, "right") == dict.fromkeys(range(2), True), outcome.output


def case_unstarted(program: str) -> None:
    """The program is there as the arguments are checked, and gone as MPI starts it."""
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S)

    def checked(command: object) -> list[str]:
        return [program]

    by_mpi.command_of = checked  # type: ignore[assignment]
    attempt(partial(comm.grow, 1))
    say(right=right(comm))
    comm.Free()


def test_the_world_of_blinkmpi_run_keeps_its_size() -> None:
    text = "from mpi4py import MPI; MPI.COMM_WORLD.grow(1)"
    outcome = run_command(2, [sys.executable, "-m", "blinkmpi", "run", "-c", text], timeout=60)
    assert "CannotGrow: grow(1): MPI.COMM_WORLD keeps its size" in outcome.output
    assert outcome.rc != 0


def test_a_rank_that_does_not_call_it_is_named() -> None:
    outcome = job("alone", n=2)
    assert said(outcome, "error") == {0: "CollectiveTimeout"}, outcome.output
    assert "rank 1" in said(outcome, "text")[0]


def case_alone() -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=NEVER_S)
    if comm.rank == 0:
        attempt(partial(comm.grow, 1, timeout=SHORT_S))
    MPI.COMM_WORLD.Barrier()


# ---------------------------------------------------------------- refused on every rank


@mpi(ranks=(1, 2))
def test_arguments_that_cannot_be_are_refused_and_the_communicator_lives(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=NEVER_S) as ours:
        for arguments, text in (
            ((0,), "at least 1"), (("two",), "at least 1"), ((1, "python"), "expected words"),
            ((1, []), "expected words"), ((1, ["no-such-program"]), "there is no program"),
        ):  # fmt: skip
            with pytest.raises(blinkmpi.ArgumentError, match=text):
                ours.grow(*arguments)  # type: ignore[arg-type]
        with pytest.raises(blinkmpi.ArgumentError, match="timeout"):
            ours.grow(1, timeout=-1)
        with pytest.raises(blinkmpi.ArgumentError, match="timeout"):
            blinkmpi.Communicator.join(timeout=-1)
        assert blinkmpi.Communicator.join() is None, "nobody has started this process later"
        assert right(ours)


@mpi(ranks=(2,))
def test_a_rank_with_bad_arguments_is_heard_by_the_others(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=NEVER_S) as ours:
        wanted = blinkmpi.ArgumentError if comm.rank else blinkmpi.RemoteError
        with pytest.raises(wanted, match="there is no program"):
            ours.grow(1, ["no-such-program" if comm.rank else "true"])
        with pytest.raises(blinkmpi.MismatchError, match=r"grow\(2\)"):
            ours.grow(1 + comm.rank, ["true"])
        assert right(ours)


@mpi(ranks=(2,))
def test_a_machine_of_so_many_ranks_does_not_grow(comm: MPI.Intracomm) -> None:
    with (
        blinkmpi.Communicator(comm, timeout=NEVER_S, topology="cpu:2") as ours,
        pytest.raises(blinkmpi.CannotGrow, match="of 2 ranks"),
    ):
        ours.grow(1)


@mpi(ranks=(2,), env={"TORCHELASTIC_RUN_ID": "none"})
def test_processes_of_torchrun_do_not_grow(comm: MPI.Intracomm) -> None:
    with (
        blinkmpi.Communicator(comm, timeout=NEVER_S) as ours,
        pytest.raises(blinkmpi.CannotGrow, match="torchrun started these processes"),
    ):
        ours.grow(1)


if __name__ == "__main__":
    run_case(globals())
