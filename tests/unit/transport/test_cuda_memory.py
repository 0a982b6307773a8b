"""GPU memory without a GPU: registered buffers, symmetric memory, what pointers are, room for other kernels."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from blinkmpi.errors import BlinkError, BufferTypeError, DeviceError, RemoteError
from blinkmpi.transport.cuda import device
from blinkmpi.transport.cuda.device import Gpu, Kernel
from blinkmpi.transport.cuda.memory_layout import default_max_ctas
from blinkmpi.transport.cuda.regions import Regions
from blinkmpi.transport.cuda.symmetric_memory import SymmetricMemory
from tests.unit.topology.test_gather import on_ranks

SIZE = 1 << 20


@dataclass
class FakeGpu:
    """Allocations of SIZE bytes at made-up addresses; what is opened and allocated is counted."""

    refuses: str = ""  # the operation that fails
    at: "count[int]" = field(default_factory=lambda: count(1 << 30, SIZE))
    allocated: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)
    device: int = 0
    driver: Any = field(default_factory=lambda: SimpleNamespace(cuMemRetainAllocationHandle=lambda *_: 1))  # not VMM

    def use(self) -> None:
        """Nothing to do."""

    def allocate(self, nbytes: int) -> int:
        self._may("allocate")
        self.allocated.add(at := next(self.at))
        return at

    def pinned(self, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(nbytes)
        self.kept = memory
        self.allocated.add(ctypes.addressof(memory))
        return ctypes.addressof(memory)

    def free(self, at: int) -> None:
        self.allocated.remove(at)

    free_pinned = free

    def allocation(self, at: int) -> tuple[int, int]:
        return at // SIZE * SIZE, SIZE

    def export(self, at: int) -> bytes:
        self._may("export")
        return at.to_bytes(8, "little")

    def open(self, handle: bytes) -> int:
        self._may("open")
        self.opened.add(at := next(self.at))
        return at

    def shut(self, at: int) -> None:
        self.opened.remove(at)

    def upload(self, to: int, data: bytes) -> None:
        self._may("upload")

    def _may(self, what: str) -> None:
        if self.refuses == what:
            raise DeviceError(f"no {what}")


def among(n: int, work: Callable[[Any, FakeGpu], Any]) -> list[Any]:
    """What ``work(comm, gpu)`` gives on each rank, or its error."""
    return on_ranks([0] * n, lambda comm, _: work(comm, FakeGpu()))


@pytest.mark.parametrize("what", ["export", "open", "upload"])
def test_a_registration_that_fails_on_one_rank_is_undone_on_all(what: str) -> None:
    def work(comm: Any, gpu: FakeGpu) -> tuple[str, dict[int, Any], set[int], int]:
        regions = Regions(gpu, 3, comm.rank, 0)  # type: ignore[arg-type]
        first = regions.register(comm, lambda: (4 * SIZE, 100))
        gpu.refuses = what if comm.rank == 1 else ""
        before = set(gpu.opened)
        with pytest.raises(BlinkError) as caught:
            regions.register(comm, lambda: (6 * SIZE, 100))
        gpu.refuses = ""
        assert (regions.known, gpu.opened) == ({first.index: first}, before)
        return type(caught.value).__name__, {}, set(), regions.register(comm, lambda: (6 * SIZE, 100)).index

    results = among(3, work)
    assert [r[0] for r in results] == ["RemoteError", "DeviceError", "RemoteError"], results
    assert len({r[3] for r in results}) == 1, "the next one has the same index everywhere"


def test_a_buffer_that_one_rank_cannot_name_is_an_error_on_all() -> None:
    def work(comm: Any, gpu: FakeGpu) -> str:
        def own() -> tuple[int, int]:
            if comm.rank == 2:
                raise BufferTypeError("a list is no array in GPU memory")
            return 4 * SIZE, 100

        with pytest.raises((BufferTypeError, RemoteError), match="a list is no array"):
            Regions(gpu, 3, comm.rank, 0).register(comm, own)  # type: ignore[arg-type]
        return "raised"

    assert among(3, work) == ["raised"] * 3


def test_a_buffer_and_a_part_of_it_are_registered_and_given_back_apart() -> None:
    def work(comm: Any, gpu: FakeGpu) -> None:
        regions = Regions(gpu, 2, comm.rank, 0)  # type: ignore[arg-type]
        whole, part = (4 * SIZE, 4 * SIZE + 1000), (4 * SIZE, 4 * SIZE + 10)
        for begin, end in (whole, part, whole):
            regions.register(comm, lambda begin=begin, end=end: (begin, end - begin))
        for gone in (part, whole):
            region = regions.find(gone)
            assert region is not None
            regions.deregister(comm, region, gone)
            assert regions.ref(4 * SIZE, 1000), "registered once more"
        assert regions.find(part) is None
        regions.deregister(comm, region, whole)
        assert not regions.ref(4 * SIZE, 10)
        assert not gpu.opened

    assert among(2, work) == [None, None]


@pytest.mark.parametrize("what", ["allocate", "export", "open"])
def test_symmetric_memory_that_one_rank_cannot_make_is_given_back_by_all(what: str) -> None:
    def work(comm: Any, gpu: FakeGpu) -> int:
        gpu.refuses = what if comm.rank == 0 else ""
        with pytest.raises(DeviceError, match=f"no {what}"):
            SymmetricMemory(comm, gpu, SIZE)  # type: ignore[arg-type]
        assert not gpu.opened
        return len(gpu.allocated)

    assert among(3, work) == [0, 0, 0]


def test_kernels_leave_room_for_others() -> None:
    assert [default_max_ctas(sms) for sms in (132, 108, 80, 40, 1)] == [100, 76, 48, 20, 1]


class Driver:
    """libcuda's part in this: contexts that are pushed, and threads that enter one."""

    pushed = 0

    def cuCtxPushCurrent_v2(self, _: Any) -> int:
        self.pushed += 1
        return 0

    def cuCtxPopCurrent_v2(self, _: Any) -> int:
        self.pushed -= 1
        return 0

    def cuThreadExchangeStreamCaptureMode(self, _: Any) -> int:
        return 0


