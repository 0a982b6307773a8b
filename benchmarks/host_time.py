"""Host time of GPU calls that are only enqueued: ``mpirun -np 2 python benchmarks/host_time.py -o FILE``.

An AllReduce in place on CuPy arrays and on torch tensors, of ours and of torch's NCCL group, in the same processes and
in turn: how long the host needs to put one on its stream. Calls of the same tensor again and again; calls of tensors
that no call has seen yet, at other addresses: each after a wait for all before it, and one behind another; and calls of
counts that no call has had, one behind another.
Writes each number as the largest of all ranks' medians. Ranks that share a GPU (``BLINKMPI_RANKS_PER_GPU``) have no
NCCL, which refuses that; its columns are then not measured.
"""

import itertools
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import jobs

SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))  # bytes
ITEM = {"float32": 4, "bfloat16": 2}
CALLS, REPEATS, FRESH = 50, 9, 48  # enqueued at a time, which no queue of launches keeps waiting; times; new tensors
WARMUP = 20  # calls, after which the chunks of this size are found
MICRO = 1e6
TIMES = ("again_us", "new_us", "row_us", "count_us")
NCCL = "NCCL group"


def process_group(world: Any, torch: Any, device: int) -> Any:
    """torch's group of all ranks, over NCCL."""
    port = world.bcast(free_port() if world.rank == 0 else None)
    where = f"tcp://127.0.0.1:{port}"
    ids = {"device_id": torch.device("cuda", device)}
    torch.distributed.init_process_group("nccl", init_method=where, rank=world.rank, world_size=world.size, **ids)
    return torch.distributed


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


Call = Callable[[Any], object]  # of a tensor


def host_us(world: Any, stream: Any, call: Call, tensor: Any) -> float:
    """Microseconds of the host for a call of the same tensor again."""
    found = []
    for _ in range(REPEATS):
        stream.synchronize()
        world.Barrier()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call(tensor)
        found.append((time.perf_counter() - begin) / CALLS * MICRO)
    stream.synchronize()
    return float(max(world.allgather(statistics.median(found))))


def new_us(world: Any, stream: Any, call: Call, tensors: Sequence[Any]) -> float:
    """Microseconds of the host for the first call of each tensor."""
    found = []
    for tensor in tensors:
        stream.synchronize()
        world.Barrier()
        begin = time.perf_counter()
        call(tensor)
        found.append((time.perf_counter() - begin) * MICRO)
    stream.synchronize()
    return float(max(world.allgather(statistics.median(found))))


def row_us(world: Any, stream: Any, call: Call, tensors: Sequence[Any]) -> float:
    """Microseconds of the host for the first call of a tensor, among others one behind another."""
    stream.synchronize()
    world.Barrier()
    begin = time.perf_counter()
    for tensor in tensors:
        call(tensor)
    took = (time.perf_counter() - begin) / len(tensors) * MICRO
    stream.synchronize()
    return float(max(world.allgather(took)))


def of_counts(tensor: Any, *, less: int = 0) -> list[Any]:
    """Parts of a tensor that are shorter by 1, 2, ... elements and so many more."""
    return [tensor[: len(tensor) - less - i] for i in range(1, FRESH + 1)]


def measured(world: Any, mpi: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each type and size, and the facts of the job."""
    import cupy
    import torch

    from blinkmpi import Communicator

    told, current = Communicator(world), Communicator(world, stream="current")
    if told.gpu is None:
        raise SystemExit(f"no GPUs: {told.context.why_no_gpus}")
    torch.cuda.set_device(told.gpu.device)
    places = world.allgather((socket.gethostname(), told.gpu.bus_id))
    group: Any = process_group(world, torch, told.gpu.device) if len({*places}) == world.size else None
    stream = torch.cuda.Stream()
    on_cupy = cupy.cuda.ExternalStream(stream.cuda_stream)
    ways: dict[str, Call] = {
        "torch, stream=": lambda t: told.Allreduce(mpi.IN_PLACE, t, stream=stream),
        "torch, current stream": lambda t: current.Allreduce(mpi.IN_PLACE, t),
        NCCL: lambda t: group.all_reduce(t),
        "CuPy, stream=": lambda t: told.Allreduce(mpi.IN_PLACE, t, stream=on_cupy),
    }
    rows: list[dict[str, Any]] = []
    for dtype, nbytes in itertools.product(("float32", "bfloat16"), SIZES):
        row: dict[str, Any] = {
            "dtype": dtype,
            "bytes": nbytes,
            "again_us": {},
            "new_us": {},
            "row_us": {},
            "count_us": {},
        }
        with torch.cuda.stream(stream), on_cupy:
            for name, call in ways.items():
                if name.startswith("CuPy") and dtype != "float32":  # which CuPy does not have
                    continue
                if name == NCCL and group is None:
                    for key in TIMES:
                        row[key][name] = None
                    continue
                new = torch.zeros((2 * FRESH + 1, nbytes // ITEM[dtype]), dtype=getattr(torch, dtype), device="cuda")
                tensors = [*map(cupy.from_dlpack, new)] if name.startswith("CuPy") else [*new]
                for _ in range(WARMUP):
                    call(tensors[0])
                row["again_us"][name] = host_us(world, stream, call, tensors[0])
                row["new_us"][name] = new_us(world, stream, call, tensors[1 : FRESH + 1])
                row["row_us"][name] = row_us(world, stream, call, tensors[FRESH + 1 :])
                for part in of_counts(tensors[0])[:3]:
                    call(part)
                row["count_us"][name] = row_us(world, stream, call, of_counts(tensors[0], less=3))
                new.fill_(world.rank + 1.0)
                call(tensors[1])
                shorter = of_counts(tensors[2], less=FRESH)[0]
                call(shorter)
                total = world.size * (world.size + 1) / 2
                right = all(bool((sums == total).all()) for sums in (new[1], new[2][: len(shorter)]))
                right = right and bool((new[2][len(shorter) :] == world.rank + 1.0).all())
                row["wrong"] = row.get("wrong", 0) + world.allreduce(int(not right))
        rows.append(row)
        if world.rank == 0:
            print(f"{dtype} {nbytes}: {', '.join(text_of(row, name) for name in row['again_us'])}", flush=True)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    facts: dict[str, Any] = {"ranks_per_gpu": world.size // len({*places})}
    facts |= {"gpu": {"name": told.gpu.name, **told.gpu.versions, "torch": torch.__version__, "NCCL": nccl}}
    facts |= jobs.rank_facts(mpi, told)
    if group is not None:
        group.destroy_process_group()
    current.Free()
    told.Free()
    return rows, facts


def text_of(row: dict[str, Any], name: str) -> str:
    """The times of a row by one way."""
    again, new, in_row, count = (row[key][name] for key in TIMES)
    if again is None:
        return f"{name} not measured"
    return f"{name} {again:.1f} us (new {new:.1f}, in a row {in_row:.1f}, of another count {count:.1f})"


if __name__ == "__main__":
    jobs.measure_on_ranks(
        __doc__, "host_time", {"calls": CALLS, "repeats": REPEATS, "new_tensors": FRESH}, measured,
        collective="allreduce", op="sum", compare=["nccl"],
        statistic="median over repeats, and over new tensors, of a rank's time per call; the largest of all ranks",
    )  # fmt: skip
