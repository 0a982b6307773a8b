"""Messages between GPUs beside NCCL's: ``mpirun -np 2 python benchmarks/gpu_messages.py -o FILE``.

torch's ``batch_isend_irecv``, and ``send`` and ``recv``, of plain bfloat16 tensors, in a group of backend ``blink`` and
in one of NCCL, in the same processes and in turn. ``exchange``: every rank sends to the next one and receives from the
one before, in a batch. ``one way``: each even rank sends to the next one. On a stream, and in a CUDA graph that is
replayed; also the host's time to put a turn on its streams. A time is the slowest rank's; medians of the repeats are
written.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import jobs
from benchmarks.host_time import process_group

SIZES = (8, *(1 << exponent for exponent in range(12, 29, 2)))  # bytes
REPEATS, SECONDS = 15, 0.004  # of each way; what a repeat takes about
MOST_CALLS, HOST_CALLS = 100, 50
RATE = 3e11  # bytes a second, for how many calls a repeat has
MICRO = 1e6
OURS, NCCL = "ours", "nccl"
Ways = dict[str, Callable[[], None]]


class Pattern:
    """What is sent and received in a turn, by the groups of two backends."""

    def __init__(self, torch: Any, groups: dict[str, Any], rank: int, n: int, nbytes: int, *, both: bool) -> None:
        self.dist, self.rank, self.n, self.both = torch.distributed, rank, n, both
        self.right, self.left = (rank + 1) % n, (rank - 1) % n
        count = max(nbytes // 2, 1)
        self.sent = torch.full((count,), rank + 1.0, dtype=torch.bfloat16, device="cuda")
        self.got = torch.zeros_like(self.sent)
        self.ways: Ways = {name: lambda group=group: self.turn(group) for name, group in groups.items()}  # type: ignore[misc]

    def turn(self, group: Any) -> None:
        """All messages of a turn; the current stream waits for them."""
        dist = self.dist
        if self.both:
            ops = [
                dist.P2POp(dist.isend, self.sent, self.right, group=group),
                dist.P2POp(dist.irecv, self.got, self.left, group=group),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        elif self.rank % 2:
            dist.recv(self.got, self.left, group=group)
        elif self.right > self.rank:
            dist.send(self.sent, self.right, group=group)

    def wrong(self) -> int:
        """Elements of the last turn that are not what was sent."""
        if not self.both and not self.rank % 2:
            return 0
        return int((self.got != self.left + 1).sum())


def slowest_us(world: Any, torch: Any, call: Callable[[], None], calls: int) -> float:
    """Microseconds of the GPU for one of some calls that were put on its stream together."""
    torch.cuda.synchronize()
    world.Barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(max(world.allgather(begin.elapsed_time(end)))) * 1e3 / calls


def graph_of(torch: Any, turn: Callable[[], None], calls: int) -> Any:
    """A graph of some turns."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        turn()  # what the first one loads may not be captured
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                turn()
    return graph


def host_us(world: Any, torch: Any, turn: Callable[[], None]) -> float:
    """Microseconds of the host to put a turn on its streams."""
    torch.cuda.synchronize()
    world.Barrier()
    begin = time.perf_counter()
    for _ in range(HOST_CALLS):
        turn()
    took = (time.perf_counter() - begin) / HOST_CALLS * MICRO
    torch.cuda.synchronize()
    return float(max(world.allgather(took)))


def row_of(world: Any, torch: Any, groups: dict[str, Any], nbytes: int, *, both: bool) -> dict[str, Any]:
    """The times of a pattern and length, of each backend in turn."""
    pattern = Pattern(torch, groups, world.rank, world.size, nbytes, both=both)
    calls = max(2, min(MOST_CALLS, int(SECONDS * RATE / max(nbytes, 1))))
    graphs = {name: graph_of(torch, turn, calls) for name, turn in pattern.ways.items()}
    found: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in groups} for kind in ("us", "graph_us", "host_us")
    }
    wrong = 0
    for _ in range(REPEATS):
        for name, turn in pattern.ways.items():
            pattern.got.zero_()
            many = lambda turn=turn: [turn() for _ in range(calls)]  # noqa: E731
            found["us"][name].append(slowest_us(world, torch, many, calls))
            wrong += pattern.wrong() if name == OURS else 0
            pattern.got.zero_()
            found["graph_us"][name].append(slowest_us(world, torch, graphs[name].replay, calls))
            wrong += pattern.wrong() if name == OURS else 0
            found["host_us"][name].append(host_us(world, torch, turn))
    medians = {kind: {name: statistics.median(us) for name, us in of.items()} for kind, of in found.items()}
    spread = {name: sorted(us)[:: REPEATS - 1] for name, us in found["us"].items()}
    row = {"pattern": "exchange" if both else "one way", "bytes": nbytes, "calls": calls, **medians}
    return {**row, "range_us": spread, "wrong": world.allreduce(wrong)}


def measured(world: Any, mpi: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each pattern and length, and the facts of the job."""
    import torch

    from blinkmpi.torch.torch_extension import wait

    device = world.rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    dist = process_group(world, torch, device)
    ours = dist.new_group(backend="blink")
    comm = ours.comm  # collective
    wait()
    groups = {OURS: ours, NCCL: dist.group.WORLD}
    rows = []
    for both, nbytes in itertools.product((True, False), SIZES):
        rows.append(row_of(world, torch, groups, nbytes, both=both))
        if world.rank == 0:
            print(text_of(rows[-1]), flush=True)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    facts: dict[str, Any] = {
        "gpu": {"name": comm.gpu.name, **comm.gpu.versions, "torch": torch.__version__, "NCCL": nccl}
    }
    facts |= jobs.rank_facts(mpi, comm)
    dist.destroy_process_group()
    return rows, facts


def text_of(row: dict[str, Any]) -> str:
    """A row, as it is printed."""
    parts = [f"{kind} {of[OURS]:.1f}, NCCL {of[NCCL]:.1f}, {of[NCCL] / of[OURS]:.2f} x" for kind, of in
             ((kind, row[kind]) for kind in ("us", "graph_us", "host_us"))]  # fmt: skip
    return f"{row['pattern']} {row['bytes']}: {'; '.join(parts)}; {row['wrong']} wrong"


if __name__ == "__main__":
    jobs.measure_on_ranks(
        __doc__, "gpu_messages", {"repeats": REPEATS, "dtype": "bfloat16"}, measured, compare=[NCCL],
        statistic="median over repeats of the slowest rank's time of a turn",
    )  # fmt: skip
