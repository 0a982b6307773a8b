"""A matrix product beside an AllReduce, ours and NCCL's: ``mpirun -np 2 python benchmarks/beside_compute/measure.py``.

On each GPU, products of bfloat16 matrices on one stream and AllReduces in place on another: the products alone, the
calls alone, and both together, by either library in turn, with the same limit of CTAs (``max_ctas=`` of a Communicator;
``min_ctas`` and ``max_ctas`` of NCCL's communicator). A kernel holds both streams back until the host has put all of a
lap on them, and one short call of the library then brings the ranks together, so no time has a part of the host's in
it. Times are CUDA's events'; ``rows.py`` says what is made of them. Sums and products are checked.
"""

import argparse
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import jobs
from benchmarks.beside_compute.rows import BLOCK_S, Lap, Marks, Side, amounts, each_s, marked, row, shown, slowest
from benchmarks.host_time import free_port

ITEM = {"float32": 4, "bfloat16": 2}
EDGES = (8192, 2048)  # of the matrices
MIB = (16, 64, 256)
CTAS = (0, 16, 8, 32)  # 0: each library's default
REPEATS, WARMUP_LAPS, TRIAL = 5, 1, 10
SECONDS = 150.0  # after which no further vector is begun
WARMUP_CALLS = 40  # after which ours has found the chunks of a size
GATE_S, LONGEST_GATE_S = 2e-3, 50e-3  # that streams are held back
GATE_CYCLES = 4_000_000  # of the trial that finds how long a cycle is
MEETING = 256  # elements of the call that brings the ranks together
TOLERANCE = 1e-2  # of a product's elements, as a part of the largest

Run = Callable[[], object]


class Work(NamedTuple):
    """What a lap has on a stream: one of these after another."""

    run: Run
    times: int


class Library(NamedTuple):
    """One that sums: its call on a tensor, which goes on the current stream, and what is known of its kernels."""

    call: Callable[[Any], object]
    about: Callable[[str, int], dict[str, Any]]  # of a type and a number of bytes
    close: Callable[[], object]


class Clock:
    """The two streams of this rank's GPU, and laps on them."""

    def __init__(self, torch: Any, world: Any, *, high_priority: bool) -> None:
        self.cuda, self.world = torch.cuda, world
        self.products = torch.cuda.Stream()
        self.calls = torch.cuda.Stream(priority=-1 if high_priority else 0)
        self.gate_s, self.late = GATE_S, 0
        with self.cuda.stream(self.calls):
            begin = self._event()
            self.cuda._sleep(GATE_CYCLES)
            end = self._event()
        self.cuda.synchronize()
        self.cycles = GATE_CYCLES / (begin.elapsed_time(end) / 1e3)  # in a second

    def lap(self, product: Work | None, call: Work | None, meet: Run | None = None) -> Lap:
        """Put the work on both streams, let them go together, and wait; of this rank.

        Args:
            meet: a short call that ends on all ranks at once.
        """
        self.cuda.synchronize()
        self.world.Barrier()
        began = time.perf_counter()
        with self.cuda.stream(self.calls):
            self.cuda._sleep(int(self.gate_s * self.cycles))
            if meet is not None:
                meet()
            begin = self._event()
        self.products.wait_event(begin)
        put = [self._put(stream, work) for stream, work in ((self.products, product), (self.calls, call))]
        self.late += bool(begin.query())
        self.gate_s = min(LONGEST_GATE_S, max(self.gate_s, 2 * (time.perf_counter() - began)))
        self.cuda.synchronize()
        return Lap(*(tuple((i, begin.elapsed_time(at) / 1e3) for i, at in marks) for marks in put))

    def seconds(self, work: Run, *, on_calls: bool, meet: Run | None = None) -> float:
        """Seconds of one of several alike, alone, of the slowest rank."""
        many = Work(work, TRIAL)
        found = self.lap(None, many, meet).calls if on_calls else self.lap(many, None, meet).products
        return each_s([slowest_of(self.world, found)])

    def _put(self, stream: Any, work: Work | None) -> list[tuple[int, Any]]:
        """Put the work on a stream; an event at each mark."""
        found: list[tuple[int, Any]] = []
        if work is not None:
            due = set(marked(work.times))
            with self.cuda.stream(stream):
                for i in range(1, work.times + 1):
                    work.run()
                    if i in due:
                        found.append((i, self._event()))
        return found

    def _event(self) -> Any:
        """An event behind all that is on the current stream."""
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return event


def slowest_of(world: Any, marks: Marks) -> Marks:
    """The marks of the slowest rank."""
    return slowest([Lap((), one) for one in world.allgather(marks)]).calls


