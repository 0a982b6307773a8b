"""Processes that share a store and gain others: these ``join`` and all go on, or nobody hangs."""

import gc
import os
import signal
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
from blinkmpi.errors import ArgumentError, CollectiveTimeout, PeerLost, RemoteError
from blinkmpi.runtime.growing.by_store import Door
from tests.harness import NEVER_S
from tests.store.folder_store import FolderStore
from tests.store.processes import Processes, attempt, report, run, said, say, sharing_a_store

COUNT = 20_000
SHORT_S = 1.5  # a deadline that passes
CYCLES, WARM = 12, 4  # times that it grows and shrinks, and after which Python has what it keeps
Made = blinkmpi.StoreCommunicator


def right(comm: Any) -> bool:
    """Whether calls have right results on all processes."""
    vector, numbers = np.full(COUNT, float(comm.rank)), np.empty(comm.size, np.int64)
    comm.Allreduce(MPI.IN_PLACE, vector)
    comm.Allgather(np.array([comm.rank]), numbers)
    return bool((vector == comm.size * (comm.size - 1) / 2).all()) and numbers.tolist() == list(range(comm.size))


def for_ever(call: Callable[[], object]) -> None:
    """Make a call again and again."""
    while True:
        call()


@pytest.mark.parametrize("old", [1, 2, 3])
def test_new_processes_come_behind_those_that_are_there_and_leave_no_key(old: int) -> None:
    with Processes(old + 2, more, arguments={"old": old}) as processes:
        ended = processes.wait()
        left = [name for name in processes.store.names() if "made" not in name and not name.endswith("drawn")]
    assert [e.rc for e in ended] == [0] * (old + 2), report(ended)
    assert [said(e)["rank"] for e in ended[:old]] == list(range(old)), report(ended)
    assert sorted(said(e)["rank"] for e in ended) == list(range(old + 2)), report(ended)
    assert all(said(e)["right"] for e in ended), report(ended)
    assert all(said(e)["arguments"] == ["numpy", True, NEVER_S, old + 2] for e in ended), report(ended)
    assert left == []


def more(store: Any, rank: int, size: int, old: int) -> None:
    """The last two join the others, and take over their arguments."""
    if rank < old:
        comm = Made(store, rank, old, name="ours", timeout=NEVER_S, executor="numpy", deterministic=True).grow(2)
    else:
        comm = Made.join(store, name="ours", timeout=NEVER_S)
    options = comm.context.options
    arguments = [options.executor, options.deterministic, comm.context.timeout_s, comm.machine.n]
    say(rank=comm.rank, right=right(comm), arguments=arguments)
    comm.Free()


def test_a_job_that_lost_a_process_grows_to_its_old_size() -> None:
    """4 -> 3 -> 4; the process that comes has waited from the beginning."""
    ended = run(5, again)
    assert [said(ended[r])["rank"] for r in (0, 2, 3, 4)] == [0, 1, 2, 3], report(ended)
    assert [said(ended[r])["sizes"] for r in (0, 2, 3, 4)] == [[4, 3, 4]] * 3 + [[4]], report(ended)
    assert all(said(ended[r])["right"] for r in (0, 2, 3, 4)), report(ended)


def again(store: Any, rank: int, size: int) -> None:
    if rank == 4:
        comm, sizes = Made.join(store, timeout=NEVER_S), []
    else:
        comm = Made(store, rank, 4, timeout=NEVER_S)
        assert right(comm)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            for_ever(partial(comm.Allreduce, MPI.IN_PLACE, np.ones(COUNT)))
        sizes, comm = [comm.size], comm.shrink()
        sizes.append(comm.size)
        comm = comm.grow(1)
    say(rank=comm.rank, sizes=[*sizes, comm.size], right=right(comm))
    comm.Free()


def test_where_too_few_ask_the_deadline_says_so_and_the_communicator_lives() -> None:
    ended = run(2, too_few)
    assert [said(e)["error"] for e in ended] == ["CollectiveTimeout", "RemoteError"], report(ended)
    assert all("1 of 2 processes of this machine ask to join" in said(e)["text"] for e in ended), report(ended)
    assert all(said(e)["alive"] for e in ended), report(ended)


def too_few(store: Any, rank: int, size: int) -> None:
    """A process has asked, another one has asked and ended, and one has been answered."""
    comm = Made(store, rank, size, timeout=NEVER_S)
    if rank == 0:
        door = Door(store, "")
        door.ask()
        if (child := os.fork()) == 0:
            door.ask()
            os._exit(0)
        os.waitpid(child, 0)
    comm.Barrier()
    attempt(partial(comm.grow, 2, timeout=SHORT_S))
    say(alive=right(comm))
    comm.Free()


def test_a_process_that_nobody_lets_in_is_told_and_leaves_no_key(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(CollectiveTimeout, match="number 1 of those that ask; call grow"):
        Made.join(store, timeout=SHORT_S)
    assert [name for name in store.names() if not name.endswith("drawn")] == []


def test_a_store_that_has_gone_is_an_error_of_who_asks(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="the key-value store failed"):
        Made.join(FolderStore(tmp_path / "gone"), timeout=SHORT_S)


def test_a_store_that_cannot_delete_has_nobody_who_asked_before(tmp_path: Path) -> None:
    class Keeping(FolderStore):
        delete_key = None  # type: ignore[assignment]

    door = Door(Keeping(tmp_path), "")
    number = door.ask()
    assert [one.number for one in door.asking()] == [number]
    door.leave(number)
    assert door.asking() == []


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no method set"):
        Made.join(object())  # type: ignore[arg-type]


@sharing_a_store((2,))
def test_arguments_that_cannot_be_are_refused_and_the_communicator_lives(store: Any, rank: int, size: int) -> None:
    with Made(store, rank, size, timeout=NEVER_S) as comm:
        for wrong in (0, "one"):
            with pytest.raises(ArgumentError, match="at least 1"):
                comm.grow(wrong)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="timeout"):
            comm.grow(1, timeout=0)
        with pytest.raises(ArgumentError if rank else RemoteError, match="at least 1"):
            comm.grow(1 - rank)
        assert right(comm)
    with Made(store, rank, size, timeout=NEVER_S, topology="cpu:2") as comm:
        with pytest.raises(blinkmpi.CannotGrow, match="of 2 ranks"):
            comm.grow(1)
        assert right(comm)


def test_many_grows_and_shrinks_leave_nothing_behind() -> None:
    ended = run(3, many, timeout=100)
    assert [said(e).get("grown") for e in ended] == [[0, 0, 0]] * 3, report(ended)


def many(store: Any, rank: int, size: int) -> None:
    """The last one joins and is left out, again and again."""

    def held() -> list[int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = len({line.split()[4] for line in maps if "/dev/shm" in line or "memfd" in line})
        until = time.monotonic() + 5  # that threads of the store take to end
        while threading.active_count() > 1 and time.monotonic() < until:
            time.sleep(0.01)
        return [len(os.listdir("/proc/self/fd")), threading.active_count(), shared]

    comm = Made(store, rank, 2, timeout=NEVER_S) if rank < 2 else None
    before = [0, 0, 0]
    for cycle in range(CYCLES):
        comm = Made.join(store, timeout=NEVER_S) if comm is None else comm.grow(1)
        assert right(comm)
        rest = comm.shrink(exclude=[2]) if rank < 2 else None
        comm.Free()
        comm = rest
        if cycle == WARM:
            before = held()
    say(grown=[max(0, a - b) for a, b in zip(held(), before, strict=True)])
    if comm is not None:
        comm.Free()
