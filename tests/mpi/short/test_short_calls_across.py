"""Short calls between nodes: announcement and data in one message, and errors as in every call."""

import os
import random
import time
from functools import partial
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, MismatchError, RemoteError
from blinkmpi.runtime.inspection import choice
from tests.conformance import COLLECTIVES, cases
from tests.harness import mpi
from tests.mpi.short.errors import rank_0_is_late, rank_1_refuses
from tests.mpi.test_conformance import run_all

NODES = {2: ("1+1",), 3: ("1+2",), 4: ("2+2", "1+2+1")}


def split(comm: MPI.Intracomm, nodes: str, **arguments: object) -> blinkmpi.Communicator:
    """A communicator on virtual nodes, which takes one shot for short calls."""
    with mock.patch.dict(os.environ, {"BLINKMPI_NODES": nodes}):
        ours = blinkmpi.Communicator(comm, **arguments)  # type: ignore[arg-type]
    assert choice(ours.context, "allreduce", 64)["protocol"] == "one_shot"
    return ours


@mpi(ranks=(3,), long=(2, 4), timeout=100)
def test_every_collective_in_one_shot(comm: MPI.Intracomm) -> None:
    some = [case for collective in COLLECTIVES for case in cases(collective, comm.size, full=False)]
    for nodes in NODES[comm.size]:
        with split(comm, nodes) as ours:
            run_all(ours, some)


@mpi(ranks=(4,), timeout=60)
def test_messages_of_different_lengths_follow_one_another(comm: MPI.Intracomm) -> None:
    """Of one piece and of many, from all nodes and from one, and between calls that Python makes."""
    n, rank = comm.size, comm.rank
    for nodes in NODES[n]:
        with split(comm, nodes) as ours:
            counts = [1, 9000, 3, 40_000, 100]
            sends = [np.empty(count, np.float64) for count in counts]
            outs, everything = [np.empty_like(x) for x in sends], [np.empty(n * x.size) for x in sends]
            for i in range(12):
                for x, y, z in zip(sends, outs, everything, strict=True):
                    x[:] = i * n + rank
                    root = (i + x.size) % n
                    ours.Reduce(x, y, root=root)
                    assert rank != root or (y == sum(i * n + r for r in range(n))).all()
                    if (i + rank) % 5 == 0:
                        time.sleep(0.0005)
                    ours.Allgather(x, z)
                    assert (z.reshape(n, -1) == i * n + np.arange(n)[:, None]).all()
                    ours.Scan(x, y)
                    assert (y == sum(i * n + r for r in range(rank + 1))).all()
                    ours.Scatter(z if rank == root else None, y, root=root)
                    assert (y == i * n + rank).all()
                if i % 3 == 0:
                    ours.Ibarrier().Wait()
                    big = np.full(300_000, 1.0)
                    ours.Allreduce(MPI.IN_PLACE, big)
                    assert (big == n).all()


@mpi(ranks=(2, 4), timeout=60)
def test_a_call_that_c_has_begun_ends_in_the_same_errors(comm: MPI.Intracomm) -> None:
    """Ranks of one node, or of several, that make different known calls; one that refuses; one that does not come."""
    x, y, z = np.ones(50, np.float32), np.empty(50, np.float32), np.ones(60_000, np.float32)
    for nodes in NODES[comm.size]:
        with split(comm, nodes) as ours:
            for _ in range(3):
                ours.Allreduce(x, y)
                ours.Bcast(z)
                ours.Barrier()
            for who in ((0,), (comm.size - 1,), (0, 1)):
                for other in (lambda: ours.Bcast(z), ours.Barrier):
                    differ = set(who) != set(range(comm.size))
                    if differ:
                        with pytest.raises(MismatchError, match="allreduce"):
                            other() if comm.rank in who else ours.Allreduce(x, y)
                    ours.Allreduce(x, y)
                    assert (y == comm.size).all()
                    ours.Bcast(z)
            rank_1_refuses(ours, x, y, z)
    rank_0_is_late(comm, split(comm, NODES[comm.size][0], timeout=2), x, y)


@mpi(ranks=(4,), timeout=60)
def test_a_rank_whose_arguments_are_mpis_own(comm: MPI.Intracomm) -> None:
    """The others have sent what they would in one shot, and all make MPI's collective."""
    with split(comm, "2+2") as ours:
        x, y = np.arange(6, dtype=np.float64), np.zeros(6)
        kind = MPI.DOUBLE.Create_contiguous(2).Commit()
        for i in range(6):
            x[:] = np.arange(6) + i if comm.rank == 0 else -1
            if i % 2:
                ours.Bcast(x)
            else:
                ours.Bcast([x, 3, kind] if comm.rank == 3 else x)
            assert (x == np.arange(6) + i).all()
            ours.Allreduce(np.full(6, 1.0), y)
            assert (y == 4).all()
        kind.Free()


@mpi(ranks=(3, 4), timeout=90)
def test_nodes_that_had_sent_long_messages_when_a_call_was_refused_go_on(comm: MPI.Intracomm) -> None:
    """They hear one another while they wait for what they sent, and what a node told earlier is not told again."""
    n, rank = comm.size, comm.rank
    draw = random.Random(n)
    for nodes in ("1+1+1",) if n == 3 else ("1+1+2", "1+1+1+1"):
        with split(comm, nodes, timeout=10) as ours:
            vectors = [(np.empty(count), np.empty(count)) for count in (1, 1000, 9000, 14_000, 30_000)]
            for i in range(400):
                x, y = draw.choice(vectors)
                x[:] = rank + i
                victim, how = draw.randrange(n), draw.randrange(6)
                if how > 1:
                    ours.Allreduce(x, y)
                    assert (y == n * i + n * (n - 1) // 2).all()
                    continue
                other = ours.Barrier if how else partial(ours.Bcast, x, root=99)
                with pytest.raises((ArgumentError, MismatchError, RemoteError)):
                    (other if rank == victim else partial(ours.Allreduce, x, y))()