class Product:
    """A product of two square matrices, of whose result is known what it is."""

    def __init__(self, torch: Any, edge: int, device: Any) -> None:
        self.edge, self._mm = edge, torch.mm
        self.a, self.b = (torch.randn(edge, edge, device=device).to(torch.bfloat16) for _ in range(2))
        self.result = torch.empty_like(self.a)
        self()
        self.right = self.result.clone()

    def __call__(self) -> None:
        self._mm(self.a, self.b, out=self.result)

    def wrong(self) -> int:
        """Elements of the result that are wrong."""
        right = self.right.float()
        return int(((self.result.float() - right).abs() > TOLERANCE * right.abs().max()).sum())


def ours(world: Any, mpi: Any, memory: Any, stream: Any, max_ctas: int, *, registered: bool) -> Library:
    """A Communicator with this limit; ``memory`` is what calls work on."""
    from blinkmpi import Communicator
    from blinkmpi.runtime.inspection import choice

    comm = Communicator(world, max_ctas=max_ctas or None, stream="current")
    if registered:
        comm.register(memory)

    def about(dtype: str, nbytes: int) -> dict[str, Any]:
        found = choice(comm.context, "allreduce", nbytes, dtype=dtype, op="sum", registered=registered)
        return {name: found[name] for name in ("scheme", "protocol", "ctas")}

    return Library(lambda x: comm.Allreduce(mpi.IN_PLACE, x, stream=stream), about, comm.Free)


def nccl(dist: Any, log: Path, max_ctas: int, *, high_priority: bool) -> Library:
    """A process group of NCCL with as many CTAs, neither more nor fewer; what it has made of that is in its log."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    if max_ctas:
        options.config.min_ctas = options.config.max_ctas = max_ctas
    group = dist.new_group(backend="nccl", pg_options=options)
    known = len(text_of(log))

    def about(dtype: str, nbytes: int) -> dict[str, Any]:
        return {"channels": channels(text_of(log)[known:])}

    return Library(lambda x: dist.all_reduce(x, group=group), about, lambda: dist.destroy_process_group(group))


def text_of(log: Path) -> str:
    """What NCCL has written so far."""
    return log.read_text(errors="replace") if log.exists() else ""


def channels(log: str) -> int | None:
    """How many channels, and so CTAs, the newest communicator of a log has for its collectives."""
    found = re.findall(r"(\d+) coll channels", log)
    return int(found[-1]) if found else None


class Bench:
    """What all rows have in common."""

    def __init__(self, torch: Any, world: Any, clock: Clock, *, repeats: int) -> None:
        self.torch, self.world, self.clock, self.repeats = torch, world, clock, repeats

    def rows_of(
        self, libraries: dict[str, Library], x: Any, products: Sequence[Product], **about: Any
    ) -> list[dict[str, Any]]:
        """The rows of a tensor, one for each of the products."""
        meeting = self.torch.zeros(MEETING, device=x.device)
        calls = {name: partial(library.call, x) for name, library in libraries.items()}
        meets = {name: partial(library.call, meeting) for name, library in libraries.items()}
        found = []
        for name in libraries:
            with self.torch.cuda.stream(self.clock.calls):
                for _ in range(WARMUP_CALLS):
                    calls[name]()
                    meets[name]()
            self.torch.cuda.synchronize()
        call_s = max(self.clock.seconds(calls[name], on_calls=True, meet=meets[name]) for name in libraries)
        for product in products:
            counts = amounts(self.clock.seconds(product, on_calls=False), call_s)
            alone, laps = self._laps(product, calls, meets, counts)
            wrong = {name: self._wrong(product, x, calls[name], meets[name]) for name in libraries}
            told = {name: library.about(about["dtype"], about["bytes"]) for name, library in libraries.items()}
            sides = {name: Side(*laps[name], wrong[name], told[name]) for name in libraries}
            found.append(row(alone, sides, edge=product.edge, **about))
        return found

    def _laps(
        self, product: Product, calls: Mapping[str, Run], meets: Mapping[str, Run], counts: tuple[int, int]
    ) -> tuple[list[Lap], dict[str, tuple[list[Lap], list[Lap]]]]:
        """Laps of the slowest rank: of the products alone, and of each library alone and beside them, in turn."""
        many = Work(product, counts[0])
        turn: dict[tuple[str, str], Callable[[], Lap]] = {("product", ""): partial(self.clock.lap, many, None)}
        for name, call in calls.items():
            for kind, other in (("alone", None), ("beside", many)):
                turn[name, kind] = partial(self.clock.lap, other, Work(call, counts[1]), meets[name])
        found: dict[tuple[str, str], list[Lap]] = {key: [] for key in turn}
        for i in range(WARMUP_LAPS + self.repeats):
            for key, lap in turn.items():
                measured = lap()
                if i >= WARMUP_LAPS:
                    found[key].append(measured)
        of_all = {key: [slowest(same) for same in zip(*self.world.allgather(laps), strict=True)]
                  for key, laps in found.items()}  # fmt: skip
        return of_all["product", ""], {name: (of_all[name, "alone"], of_all[name, "beside"]) for name in calls}

    def _wrong(self, product: Product, x: Any, call: Run, meet: Run) -> int:
        """Wrong elements of a sum and of the products beside it, on all ranks; x is zeros again then."""
        n = self.world.size
        x.fill_(self.world.rank + 1)
        product.result.zero_()
        self.clock.lap(Work(product, 2), Work(call, 1), meet)
        wrong = int((x != n * (n + 1) / 2).sum()) + product.wrong()
        x.zero_()
        return int(self.world.allreduce(wrong))


def measured(
    torch: Any, world: Any, mpi: Any, device: Any, log: Path, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[str], dict[str, Any]]:
    """All rows, what there was no time for, and the facts of the laps."""
    end = time.monotonic() + options.seconds
    clock = Clock(torch, world, high_priority=options.high_priority)
    bench = Bench(torch, world, clock, repeats=options.repeats)
    with torch.cuda.stream(clock.products):
        products = [Product(torch, edge, device) for edge in options.edges]
    memory = torch.zeros(max(options.mib) << 20, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for ctas in options.ctas:
        mine = ours(world, mpi, memory, clock.calls, ctas, registered=not options.plain)
        theirs = nccl(torch.distributed, log, ctas, high_priority=options.high_priority)
        for dtype, mib in itertools.product(options.dtypes, options.mib):
            if world.bcast(time.monotonic() > end):
                failed.append(f"{ctas or 'default'} CTAs, {dtype}, {mib} MiB: not begun after {options.seconds:.0f} s")
                continue
            x = memory[: mib << 20].view(getattr(torch, dtype))
            about = {"dtype": dtype, "bytes": mib << 20, "max_ctas": ctas or None}
            found = bench.rows_of({"ours": mine, "nccl": theirs}, x, products, **about)
            rows += found
            if world.rank == 0:
                print("\n".join(map(shown, found)), flush=True)
        torch.cuda.synchronize()
        mine.close()
        theirs.close()
    return rows, failed, {"late_laps": world.allreduce(clock.late), "gate_us": max(world.allgather(clock.gate_s)) * 1e6}


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--edges", type=int, nargs="+", default=EDGES, metavar="N", help="products of N x N matrices")
    parser.add_argument("--mib", type=int, nargs="+", default=MIB, metavar="N", help="MiB of an AllReduce")
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(ITEM), default=list(ITEM), metavar="T", help="of AllReduces"
    )
    parser.add_argument("--ctas", type=int, nargs="+", default=CTAS, metavar="N", help="limits; 0: the default of each")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin nothing after so long")
    parser.add_argument("--high-priority", action="store_true", help="the stream of the calls has a high priority")
    parser.add_argument("--plain", action="store_true", help="tensors that are not registered")
    parser.add_argument("-o", "--output", help="write the result as JSON under this name, or one beside it if taken")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, and let rank 0 write."""
    options = parsed()
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        log = Path(folder) / "nccl.log"
        os.environ.update(jobs.NCCL_LOG, NCCL_DEBUG_FILE=str(log))  # which NCCL reads when it is loaded
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        rows = run(options, log)
    if any(one["wrong"] for found in rows for one in found["libraries"].values()):
        raise SystemExit("wrong results")


