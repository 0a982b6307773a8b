"""Algorithms of blinkmpi.lang on GPUs: the library's, others by chance, in graphs, on emulated links, on few CTAs."""

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.lang import Algorithm, library
from blinkmpi.program.call import Call
from blinkmpi.topology import machine, modify
from blinkmpi.transport.cuda.device import cupy, device_count
from blinkmpi.transport.cuda.loaded_kernel import KernelCache
from tests.conformance import PLANNED, Case, cases
from tests.gpu.compile_ahead import NotingGpu, Source, compile_share
from tests.gpu.helpers import DGX1, Pools, at_least, run_all, sizes
from tests.harness import mpi
from tests.unit.lang.algorithms import COLLECTIVES, by_chance, of_ranks

SIZES = sizes(1, 2, 3, 4, 8)
SEVERAL = sizes(2, 3, 4, 8)
CALLS = {"allreduce": ("allreduce",), "allgather": ("allgather", "allgatherv"), "alltoall": ("alltoall", "alltoallv")}
PAIRS = (("float32", "sum"), ("bfloat16", "avg"))
MOVED = ("float32", "bool", "complex128")  # where bytes only move, all types are one kernel

pytestmark = [pytest.mark.gpu, at_least(1)]


def chosen(kind: str, n: int, pairs: tuple[tuple[str, str], ...] = PAIRS) -> list[Case]:
    """The cases of these types and operations, from rank 0."""
    some = [c for c in cases(kind, n) if (c.dtype, c.op) in pairs or (not c.op and c.dtype in MOVED)]
    return [c for c in some if c.root == 0]


def every_pair(n: int) -> list[Case]:
    """The longest allreduce of every type and operation."""
    found = sorted((c for c in cases("allreduce", n) if not c.in_place), key=lambda c: c.count)
    return list({(c.dtype, c.op): c for c in found}.values())


def full(n: int) -> list[Algorithm]:
    """Those that run every type and operation: with partial results on the way, and with operands alone."""
    return [library.ring(n), library.one_step(n)]


def named(ours: blinkmpi.Communicator, it: Algorithm) -> None:
    """Calls take the algorithm, on GPUs."""
    assert ours.gpu is not None, ours.context.why_no_gpus
    assert f"runs as     {it.scheme}" in ours.explain(it.collective, 1 << 20)


# ---------------------------------------------------------------- compiled before: most of the time would go there


def wanted() -> Iterator[tuple[Algorithm, Call]]:
    """What the ranks call most."""
    for it, case in ((it, case) for it in full(SIZES[-1]) for case in every_pair(SIZES[-1])):
        yield it, Call("allreduce", it.n, (case.count,), case.dtype, case.op)
    for it in (it for n in SIZES for it in of_ranks(n, inner=n > 4)):
        for case in chosen(it.collective, it.n):
            if case.count:
                yield it, Call(it.collective, it.n, (case.count,), case.dtype, case.op)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    noted: dict[Source, None] = {}
    caches: dict[int, KernelCache] = {}
    for it, call in wanted():
        program = it.program(call, chunk_bytes=4096)
        cache = caches.setdefault(it.n, KernelCache(NotingGpu(noted), it.n))  # type: ignore[arg-type]
        for rank in range(it.n):
            if program.of(rank):
                cache.stages(program, rank)
    cores, gpus, found = len(os.sched_getaffinity(0)), device_count(), list(noted)
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.starmap(compile_share, [(found[i::cores], i % gpus) for i in range(cores)], chunksize=1)


# ---------------------------------------------------------------- the conformance suite


@mpi(ranks=SIZES[-1:], timeout=240)
def test_every_type_and_operation(comm: MPI.Intracomm) -> None:
    for it in full(comm.size):
        with blinkmpi.Communicator(comm, algorithms=[it]) as ours:
            named(ours, it)
            run_all(ours, Pools(ours, registered=False), every_pair(comm.size))


@mpi(ranks=SIZES, timeout=240)
def test_every_algorithm_of_the_library(comm: MPI.Intracomm) -> None:
    """Any buffers, aligned and not, and registered ones; in place and not; every length."""
    for it in of_ranks(comm.size, inner=comm.size > 4):
        with blinkmpi.Communicator(comm, algorithms=[it]) as ours:
            named(ours, it)
            plain, registered = (Pools(ours, registered=r) for r in (False, True))
            for kind in CALLS[it.collective]:
                some = chosen(kind, comm.size)
                run_all(ours, plain, some)
                run_all(ours, plain, some, skew=3)
                run_all(ours, registered, some, skew=1)


@at_least(2)
@mpi(ranks=SEVERAL, timeout=240)
def test_algorithms_by_chance(comm: MPI.Intracomm) -> None:
    """All collectives, with values that go round about, and several uses of one on its own rank."""
    n = comm.size
    drawn = [by_chance(collective, n, 2, seed=n, at=0) for collective in COLLECTIVES]
    with blinkmpi.Communicator(comm, algorithms=drawn) as ours:
        pools = Pools(ours, registered=False)
        for it in drawn:
            named(ours, it)
            for kind in [it.collective, *(kind for kind, planned in PLANNED.items() if planned == it.collective)]:
                whole = (("int32", "sum"),) if kind == "allreduce" else PAIRS  # its ranks' bits may differ
                run_all(ours, pools, chosen(kind, n, whole), skew=1)


