"""The conformance suite among processes that MPI did not start, and what else a healthy StoreCommunicator does."""

import hashlib
import threading
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from tests.conformance import COLLECTIVES, Case, cases, expected, inputs, mistakes, same
from tests.conformance_calls import before, call
from tests.store.processes import sharing_a_store

CALLS = (
    "Bcast", "Reduce", "Allreduce", "Gather", "Scatter", "Allgather", "Reduce_scatter_block", "Reduce_scatter",
    "Gatherv", "Scatterv", "Allgatherv", "Alltoall", "Alltoallv", "Scan", "Exscan", "Barrier",
)  # fmt: skip


def run_all(comm: blinkmpi.StoreCommunicator, chosen: list[Case]) -> None:
    """Run cases; raise on the first that is wrong, naming it."""
    for case in chosen:
        sends, want = inputs(case), expected(case, comm.rank)
        send, recv = sends[comm.rank].copy(), before(case, sends[comm.rank], want, comm.rank)
        got = call(comm, case, send, recv)  # type: ignore[arg-type]
        if got is not None and want is not None:
            wrong = mistakes(case, got[: want.size], want, comm.rank)
            assert wrong == 0, f"{case}: rank {comm.rank}: {wrong} of {want.size} elements wrong"
        assert same(send, sends[comm.rank]), f"{case}: rank {comm.rank}: the send buffer was changed"
        if case.collective == "allreduce" and got is not None:
            own = np.frombuffer(hashlib.sha256(got.tobytes()).digest(), np.uint8)
            prints = np.empty((comm.size, own.size), np.uint8)
            comm.Allgather(own, prints)
            assert (prints == own).all(), f"{case}: ranks differ in their bits"


@pytest.mark.parametrize("executor", ["auto", "numpy"])
@sharing_a_store((1, 2, 3), long=(4,), timeout=240)
def test_every_collective(store: Any, rank: int, size: int, executor: str) -> None:
    with blinkmpi.StoreCommunicator(store, rank, size, executor=executor) as comm:
        assert (comm.rank, comm.size, comm.Get_rank(), comm.Get_size()) == (rank, size, rank, size)
        for collective in COLLECTIVES:
            run_all(comm, list(cases(collective, size, full=False)))
        if executor == "auto":
            run_all(comm, list(cases("allreduce", size)))
        assert all(rule.scheme != "mpi" for rule in comm.plans.rules)


@sharing_a_store((3,))
def test_another_machine_and_schemes_by_name(store: Any, rank: int, size: int) -> None:
    some = [case for name in ("allreduce", "broadcast", "alltoall") for case in cases(name, size, full=False)]
    for arguments in (
        {"topology": "cpu:3"},
        {"algo": "allreduce:chain", "deterministic": True},
        {"algo": "allreduce:lang:ring;alltoall:lang:bruck_alltoall"},
    ):
        with blinkmpi.StoreCommunicator(store, rank, size, **arguments) as comm:
            run_all(comm, some)


@sharing_a_store((2,), env={"BLINKMPI_CMA_DISABLE": "1"})
def test_without_cma(store: Any, rank: int, size: int) -> None:
    with blinkmpi.StoreCommunicator(store, rank, size) as comm:
        run_all(comm, list(cases("allreduce", size, full=False)))
        assert all(rule.scheme != "mpi" for rule in comm.plans.rules)


def test_it_has_the_methods_of_a_communicator() -> None:
    names = [*CALLS, *(f"I{name.lower()}" for name in CALLS)]
    names += ["Allreduce_init", "Bcast_init", "Allgather_init", "Reduce_scatter_block_init"]
    for name in names:
        assert getattr(blinkmpi.StoreCommunicator, name) is not None
        if not name.endswith("_init"):
            assert name in dir(blinkmpi.Communicator)
    for name in (
        "empty", "register", "deregister", "check", "plan", "replan", "explain", "plan_line", "context", "machine",
        "plans", "gpu", "executor", "Free", "free",
    ):  # fmt: skip
        assert name in dir(blinkmpi.StoreCommunicator)
        assert name in dir(blinkmpi.Communicator)


# ---------------------------------------------------------------- requests and threads


