"""Several nodes, made of one machine by BLINKMPI_NODES: no shared memory leads from one to the other, only messages."""

import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import CollectiveTimeout, MismatchError, PeerLost, RemoteError, SettingsError
from blinkmpi.topology import machine
from blinkmpi.transport.host.shared_window import SharedWindow
from blinkmpi.transport.network import messages
from tests.conformance import COLLECTIVES, cases
from tests.harness import PATIENCE_S, mpi
from tests.mpi.faults import stop_until
from tests.mpi.test_conformance import OURS, run_all

SPLITS = {2: ("1+1",), 3: ("1+2",), 4: ("2+2", "3+1", "1+2+1"), 8: ("3+5", "2+3+3")}


def split(comm: MPI.Intracomm, nodes: str, **arguments: object) -> blinkmpi.Communicator:
    """A communicator on virtual nodes."""
    with mock.patch.dict(os.environ, {"BLINKMPI_NODES": nodes}):
        ours = blinkmpi.Communicator(comm, **arguments)  # type: ignore[arg-type]
    sizes = [int(size) for size in nodes.split("+")]
    assert [len(ours.machine.ranks_of(node)) for node in ours.machine.nodes] == sizes
    return ours


@mpi(ranks=(3,), long=(2, 4, 8), timeout=150)
def test_every_collective(comm: MPI.Intracomm) -> None:
    some = [case for collective in COLLECTIVES for case in cases(collective, comm.size, full=False)]
    for turn, nodes in enumerate(SPLITS[comm.size]):
        with split(comm, nodes, algo=OURS, executor=("auto", "numpy")[turn % 2]) as ours:
            run_all(ours, some)
    if comm.size == 2:
        with split(comm, "1+1") as ours:  # small vectors go to MPI's own collectives
            run_all(ours, some)
    if comm.size == 3:
        with split(comm, "1+2", algo=OURS) as ours:  # tests/hosts does so for 2 + 2
            run_all(ours, [case for collective in COLLECTIVES for case in cases(collective, comm.size)])


@mpi(ranks=(4,), timeout=60)
def test_bits_are_the_same_every_time(comm: MPI.Intracomm) -> None:
    x = np.random.default_rng(comm.rank).standard_normal(300_001).astype(np.float32)
    with split(comm, "1+3", algo=OURS) as ours:
        results = []
        for _ in range(5):
            y = np.empty_like(x)
            ours.Allreduce(x, y)
            results.append(y.tobytes())
    assert len(set(results)) == 1
    assert len(set(comm.allgather(hash(results[0])))) <= comm.size  # string hashes differ by process
    everybody = comm.allgather(results[0])
    assert len(set(everybody)) == 1


@mpi(ranks=(4,), timeout=60)
def test_free_waits_for_a_slow_rank(comm: MPI.Intracomm) -> None:
    """Its messages are closed by then, and nobody looks at them any more."""
    for nodes in ("2+2", "3+1"):
        ours = split(comm, nodes)
        total = np.empty(1000)
        ours.Allreduce(np.ones(1000), total)
        closed = SharedWindow.close

        def late(window: SharedWindow, closed: Callable[..., None] = closed, **how: bool) -> None:
            time.sleep(0.8 if comm.rank == 1 else 0.0)
            closed(window, **how)

        with mock.patch.object(SharedWindow, "close", late):
            ours.Free()
        assert (total == comm.size).all()


@mpi(ranks=(4,), timeout=60)
def test_many_calls_of_changing_sizes(comm: MPI.Intracomm) -> None:
    draw = np.random.default_rng(7)
    with split(comm, "2+2", algo=OURS) as ours:
        for i in range(200):
            count, root = int(draw.integers(1, 60_000)), int(draw.integers(comm.size))
            x = np.full(count, comm.rank + i, np.int64)
            ours.Allreduce(MPI.IN_PLACE, x)
            assert (x == sum(r + i for r in range(comm.size))).all()
            x[:] = comm.rank
            ours.Bcast(x, root)
            assert (x == root).all()


@mpi(ranks=(4,), timeout=60)
def test_children_keep_their_nodes(comm: MPI.Intracomm) -> None:
    with split(comm, "1+3", algo=OURS) as ours:
        for child, nodes in ((ours.Split(comm.rank % 2, comm.rank), 2 if comm.rank % 2 == 0 else 1), (ours.Dup(), 2)):
            assert len(child.machine.nodes) == nodes
            x = np.ones(10_000)
            child.Allreduce(MPI.IN_PLACE, x)
            assert (x == child.size).all()
            child.Free()


@mpi(ranks=(4,), timeout=60)
def test_requests_of_several_communicators(comm: MPI.Intracomm) -> None:
    with split(comm, "2+2", algo=OURS) as one, split(comm, "3+1", algo=OURS) as other:
        x, y = np.ones(500_000), np.full(500_000, 2.0)
        requests = [one.Iallreduce(MPI.IN_PLACE, x), other.Iallreduce(MPI.IN_PLACE, y)]
        for request in reversed(requests):
            request.Wait()
        assert (x == 4).all()
        assert (y == 8).all()


@mpi(ranks=(3,), timeout=60)
def test_children_within_a_node_have_children(comm: MPI.Intracomm) -> None:
    """Though the setting, which still holds, is about all ranks of the job."""
    with mock.patch.dict(os.environ, {"BLINKMPI_NODES": "1+2"}), blinkmpi.Communicator(comm) as ours:
        child = ours.Split(int(comm.rank > 0), comm.rank)
        grandchild = child.Dup()
        for one in (child, grandchild):
            x = np.full(1000, comm.rank)
            one.Allreduce(MPI.IN_PLACE, x)
            assert (x == (3 if comm.rank else 0)).all()
            one.Free()