@pytest.mark.parametrize("ctas", [1, 3])
@at_least(2)
@mpi(ranks=SEVERAL, timeout=240)
def test_ctas_of_several_stages(comm: MPI.Intracomm, ctas: int) -> None:
    """As where a rank has more stages than the GPU has room for CTAs."""
    n = comm.size
    for it in (library.ring(n), library.one_step(n), library.bruck_alltoall(n), by_chance("allreduce", n, 3, 5)):
        with blinkmpi.Communicator(comm, algorithms=[it]) as ours:
            transport = ours.context.cuda().transport
            transport.sms = transport.max_ctas = ctas
            named(ours, it)
            pools = Pools(ours, registered=False)
            pairs = (("int32", "sum"),) if it.name == "drawn" else PAIRS
            for skew in (0, 3):
                run_all(ours, pools, chosen(it.collective, n, pairs), skew=skew)


@at_least(2)
@mpi(ranks=SEVERAL, timeout=200)
def test_on_an_emulated_machine(comm: MPI.Intracomm) -> None:
    """Straight ways by NVLink, and others through host memory, each at its pace."""
    n = comm.size
    told = modify(machine("dgx-1v"), gpus=DGX1[n])
    for it in (library.all_pairs(n), library.one_step(n), library.all_pairs_alltoall(n)):
        with blinkmpi.Communicator(comm, topology=told, algorithms=[it]) as ours:
            assert ours.context.cuda().emulated
            named(ours, it)
            run_all(ours, Pools(ours, registered=False), chosen(it.collective, n, PAIRS[:1]), skew=1)


# ---------------------------------------------------------------- how they are called


@at_least(2)
@mpi(ranks=SEVERAL, timeout=120)
def test_streams_graphs_and_requests(comm: MPI.Intracomm) -> None:
    """Captured, replayed, and between calls of other collectives; named by ``algo``."""
    cp, n = cupy(), comm.size
    with blinkmpi.Communicator(comm, algo="allreduce:lang:ring;alltoall:lang:bruck_alltoall") as ours:
        named(ours, library.ring(n))
        stream = cp.cuda.Stream(non_blocking=True)
        for count in (1, 1000, 300_001):
            with stream:
                x, y, z = (cp.zeros(count, "float32") for _ in range(3))
                sent, got = (cp.zeros((n, count), "int32") for _ in range(2))
            stream.synchronize()
            with stream:
                stream.begin_capture()
                ours.Allreduce(x, y)
                request = ours.Iallreduce(y, z)
                request.Wait()
                ours.Alltoall(sent, got)
                graph = stream.end_capture()
            for i in range(5):
                with stream:
                    x[...] = comm.rank + i
                    sent[...] = 100 * comm.rank + cp.arange(n, dtype="int32")[:, None] + i
                graph.launch(stream)
                with stream:
                    ours.Allreduce(MPI.IN_PLACE, x)
                stream.synchronize()
                one = n * i + n * (n - 1) / 2
                assert (x == one).all(), (count, i)
                assert (z == n * one).all(), (count, i)
                assert (got == 100 * cp.arange(n, dtype="int32")[:, None] + comm.rank + i).all(), (count, i)
        ours.check()


@at_least(2)
@mpi(ranks=SEVERAL[-1:], timeout=120)
def test_many_calls_that_nobody_waits_for(comm: MPI.Intracomm) -> None:
    """Algorithms and trees in turn over the same slots, some ranks late."""
    cp, n = cupy(), comm.size
    algorithms = [library.one_step(n), library.bruck_alltoall(n)]
    with blinkmpi.Communicator(comm, algorithms=algorithms) as ours:
        stream, busy = cp.cuda.Stream(non_blocking=True), cp.ones(1 << 22, "float32")
        with stream:
            vector, total = cp.arange(50_000, dtype="int64") + comm.rank, cp.zeros(50_000, "int64")
            blocks, others = cp.full((n, 3000), comm.rank, "int64"), cp.zeros((n, 3000), "int64")
            gathered = cp.zeros((n, 50_000), "int64")
            wrong = cp.zeros((), "int64")
        want: Any = n * cp.arange(50_000, dtype="int64") + n * (n - 1) // 2
        cp.cuda.Device().synchronize()
        for turn in range(200):
            with stream:
                if turn % n == comm.rank:
                    busy *= 1.0
                total[...] = 0
                ours.Allreduce(vector, total, stream=stream)
                ours.Allgather(total, gathered, stream=stream)
                ours.Alltoall(blocks, others, stream=stream)
                wrong += cp.count_nonzero(gathered != want) + cp.count_nonzero(others != cp.arange(n)[:, None])
        stream.synchronize()
        assert int(wrong) == 0
        ours.check()