def run(options: argparse.Namespace, log: Path) -> list[dict[str, Any]]:
    """The job of this rank; the rows."""
    import torch
    from mpi4py import MPI

    from blinkmpi import Communicator

    began, world = datetime.now().astimezone(), MPI.COMM_WORLD
    with Communicator(world) as comm:
        if comm.gpu is None:
            raise SystemExit(f"no GPUs: {comm.context.why_no_gpus}")
        device = torch.device("cuda", comm.gpu.device)
        facts = jobs.rank_facts(MPI, comm)
        gpu = {"name": comm.gpu.name, **comm.gpu.versions, "torch": torch.__version__}
    torch.cuda.set_device(device)
    where = f"tcp://127.0.0.1:{world.bcast(free_port() if world.rank == 0 else None)}"
    torch.distributed.init_process_group("nccl", init_method=where, rank=world.rank, world_size=world.size)
    rows, failed, laps = measured(torch, world, MPI, device, log, options)
    facts["gpu"] = {**gpu, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    torch.distributed.destroy_process_group()
    if world.rank == 0 and failed:
        print("\n".join(failed), flush=True)
    if world.rank == 0 and options.output:
        about = {"repeats": options.repeats, "block_seconds": BLOCK_S, **laps, "registered": not options.plain,
                 "high_priority": options.high_priority}  # fmt: skip
        what = {"collective": "allreduce", "op": "sum", "compare": ["nccl"], "memory": "gpu", "ranks": world.size}
        statistic = "median over laps of the slowest rank's time"
        head = {"beside_compute": about, "env": facts["env"]}
        jobs.write(options.output, jobs.document(head, rows, failed, began, statistic=statistic, **what, **facts))
    return rows


if __name__ == "__main__":
    main()
