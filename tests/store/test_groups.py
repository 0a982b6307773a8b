"""Several communicators over one store, groups of some processes, and other stores than ours."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from tests.harness import SharedMemoryWatch
from tests.store.folder_store import FolderStore
from tests.store.processes import Processes, report, sharing_a_store


def total(comm: blinkmpi.StoreCommunicator, count: int = 100) -> float:
    """The sum of the ranks plus 1, by an Allreduce."""
    x = np.full(count, comm.rank + 1.0)
    comm.Allreduce(MPI.IN_PLACE, x)
    assert (x == x[0]).all()
    return float(x[0])


@sharing_a_store((1, 2), long=(4,))
def test_two_communicators_at_once(store: Any, rank: int, size: int) -> None:
    want = size * (size + 1) / 2
    one, other = (blinkmpi.StoreCommunicator(store, rank, size) for _ in range(2))
    for _ in range(10):
        assert total(one) == total(other) == want
    one.Free()
    assert total(other) == want
    with blinkmpi.StoreCommunicator(store, rank, size) as third:
        assert total(third) == want
    other.Free()
    other.Free()
    with pytest.raises(blinkmpi.ArgumentError, match=r"freed; make one with blinkmpi\.StoreCommunicator"):
        other.Barrier()


@sharing_a_store((3,), long=(4,))
def test_a_group_of_processes_0_and_2(store: Any, rank: int, size: int) -> None:
    """It has ranks of its own; the others need not know of it."""
    whole = blinkmpi.StoreCommunicator(store, rank, size)
    if rank in (0, 2):
        with blinkmpi.StoreCommunicator(store, (0, 2).index(rank), 2) as part:
            assert total(part) == 3
            assert total(part, 1 << 18) == 3
    assert total(whole) == size * (size + 1) / 2
    whole.Free()


@sharing_a_store((4,))
def test_groups_of_one_size_have_names(store: Any, rank: int, size: int) -> None:
    row, column = divmod(rank, 2)
    with (
        blinkmpi.StoreCommunicator(store, column, 2, name=f"row {row}") as mine,
        blinkmpi.StoreCommunicator(store, row, 2, name=f"column {column}") as across,
    ):
        x = np.array([float(rank)])
        for _ in range(3):
            mine.Allreduce(MPI.IN_PLACE, x)
            across.Allreduce(MPI.IN_PLACE, x)
        assert x[0] == 6 * 4 * 4


# ---------------------------------------------------------------- what is left in the store and in shared memory


@sharing_a_store((3,))
def test_a_store_does_not_grow(store: Any, rank: int, size: int) -> None:
    comm = blinkmpi.StoreCommunicator(store, rank, size)
    for _ in range(50):
        comm.context.together.Barrier()
    assert len(store.names()) <= 4 * size + 3
    for root in range(size):
        comm.plan("gather", root)
    assert len(store.names()) <= 4 * size + 3
    comm.Free()


def test_nothing_is_left_but_how_many_were_made(tmp_path: Path) -> None:
    with (
        SharedMemoryWatch() as watch,
        Processes(3, makes_two_communicators, env=watch.environment) as processes,
    ):
        ended = processes.wait()
        assert [e.rc for e in ended] == [0, 0, 0], report(ended)
        assert processes.store.names() == [f"blinkmpi%2F3%2Fmade%2F{r}" for r in range(3)]
        assert not [name for name in watch.left() if "blinkmpi" in name]


def makes_two_communicators(store: Any, rank: int, size: int) -> None:
    for _ in range(2):
        with blinkmpi.StoreCommunicator(store, rank, size) as comm:
            assert total(comm) == 6


class Keeps(FolderStore):
    """A store that deletes nothing."""

    def delete_key(self, key: str) -> bool:
        raise NotImplementedError


@sharing_a_store((2,))
def test_a_store_need_not_delete(store: Any, rank: int, size: int) -> None:
    for _ in range(2):
        with blinkmpi.StoreCommunicator(Keeps(store.folder), rank, size) as comm:
            assert total(comm) == 3


# ---------------------------------------------------------------- torch's


@pytest.mark.parametrize("make", ["file", "tcp", "prefix"])
def test_torchs_stores(make: str, tmp_path: Path) -> None:
    """One of TCP is served by rank 0, which must not end before the others are through."""
    pytest.importorskip("torch")
    with Processes(3, over_torchs_store, timeout=90, arguments={"make": make, "folder": tmp_path}) as processes:
        ended = processes.wait()
    assert [e.rc for e in ended] == [0, 0, 0], report(ended)
    assert "Traceback" not in report(ended)


def over_torchs_store(store: Any, rank: int, size: int, make: str, folder: Path) -> None:
    torchs = STORES[make](store, rank, size, folder)
    for _ in range(2):
        with blinkmpi.StoreCommunicator(torchs, rank, size, timeout=30) as comm:
            assert total(comm) == 6
            assert total(comm, 1 << 18) == 6


def tcp_store(store: Any, rank: int, size: int, folder: Path) -> Any:
    from torch.distributed import TCPStore

    limit = datetime.timedelta(seconds=30)
    if rank == 0:
        served = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=limit)
        store.set("port", b"%d" % served.port)
        return served
    while not store.check(["port"]):
        pass
    return TCPStore("127.0.0.1", int(store.get("port")), size, is_master=False, timeout=limit)


def file_store(store: Any, rank: int, size: int, folder: Path) -> Any:
    from torch.distributed import FileStore

    return FileStore(str(folder / "file"), size)


def prefix_store(store: Any, rank: int, size: int, folder: Path) -> Any:
    from torch.distributed import PrefixStore

    return PrefixStore("group", file_store(store, rank, size, folder))


STORES: dict[str, Callable[..., Any]] = {"file": file_store, "tcp": tcp_store, "prefix": prefix_store}
