"""A program of four ranks for a small /dev/shm: communicators until none fits, each used, all freed, and again."""

import sys

import numpy as np
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import TopologyError


def use(comm: MPI.Intracomm) -> None:
    x = np.ones(1_000_000)
    for _ in range(3):
        comm.Allreduce(MPI.IN_PLACE, x)
        x /= comm.size
    y = np.full(300_000, comm.rank, np.int32)
    comm.Bcast(y, root=comm.size - 1)
    assert x[0] == 1
    assert y[-1] == comm.size - 1


def main() -> None:
    world = MPI.COMM_WORLD
    for _ in range(2):
        made: list[MPI.Intracomm] = [blinkmpi.Communicator(world, timeout=20)]
        sizes, refused = [], ""
        while len(made) < 12:
            try:
                made.append(made[0].Split(world.rank % 2, world.rank))
            except TopologyError as error:
                refused = str(error)
            use(made[-1])
            sizes.append(made[-1].context.host.arena_bytes)  # type: ignore[attr-defined]
            if refused := max(world.allgather(refused)):
                break
        for comm in made:
            use(comm)
        for comm in made:
            comm.Free()
        if world.rank == 0:
            print(f"{len(made)} communicators, slots of {sizes} bytes; then: {refused}")
    world.Barrier()


if __name__ == "__main__":
    sys.exit(main())