@mpi(ranks=(8,), timeout=60)
def test_trees_of_another_machine_across_nodes(comm: MPI.Intracomm) -> None:
    with mock.patch.dict(os.environ, {"BLINKMPI_NODES": "3+5"}):
        ours = blinkmpi.Communicator(comm, topology=machine("dgx-1v"))
    with ours:
        x = np.arange(100_003, dtype=np.int64) + comm.rank
        ours.Allreduce(MPI.IN_PLACE, x)
        assert (x == 8 * np.arange(100_003) + 28).all()


# ---------------------------------------------------------------- what goes wrong


@mpi(ranks=(3,), timeout=60)
def test_nodes_that_do_not_fit(comm: MPI.Intracomm) -> None:
    for nodes, word in (("2+2", "the job has 3"), ("2+x", "as in 4\\+4"), ("3+0", "as in 4\\+4")):
        with pytest.raises(SettingsError, match=word):
            split(comm, nodes)


@mpi(ranks=(4,), timeout=60)
def test_ranks_that_disagree_across_nodes(comm: MPI.Intracomm) -> None:
    with split(comm, "2+2", algo=OURS) as ours:
        x, y = np.ones(1000), np.empty(1000)
        with pytest.raises(MismatchError, match=r"rank 3.*allreduce\(999 x float64") as caught:
            ours.Allreduce(x[: 1000 - (comm.rank == 3)], y[: 1000 - (comm.rank == 3)])
        assert len(set(comm.allgather(str(caught.value)))) == 1
        with pytest.raises((RemoteError, TypeError), match="object" if comm.rank == 1 else "rank 1 failed"):
            ours.Allreduce(np.array([None]) if comm.rank == 1 else x, y)
        ours.Allreduce(x, y)  # it lives on
        assert (y == 4).all()


@mpi(ranks=(4,), timeout=60)
@pytest.mark.parametrize("executor", ["c", "numpy"])
def test_a_rank_of_another_node_that_never_comes(comm: MPI.Intracomm, executor: str) -> None:
    ours = split(comm, "1+3", algo=OURS, timeout=2, executor=executor)
    x = np.ones(1_000_000)
    if comm.rank != 2:
        since = time.monotonic()
        with pytest.raises(CollectiveTimeout, match="rank 2") as caught:
            ours.Allreduce(MPI.IN_PLACE, x)
        assert "its call 1" in str(caught.value)
        assert time.monotonic() - since < 2 + PATIENCE_S
        with pytest.raises(PeerLost, match="died earlier"):
            ours.Barrier()
    comm.Barrier()
    if comm.rank == 2:
        with pytest.raises(CollectiveTimeout, match="found by rank"):
            ours.Allreduce(MPI.IN_PLACE, x)
    ours.Free()


@mpi(ranks=(4,), timeout=60)
def test_a_rank_of_another_node_that_is_stopped_in_a_call(comm: MPI.Intracomm) -> None:
    ours = split(comm, "2+2", algo=OURS, timeout=2)
    x = np.ones(16_000_000)
    ours.Allreduce(MPI.IN_PLACE, x)
    folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else ""))
    if comm.rank == 3:  # until the others have given up
        threading.Timer(0.02, stop_until, [[folder / str(r) for r in range(3)]]).start()
    with pytest.raises(CollectiveTimeout):
        forever(lambda: ours.Allreduce(MPI.IN_PLACE, x))
    (folder / str(comm.rank)).touch()
    ours.Free()
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)


def forever(call: Callable[[], object]) -> None:
    """Call until it fails."""
    while True:
        call()


class Dirty:
    """NumPy, whose empty arrays begin with the number 1."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: int, dtype: Any) -> Any:
        found = np.zeros(shape, dtype)
        found[:1] = 1
        return found


@mpi(ranks=(3,), timeout=60)
def test_what_lay_in_memory_before_is_no_announcement(comm: MPI.Intracomm) -> None:
    """C looks at the number of the call that another node announces before any announcement has come."""
    with mock.patch.object(messages, "np", Dirty()), split(comm, "1+2", timeout=8) as ours:
        for _ in range(3):
            ours.Dup().Free()
            ours.Barrier()


@mpi(ranks=(6,), timeout=60)
def test_blocks_in_place_some_of_which_are_empty(comm: MPI.Intracomm) -> None:
    """MPI makes these calls, and Open MPI's own non-blocking one gives the blocks of other ranks if it is in place."""
    rank, n = comm.rank, comm.size
    with mock.patch.dict(os.environ, {"BLINKMPI_NODES": "1+3+2"}), blinkmpi.Communicator(comm) as ours:
        for count in (3, 30_000):
            lengths = [0 if (rank + r) % 3 == 2 else count + rank * r for r in range(n)]
            places = [0, *itertools.accumulate(lengths)]
            for call, whole in itertools.product((ours.Alltoallv, ours.Ialltoallv), (True, False)):
                x = np.concatenate([np.arange(k) + 1e6 * (n * rank + r) for r, k in enumerate(lengths)])
                spec = [x, lengths, places[:n], MPI.DOUBLE] if whole else [memoryview(x), lengths]
                done = call(MPI.IN_PLACE, spec)  # type: ignore[operator]
                if done is not None:
                    done.Wait()
                for r, k in enumerate(lengths):
                    assert (x[places[r] : places[r + 1]] == np.arange(k) + 1e6 * (n * r + rank)).all(), (count, r)
