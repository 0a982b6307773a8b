"""Processes that share a store and lose some of them: those that are left go on by ``shrink``."""

import gc
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import CollectiveTimeout, PeerLost
from blinkmpi.runtime.shrinking import by_store
from tests.harness import NEVER_S, wait_until
from tests.lossy import COUNT, make_calls
from tests.store.processes import Ended, Processes, attempt, report, run, said, say, sharing_a_store

SHORT_S = 1.5  # a deadline that passes


def went_on(ended: list[Ended], sizes: dict[int, list[int]]) -> None:
    """These processes made all calls, in communicators of these sizes, and ended in order."""
    for rank, wanted in sizes.items():
        facts = said(ended[rank])
        assert facts.get("sizes") == wanted, report(ended)
        assert facts["wrong"] == 0, report(ended)
        assert ended[rank].rc == 0, report(ended)


@pytest.mark.parametrize("executor", ["c", "numpy"])
def test_the_others_of_a_killed_process_go_on(executor: str) -> None:
    ended = run(4, lossy, arguments={"victims": {2: 10}, "executor": executor})
    went_on(ended, {0: [4, 3], 1: [4, 3], 3: [4, 3]})
    assert [said(ended[r])["lost"] for r in (0, 1, 3)] == [[[2]]] * 3


def test_processes_that_are_lost_one_after_another() -> None:
    """Process 0, which plans and collects, is the first. The keys of the dead communicators do not stay."""
    with Processes(4, lossy, arguments={"victims": {0: 10, 3: 20}}) as processes:
        ended = processes.wait()
        left = [name for name in processes.store.names() if "made" not in name]
    went_on(ended, {1: [4, 3, 2], 2: [4, 3, 2]})
    assert left == [], report(ended)


def test_processes_that_are_lost_at_once_and_one_that_is_left_alone() -> None:
    ended = run(4, lossy, arguments={"victims": {0: 10, 1: 10, 3: 10}})
    went_on(ended, {2: [4, 1]})


def lossy(store: Any, rank: int, size: int, victims: dict[int, int], executor: str = "auto") -> None:
    """Make calls; a victim is killed at its step; the others shrink."""
    comm = blinkmpi.StoreCommunicator(store, rank, size, timeout=NEVER_S, executor=executor)
    comm, found = make_calls(comm, victims.get(rank))
    say(**found)
    comm.Free()


@pytest.mark.parametrize("at", ["meet", "Dispatcher"])
def test_a_process_that_is_killed_while_the_others_shrink(at: str) -> None:
    ended = run(4, lossy_amid, arguments={"at": at})
    went_on(ended, {0: [4, 2], 3: [4, 2]})


def lossy_amid(store: Any, rank: int, size: int, at: str) -> None:
    """Process 2 is killed in a call, process 1 as it shrinks."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        setattr(by_store, at, die)
    lossy(store, rank, size, {2: 10})


def test_a_stopped_process_is_counted_out_and_refused_when_it_wakes() -> None:
    with Processes(3, one_stops) as processes:
        for rank in (0, 2):
            processes.wait_for('"returned"', [rank])
        processes.signal(1, signal.SIGCONT)
        ended = processes.wait()
    assert [said(ended[r])["size"] for r in (0, 2)] == [2, 2], report(ended)
    assert said(ended[1])["error"] == "CannotShrink", report(ended)
    assert "went on without rank 1" in said(ended[1])["text"]


def one_stops(store: Any, rank: int, size: int) -> None:
    comm = blinkmpi.StoreCommunicator(store, rank, size, timeout=SHORT_S)
    comm.Barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises((CollectiveTimeout, PeerLost)):
        comm.Allreduce(np.ones(COUNT), np.empty(COUNT))
    if rank == 1:
        attempt(comm.shrink)
        return
    comm = comm.shrink()
    x = np.ones(COUNT)
    comm.Allreduce(MPI.IN_PLACE, x)
    assert (x == 2).all()
    say(size=comm.size)
    comm.Free()


def test_a_process_that_runs_and_does_not_come_is_named() -> None:
    ended = run(3, one_is_late)
    for rank in (0, 1):
        assert said(ended[rank])["error"] == "CollectiveTimeout", report(ended)
        assert "rank 2 (process" in said(ended[rank])["text"]
        assert "exclude=" in said(ended[rank])["text"]
    assert [said(e)["total"] for e in ended] == [3.0] * 3, report(ended)


def one_is_late(store: Any, rank: int, size: int) -> None:
    """When it comes, they go on together."""
    comm = blinkmpi.StoreCommunicator(store, rank, size, timeout=NEVER_S)
    comm.Barrier()
    late = [store.folder.parent / f"late-{r}" for r in (0, 1)]
    if rank < 2:
        attempt(partial(comm.shrink, timeout=SHORT_S))
        late[rank].touch()
    wait_until(lambda: all(file.exists() for file in late), "the others have given up")
    comm, x = comm.shrink(), np.ones(COUNT)
    comm.Allreduce(MPI.IN_PLACE, x)
    say(total=x[0])
    comm.Free()


@sharing_a_store((3,))
def test_processes_that_go_are_left_out_and_the_old_communicator_lives_on(store: Any, rank: int, size: int) -> None:
    with blinkmpi.StoreCommunicator(store, rank, size, timeout=NEVER_S) as comm:
        for total in (1.0, 2.0):
            if rank != 1:
                with comm.shrink(exclude=[1]) as rest:
                    x = np.full(COUNT, float(rank) * total)
                    rest.Allreduce(MPI.IN_PLACE, x)
                    assert (x == 2 * total).all()
                    assert rest.machine.n == 2
        y = np.ones(COUNT)
        comm.Allreduce(MPI.IN_PLACE, y)
        assert (y == size).all()


@sharing_a_store((2,), timeout=100)
def test_many_shrinks_leave_nothing_behind(store: Any, rank: int, size: int) -> None:
    def held() -> list[int]:
        files = len(os.listdir("/proc/self/fd"))  # none waits for Python's collector, as mappings do
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = len({line.split()[4] for line in maps if "/dev/shm" in line or "memfd" in line})
        until = time.monotonic() + 5  # that threads of the store take to end
        while threading.active_count() > threads and time.monotonic() < until:
            time.sleep(0.01)
        return [files, threading.active_count(), shared]

    comm, threads = blinkmpi.StoreCommunicator(store, rank, size, timeout=NEVER_S), threading.active_count()
    before = [0, 0, 0]
    gc.disable()
    for i in range(50):
        if i == 10:  # MPI and Python have what they keep
            before = held()
        vector = np.ones(COUNT)
        comm.Allreduce(MPI.IN_PLACE, vector)
        assert (vector == size).all()
        comm = comm.shrink()
    assert all(a <= b for a, b in zip(held(), before, strict=True)), (held(), before)
    comm.Free()
