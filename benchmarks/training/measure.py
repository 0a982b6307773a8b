"""Training by DDP over each library in turn: ``mpirun -np 2 python benchmarks/training/measure.py -o NAME``.

Copies of one model are trained side by side, each by ``DistributedDataParallel`` over another library: on CPU ranks
torch's group of backend blink, its group of gloo, and MPI's own Allreduce (in a communication hook); with ``--gpu``
backend blink, backend blink with ``blinkmpi.torch.ddp_hook``, the same with DDP's buckets in a memory pool
(``registered``), NCCL's group, and a hook by which NCCL averages a bucket (``nccl_hook``). They take turns, each round
in another order, so what the machine does beside them meets all alike. On GPUs a turn is some steps that nothing waits
for in between, as in training. Another copy takes steps without communication (``no_sync``). A row has a step's time,
what communication adds to it (exposed), and what communication takes alone, with nothing to hide behind. A turn takes
as long as on the slowest rank, a number is the median over turns, and the step of each turn is kept (``turns_ms``), so
that libraries can be compared round by round. The copies must end with the same weights.

``--emulated 0,1`` trains over the links of these GPUs of a DGX-1V instead, which the kernels pace: by ``ddp_hook`` of a
Communicator with Blink's plan of that part of the machine, and with the rings and the trees that NCCL builds there
(between two ranks the ring; among more, as ``emulated.py`` has kept them).

``--gradients`` also records when each gradient is ready; ``figure.py`` simulates other machines from that.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import jobs
from benchmarks.emulated import MACHINE, PACED, UNIT_MBPS, emulated_part, kept_graphs

DTYPES = ("float32", "bfloat16")
MILLI = 1e3
WARMUP, REPEATS = 3, 11
RATE = 1e-3  # of learning
STEPS = 4  # of a turn, on GPUs
STEPS_TO_BUCKETS = 2  # DDP arranges its buckets anew at the second
POOL_BYTES = 12 << 30  # of a rank: a model, its gradients, and what two steps of one sample need
NONE = "no communication"


class Way(NamedTuple):
    """A library that averages gradients: DDP's group, its hook if it has one, and a call that sums one tensor.

    ``within`` is entered while the model is made and DDP arranges its buckets.
    """

    name: str
    group: Any
    hook: Callable[[Any, Any], Any] | None
    total: Callable[[Any], object]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def ways_of(torch: Any, mpi: Any, *, gpu: bool) -> list[Way]:
    """What is compared, on the ranks of this job; the first is ours."""
    dist, blink = torch.distributed, torch.distributed.group.WORLD

    def by(group: Any) -> Callable[[Any], object]:
        return lambda x: dist.all_reduce(x, group=group)

    ours = Way("blink", blink, None, by(blink))
    if gpu:
        from blinkmpi.torch import ddp_hook, memory, memory_pool

        memory_pool(POOL_BYTES)
        nccl, stream = dist.new_group(backend="nccl"), torch.cuda.current_stream()

        def total(x: Any) -> None:
            blink.comm.Allreduce(None, x, stream=stream)

        def averaged(state, bucket):  # type: ignore[no-untyped-def]
            work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group=nccl, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        averaged.__annotations__ = hook_annotations(torch)
        return [ours, Way("hook", blink, ddp_hook(), total), Way("registered", blink, ddp_hook(), total, memory),
                Way("nccl", nccl, None, by(nccl)), Way("nccl_hook", nccl, averaged, by(nccl))]  # fmt: skip
    gloo, world = dist.new_group(backend="gloo"), mpi.COMM_WORLD

    def summed(x: Any) -> None:
        world.Allreduce(mpi.IN_PLACE, x.numpy())

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        buffer, future = bucket.buffer(), torch.futures.Future()
        summed(buffer.div_(world.size))
        future.set_result(buffer)
        return future

    hook.__annotations__ = hook_annotations(torch)
    found = [ours, Way("gloo", gloo, None, by(gloo)), Way("mpi", gloo, hook, summed)]
    return found


def hook_annotations(torch: Any) -> dict[str, Any]:
    """What DDP asks of a hook."""
    return {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def emulated_ways(torch: Any, mpi: Any, gpus: str) -> list[Way]:
    """Our plan on a part of a DGX-1V, and what NCCL builds there; DDP's own group, for buffers, is not paced."""
    from benchmarks.lang.nccl_graphs import ring_allreduce
    from blinkmpi import Communicator
    from blinkmpi.torch import ddp_hook

    world, part, group = mpi.COMM_WORLD, emulated_part(gpus), torch.distributed.group.WORLD
    stream = torch.cuda.current_stream()
    algorithms: dict[str, list[Any]] = {"blink": []}
    if world.size == 2:
        algorithms["ring"] = [ring_allreduce(2, [(0, 1)])]
    else:
        graphs = kept_graphs(gpus, world.size)
        algorithms |= {name: [made(world.size, graphs[name])] for name, made in PACED.items()}

    def way(name: str) -> Way:
        comm = Communicator(world, topology=part, algorithms=algorithms[name])
        return Way(name, group, ddp_hook(comm), lambda x: comm.Allreduce(None, x, stream=stream))

    return [way(name) for name in algorithms]


