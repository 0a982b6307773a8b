"""A program of four ranks for a small /dev/shm: communicators until none fits, each used, all freed, and again."""

import sys

import numpy as np
from mpi4py import MPI

import blinkmpi


def use(comm: MPI.Intracomm) -> None:
    x = np.ones(1_000_000)
    for _ in range(3):
        comm.Allreduce(MPI.IN_PLACE, x)
        x /= comm.size
    y = np.full(300_000, comm.rank, np.int32)
    comm.Bcast(y, root=comm.size - 1)
    assert x[0] == 1
    assert y[-1] == comm.size - 1
    counts = [40_000 + r for r in range(comm.size)]
    places = [sum(counts[:r]) for r in range(comm.size)]
    for turn in range(3):
        whole = np.empty(sum(counts))
        comm.Allgatherv(np.full(counts[comm.rank], turn + comm.rank, float), [whole, (counts, places), MPI.DOUBLE])
        assert [whole[at] for at in places] == [turn + r for r in range(comm.size)]


def main() -> None:
    world = MPI.COMM_WORLD
    for _ in range(2):
        made, sizes, full = [blinkmpi.Communicator(world, timeout=20)], [], ""
        while len(made) < 40 and not full:
            half = world.Split(world.rank % 2, world.rank)
            made.append(blinkmpi.Communicator(half, timeout=20))
            half.Free()
            use(made[-1])
            full = max(world.allgather(made[-1].context.host.window.full))
            sizes.append(made[-1].context.host.arena_bytes)
        children = [made[0].Split(world.rank % 2, world.rank) for _ in range(12)]
        for comm in (*made, *children):
            use(comm)
        for comm in (*made, *children):
            comm.Free()
        if world.rank == 0:
            print(f"{len(made)} communicators, slots of {sizes} bytes; then: {full}")
    world.Barrier()


if __name__ == "__main__":
    sys.exit(main())
