"""The host's part of a call on GPU memory, without a GPU: ``mpirun -np 2 python benchmarks/launch_cost.py``.

An AllReduce in place of torch tensors that is only put on a stream, by a driver that launches nothing (``fake/``), so
that what is left is ours. Of one tensor again and again, and of tensors that no call has seen, by C and by Python.
Prints microseconds, for each the largest of all ranks' medians.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.fake.gpu import fake_gpus

STREAM, ELEMENTS = 5, 256
CALLS, ROUNDS = 500, 7


def call_us(world: Any, comm: Any, in_place: Any, tensors: Sequence[Any]) -> float:
    """Microseconds of a call among some of these tensors."""
    world.Barrier()
    began = time.perf_counter()
    for tensor in tensors:
        comm.Allreduce(in_place, tensor, stream=STREAM)
    return (time.perf_counter() - began) / len(tensors) * 1e6


def measured(world: Any, mpi: Any, executor: str) -> tuple[float, float]:
    """Microseconds of a repeated call, and of one at a new address."""
    import torch

    from blinkmpi import Communicator

    with fake_gpus(), Communicator(world, executor=executor) as comm:
        tensor, again, new = torch.zeros(ELEMENTS), [], []
        for _ in range(ROUNDS):
            for _ in range(5):
                comm.Allreduce(mpi.IN_PLACE, tensor, stream=STREAM)
            fresh = [torch.zeros(ELEMENTS) for _ in range(CALLS)]
            again.append(call_us(world, comm, mpi.IN_PLACE, [tensor] * CALLS))
            new.append(call_us(world, comm, mpi.IN_PLACE, fresh))
        times = world.allgather((statistics.median(again), statistics.median(new)))
    return max(time[0] for time in times), max(time[1] for time in times)


def main() -> None:
    """Measure both, and let rank 0 print."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for name, executor in (("C", "c"), ("Python", "numpy")):
        again, new = measured(world, MPI, executor)
        if world.rank == 0:
            print(f"{name}: a repeated call {again:.2f} us, at a new address {new:.2f} us", flush=True)


if __name__ == "__main__":
    main()
