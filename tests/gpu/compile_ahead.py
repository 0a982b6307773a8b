"""Compile what tests and campaigns on GPUs call, before they do: ``python -m tests.gpu.compile_ahead 2 4``.

A rank compiles a kernel when it first calls it, half a second each, one after another; CuPy keeps them on disk. Here
the contexts of so many ranks load the calls of all collectives, types and operations on a GPU that only notes what it
should compile, and then every core compiles its share.
"""

import argparse
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from blinkmpi.planning.on_demand import PlanOnDemand
from blinkmpi.planning.planner import make_plan
from blinkmpi.program.call import BLOCKED, REDUCTIONS, Call
from blinkmpi.program.reduction import DTYPES
from blinkmpi.runtime.cuda.context import CudaContext
from blinkmpi.topology import machine, modify
from blinkmpi.transport.announcement import Called
from blinkmpi.transport.cuda.device import Kernel, cupy, device_count
from blinkmpi.transport.cuda.kernels.compiler import machine_code
from tests.conformance import COLLECTIVES, PLANNED, allowed
from tests.unit.runtime.test_cuda_new_counts import CountingGpu
from tests.unit.topology.test_gather import on_ranks

PLANNED_FOR = list(dict.fromkeys(PLANNED.get(c, c) for c in COLLECTIVES))
ROOTED = ("broadcast", "reduce", "gather", "scatter")
BYTES = (8, 4 << 10, 256 << 10, 4 << 20, 64 << 20)
ALGOS = ("", "slots", "direct")
Source = tuple[str, str]  # and the kernel's name


class NotingGpu(CountingGpu):
    """Compiles nothing, and notes what it should."""

    def __init__(self, noted: dict[Source, None]) -> None:
        super().__init__()
        self.noted = noted

    def compile(self, source: str, name: str) -> Kernel:
        self.noted[source, name] = None
        return super().compile(source, name)


def calls(n: int, dtypes: Iterable[str]) -> Iterator[Call]:
    """Calls of some lengths, with even blocks and with others, from every root."""
    reductions = [(dtype, op) for dtype in dtypes for op in allowed(dtype)]
    for collective in PLANNED_FOR:
        for dtype, op in reductions if collective in REDUCTIONS else [("float32", "")]:
            if op == "avg" and "scan" in collective:
                continue
            for nbytes, root in itertools.product(BYTES, range(n) if collective in ROOTED else (-1,)):
                call = Call(collective, n, (1,), dtype, op, root)
                each = max(1, nbytes // call.itemsize // (n if collective in BLOCKED else 1))
                yield replace(call, counts=(each,) * (n if collective == "reduce_scatter" else 1))
                if collective in BLOCKED:
                    blocks = n * n if collective == "alltoall" else n
                    yield replace(call, counts=tuple(range(each, each + blocks)))


def sources(n: int, dtypes: Iterable[str]) -> list[Source]:
    """What ``n`` ranks with one hop between them compile for calls on these types, by default and by some protocols."""
    noted: dict[Source, None] = {}
    topology = modify(machine("hgx-h200"), gpus=",".join(map(str, range(n))))
    reductions = [c for c in PLANNED_FOR if c in REDUCTIONS and "scan" not in c]

    def work(comm: Any, _: Any) -> None:
        comm.size = n
        for protocol in ALGOS if n > 1 else ALGOS[:1]:  # one rank has no hop
            algo = ";".join(f"{c}:onehop/{protocol}" for c in reductions) if protocol else ""
            plans = PlanOnDemand(comm, topology, make_plan(topology, gpus="onehop", algo=algo))
            context = CudaContext(comm, NotingGpu(noted), topology, plans, emulated=False, say=lambda *_: None)  # type: ignore[arg-type]
            for call, registered in itertools.product(calls(n, dtypes), (True, False)):
                context.kernel(call, Called(""), registered)

    for result in on_ranks([0] * n, work):
        if isinstance(result, BaseException):
            raise result
    return list(noted)


def compile_share(share: list[Source], gpu: int) -> None:
    """Compile some of the kernels."""
    cp = cupy()
    cp.cuda.Device(gpu).use()
    found = cp.cuda.runtime.getDeviceProperties(gpu)
    for source, _ in share:
        machine_code(cp.cuda.nvrtc, source, (found["major"], found["minor"]))


def compile_all(wanted: Iterable[tuple[int, Iterable[str]]]) -> int:
    """Compile what so many ranks call with these types; how many kernels there are."""
    cores, gpus = len(os.sched_getaffinity(0)), device_count()
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        found = pool.starmap(sources, [(n, (dtype,)) for n, dtypes in wanted for dtype in dtypes], chunksize=1)
        made = list(dict.fromkeys(itertools.chain.from_iterable(found)))
        pool.starmap(compile_share, [(made[i::cores], i % gpus) for i in range(cores)], chunksize=1)
    return len(made)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.compile_ahead", description=__doc__.splitlines()[0])
    parser.add_argument("ranks", type=int, nargs="+")
    parser.add_argument("--types", default=",".join(DTYPES), help="separated by commas; all by default")
    args, began = parser.parse_args(), time.monotonic()
    many = compile_all([(n, args.types.split(",")) for n in args.ranks])
    print(f"{many} kernels in {time.monotonic() - began:.0f} s")
