"""torch's collectives by backend blink and by another one, in turn: ``mpirun -np 2 python benchmarks/torch_group.py``.

``dist.all_reduce`` and its like, as a program calls them, on tensors in host memory beside gloo, or with ``--gpu`` on
tensors of GPUs beside NCCL. Both groups are of the same processes and work on the same tensors, repeat by repeat; every
result is checked. On GPUs it begins when torch_extension.cpp is compiled. A number is the largest of all ranks'
medians.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import jobs

SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))  # bytes
ITEM = {"float32": 4, "bfloat16": 2}
REPEATS = 15
BLOCK_S = 0.02  # that the calls of a repeat take together, at most BLOCK of them
BLOCK = 50
WARMUP = 4
MICRO = 1e6
Call = Callable[[Any], object]  # of a process group


def calls(torch: Any, n: int, dtype: Any, count: int, device: Any) -> dict[str, tuple[Call, Callable[[], bool]]]:
    """Each collective on buffers of ``count`` elements, and whether its result is right after a call with ones."""
    dist = torch.distributed
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the older names warn in every call
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    x = torch.zeros(count, dtype=dtype, device=device)
    part = torch.zeros(max(count // n, 1), dtype=dtype, device=device)
    whole = torch.zeros(part.numel() * n, dtype=dtype, device=device)

    def after(call: Call, source: Any, result: Any, wanted: float) -> Callable[[], bool]:
        def right(group: Any) -> bool:
            result.zero_()
            source.fill_(1)
            call(group)
            found = bool((result == wanted).all())
            source.zero_()
            return found

        return right  # type: ignore[return-value]

    found: dict[str, tuple[Call, Any]] = {}
    for name, call, source, result, wanted in (
        ("all_reduce", lambda g: dist.all_reduce(x, group=g), x, x, n),
        ("broadcast", lambda g: dist.broadcast(x, 0, group=g), x, x, 1),
        ("all_gather", lambda g: gather(whole, part, group=g), part, whole, 1),
        ("reduce_scatter", lambda g: scatter(part, whole, group=g), whole, part, n),
    ):
        found[name] = call, after(call, source, result, wanted)
    return found


def microseconds(world: Any, wait: Callable[[], object], groups: dict[str, Any], call: Call) -> dict[str, float]:
    """Time of a call by each group."""
    times: dict[str, list[float]] = {name: [] for name in groups}
    block = {}
    for name, group in groups.items():
        for _ in range(WARMUP):
            call(group)
        wait()
        begin = time.perf_counter()
        call(group)
        wait()
        each = max(world.allgather(time.perf_counter() - begin))
        block[name] = max(1, min(BLOCK, int(BLOCK_S / each)))
    for _ in range(REPEATS):
        for name, group in groups.items():
            world.Barrier()
            call(group)
            wait()
            world.Barrier()
            begin = time.perf_counter()
            for _ in range(block[name]):
                call(group)
            wait()
            times[name].append((time.perf_counter() - begin) / block[name] * MICRO)
    return {name: float(max(world.allgather(statistics.median(found)))) for name, found in times.items()}


def measured(world: Any, mpi: Any, *, gpu: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each collective, type and size, and the facts of the job."""
    import torch

    import blinkmpi.torch  # noqa: F401
    from blinkmpi.torch import torch_extension

    dist, other = torch.distributed, "nccl" if gpu else "gloo"
    torch.set_num_threads(1)
    device = torch.device("cuda", world.rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("blink", init_method="mpi://")
    groups = {other: dist.new_group(backend=other), "blink": dist.group.WORLD}
    wait = torch.cuda.synchronize if gpu else lambda: None
    compiled = gpu and torch_extension.wait() is not None
    rows: list[dict[str, Any]] = []
    names = list(calls(torch, world.size, torch.float32, 1, device))
    for name, dtype, nbytes in itertools.product(names, ITEM, SIZES):
        count = nbytes // ITEM[dtype]
        call, right = calls(torch, world.size, getattr(torch, dtype), count, device)[name]
        row = {"collective": name, "dtype": dtype, "bytes": nbytes}
        try:
            row["us"] = microseconds(world, wait, groups, call)
        except RuntimeError as error:  # gloo reduces no bfloat16 in some versions
            row["refused"] = str(error).splitlines()[0]
            rows.append(row)
            continue
        row["wrong"] = {which: world.allreduce(int(not right(group))) for which, group in groups.items()}
        rows.append(row)
        if world.rank == 0:
            us = row["us"]
            print(f"{name} {dtype} {nbytes}: {other} {us[other]:.1f} us, blink {us['blink']:.1f} us, "
                  f"ratio {us[other] / us['blink']:.2f}", flush=True)  # fmt: skip
    comm = dist.group.WORLD.comm
    facts = {"torch": torch.__version__, **jobs.rank_facts(mpi, comm)}
    if gpu:
        facts["torch_extension"] = compiled
        facts["gpu"] = {
            "name": comm.gpu.name,
            **comm.gpu.versions,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    dist.destroy_process_group()
    return rows, facts


def main() -> None:
    """Measure, and let rank 0 write."""
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="tensors of GPUs, beside NCCL")
    parser.add_argument("-o", "--output", help="write the result as JSON under this name, or one beside it if taken")
    options = parser.parse_args()
    began, world = datetime.now().astimezone(), MPI.COMM_WORLD
    rows, facts = measured(world, MPI, gpu=options.gpu)
    if world.rank == 0 and options.output:
        head = {"torch_group": {"repeats": REPEATS, "block_seconds": BLOCK_S}, "env": facts["env"]}
        statistic = "median over repeats of a rank's time per call; the largest of all ranks"
        found = jobs.document(head, rows, [], began, ranks=world.size, statistic=statistic,
                              memory="gpu" if options.gpu else "host", **facts)  # fmt: skip
        jobs.write(options.output, found)
    if any(row.get("wrong", {}).get("blink") for row in rows):
        raise SystemExit("wrong results")


if __name__ == "__main__":
    main()
