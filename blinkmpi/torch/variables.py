"""What torchrun says in the environment, and the same for a job that MPI started; no MPI before it is needed."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

from ..errors import no_mpi_has_a_remedy
from ..util.together import bcast

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def of_attempt(store: Any) -> Any:
    """A store without what an earlier start of the job has left in it: torchrun starts a job again with its store."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return store if attempt is None else dist.PrefixStore(f"attempt{attempt}", store)


def setenv() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from MPI, as torchrun does.

    For programs and frameworks that use ``env://``. What is set already stays, so under torchrun it does nothing.
    Otherwise collective: all ranks of the job call it.
    """
    if all(name in os.environ for name in VARIABLES):
        return
    with no_mpi_has_a_remedy():
        from mpi4py import MPI  # not before: under torchrun a group decides how MPI starts (:mod:`.nodes`)

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    where = None
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            where = socket.getfqdn() if node.size < world.size else "localhost", free.getsockname()[1]
    host, port = bcast(world, where, tuple[str, int])
    found = world.rank, world.size, node.rank, node.size, host, port
    node.Free()
    for name, value in zip(VARIABLES, found, strict=True):
        os.environ.setdefault(name, str(value))
