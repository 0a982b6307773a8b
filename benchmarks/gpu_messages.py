"""Messages between GPUs beside NCCL's: ``mpirun -np 2 python benchmarks/gpu_messages.py -o FILE``.

torch's ``batch_isend_irecv``, and ``send`` and ``recv``, of plain bfloat16 tensors, in a group of backend ``blink`` and
in one of NCCL, in the same processes and in turn. ``exchange``: every rank sends to the next one and receives from the
one before, in a batch. ``one way``: each even rank sends to the next one. ``alltoallv``: ``all_to_all_single`` with
split sizes of which one is three times another, always the same, and ``alltoallv, new lengths``: others in each turn.
``experts``: what expert parallelism does around its experts, of tokens of 7168 elements, each for one expert by chance,
of which a GPU has 8. They go there and back. Ours has the counts in GPU memory, NCCL's ranks exchange them first and
wait for them on the host. On a stream, and in a CUDA graph that is replayed; also the host's time to put a turn on its
streams. A time is the slowest rank's; medians of the repeats are written.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
BLOCKS = (8, *(1 << exponent for exponent in range(12, 29, 4)))  # bytes that a rank sends in an alltoallv
VARIANTS = 64  # of lengths, in turn
TOKENS, COLUMNS, EXPERTS = (16, 64, 256, 1024, 4096), 7168, 8  # of a rank; of a token; of a GPU
Ways = dict[str, Callable[[], None]]


class Pattern:
    """What is sent and received in a turn, by the groups of two backends."""

    def __init__(self, torch: Any, groups: dict[str, Any], rank: int, n: int, nbytes: int, *, both: bool) -> None:
        self.dist, self.rank, self.n, self.both = torch.distributed, rank, n, both
        self.right, self.left = (rank + 1) % n, (rank - 1) % n
        count = max(nbytes // 2, 1)
        self.sent = torch.full((count,), rank + 1.0, dtype=torch.bfloat16, device="cuda")
        self.got, self.last = torch.zeros_like(self.sent), 0
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


class Alltoallv:
    """Parts of a tensor to all ranks, and from all.

    Args:
        variants: of lengths, which turns take one after another.
    """

    def __init__(self, torch: Any, groups: dict[str, Any], rank: int, n: int, nbytes: int, variants: int) -> None:
        self.dist, self.last = torch.distributed, 0
        count = max(nbytes // 2, 1)
        sent = torch.full((count,), rank + 1.0, dtype=torch.bfloat16, device="cuda")
        self.got = torch.zeros(2 * count, dtype=torch.bfloat16, device="cuda")
        self.turns = []
        for variant in range(variants):
            mine = [self.part(count, n, rank, other, variant) for other in range(n)]
            theirs = [self.part(count, n, other, rank, variant) for other in range(n)]
            self.turns.append((self.got[: sum(theirs)], sent[: sum(mine)], theirs, mine))
        self.next = {name: itertools.cycle(range(variants)) for name in groups}
        self.ways: Ways = {
            name: lambda name=name, group=group: self.turn(name, group) for name, group in groups.items()
        }  # type: ignore[misc]

    @staticmethod
    def part(count: int, n: int, source: int, target: int, variant: int) -> int:
        """Elements from a rank to another."""
        weight = 3 if (source + target) % 2 else 1
        whole = sum(3 if k % 2 else 1 for k in range(source, source + n))
        return max(0, count * weight // whole - variant * (1 + target))

    def turn(self, name: str, group: Any) -> None:
        """One exchange; the current stream waits for it."""
        self.last = next(self.next[name])
        self.dist.all_to_all_single(*self.turns[self.last], group=group)

    def wrong(self) -> int:
        """Elements of the last turn that are not what was sent."""
        got, _, theirs, _ = self.turns[self.last]
        parts = got.split(theirs)
        return sum(int((part != source + 1).sum()) for source, part in enumerate(parts))


class Experts:
    """Tokens to the ranks of their experts, and back."""

    def __init__(self, torch: Any, groups: dict[str, Any], rank: int, n: int, tokens: int) -> None:
        self.torch, self.dist, self.n = torch, torch.distributed, n
        draw = torch.Generator().manual_seed(rank)
        experts = torch.randint(EXPERTS * n, (tokens,), generator=draw)
        self.counts = torch.bincount(experts // EXPERTS, minlength=n).cuda()  # the tokens lie in this order
        self.sent = torch.full((tokens, COLUMNS), rank + 1.0, dtype=torch.bfloat16, device="cuda")
        self.there = torch.zeros((n * tokens, COLUMNS), dtype=torch.bfloat16, device="cuda")
        self.got, self.last = torch.zeros_like(self.sent), 0
        self.told, self.back = torch.zeros_like(self.counts), torch.zeros_like(self.counts)
        self.comm, self.nccl = groups[OURS].comm, groups[NCCL]
        self.ways: Ways = {OURS: self.ours, NCCL: self.theirs}

    def ours(self) -> None:
        """The counts stay in GPU memory."""
        counts, stream = self.counts * COLUMNS, self.torch.cuda.current_stream()
        self.comm.Alltoallv([self.sent, counts], [self.there, self.told], stream=stream)
        self.comm.Alltoallv([self.there, self.told], [self.got, self.back], stream=stream)

    def theirs(self) -> None:
        """The host needs the counts."""
        self.dist.all_to_all_single(self.told, self.counts, group=self.nccl)
        told, mine = self.torch.stack([self.told, self.counts]).tolist()
        there = self.there[: sum(told)]
        self.dist.all_to_all_single(there, self.sent, told, mine, group=self.nccl)
        self.dist.all_to_all_single(self.got, there, mine, told, group=self.nccl)

    def wrong(self) -> int:
        """Elements of tokens that did not come back as they went."""
        return int((self.got != self.sent).sum())


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


def row_of(
    world: Any, torch: Any, name: str, pattern: Pattern | Alltoallv | Experts, nbytes: int, captured: Sequence[str]
) -> dict[str, Any]:
    """The times of a pattern and length, of each backend in turn.

    Args:
        captured: the backends whose turn can be.
    """
    calls = max(2, min(MOST_CALLS, int(SECONDS * RATE / max(nbytes, 1))))
    graphs = {way: graph_of(torch, pattern.ways[way], calls) for way in captured}
    ends = pattern.last  # of the graphs, all of which have as many turns
    found: dict[str, dict[str, list[float]]] = {
        kind: {way: [] for way in (captured if kind == "graph_us" else pattern.ways)}
        for kind in ("us", "graph_us", "host_us")
    }
    wrong = 0
    for _ in range(REPEATS):
        for way, turn in pattern.ways.items():
            pattern.got.zero_()
            many = lambda turn=turn: [turn() for _ in range(calls)]  # noqa: E731
            found["us"][way].append(slowest_us(world, torch, many, calls))
            wrong += pattern.wrong() if way == OURS else 0
            if way in graphs:
                pattern.got.zero_()
                found["graph_us"][way].append(slowest_us(world, torch, graphs[way].replay, calls))
                pattern.last = ends
                wrong += pattern.wrong() if way == OURS else 0
            found["host_us"][way].append(host_us(world, torch, turn))
    medians = {kind: {way: statistics.median(us) for way, us in of.items()} for kind, of in found.items()}
    spread = {way: sorted(us)[:: REPEATS - 1] for way, us in found["us"].items()}
    row = {"pattern": name, "bytes": nbytes, "calls": calls, **medians}
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
    given, both_ways = (torch, groups, world.rank, world.size), (OURS, NCCL)
    for name, pattern, nbytes in patterns(given):
        rows.append(row_of(world, torch, name, pattern, nbytes, [OURS] if name == "experts" else both_ways))
        if world.rank == 0:
            print(text_of(rows[-1]), flush=True)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    facts: dict[str, Any] = {
        "gpu": {"name": comm.gpu.name, **comm.gpu.versions, "torch": torch.__version__, "NCCL": nccl}
    }
    facts |= jobs.rank_facts(mpi, comm)
    dist.destroy_process_group()
    return rows, facts


def patterns(given: tuple[Any, Any, int, int]) -> Iterator[tuple[str, Pattern | Alltoallv | Experts, int]]:
    """The patterns and their lengths; each is made when its turn has come.

    Args:
        given: torch, the groups, this rank and how many there are.
    """
    for both, nbytes in itertools.product((True, False), SIZES):
        yield "exchange" if both else "one way", Pattern(*given, nbytes, both=both), nbytes
    for variants, nbytes in itertools.product((1, VARIANTS), BLOCKS):
        yield "alltoallv" if variants == 1 else "alltoallv, new lengths", Alltoallv(*given, nbytes, variants), nbytes
    for tokens in TOKENS:
        yield "experts", Experts(*given, tokens), 2 * COLUMNS * tokens


def text_of(row: dict[str, Any]) -> str:
    """A row, as it is printed."""
    parts = []
    for kind in ("us", "graph_us", "host_us"):
        ours, theirs = row[kind][OURS], row[kind].get(NCCL)
        beside = "" if theirs is None else f", NCCL {theirs:.1f}, {theirs / ours:.2f} x"
        parts.append(f"{kind} {ours:.1f}{beside}")
    return f"{row['pattern']} {row['bytes']}: {'; '.join(parts)}; {row['wrong']} wrong"


if __name__ == "__main__":
    jobs.measure_on_ranks(
        __doc__, "gpu_messages", {"repeats": REPEATS, "dtype": "bfloat16"}, measured, compare=[NCCL],
        statistic="median over repeats of the slowest rank's time of a turn",
    )  # fmt: skip
