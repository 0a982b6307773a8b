"""What is wrong in a call or in the arguments of a StoreCommunicator is a typed error on every process."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

import blinkmpi
from blinkmpi.errors import (
    ArgumentError,
    BlinkError,
    BufferTypeError,
    MismatchError,
    PlanError,
    RemoteError,
    SettingsError,
    TopologyError,
)
from blinkmpi.planning.plan import Rule
from blinkmpi.runtime.ranks.store import local_place
from tests.store.processes import sharing_a_store


def works(comm: blinkmpi.StoreCommunicator) -> None:
    """It is as good as before."""
    x = np.ones(5)
    comm.Allreduce(MPI.IN_PLACE, x)
    assert (x == comm.size).all()


# ---------------------------------------------------------------- calls


@sharing_a_store((2, 3))
def test_calls_that_differ(store: Any, rank: int, size: int) -> None:
    with blinkmpi.StoreCommunicator(store, rank, size, timeout=20) as comm:
        x = np.ones(8 if rank == 1 else 9)
        with pytest.raises(MismatchError, match=r"allreduce\(8 x float64"):
            comm.Allreduce(MPI.IN_PLACE, x)
        works(comm)
        with pytest.raises(MismatchError, match="broadcast"):
            (comm.Bcast if rank == 1 else comm.Barrier)(*([x] if rank == 1 else []))
        works(comm)


@sharing_a_store((2, 3))
def test_bad_arguments_of_one_rank(store: Any, rank: int, size: int) -> None:
    with blinkmpi.StoreCommunicator(store, rank, size, timeout=20) as comm:
        x = np.ones(9)
        for bad, kind in (
            ((object(), x), BufferTypeError),
            ((x[::2], x), ArgumentError),
            ((x, x, "no"), ArgumentError),
        ):
            for call in (comm.Allreduce, lambda *args: comm.Iallreduce(*args).Wait()):
                with pytest.raises(kind if rank == 1 else RemoteError):
                    call(*(bad if rank == 1 else (x, x.copy())))
                works(comm)


@sharing_a_store((2, 3))
def test_what_only_mpi_could_do(store: Any, rank: int, size: int) -> None:
    """MPI has none of these processes, so the error says how to start them."""
    twice = MPI.Op.Create(lambda a, b, _: None, commute=True)
    kind = MPI.DOUBLE.Create_contiguous(2).Commit()
    x, y = np.ones(4), np.empty(4)
    with blinkmpi.StoreCommunicator(store, rank, size, timeout=20) as comm:
        calls = [
            lambda: comm.Allreduce(x, y, twice),
            lambda: comm.Iallreduce(x, y, twice),
            lambda: comm.Allreduce_init(x, y, twice),
            lambda: comm.Allreduce([x, 2, kind], [y, 2, kind]),
            lambda: comm.Ibcast([x, 2, kind]),
            lambda: comm.Bcast([None, 2, MPI.DOUBLE]),
            lambda: comm.Allgatherv([None, 2, MPI.DOUBLE], np.empty(2 * size)),
        ]
        for call in calls:
            with pytest.raises(BufferTypeError, match="mpirun or srun"):
                call()
            works(comm)
        with pytest.raises(BufferTypeError if rank == 1 else RemoteError, match="MPI's alone"):
            comm.Allreduce(x, y, twice if rank == 1 else MPI.SUM)
        works(comm)
        for name in ("Send", "Split", "allreduce", "Dup"):
            with pytest.raises(AttributeError, match=rf"no {name}\(\).* mpirun or srun"):
                getattr(comm, name)
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            comm.nonsense  # noqa: B018
        assert not hasattr(comm, "Recv")
    twice.Free()
    kind.Free()


@sharing_a_store((2,))
def test_a_plan_that_leaves_calls_to_mpi(store: Any, rank: int, size: int) -> None:
    with blinkmpi.StoreCommunicator(store, rank, size) as comm:
        machine, plan = comm.machine, comm.plan("allreduce")
    plan = replace(plan, rules=(Rule("allreduce", 0, "mpi"), *(r for r in plan.rules if r.collective != "allreduce")))
    with blinkmpi.StoreCommunicator(store, rank, size, topology=machine, plan=plan) as comm:
        for call in (comm.Allreduce, lambda *args: comm.Iallreduce(*args).Wait()):
            with pytest.raises(PlanError, match="mpirun or srun"):
                call(np.ones(4), np.empty(4))
        comm.Barrier()


# ---------------------------------------------------------------- the constructor


@pytest.mark.parametrize(("arguments", "kind", "text"), [
    ({"algo": "allreduce:mpi"}, SettingsError, "BLINKMPI_ALGO=allreduce:mpi.* mpirun or srun"),
    ({"algo": "allreduce:nonsense"}, BlinkError, "nonsense"),
    ({"executor": "fast"}, ArgumentError, "executor='fast'"),
    ({"timeout": -1}, ArgumentError, "timeout=-1"),
    ({"topology": "dgx-1v"}, BlinkError, "8 devices, the job has 2 ranks"),
])  # fmt: skip
@sharing_a_store((2,))
def test_bad_arguments(
    store: Any, rank: int, size: int, arguments: dict[str, Any], kind: type[BlinkError], text: str
) -> None:
    for _ in range(2):
        with pytest.raises(kind, match=text):
            blinkmpi.StoreCommunicator(store, rank, size, **arguments)
    with blinkmpi.StoreCommunicator(store, rank, size) as comm:
        works(comm)


@sharing_a_store((2,))
def test_arguments_that_differ(store: Any, rank: int, size: int) -> None:
    with pytest.raises(MismatchError, match="deterministic=True"):
        blinkmpi.StoreCommunicator(store, rank, size, deterministic=rank == 1)
    with blinkmpi.StoreCommunicator(store, rank, size) as comm:
        works(comm)


@sharing_a_store((2,), env={"BLINKMPI_NODES": "1+1"})
def test_virtual_nodes_are_refused(store: Any, rank: int, size: int) -> None:
    with pytest.raises(SettingsError, match=r"BLINKMPI_NODES=1\+1: .* mpirun or srun"):
        blinkmpi.StoreCommunicator(store, rank, size)


@sharing_a_store((3,))
def test_processes_of_two_nodes_are_refused(store: Any, rank: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLINKMPI_NODE_ID", f"node {rank // 2}")
        with pytest.raises(TopologyError, match=r"rank 2 on \S+ shares no memory with rank 0 .* mpirun or srun"):
            blinkmpi.StoreCommunicator(store, rank, size)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), ("0", 2), (0.0, 1)])
def test_ranks_that_there_are_not(rank: Any, size: Any) -> None:
    with pytest.raises(ArgumentError, match="0 <= rank < size"):
        blinkmpi.StoreCommunicator(Nothing(), rank, size)


class Nothing:
    """Has the methods of a store."""

    set = get = check = add = print


def test_what_is_no_store() -> None:
    with pytest.raises(ArgumentError, match=r"no method set\(\)"):
        blinkmpi.StoreCommunicator({}, 0, 1)  # type: ignore[arg-type]


def test_the_place_of_a_process_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert local_place(1, 2) == (1, 2)
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_place(1, 2) == (5, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    with pytest.raises(ArgumentError, match="LOCAL_RANK=5"):
        local_place(1, 2)