class Copy:
    """A copy of the model, trained over one library."""

    def __init__(self, torch: Any, workload: Any, way: Way, dtype: Any, device: Any, batch: Sequence[Any]) -> None:
        torch.manual_seed(0)
        small = [part[:1] for part in batch]
        with way.within():
            model = workload.model().to(device, dtype)
            self.ddp = torch.nn.parallel.DistributedDataParallel(
                model, process_group=way.group, gradient_as_bucket_view=True
            )
            if way.hook is not None:
                self.ddp.register_comm_hook(None, way.hook)
            self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=RATE)
            for _ in range(STEPS_TO_BUCKETS):
                self.step(small, rate=0.0)

    def step(self, batch: Sequence[Any], *, alone: bool = False, rate: float = RATE) -> None:
        """One step; alone without communication, and with nothing learnt."""
        self.optimizer.param_groups[0]["lr"] = 0.0 if alone else rate
        with self.ddp.no_sync() if alone else nullcontext():
            self.ddp(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # gradients stay where DDP has put them

    def bucket_bytes(self) -> list[int]:
        """The gradients that DDP averages together, as it has arranged them after the first step."""
        told = self.ddp._get_ddp_logging_data()
        sizes = told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]
        return [int(size) for size in sizes.split(",")]


class Gradients(NamedTuple):
    """When gradients were ready: (elements, milliseconds since the step began), and when backward began."""

    backward_ms: float
    ready: list[tuple[int, float]]


def gradients(torch: Any, copy: Copy, batch: Sequence[Any], *, gpu: bool) -> Gradients:
    """The medians of some steps without communication."""
    model, found = copy.ddp.module, list[list[tuple[int, float]]]()
    begins: list[float] = []
    marks: list[tuple[int, Any]] = []

    def now() -> Any:
        if not gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    handles = [p.register_post_accumulate_grad_hook(lambda q: marks.append((q.numel(), now())))
               for p in model.parameters()]  # fmt: skip
    for _ in range(WARMUP + REPEATS):
        marks.clear()
        begin = now()
        loss = model(*batch)
        middle = now()
        loss.backward()
        model.zero_grad()
        if gpu:
            torch.cuda.synchronize()

        def since(mark: Any, begin: Any = begin) -> float:
            return float(begin.elapsed_time(mark) if gpu else (mark - begin) * MILLI)

        begins.append(since(middle))
        found.append([(count, since(mark)) for count, mark in marks])
    for handle in handles:
        handle.remove()
    kept = found[WARMUP:]
    ready = [(row[0][0], statistics.median(ms for _, ms in row)) for row in zip(*kept, strict=True)]
    return Gradients(statistics.median(begins[WARMUP:]), ready)