def fake_device(driver: Driver) -> Gpu:
    gpu = object.__new__(Gpu)
    gpu.device, gpu.driver, gpu._context = 0, driver, ctypes.c_void_p()
    return gpu


def test_the_driver_is_asked_what_a_pointer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {0x1000: (2, 0), 0x2000: (2, 1), 0x3000: (1, 0), 0x4000: (3, 0)}
    asked = lambda at: SimpleNamespace(**dict(zip(("type", "device"), kinds.get(at, (0, -2)), strict=True)))  # noqa: E731
    runtime = SimpleNamespace(pointerGetAttributes=asked)
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    gpu = fake_device(Driver())
    assert [gpu.why_not_here(at) for at in (0x1000, 0x4000)] == ["", ""], "ours, managed"
    assert "GPU 1, this rank's is GPU 0" in gpu.why_not_here(0x2000)
    assert all("is host memory" in gpu.why_not_here(at) for at in (0x3000, 0x5000)), "pinned, and any other"


def test_a_gpu_that_cannot_be_used_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(_: int) -> None:
        raise RuntimeError("cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable")

    runtime = SimpleNamespace(setDevice=unavailable)
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(DeviceError, match=r"GPU 3 cannot be used: cudaErrorDevicesUnavailable.*compute mode"):
        Gpu(3)


def test_a_thread_that_never_used_the_gpu_launches_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, launched = Driver(), []

    class Refused(Exception):
        status = 201

    def launch(*_: int) -> None:
        if not driver.pushed:
            raise Refused("CUDA_ERROR_INVALID_CONTEXT")
        launched.append(1)

    cuda = SimpleNamespace(driver=SimpleNamespace(launchKernel=launch))
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    params = (ctypes.c_void_p * 1)(77)
    start = Kernel(None, 11, 32, fake_device(driver)).launcher(5, 256, 9, params, "allreduce(1 x int8)")
    start()
    assert (launched, driver.pushed) == ([1], 0)
    Refused.status = 719
    with pytest.raises(DeviceError, match="must be started again"):
        start()
