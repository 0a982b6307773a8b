"""How a communicator's GPUs load algorithms, without a GPU: kernels, tables, ways of channels, emulated links."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from blinkmpi.lang import Algorithm, library
from blinkmpi.planning.algorithms import with_algorithms
from blinkmpi.planning.on_demand import PlanOnDemand
from blinkmpi.planning.planner import make_plan
from blinkmpi.program.call import Call
from blinkmpi.runtime.cuda.context import NS_PER_MIB, CudaContext
from blinkmpi.topology import Topology, machine, modify
from blinkmpi.transport.announcement import Called
from tests.unit.runtime.test_cuda_new_counts import CountingGpu
from tests.unit.topology.test_gather import on_ranks

FOUR = "0,1,2,3"
H200, DGX = modify(machine("hgx-h200"), gpus=FOUR), modify(machine("dgx-1v"), gpus="1,4,5,6")


def with_gpus(
    work: Callable[[CudaContext, CountingGpu], Any], algorithms: list[Algorithm], topology: Topology = H200, *,
    emulated: bool = False, sms: int = 132,
) -> Any:  # fmt: skip
    """What ``work`` gives on rank 1, whose plan has these algorithms."""
    gpus = "slots" if emulated else "onehop"
    kinds = [it.collective for it in algorithms]
    plan = with_algorithms(make_plan(topology, gpus=gpus, collectives=kinds), algorithms, {}, gpus)  # type: ignore[arg-type]

    def one(comm: Any, _: Any) -> Any:
        comm.size, gpu = topology.n, CountingGpu()
        gpu.sms = sms
        plans = PlanOnDemand(comm, topology, plan)
        context = CudaContext(comm, gpu, topology, plans, emulated=emulated, say=say)  # type: ignore[arg-type]
        return work(context, gpu) if comm.rank == 1 else None

    said: list[str] = []

    def say(text: Callable[[], str], level: str) -> None:
        said.append(text())

    found = on_ranks([0] * topology.n, one)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found[1], said


def allreduce(count: int, dtype: str = "float32") -> Call:
    return Call("allreduce", 4, (count,), dtype, "sum")


@pytest.mark.parametrize("registered", [False, True])
def test_every_count_has_its_table_and_all_one_kernel(registered: bool) -> None:
    def work(context: CudaContext, gpu: CountingGpu) -> None:
        for turn, count in enumerate((5000, 5001, 5002)):
            for _ in range(2):
                loaded = context.kernel(allreduce(count), Called(f"{count}"), registered)
                assert (loaded.protocol, loaded.table is not None) == ("slots", True)
                assert 0 < loaded.grid <= 100
            assert (gpu.uploads, gpu.compiled) == (turn + 1, 1)

    _, said = with_gpus(work, [library.ring(4)])
    assert any("lang:ring: every new count makes a table of its own" in text for text in said)
    assert any("5000: lang:ring, slots" in text for text in said)


@pytest.mark.parametrize("it", [library.one_step(4), library.bruck_alltoall(4), library.islands(4, 2)])
def test_a_small_gpu_takes_one_too(it: Algorithm) -> None:
    """All CTAs must be there at once: with fewer than stages, one has several."""
    call = Call(it.collective, 4, (1000,), "float32", "sum" if it.collective == "allreduce" else "")  # type: ignore[arg-type]

    def work(context: CudaContext, gpu: CountingGpu) -> int:
        return context.kernel(call, Called(""), False).grid

    grids = [with_gpus(work, [it], sms=sms)[0] for sms in (1, 3, 132)]
    assert grids[0] == 1
    assert grids[0] < grids[1] + (it.name == "one_step") <= grids[2] + (it.name == "one_step")
    assert grids[1] <= 3


def test_long_vectors_of_many_channels_take_fewer_ctas_instead_of_failing() -> None:
    """Slots of 1 MiB, which the search for a chunk does not try."""
    plan_slots = replace(allreduce(1 << 24), dtype="float64")

    def work(context: CudaContext, gpu: CountingGpu) -> tuple[int, int]:
        rule = context.rule(plan_slots)
        assert rule.scheme == "lang:one_step"
        usual = context._load(plan_slots, rule, Called("usual"))
        large = context._load(plan_slots, replace(rule, chunk_bytes=1 << 20), Called("large"))
        search = context.chunk_search(plan_slots, registered=False)
        assert search is not None
        assert search.chunk == rule.chunk_bytes < 1 << 20, "it begins with the table's"
        context.searches = False  # as where calls are not waited for
        assert context.chunk_search(plan_slots, registered=False) is None
        return usual.grid, large.grid

    (usual, large), _ = with_gpus(work, [library.one_step(4)])
    assert usual == 100
    assert 2 <= large < usual


def test_channels_go_the_ways_of_the_machine() -> None:
    """Straight by NVLink, through host memory where there is none, nowhere where a rank reads what it writes."""
    it = library.one_step(4)
    call = allreduce(1 << 16)

    def work(context: CudaContext, gpu: CountingGpu) -> None:
        rule = context.rule(call)
        program = context.program(call, rule)
        links = {(link.src, link.dst): link for link in DGX.links}
        paths = context._paths(program, rule)
        hosted = context._in_host_memory(program, rule)
        for c, channel in enumerate(program.channels):
            ends = channel.writer, channel.readers[0]
            assert (paths[c][0], paths[c][-1]) == ends
            assert len(paths[c]) == (1 if ends[0] == ends[1] else 2 if ends in links else len(paths[c]))
            assert (c in hosted) == (ends[0] != ends[1] and ends not in links)
        assert hosted
        assert len(hosted) < len(program.channels)
        emulated = context._emulated(program, rule)
        for c, channel in enumerate(program.channels):
            ends = channel.writer, channel.readers[0]
            if ends[0] == ends[1]:
                assert emulated(c) == (0, 0)
            elif ends in links:
                assert emulated(c)[1] == NS_PER_MIB // links[ends].mbps

    with_gpus(work, [it], DGX, emulated=True)


def test_an_emulated_machine_paces_an_algorithm() -> None:
    def work(context: CudaContext, gpu: CountingGpu) -> None:
        context._in_host_memory = lambda program, rule: ()  # type: ignore[method-assign]  # host memory needs a GPU
        assert context.kernel(allreduce(1000, "bfloat16"), Called(""), False).protocol == "slots"

    with_gpus(work, [library.ring(4)], DGX, emulated=True)
