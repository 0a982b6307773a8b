"""How short calls end that a rank refuses, or does not come to: alike on one node and between nodes."""

from typing import Any

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, CollectiveTimeout, RemoteError


def rank_1_refuses(ours: blinkmpi.Communicator, x: Any, y: Any, z: Any) -> None:
    """Wrong arguments on rank 1 are an error on all, no data is touched, and the communicator lives on."""
    with pytest.raises(ArgumentError if ours.rank == 1 else RemoteError, match="root"):
        ours.Bcast(z, root=99 if ours.rank == 1 else 0)
    y[:] = -1
    with pytest.raises(BlinkError):
        ours.Allreduce(x, y[:7] if ours.rank == 1 else y)
    assert (y == -1).all(), "a refused call touches no data"
    ours.Allreduce(x, y)
    assert (y == ours.size).all()


def rank_0_is_late(comm: MPI.Intracomm, ours: blinkmpi.Communicator, x: Any, y: Any) -> None:
    """The others name it when the deadline of ``ours`` is over, and the communicator is dead on all."""
    for _ in range(3):
        ours.Allreduce(x, y)
    comm.Barrier()
    if comm.rank:
        with pytest.raises(CollectiveTimeout, match="rank 0"):
            ours.Allreduce(x, y)
    comm.Barrier()
    with pytest.raises(BlinkError):
        ours.Allreduce(x, y)
    ours.Free()
