"""What a message costs besides its bytes: ``mpirun -np 2 python benchmarks/message_cost.py [--gpus] [-o FILE]``.

Vectors of some kilobytes cross from rank 0 to rank 1 through slots of one channel, in chunks of several sizes. The time
of one chunk more, in a stream of them, is the chunk's bytes over a rate and a time that has nothing to do with bytes:
the message's. It is what a step of a schedule keeps its rank (or, on a GPU, its thread groups) busy for. The difference
between an AllReduce and a Broadcast of one small chunk is the time of one hop more, from rank to rank.

With ``BLINKMPI_NODES=1+1`` the two ranks are of two nodes, and the chunks are MPI messages.
"""

import argparse
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from msgspec.structs import replace  # noqa: E402

from benchmarks import jobs  # noqa: E402
from blinkmpi.planning.plan import Plan, Rule  # noqa: E402
from blinkmpi.trees.tree import Collective  # noqa: E402

CHUNKS = (256, 512, 1024, 2048, 4096)  # bytes
COUNTS = (64, 320)  # chunks of a vector
DEPTH = 8  # slots of a channel
REPEATS, CALLS = 15, 20  # the least of so many times, of so many calls each
MICRO = 1e6


def with_chunks(plan: Plan, chunk: int) -> Plan:
    """The plan with one rule for each collective: slots of ``chunk`` bytes, one thread group for each stage."""
    rules: list[Rule] = []
    collectives: tuple[Collective, ...] = ("broadcast", "allreduce")
    for collective in collectives:
        scheme = plan.schemes(collective, 0 if collective == "broadcast" else -1)[0]
        rules.append(Rule(collective, 0, scheme, chunk, DEPTH, "to be measured", ctas=1))
    return replace(plan, rules=tuple(rules))


class Clock:
    """Seconds of a call of one of the collectives on a vector, on the slowest rank: the least of the repeats."""

    def __init__(self, world: Any, comm: Any, *, gpus: bool) -> None:
        self.world, self.comm, self.gpus = world, comm, gpus

    def seconds(self, collective: str, nbytes: int) -> float:
        """Seconds of one call."""
        if self.gpus:
            import cupy as xp
        else:
            import numpy as xp
        vector, result = xp.ones(nbytes // 4, "float32"), xp.empty(nbytes // 4, "float32")

        def call(**stream: Any) -> None:
            if collective == "broadcast":
                self.comm.Bcast(vector, root=0, **stream)
            else:
                self.comm.Allreduce(vector, result, **stream)

        run = self._graph(call) if self.gpus else lambda: [call() for _ in range(CALLS)]
        found = []
        for _ in range(REPEATS):
            self.world.Barrier()
            start = time.perf_counter()
            run()
            found.append((time.perf_counter() - start) / CALLS)
        expected = 1 if collective == "broadcast" else self.world.size
        right = bool((vector == 1).all()) and (collective == "broadcast" or bool((result == expected).all()))
        if not self.world.allreduce(int(right)) == self.world.size:
            raise SystemExit(f"{collective} of {nbytes} bytes is wrong")
        return min(max(times) for times in zip(*self.world.allgather(found), strict=True))

    def _graph(self, call: Callable[..., None]) -> Callable[[], None]:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        call(stream=stream)
        stream.synchronize()
        stream.begin_capture()
        for _ in range(CALLS):
            call(stream=stream)
        graph = stream.end_capture()

        def run() -> None:
            graph.launch(stream)
            stream.synchronize()

        run()
        return run


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The intercept and slope of the straight line nearest to these points (least squares)."""
    n = len(points)
    mx, my = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    slope = sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)
    return my - slope * mx, slope


def measured(world: Any, *, gpus: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each chunk size, and what they say about a message and a hop, with the facts of the job."""
    import blinkmpi

    comm = blinkmpi.Communicator(world)
    comm.plan("broadcast")
    plan = comm.plan("allreduce")
    machine = None if gpus else comm.machine  # a CPU machine's rates are measured anew each time
    facts = jobs.rank_facts(sys.modules["mpi4py.MPI"], comm)
    facts["device"] = comm.gpu.name if gpus and comm.gpu else "cpu"
    comm.Free()
    rows: list[dict[str, Any]] = []
    for chunk in CHUNKS:
        comm = blinkmpi.Communicator(world, topology=machine, plan=with_chunks(plan, chunk), deterministic=True)
        clock = Clock(world, comm, gpus=gpus)
        few, many = (clock.seconds("broadcast", chunk * count) for count in COUNTS)
        hop = median(clock.seconds("allreduce", chunk) - clock.seconds("broadcast", chunk) for _ in range(3))
        one_more = (many - few) / (COUNTS[1] - COUNTS[0])
        rows.append({"chunk_bytes": chunk, "chunks": COUNTS, "call_us": [few * MICRO, many * MICRO],
                     "chunk_us": one_more * MICRO, "hop_us": hop * MICRO})  # fmt: skip
        comm.Free()
    message, per_byte = line([(row["chunk_bytes"], row["chunk_us"]) for row in rows])
    return rows, {**facts, "message_us": message, "gbps": 1e-3 / per_byte, "hop_us": rows[0]["hop_us"]}


def main() -> None:
    """Measure, and let rank 0 print and write."""
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--gpus", action="store_true", help="between two GPUs")
    parser.add_argument("-o", "--output", help="write the result as JSON under this name, or one beside it if taken")
    options = parser.parse_args()
    began, world = datetime.now().astimezone(), MPI.COMM_WORLD
    rows, found = measured(world, gpus=options.gpus)
    if world.rank == 0:
        for row in rows:
            print(f"{row['chunk_bytes']:6} bytes: {row['chunk_us']:7.3f} us a chunk, {row['hop_us']:7.3f} us a hop")
        print(f"a message {found['message_us']:.3f} us, then {found['gbps']:.1f} GB/s")
        if options.output:
            jobs.write(options.output, jobs.document({"depth": DEPTH, "calls": CALLS}, rows, [], began, **found))


if __name__ == "__main__":
    main()
