"""How processes end that share a StoreCommunicator: in order, without Free, killed, late, or not there at all."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import PeerLost
from blinkmpi.util.singleton import MAPS, mapped_segments
from tests.harness import NEVER_S, PATIENCE_S, wait_until
from tests.store.folder_store import FolderStore
from tests.store.processes import Ended, Processes, attempt, report, run, said, say, sharing_a_store

N, VICTIM = 3, 1
OTHERS = [r for r in range(N) if r != VICTIM]


def failed(ended: list[Ended], ranks: list[int], kind: str, deadline: float, *texts: str) -> None:
    """These processes raised an error of this kind soon after the deadline, that has the texts, and ended themselves.

    A deadline of 0: as soon as it could be known.
    """
    longest = max(said(ended[rank])["seconds"] for rank in ranks)
    assert 0.9 * deadline <= longest < deadline + PATIENCE_S, report(ended)
    for rank in ranks:
        facts = said(ended[rank])
        assert facts.get("error") == kind, report(ended)
        assert all(text in facts["text"] for text in texts), report(ended)
        assert (ended[rank].rc, ended[rank].timed_out) == (0, False), report(ended)
        assert facts["returned"], report(ended)


def meet(store: Any, rank: int, ranks: list[int]) -> None:
    """Wait for some processes, beside the store: they start when they get a core."""
    here = [store.folder.parent / f"here-{r}" for r in ranks]
    here[ranks.index(rank)].touch()
    wait_until(lambda: all(path.exists() for path in here), "the other processes start")


def make(store: Any, rank: int, size: int, timeout: float = NEVER_S) -> blinkmpi.StoreCommunicator:
    comm = blinkmpi.StoreCommunicator(store, rank, size, timeout=timeout)
    comm.Barrier()
    return comm


# ---------------------------------------------------------------- in order


def test_after_free_every_process_ends_at_once() -> None:
    ended = run(N, frees)
    assert [e.rc for e in ended] == [0] * N, report(ended)
    assert max(said(e)["freed"] for e in ended) < PATIENCE_S, report(ended)
    assert not any("BLINKMPI" in e.output for e in ended), report(ended)


def frees(store: Any, rank: int, size: int) -> None:
    comm = make(store, rank, size)
    since = time.monotonic()
    comm.Free()
    say(freed=time.monotonic() - since)


# ---------------------------------------------------------------- without Free


@pytest.mark.parametrize("how", ["returns", "raises", "exits"])
def test_a_process_that_ends_without_free(how: str) -> None:
    with Processes(N, ends_without_free, arguments={"how": how}) as processes:
        ended = processes.wait()
    failed(ended, OTHERS, "PeerLost", 0, f"rank {VICTIM} (process {processes.pids[VICTIM]}) has left")
    assert ended[VICTIM].rc == {"returns": 0, "raises": 1, "exits": 3}[how], report(ended)
    assert not ended[VICTIM].timed_out


def ends_without_free(store: Any, rank: int, size: int, how: str) -> None:
    comm = make(store, rank, size)
    if rank != VICTIM:
        attempt(lambda: comm.Allreduce(np.ones(10), np.empty(10)))
        dead(comm)
    elif how == "raises":
        raise ValueError("a process fails")
    elif how == "exits":
        sys.exit(3)


def dead(comm: blinkmpi.StoreCommunicator) -> None:
    """It says so at once, and can be freed."""
    with pytest.raises(PeerLost, match="died earlier"):
        comm.Barrier()
    with pytest.raises(PeerLost, match="died earlier"):
        comm.Ibarrier().Wait()
    comm.Free()


# ---------------------------------------------------------------- killed


@pytest.mark.parametrize("executor", ["c", "numpy"])
def test_a_process_that_is_killed_in_a_call(executor: str) -> None:
    with Processes(N, calls_until_death, arguments={"executor": executor}) as processes:
        processes.wait_for("calling", range(N))
        processes.signal(VICTIM, signal.SIGKILL)
        ended = processes.wait()
        pid = processes.pids[VICTIM]
    failed(ended, OTHERS, "PeerLost", 0, f"rank {VICTIM}", str(pid))
    assert ended[VICTIM].rc == -signal.SIGKILL


def calls_until_death(store: Any, rank: int, size: int, executor: str) -> None:
    comm = blinkmpi.StoreCommunicator(store, rank, size, timeout=NEVER_S, executor=executor)
    x, y = np.ones(1 << 18), np.empty(1 << 18)
    comm.Allreduce(x, y)
    say(calling=True)
    last = [0.0]

    def calls() -> None:
        while True:
            last[0] = time.monotonic()
            comm.Allreduce(x, y)

    attempt(calls)
    say(seconds=time.monotonic() - last[0])
    dead(comm)


def test_a_process_that_is_killed_while_others_plan() -> None:
    """They wait for it in the store."""
    with Processes(N, plans_while_one_dies) as processes:
        ended = processes.wait()
        pid = processes.pids[VICTIM]
    failed(ended, OTHERS, "PeerLost", 0, f"rank {VICTIM} (host ", f"process {pid}) has ended")


def plans_while_one_dies(store: Any, rank: int, size: int) -> None:
    comm = make(store, rank, size)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    attempt(comm.context.together.Barrier)
    dead(comm)


# ---------------------------------------------------------------- not there, or late


@pytest.mark.parametrize("later_s", [0.0, 0.1, 0.2])
def test_a_process_that_never_comes(later_s: float) -> None:
    """Nor is one that gave up a moment before, and has ended since, taken for the missing one."""
    ended = run(N, never_comes, arguments={"later_s": later_s})
    failed(ended, OTHERS, "CollectiveTimeout", 2, f"rank {VICTIM} has not come to the store", "BLINKMPI_TIMEOUT")


def never_comes(store: Any, rank: int, size: int, later_s: float) -> None:
    if rank != VICTIM:
        meet(store, rank, OTHERS)
        time.sleep(later_s * rank)
        attempt(lambda: blinkmpi.StoreCommunicator(store, rank, size, timeout=2))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_stopped(victim: int) -> None:
    with Processes(N, stops, arguments={"victim": victim}) as processes:
        others = [r for r in range(N) if r != victim]
        for rank in others:
            processes.wait_for('"returned"', [rank])
        processes.signal(victim, signal.SIGCONT)
        ended = processes.wait()
        pid = processes.pids[victim]
    failed(ended, others, "CollectiveTimeout", 2, f"rank {victim} (host ", f"process {pid}) is stopped")
    assert said(ended[victim])["error"] in ("CollectiveTimeout", "PeerLost"), report(ended)


def stops(store: Any, rank: int, size: int, victim: int) -> None:
    comm = make(store, rank, size, timeout=2)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    attempt(comm.context.together.Barrier)


@pytest.mark.parametrize("late", [0, 2])
def test_a_process_that_comes_late_is_told_that_the_others_have_given_up(late: int) -> None:
    with Processes(N, one_comes_late, arguments={"late": late}) as processes:
        ended = processes.wait()
    others = [r for r in range(N) if r != late]
    failed(ended, others, "CollectiveTimeout", 1.5, f"rank {late} has not come to the store")
    failed(ended, [late], "CollectiveTimeout", 0, f"rank {late} has not come to the store")


def one_comes_late(store: Any, rank: int, size: int, late: int) -> None:
    if rank == late:
        while not any("given-up" in key for key in store.names()):
            time.sleep(0.01)
    else:
        meet(store, rank, [r for r in range(size) if r != late])
    attempt(lambda: blinkmpi.StoreCommunicator(store, rank, size, timeout=NEVER_S if rank == late else 1.5))


def test_a_long_wait_is_warned_of(tmp_path: Path) -> None:
    arguments = {"goes_on": tmp_path / "goes on"}
    with Processes(N, waits_long, env={"BLINKMPI_WARN_AFTER": "0.5"}, arguments=arguments) as processes:
        processes.wait_for("it goes on waiting", [0])
        arguments["goes_on"].touch()
        ended = processes.wait()
    assert [e.rc for e in ended] == [0] * N, report(ended)
    assert "StoreCommunicator(): rank 0 has waited" in ended[0].output, report(ended)
    assert f"rank {VICTIM} has not come to the store; it goes on waiting" in ended[0].output
    assert "WARN" not in ended[2].output, report(ended)


def waits_long(store: Any, rank: int, size: int, goes_on: Path) -> None:
    if rank == VICTIM:
        wait_until(goes_on.exists, "the others wait")
    make(store, rank, size).Free()


def test_a_call_has_the_deadline() -> None:
    ended = run(N, one_does_not_call)
    failed(ended, OTHERS, "CollectiveTimeout", 1.5, f"rank {VICTIM}", "BLINKMPI_TIMEOUT")


def one_does_not_call(store: Any, rank: int, size: int) -> None:
    comm = make(store, rank, size)
    if rank == VICTIM:
        while store.names().count("done") + store.names().count("done2") < 2:
            time.sleep(0.01)
        return
    attempt(lambda: comm.Allreduce(np.ones(10), np.empty(10), timeout=1.5))
    store.set("done" if rank else "done2", b"")


# ---------------------------------------------------------------- the store


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_goes_away_is_an_error_when_it_is_next_needed(rank: int) -> None:
    ended = run(2, loses_its_store, arguments={"removes": rank})
    failed(ended, [0, 1], "PeerLost", 0, "the key-value store failed in", "start the job again")


def loses_its_store(store: Any, rank: int, size: int, removes: int) -> None:
    comm = make(store, rank, size)
    x = np.ones(10)
    comm.Allreduce(MPI.IN_PLACE, x)
    if rank == removes:
        shutil.rmtree(store.folder)
    comm.Barrier()
    comm.Allreduce(MPI.IN_PLACE, x)  # needs no store
    assert (x == 4).all()
    attempt(lambda: comm.Scan(np.ones(10), x))  # the first of its kind: rank 0 plans
    dead(comm)


def test_a_store_that_does_not_answer_is_an_error_at_the_deadline() -> None:
    ended = run(2, has_a_silent_store)
    failed(ended, [0, 1], "CollectiveTimeout", 2, "the key-value store has not answered for", "BLINKMPI_TIMEOUT")


def has_a_silent_store(store: Any, rank: int, size: int) -> None:
    comm = make(store, rank, size, timeout=2)
    comm.context.rendezvous.met = False  # or a rank may work for longer
    (store.folder / f".{FolderStore.SILENT}").touch()
    attempt(comm.context.together.Barrier)
    dead(comm)


@sharing_a_store((2,))
def test_open_mpi_leaves_no_file_where_a_process_is_killed(store: Any, rank: int, size: int) -> None:
    """There is none any more, however the process ends."""
    with blinkmpi.StoreCommunicator(store, rank, size, timeout=NEVER_S):
        assert mapped_segments(MAPS.read_text().splitlines()) == []
