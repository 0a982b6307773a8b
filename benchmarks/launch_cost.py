"""The host's part of a call on GPU memory, without a GPU: ``mpirun -np 2 python benchmarks/launch_cost.py``.

An AllReduce in place of torch tensors that is only put on a stream, by a driver that launches nothing (``fake/``), so
that what is left is ours. Of one tensor again and again, also on two streams in turn, of tensors that no call has seen,
and of counts that none has had, by C and by Python, over packets and through slots. Prints microseconds: the largest of
all ranks' medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.fake.gpu import fake_gpus

STREAM, OTHER, ELEMENTS = 5, 6, 256
ALGOS = ("onehop/ll16_one_shot", "trees")  # packets, slots
CALLS, ROUNDS = 500, 7


def call_us(world: Any, comm: Any, in_place: Any, tensors: Sequence[Any], others: int = STREAM) -> float:
    """Microseconds of a call among some of these tensors, each second one on another stream."""
    world.Barrier()
    began = time.perf_counter()
    for i, tensor in enumerate(tensors):
        comm.Allreduce(in_place, tensor, stream=others if i % 2 else STREAM)
    return (time.perf_counter() - began) / len(tensors) * 1e6


def measured(world: Any, mpi: Any, executor: str, algo: str) -> list[float]:
    """Microseconds of a repeated call, of those on streams in turn, at new addresses, and of other counts."""
    import torch

    from blinkmpi import Communicator

    rounds = []
    with fake_gpus(f"allreduce:{algo}"), Communicator(world, executor=executor) as comm:
        tensor = torch.zeros(ELEMENTS)
        many = torch.zeros(1 << 13)
        for i in range(ROUNDS):
            for stream in (STREAM, OTHER) * 5:
                comm.Allreduce(mpi.IN_PLACE, tensor, stream=stream)
            fresh = [torch.zeros(ELEMENTS) for _ in range(CALLS)]
            first = len(many) // 2 + 1 + CALLS * i
            counts = [many[:count] for count in range(first, first + CALLS)]
            again, *row = [call_us(world, comm, mpi.IN_PLACE, some) for some in ([tensor] * CALLS, fresh, counts)]
            rounds.append([again, call_us(world, comm, mpi.IN_PLACE, [tensor] * CALLS, OTHER), *row])
        times = world.allgather([statistics.median(row) for row in zip(*rounds, strict=True)])
    return [max(row) for row in zip(*times, strict=True)]


def main() -> None:
    """Measure all, and let rank 0 print."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for name, executor in (("C", "c"), ("Python", "numpy")):
        for algo in ALGOS:
            again, turn, new, other = measured(world, MPI, executor, algo)
            if world.rank == 0:
                text = f"a repeated call {again:.2f} us, streams in turn {turn:.2f} us, at a new address {new:.2f} us"
                print(f"{name}, {algo}: {text}, of another count {other:.2f} us", flush=True)


if __name__ == "__main__":
    main()
