"""What torch's collectives on GPUs cost the host: ``mpirun -np 2 python benchmarks/torch_host_time.py -o FILE``.

A group of backend ``blink`` beside NCCL's, in the same processes and in turn, on the same tensors: synchronous and
asynchronous calls, on one stream and on two in turn (as FSDP2 has its all-gathers and reduce-scatters), of 1 KiB to
64 MiB. The time is that until the call has returned, and the wait for its Work; the choice of the stream is not in it.
A number is the largest of all ranks' medians. Results are checked, and it begins when torch_extension.cpp is compiled.

``--fake`` needs no GPU: a driver that launches nothing (``fake/``) leaves our part alone, with nothing beside it, and
nothing is checked.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import jobs

SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))  # bytes of the longer buffer
ITEM = 4
CALLS, REPEATS, WARMUP = 40, 7, 8  # enqueued at a time, which no queue of launches keeps waiting; times
MICRO = 1e6
TOGETHER = 4  # calls of a coalescing manager
Call = Callable[[Any, bool], object]  # of a group, and whether it is asynchronous; returns a Work, or nothing


class Case(NamedTuple):
    """A call, and the tensors that it reads and writes."""

    name: str
    call: Call
    reads: Sequence[Any]
    writes: Sequence[Any]
    result: float  # of each element that it writes, where each that it reads is 1


def cases(torch: Any, rank: int, n: int, count: int, device: Any) -> list[Case]:
    """The calls on buffers of ``count`` elements."""
    dist = torch.distributed
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the older names warn in every call
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    each = max(count // n, 2)

    def zeros(length: int) -> Any:
        return torch.zeros(length, device=device)

    x, part, whole, other, long = (zeros(length) for length in (count, each, each * n, each * n, 2 * each * n))
    parts = [zeros(each) for _ in range(n)]
    some = [zeros(max(each // TOGETHER, 1)) for _ in range(TOGETHER)]
    wholes = [zeros(n * one.numel()) for one in some]
    turn = itertools.count()

    def splits(less: int) -> tuple[list[int], list[int]]:
        """What this rank sends each: of each pair of neighbours, one gets so many rows less and one more."""
        lengths = [each + (less if i % 2 else -less) * (i < n // 2 * 2) for i in range(n)]
        return lengths, [lengths[rank]] * n

    def exchange(group: Any, asynchronous: bool, less: int) -> Any:
        sent, got = splits(less)
        return dist.all_to_all_single(
            long[: sum(got)], other[: sum(sent)], got, sent, group=group, async_op=asynchronous
        )

    def new(group: Any, asynchronous: bool) -> Any:
        return exchange(group, asynchronous, next(turn) * 13 % each)

    def together(group: Any, asynchronous: bool) -> Any:
        with dist._coalescing_manager(group=group, device=device, async_ops=asynchronous) as manager:
            for one, all_of_it in zip(some, wholes, strict=True):
                gather(all_of_it, one, group=group, async_op=asynchronous)
        return manager if asynchronous else None

    return [
        Case("all_reduce", lambda g, a: dist.all_reduce(x, group=g, async_op=a), [x], [x], n),
        Case("broadcast", lambda g, a: dist.broadcast(x, 0, group=g, async_op=a), [x], [x], 1),
        Case("reduce", lambda g, a: dist.reduce(x, 0, group=g, async_op=a), [x], [x] if rank == 0 else [], n),
        Case("all_gather_into_tensor", lambda g, a: gather(whole, part, group=g, async_op=a), [part], [whole], 1),
        Case("reduce_scatter_tensor", lambda g, a: scatter(part, whole, group=g, async_op=a), [whole], [part], n),
        Case("all_gather", lambda g, a: dist.all_gather(parts, part, group=g, async_op=a), [part], parts, 1),
        Case("all_gather_into_tensor, coalesced", together, some, wholes, 1),
        Case(
            "all_to_all_single", lambda g, a: dist.all_to_all_single(whole, other, group=g, async_op=a), [other],
            [whole], 1,
        ),
        Case("all_to_all_single, splits", lambda g, a: exchange(g, a, each // 3), [other], [], 1),
        Case("all_to_all_single, new splits", new, [other], [], 1),
    ]  # fmt: skip


def is_right(case: Case, group: Any, wait: Callable[[], object]) -> bool:
    """Whether a call gives what it should."""
    for tensor in (*case.writes, *case.reads):
        tensor.zero_()
    for tensor in case.reads:
        tensor.fill_(1)
    wait()
    case.call(group, False)
    wait()
    found = all(bool((tensor == case.result).all()) for tensor in case.writes)
    for tensor in case.reads:
        tensor.zero_()
    wait()
    return found


def host_us(
    world: Any, groups: dict[str, Any], call: Call, on: Callable[[int], object], wait: Callable[[], object], *,
    asynchronous: bool, alternates: bool,
) -> dict[str, float]:  # fmt: skip
    """Microseconds of the host for a call of each group."""
    times: dict[str, list[float]] = {name: [] for name in groups}

    def some(group: Any, calls: int) -> float:
        took = 0.0
        for i in range(calls):
            on(i % 2 if alternates else 0)
            began = time.perf_counter()
            work: Any = call(group, asynchronous)
            if asynchronous and work is not None:
                work.wait()
            took += time.perf_counter() - began
        wait()
        return took / calls * MICRO

    for group in groups.values():
        some(group, WARMUP)
    for _ in range(REPEATS):
        for name, group in groups.items():
            world.Barrier()
            times[name].append(some(group, CALLS))
    return {name: float(max(world.allgather(statistics.median(found)))) for name, found in times.items()}


def rows_of(
    world: Any, torch: Any, groups: dict[str, Any], device: Any, on: Callable[[int], object],
    wait: Callable[[], object], sizes: Sequence[int], *, checks: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each call, size, way to wait, and way of streams."""
    rows: list[dict[str, Any]] = []
    for nbytes in sizes:
        for case in cases(torch, world.rank, world.size, nbytes // ITEM, device):
            for asynchronous, alternates in itertools.product((False, True), (False, True)):
                row: dict[str, Any] = {"call": case.name, "bytes": nbytes}
                row |= {"asynchronous": asynchronous, "alternates": alternates}
                kind = {"asynchronous": asynchronous, "alternates": alternates}
                row["us"] = host_us(world, groups, case.call, on, wait, **kind)
                on(0)
                right = [is_right(case, group, wait) for group in groups.values()] if checks else []
                row["wrong"] = world.allreduce(right.count(False))
                rows.append(row)
                if world.rank == 0:
                    how = f"{'async' if asynchronous else 'sync'}, {'two streams' if alternates else 'one stream'}"
                    us = ", ".join(f"{name} {found:.1f} us" for name, found in row["us"].items())
                    print(f"{case.name}, {nbytes} B, {how}: {us}", flush=True)
    return rows


@contextlib.contextmanager
def on_gpus(world: Any, torch: Any) -> Iterator[tuple[dict[str, Any], Any, Callable[[int], object], dict[str, Any]]]:
    """Both groups, the device, what chooses one of two streams, and the facts of the job."""
    import blinkmpi.torch  # noqa: F401
    from blinkmpi.torch import torch_extension

    dist = torch.distributed
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("blink", init_method="mpi://")
    groups = {"nccl": dist.new_group(backend="nccl"), "blink": dist.group.WORLD}
    comm, streams = dist.group.WORLD.comm, [torch.cuda.Stream(device) for _ in range(2)]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    facts: dict[str, Any] = {"torch": torch.__version__, "torch_extension": torch_extension.wait() is not None}
    facts["gpu"] = {"name": comm.gpu.name, **comm.gpu.versions, "NCCL": nccl}
    yield groups, device, lambda i: torch.cuda.set_stream(streams[i]), facts
    torch.cuda.synchronize()
    facts |= jobs.rank_facts(_mpi(), comm)
    dist.destroy_process_group()


@contextlib.contextmanager
def on_nothing(torch: Any) -> Iterator[tuple[dict[str, Any], Any, Callable[[int], object], dict[str, Any]]]:
    """The same on a driver that launches nothing."""
    import blinkmpi.torch  # noqa: F401
    from benchmarks.fake.gpu import fake_gpus
    from benchmarks.fake.torch_group import streams_of_nothing

    dist = torch.distributed
    with fake_gpus(), streams_of_nothing() as streams:
        dist.init_process_group("blink", init_method="mpi://")
        facts = {"torch": torch.__version__, "torch_extension": True, "fake": True}
        yield {"blink": dist.group.WORLD}, torch.device("cpu"), lambda i: streams.go_on(8 + i), facts
        facts |= jobs.rank_facts(_mpi(), dist.group.WORLD.comm)
        dist.destroy_process_group()


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


def main() -> None:
    """Measure, and let rank 0 write."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fake", action="store_true", help="on a driver that launches nothing, where there is no GPU")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the longer buffer")
    parser.add_argument("-o", "--output", help="write the result as JSON under this name, or one beside it if taken")
    options = parser.parse_args()
    began, world = datetime.now().astimezone(), _mpi().COMM_WORLD
    torch.set_num_threads(1)
    wait: Callable[[], object] = (lambda: None) if options.fake else torch.cuda.synchronize
    with on_nothing(torch) if options.fake else on_gpus(world, torch) as (groups, device, on, facts):
        rows = rows_of(world, torch, groups, device, on, wait, options.sizes, checks=not options.fake)
    if world.rank == 0 and options.output:
        head = {"torch_host_time": {"calls": CALLS, "repeats": REPEATS}, "env": facts["env"]}
        statistic = "median over repeats of a rank's time per call; the largest of all ranks"
        made = jobs.document(head, rows, [], began, ranks=world.size, statistic=statistic, memory="gpu", **facts)
        jobs.write(options.output, made)
    if any(row["wrong"] for row in rows):
        raise SystemExit("wrong results")


if __name__ == "__main__":
    main()
