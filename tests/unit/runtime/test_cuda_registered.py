"""Registered buffers of a communicator's GPUs, without a GPU: which are known, by what, and what is given back."""

from collections.abc import Callable
from typing import Any

import pytest

from blinkmpi.errors import BlinkError, BufferTypeError, RemoteError
from blinkmpi.planning.on_demand import PlanOnDemand
from blinkmpi.planning.planner import make_plan
from blinkmpi.program.memory import DeviceArray
from blinkmpi.runtime.cuda.context import CudaContext
from blinkmpi.topology import machine, modify
from tests.unit.runtime.test_cuda_new_counts import CountingGpu
from tests.unit.topology.test_gather import on_ranks

H200 = modify(machine("hgx-h200"), gpus="0,1")
PLAN = make_plan(H200, gpus="onehop")
HOST = 7  # an address that is no memory of a GPU


class Gpu(CountingGpu):
    """Its arrays are what describes them."""

    def why_not_here(self, at: int) -> str:
        return "it is host memory" if at == HOST else ""

    def array(self, at: int, count: int, dtype: Any, owner: Any) -> Any:
        class Array(DeviceArray):
            def reshape(self, _: Any) -> DeviceArray:
                return self

        return Array(at, count, dtype.itemsize, 0, owner)


def each(work: Callable[[CudaContext, Gpu, int], Any]) -> list[Any]:
    """What ``work(context, gpu, rank)`` gives on two ranks."""

    def one(comm: Any, _: Any) -> Any:
        comm.size, gpu = 2, Gpu()
        plans = PlanOnDemand(comm, H200, PLAN)
        return work(CudaContext(comm, gpu, H200, plans, emulated=False, say=lambda *_: None), gpu, comm.rank)  # type: ignore[arg-type]

    found = on_ranks([0, 0], one)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def buffer(at: int, size: int) -> DeviceArray:
    return DeviceArray(at, size, 4, 0, f"owner of {at}")


def test_an_array_and_a_part_of_it_are_registered_apart_and_as_often_as_one_likes() -> None:
    def work(context: CudaContext, gpu: Gpu, rank: int) -> None:
        regions, mapped = context.transport.regions, set(gpu.opened)
        whole, part = buffer(1 << 40, 100), buffer(1 << 40, 10)
        for device in (whole, part, whole):
            context.register(device)
        for device in (part, whole, whole):
            assert regions.ref(device.ptr, device.nbytes)
            context.deregister(device)
        assert (regions.known, gpu.opened) == ({}, mapped)
        for device in (whole, part):
            with pytest.raises(BufferTypeError, match="not registered"):
                context.deregister(device)

    each(work)


@pytest.mark.parametrize(("bad", "text"), [(buffer(HOST, 5), "it is host memory"), (buffer(1 << 41, 0), "no elements")])
def test_what_one_rank_cannot_register_none_does(bad: DeviceArray, text: str) -> None:
    def work(context: CudaContext, gpu: Gpu, rank: int) -> str:
        with pytest.raises((BufferTypeError, RemoteError), match=text) as caught:
            context.register(bad if rank else buffer(1 << 40, 5))
        assert not context.transport.regions.known
        with pytest.raises(BlinkError):
            context.deregister(buffer(1 << 40, 5))
        return type(caught.value).__name__

    assert each(work) == ["RemoteError", "BufferTypeError"]


def test_memory_that_one_rank_has_no_room_for_is_given_back_by_all() -> None:
    def work(context: CudaContext, gpu: Gpu, rank: int) -> None:
        before = set(gpu.allocated)
        gpu.refuses = "allocate" if rank else ""
        with pytest.raises(BlinkError, match="no allocate"):
            context.empty(100, "float32")
        gpu.refuses = ""
        assert gpu.allocated == before
        for shape in ((2, 50), 0):
            made = context.empty(shape, "float32")
            context.deregister(made)
        assert gpu.allocated == before

    each(work)
