"""Compile the door's kernels before the programs run, on all cores.

A program of nccl-tests is over before a thread of the door has compiled the kernels of its kinds, half a second each;
where they lie in the cache folder, most of its calls can become the door's.
"""

import multiprocessing
import os
from collections.abc import Iterator

from blinkmpi.errors import ArgumentError
from blinkmpi.nccl.binder import COLLECTIVES, Kind
from blinkmpi.nccl.counts import OPS, TYPES
from blinkmpi.planning.on_demand import PlanOnDemand
from blinkmpi.planning.planner import make_plan
from blinkmpi.program.call import REDUCTIONS
from blinkmpi.runtime.cuda.context import CudaContext
from blinkmpi.topology import machine, modify
from blinkmpi.transport.announcement import Called
from blinkmpi.transport.cuda.device import device_count
from blinkmpi.transport.cuda.packets import PROTOCOLS
from blinkmpi.trees.tree import ROOTED
from tests.gpu.compile_ahead import NotingGpu, Source, compile_share
from tests.unit.nccl.door.fakes import Alike

FLOATS = ("float16", "float32", "float64", "bfloat16")
CLASSES = range(3, 25)  # of sizes: from 8 bytes to 16 MiB


def kinds(n: int) -> Iterator[Kind]:
    """All kinds of calls that the door may make among ``n`` ranks, by its own rules."""
    for collective, name in enumerate(COLLECTIVES):
        for dtype, text in enumerate(TYPES):
            ops = [-1]
            if name in REDUCTIONS:
                named = ("sum", "prod", "avg") if text in FLOATS else () if "float8" in text else ("sum", "prod")
                ops = [OPS.index(op) for op in named]
            for op in ops:
                for root in range(n) if name in ROOTED else (-1,):
                    yield from (Kind(collective, dtype, op, root, size) for size in CLASSES)


def sources(n: int) -> list[Source]:
    """The kernels that ``n`` ranks with one hop between them load for these kinds."""
    noted: dict[Source, None] = {}
    comm = Alike(0, n)
    topology = modify(machine("hgx-h200"), gpus=",".join(map(str, range(n))))
    plans = PlanOnDemand(comm, topology, make_plan(topology, gpus="onehop"))
    context = CudaContext(comm, NotingGpu(noted), topology, plans, emulated=False, say=lambda *_: None)  # type: ignore[arg-type]
    for kind in kinds(n):
        try:
            call = kind.largest(n)
        except ArgumentError:  # shorter than an element of each rank
            continue
        rule = context.rule(call, registered=False)
        if rule.protocol in PROTOCOLS:
            context.transport.load_packets(call, rule.protocol, Called("", call.counts[0]), rule.ctas)
    return list(noted)


def compile_all(n: int) -> int:
    """Compile them for this machine's GPUs; how many there are."""
    made, cores = sources(n), len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.starmap(compile_share, [(made[i::cores], i % device_count()) for i in range(cores)], chunksize=1)
    return len(made)