def measured(torch: Any, mpi: Any, workload: Any, dtype: Any, device: Any, ways: list[Way], *,
             repeats: int, seconds: float, with_gradients: bool) -> dict[str, Any]:  # fmt: skip
    """The row of a model: ``repeats`` rounds of turns, and more until they have taken ``seconds``."""
    world, gpu = mpi.COMM_WORLD, device.type == "cuda"
    wait = torch.cuda.synchronize if gpu else lambda: None
    batch = workload.batch(world.rank, device, dtype)
    copies = {way.name: Copy(torch, workload, way, dtype, device, batch) for way in ways}
    silent = Copy(torch, workload, ways[0], dtype, device, batch)
    turns = [(NONE, silent, True), *((name, copy, False) for name, copy in copies.items())]
    draw = random.Random(0)  # the same on all ranks
    steps: dict[str, list[float]] = {name: [] for name, *_ in turns}
    totals: dict[str, list[float]] = {way.name: [] for way in ways}

    def timed(call: Callable[[], object], count: int = 1) -> float:
        wait()
        world.Barrier()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        took = (time.perf_counter() - begin) * MILLI / count
        return float(world.allreduce(took, mpi.MAX))

    begin = time.perf_counter()
    while len(steps[NONE]) < WARMUP + repeats or world.bcast(time.perf_counter() - begin) < seconds:
        for name, copy, alone in draw.sample(turns, len(turns)):
            steps[name].append(timed(partial(copy.step, batch, alone=alone), STEPS if gpu else 1))
    ours = copies[ways[0].name]
    buckets = ours.bucket_bytes()
    difference = {name: world.allreduce(apart(ours, copy), mpi.MAX) for name, copy in copies.items()}
    seen = gradients(torch, ours, batch, gpu=gpu) if with_gradients else None
    parameters = sum(p.numel() for p in ours.ddp.parameters())
    buffers: dict[str, list[Any]] = {}
    for way in ways:
        with way.within():
            buffers[way.name] = [torch.zeros(size // dtype.itemsize, dtype=dtype, device=device) for size in buckets]

    def total(way: Way) -> None:
        for buffer in buffers[way.name]:
            way.total(buffer)

    for _ in range(WARMUP + repeats):
        for way in draw.sample(ways, len(ways)):
            totals[way.name].append(timed(partial(total, way)))
    compute = statistics.median(steps[NONE][WARMUP:])
    row: dict[str, Any] = {
        "model": workload.name, "dtype": str(dtype).removeprefix("torch."), "batch": workload.about,
        "parameters": parameters, "bucket_bytes": buckets, "compute_ms": compute, "libraries": {},
    }  # fmt: skip
    for way in ways:
        step, alone = (statistics.median(some[way.name][WARMUP:]) for some in (steps, totals))
        exposed = step - compute
        row["libraries"][way.name] = {
            "step_ms": step, "exposed_ms": exposed, "share": exposed / step, "communication_ms": alone,
            "overlap": 1 - exposed / alone, "weights_differ_by": difference[way.name],
            "turns_ms": [round(turn, 4) for turn in steps[way.name][WARMUP:]],
        }  # fmt: skip
    if seen is not None:
        row["gradients"] = {"backward_ms": seen.backward_ms, "ready": seen.ready}
    return row


def apart(one: Copy, other: Copy) -> float:
    """The length of the difference of all weights, as part of their length."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(one.ddp.parameters(), other.ddp.parameters(), strict=True)]
    return (
        float(sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(a.square().sum()) for a, _ in pairs))
        ** 0.5
    )


def shown(row: dict[str, Any]) -> str:
    """A row as a line."""
    parts = [f"{name} {one['step_ms']:.1f} ms (exposed {one['exposed_ms']:.1f}, alone {one['communication_ms']:.1f})"
             for name, one in row["libraries"].items()]  # fmt: skip
    return f"{row['model']} {row['dtype']}: compute {row['compute_ms']:.1f} ms; {'; '.join(parts)}"


def main() -> None:
    """Measure, and let rank 0 write."""
    import torch
    from mpi4py import MPI

    import blinkmpi.torch  # noqa: F401
    from benchmarks.training.models import USUAL, workloads
    from blinkmpi.torch import torch_extension

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="models on GPUs, beside NCCL")
    parser.add_argument("--emulated", metavar="GPUS", help="with --gpu, on paced links of these GPUs of a DGX-1V")
    parser.add_argument("--models", nargs="+", choices=list(workloads(gpu=False)), metavar="M")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"], metavar="T")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--seconds", type=float, default=0.0, help="repeat for so long at least")
    parser.add_argument("--gradients", action="store_true", help="record when each gradient is ready, too")
    parser.add_argument("-o", "--output", help="write the result as JSON under this name, or one beside it if taken")
    options = parser.parse_args()
    if options.emulated and not options.gpu:
        parser.error("--emulated: kernels on GPUs pace the links; add --gpu")
    began, world = datetime.now().astimezone(), MPI.COMM_WORLD
    torch.set_num_threads(1)
    device = torch.device("cuda", world.rank % torch.cuda.device_count()) if options.gpu else torch.device("cpu")
    if options.gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("blink", init_method="mpi://")
    compiled = options.gpu and torch_extension.wait() is not None
    gpus, rows = options.emulated, []
    ways = emulated_ways(torch, MPI, gpus) if gpus else ways_of(torch, MPI, gpu=options.gpu)
    there = workloads(gpu=options.gpu)
    for name in options.models or USUAL:
        for dtype in options.dtypes:
            row = measured(torch, MPI, there[name], getattr(torch, dtype), device, ways,
                           repeats=options.repeats, seconds=options.seconds,
                           with_gradients=options.gradients)  # fmt: skip
            rows.append(row)
            gc.collect()  # the copies, before those of the next model
            if world.rank == 0:
                print(shown(row), flush=True)
    comm = torch.distributed.group.WORLD.comm
    facts = {"torch": torch.__version__, **jobs.rank_facts(MPI, comm)}
    if options.gpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        facts["torch_extension"] = compiled
        facts["gpu"] = {"name": comm.gpu.name, **comm.gpu.versions, "NCCL": nccl}
    torch.distributed.destroy_process_group()
    if world.rank == 0 and options.output:
        how = {
            "repeats": options.repeats,
            "seconds": options.seconds,
            "steps": STEPS if options.gpu else 1,
            "threads": 1,
        }
        if gpus:
            how |= {"emulated": gpus, "machine": MACHINE, "nvlink_unit_mbps": UNIT_MBPS}
        head = {"training": how, "env": facts["env"]}
        statistic = "median over turns of the slowest rank's time of a step"
        jobs.write(options.output, jobs.document(head, rows, [], began, ranks=world.size, statistic=statistic,
                                                 memory="gpu" if options.gpu else "host", **facts))  # fmt: skip


if __name__ == "__main__":
    main()
