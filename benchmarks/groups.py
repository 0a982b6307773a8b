"""Many small tensors: in a group, as one vector of their sum, and one call each.

``mpirun -np 2 python benchmarks/groups.py -o benchmarks/results/groups-np2.json`` on CPU ranks; ``--gpu`` takes CuPy
arrays, one GPU a rank (or shared ones, BLINKMPI_RANKS_PER_GPU), and NCCL's group beside ours where there are as many
GPUs as ranks. The three take turns. A time is the median over rounds of the slowest rank's, of a call or group from its
start to its results, between two barriers; with ``--gpu`` also in CUDA graphs, where the host's part does not count.
Each way's sums are checked at the end.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402

COUNTS, SIZES = (10, 100), (1 << 10, 4 << 10, 16 << 10, 64 << 10)
DTYPE = "float32"
WARMUP, ROUNDS, REPLAYS = 5, 21, 10


class Way(NamedTuple):
    """One of the ways: its call or calls, and the arrays that they sum."""

    run: Callable[[], None]
    arrays: Sequence[Any]


def contenders(comm: Any, make: Callable[[int], Any], count: int, size: int, stream: Any) -> dict[str, Way]:
    """The three ways of ours, on tensors of zeros."""
    from mpi4py import MPI

    tensors, whole = [make(size // 4) for _ in range(count)], make(count * size // 4)

    def each() -> None:
        for tensor in tensors:
            comm.Allreduce(MPI.IN_PLACE, tensor, stream=stream)

    return {
        "group": Way(lambda: comm.Allreduce(MPI.IN_PLACE, tensors, stream=stream), tensors),
        "vector": Way(lambda: comm.Allreduce(MPI.IN_PLACE, whole, stream=stream), [whole]),
        "each": Way(each, tensors),
    }


def nccl_communicator(world: Any) -> tuple[Any, Any]:
    """CuPy's module of NCCL, and a communicator of all ranks."""
    from blinkmpi.bench.peers import nccl_module, nvls_setting
    from blinkmpi.transport.cuda.device import cupy

    nvls_setting(world)
    nccl = nccl_module(cupy())
    unique = world.bcast(nccl.get_unique_id() if world.rank == 0 else None)
    return nccl, nccl.NcclCommunicator(world.size, unique, world.rank)


def nccl_group(nccl: Any, peer: Any, make: Callable[[int], Any], count: int, size: int, stream: Any) -> Way:
    """NCCL's allreduces between ncclGroupStart and ncclGroupEnd."""
    tensors = [make(size // 4) for _ in range(count)]

    def group() -> None:
        nccl.groupStart()
        for tensor in tensors:
            peer.allReduce(tensor.data.ptr, tensor.data.ptr, tensor.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
        nccl.groupEnd()

    return Way(group, tensors)


def wrong(world: Any, way: Way, wait: Callable[[], None]) -> int:
    """Wrong elements on all ranks after a call with ones; the arrays are zeros again then."""
    for array in way.arrays:
        array.fill(1)
    wait()
    way.run()
    wait()
    own = sum(int((array != world.size).sum()) for array in way.arrays)
    for array in way.arrays:
        array.fill(0)
    wait()
    return int(world.allreduce(own))


def times(world: Any, ways: dict[str, Callable[[], object]], wait: Callable[[], None]) -> dict[str, float]:
    """Microseconds of each way, which take turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARMUP + ROUNDS):
        for name, way in ways.items():
            world.Barrier()
            began = time.perf_counter()
            way()
            wait()
            slowest = max(world.allgather(time.perf_counter() - began))
            if turn >= WARMUP:
                found[name].append(slowest * 1e6)
    return {name: median(values) for name, values in found.items()}


def in_graphs(ways: dict[str, Way], stream: Any) -> dict[str, Callable[[], object]]:
    """The same ways, REPLAYS times each, captured."""
    graphs = {}
    for name, way in ways.items():
        stream.begin_capture()
        for _ in range(REPLAYS):
            way.run()
        graphs[name] = stream.end_capture()
    return {name: graph.launch for name, graph in graphs.items()}


def nothing() -> None:
    """On CPU ranks a call has ended when it returns."""


def measured(world: Any, comm: Any, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """A row for each number and length of tensors, and why NCCL is not among them, or nothing."""
    rows: list[dict[str, Any]] = []
    why_no_nccl, stream, peer = "", None, None
    wait = wait_all = nothing
    if args.gpu:
        from blinkmpi.transport.cuda.device import cupy, device_count

        if comm.gpu is None:
            sys.exit(f"--gpu: {comm.context.why_no_gpus}")
        xp = cupy()
        stream = xp.cuda.Stream(non_blocking=True)
        wait, wait_all = stream.synchronize, xp.cuda.runtime.deviceSynchronize
        why_no_nccl = "" if device_count() >= world.size else "ranks share a GPU"
        peer = None if why_no_nccl else nccl_communicator(world)
    else:
        import numpy as xp

    def make(count: int) -> Any:
        return xp.zeros(count, DTYPE)

    for count in args.counts:
        for size in args.sizes:
            ways = contenders(comm, make, count, size, stream)
            if peer is not None:
                ways["nccl"] = nccl_group(*peer, make, count, size, stream)
            wait_all()
            us = times(world, {name: way.run for name, way in ways.items()}, wait)
            row: dict[str, Any] = {"tensors": count, "bytes": size, "us": us}
            if stream is not None:
                with stream:
                    replayed = times(world, in_graphs(ways, stream), wait)
                row["graph_us"] = {name: us / REPLAYS for name, us in replayed.items()}
            row["wrong"] = {name: wrong(world, way, wait_all) for name, way in ways.items()}
            rows.append(row)
            if world.rank == 0:
                for kind in ("us", "graph_us")[: 1 + args.gpu]:
                    times_of = ", ".join(f"{name} {us:.1f} us" for name, us in row[kind].items())
                    print(f"{count} x {size} B{', in graphs' * (kind != 'us')}: {times_of}", flush=True)
    return rows, why_no_nccl


def main() -> None:
    """Measure on all ranks; rank 0 writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", help="write the result as JSON under this name, or one beside it if taken")
    parser.add_argument("--gpu", action="store_true", help="CuPy arrays")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="of tensors")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of a tensor")
    args = parser.parse_args()
    from mpi4py import MPI

    from blinkmpi.communicator import Communicator

    began, world = datetime.now().astimezone(), MPI.COMM_WORLD
    with Communicator(world) as comm:
        rows, why_no_nccl = measured(world, comm, args)
        facts = jobs.rank_facts(MPI, comm)
        if comm.gpu is not None and args.gpu:
            facts["gpu"] = {"name": comm.gpu.name, **comm.gpu.versions}
    if world.rank == 0 and args.output:
        head = {"groups": {"rounds": ROUNDS, "replays": REPLAYS, "no_nccl": why_no_nccl}, "env": facts["env"]}
        what = {"collective": "allreduce", "op": "sum", "dtype": DTYPE, "memory": "gpu" if args.gpu else "host"}
        statistic = "median over rounds of the slowest rank's time"
        made = jobs.document(head, rows, [], began, ranks=world.size, statistic=statistic, **what, **facts)
        jobs.write(args.output, made)
    if any(count for row in rows for count in row["wrong"].values()):
        raise SystemExit("wrong sums")


if __name__ == "__main__":
    main()