@sharing_a_store((1, 2, 3))
def test_non_blocking_calls(store: Any, rank: int, size: int) -> None:
    assert MPI.COMM_WORLD.size == 1
    with blinkmpi.StoreCommunicator(store, rank, size) as comm:
        x, all_x = np.full(1000, rank + 1.0), size * (size + 1) / 2
        y, z, gathered = np.empty_like(x), np.full(10, rank, np.int32), np.empty((size, 1000))
        requests = [comm.Iallreduce(x, y), comm.Ibcast(z, size - 1), comm.Iallgather(x, gathered), comm.Ibarrier()]
        MPI.Request.Waitall(requests)
        assert (y == all_x).all()
        assert (z == size - 1).all()
        assert (gathered == np.arange(1.0, size + 1)[:, None]).all()
        request = comm.Iallreduce(MPI.IN_PLACE, x)
        while not request.Test():
            pass
        comm.Barrier()  # behind them
        assert (x == all_x).all()
        blocks = np.arange(float(size * 4))
        mine = np.empty(4)
        comm.Ireduce_scatter_block(blocks, mine).wait()
        assert (mine == size * blocks[4 * rank : 4 * rank + 4]).all()
        counts = [r + 1 for r in range(size)]
        found = np.zeros(sum(counts))
        comm.Igatherv(np.full(rank + 1, float(rank)), [found, counts], root=0).Wait()
        assert rank or found.tolist() == [float(r) for r in range(size) for _ in range(r + 1)]


@sharing_a_store((2, 3))
def test_persistent_calls(store: Any, rank: int, size: int) -> None:
    with blinkmpi.StoreCommunicator(store, rank, size) as comm:
        x, y = np.empty(100), np.empty(100)
        call = comm.Allreduce_init(x, y)
        for turn in range(5):
            x[:] = rank + turn
            call.Start()
            if turn % 2:
                while not call.Test():
                    pass
            call.Wait()
            assert (y == sum(r + turn for r in range(size))).all()
        call.Start()
        with pytest.raises(blinkmpi.ArgumentError, match="not completed"):
            call.Start()
        call.Wait()
        assert call.Test()
        call.Free()
        with pytest.raises(blinkmpi.ArgumentError, match="freed"):
            call.Start()
        root, blocks, mine = np.full(3, rank, np.int64), np.ones(2 * size), np.empty(2)
        gathered = np.empty(3 * size, np.int64)
        some = [
            comm.Bcast_init(root, 1), comm.Allgather_init(root, gathered),
            comm.Reduce_scatter_block_init(blocks, mine, MPI.SUM),
        ]  # fmt: skip
        for made in some:
            made.Start()
        for made in some:
            made.Wait()
        assert (root == 1).all()
        assert (gathered == 1).all()
        assert (mine == size).all()
        with pytest.raises(blinkmpi.BufferTypeError):
            comm.Allreduce_init(object(), y)
        comm.Barrier()


@sharing_a_store((2, 3))
def test_threads_use_communicators_of_their_own(store: Any, rank: int, size: int) -> None:
    wrong: list[str] = []

    def work(comm: blinkmpi.StoreCommunicator, k: int) -> None:
        for turn in range(200):
            x = np.full(100, k + turn, np.int64)
            comm.Allreduce(MPI.IN_PLACE, x)
            if (x != size * (k + turn)).any():
                wrong.append(f"{k} {turn}")
        comm.plan("scatter", 1)  # over the store, at the same time

    comms = [blinkmpi.StoreCommunicator(store, rank, size) for _ in range(3)]
    threads = [threading.Thread(target=work, args=(comm, k)) for k, comm in enumerate(comms)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for comm in comms:
        comm.Free()


@sharing_a_store((2,))
def test_any_thread_may_make_it_and_call(store: Any, rank: int, size: int) -> None:
    found: list[float] = []

    def work() -> None:
        with blinkmpi.StoreCommunicator(store, rank, size) as comm:
            x = np.ones(10)
            comm.Allreduce(MPI.IN_PLACE, x)
            found.extend(x.tolist())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [size] * 10


# ---------------------------------------------------------------- what it says of itself


@sharing_a_store((2,))
def test_it_says_what_it_does(store: Any, rank: int, size: int) -> None:
    with blinkmpi.StoreCommunicator(store, rank, size) as comm:
        assert comm.machine.n == comm.plans.n == size
        assert comm.gpu is None
        assert not comm.strict
        assert "executor" in comm.executor
        assert "allreduce" in comm.explain("allreduce", 100)
        assert "one shot" in comm.explain("allreduce", 100).split("why")[0], "not MPI's own"
        assert "allreduce" in comm.plan_line("allreduce")
        assert comm.plan("reduce", 1).rule("reduce", 1 << 20, root=1).scheme != "mpi"
        assert comm.replan() == () or size
        comm.check()
        x = np.ones(7)
        comm.Allreduce(MPI.IN_PLACE, x, "avg")
        assert (x == 1).all()
        for of_gpus in (comm.empty, comm.memory_pool, lambda _: comm.memory_pool(), lambda _: comm.cupy_memory()):
            with pytest.raises(blinkmpi.BlinkError, match="no GPUs"):
                of_gpus(10)
