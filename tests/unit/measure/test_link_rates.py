"""The GPU's part of measuring, on memory of the host: where things lie, what kernels are told, what is given back."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from blinkmpi.errors import DeviceError
from blinkmpi.transport.cuda import device
from blinkmpi.transport.cuda import link_rates as rates
from blinkmpi.transport.cuda.device import Kernel
from blinkmpi.transport.cuda.link_rates import LINE, NBYTES, PACK, TRIPS, WARM, Rates

SMALL = 64 * PACK
FLAG = (ctypes.c_uint64,) * 3 + (ctypes.c_uint32,) * 4 + (ctypes.c_uint64,)
PUSH = (ctypes.c_uint64,) * 3


def told(params: Any, types: tuple[Any, ...]) -> list[int]:
    """A kernel's arguments, as it would read them."""
    return [kind.from_address(at).value for at, kind in zip(params, types, strict=True)]


@dataclass
class FakeGpu:
    """Device memory is memory of this process; a handle is an address."""

    answers: bool = True
    refused: bool = False
    memory: dict[int, Any] = field(default_factory=dict)
    mapped: list[int] = field(default_factory=list)
    flags: list[list[int]] = field(default_factory=list)
    sms: int = 4

    def __post_init__(self) -> None:
        copied = lambda to, source, nbytes, kind, stream: ctypes.memmove(to, source, nbytes)  # noqa: E731
        self.runtime = SimpleNamespace(memcpyAsync=copied)

    def allocate(self, nbytes: int) -> int:
        buffer = ctypes.create_string_buffer(nbytes)
        self.memory[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    pinned = allocate

    def free(self, at: int) -> None:
        del self.memory[at]

    free_pinned = free

    def export(self, at: int) -> bytes:
        return at.to_bytes(8, "little")

    def open(self, handle: bytes) -> int:
        if self.refused:
            raise OSError("cudaErrorPeerAccessUnsupported")
        self.mapped.append(int.from_bytes(handle, "little"))
        return self.mapped[-1]

    def shut(self, at: int) -> None:
        self.mapped.remove(at)

    def upload(self, to: int, data: bytes) -> None:
        ctypes.memmove(to, data, len(data))

    def download(self, at: int, nbytes: int) -> bytes:
        return ctypes.string_at(at, nbytes)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def compile(self, source: str, name: str) -> Any:
        return SimpleNamespace(launcher=lambda *args: lambda: self.launch(name, *args))

    def launch(self, name: str, grid: int, block: int, stream: int, params: Any, what: str) -> None:
        assert what == name
        if name == "push":
            to, source, packs = told(params, PUSH)
            assert (grid, block) == (self.sms, rates.THREADS)
            ctypes.memmove(to, source, packs * PACK)
        else:
            args = told(params, FLAG)
            self.flags.append(args)
            if self.answers:
                ctypes.c_uint64.from_address(args[2]).value = TRIPS * 2500

    @contextlib.contextmanager
    def timed(self, stream: int) -> Iterator[Callable[[], float]]:
        yield lambda: 0.5


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(ptr=7, synchronize=lambda: None)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Stream=lambda non_blocking: stream))
    monkeypatch.setattr(rates, "cupy", lambda: cupy)


def joined(*gpus: FakeGpu) -> list[Rates]:
    ports = [Rates(gpu, i, len(gpus), nbytes=SMALL, host_bytes=SMALL) for i, gpu in enumerate(gpus)]  # type: ignore[arg-type]
    for port in ports:
        assert not port.connect([p.handle() for p in ports])
    return ports


def test_bytes_land_where_the_peer_receives() -> None:
    ports = joined(FakeGpu(), FakeGpu(), FakeGpu())
    for salt, (a, b) in enumerate([(0, 1), (1, 0), (2, 1), (0, 2)]):
        sent = bytes((salt + i) % 256 for i in range(SMALL))
        for move in (ports[a].copy, ports[a].push):
            ports[a].send(sent)
            assert move(b, 2) == 0.5
            assert ports[b].received(SMALL) == sent
            ports[a].send(bytes(SMALL))
            ports[a].copy(b, 1)
            assert ports[b].received(SMALL) == bytes(SMALL)
    assert ports[0].to_host(1) == ports[0].from_host(3) == 0.5


def test_each_pair_has_words_of_its_own_that_only_grow() -> None:
    gpus = [FakeGpu() for _ in range(3)]
    ports = joined(*gpus)
    for turn in range(2):
        for a, b in ((0, 1), (1, 2), (0, 2)):
            assert ports[a].flag(b) == ports[b].flag(a) == 2.5e-6
            (theirs, mine, _, *ones), (other, own, _, *twos) = gpus[a].flags[-1], gpus[b].flags[-1]
            assert (theirs, mine) == (own, other)
            assert ones[:3] == twos[:3] == [turn * (WARM + TRIPS), WARM, TRIPS]
            assert (ones[3], twos[3]) == (1, 0), "one begins"
    words = {args[1] for gpu in gpus for args in gpu.flags}
    assert len(words) == 6
    for gpu in gpus:
        begin = next(iter(gpu.memory))
        results = {args[2] for args in gpu.flags}
        assert {args[1] - begin for args in gpu.flags} <= {2 * SMALL + i * LINE for i in range(3)}
        assert results == {begin + 2 * SMALL + 3 * LINE}
        assert max(results) + 8 <= begin + len(gpu.memory[begin])


def test_a_peer_that_does_not_answer_is_an_error() -> None:
    ports = joined(FakeGpu(answers=False), FakeGpu())
    ports[1].flag(0)
    with pytest.raises(DeviceError, match="GPU 1 of the node has not answered for 10 s"):
        ports[0].flag(1)


def test_a_kernel_is_launched_with_its_arguments_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    refused = RuntimeError("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure")

    def launch(*numbers: int) -> None:
        calls.append(numbers)
        if len(calls) > 1:
            raise refused

    monkeypatch.setattr(
        device, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(driver=SimpleNamespace(launchKernel=launch)))
    )
    params = (ctypes.c_void_p * 1)(77)
    start = Kernel(None, 11, 32, None).launcher(5, 256, 9, params, "allreduce(1 x int8)")
    start()
    assert calls == [(11, 5, 1, 1, 256, 1, 1, 0, 9, ctypes.addressof(params), 0)]
    with pytest.raises(
        DeviceError, match=r"launch of allreduce\(1 x int8\): CUDA_ERROR_LAUNCH_FAILED.*started again"
    ) as caught:
        start()
    assert caught.value.__cause__ is refused


def test_memory_that_cannot_be_mapped_has_its_reason_and_all_is_given_back() -> None:
    gpu = FakeGpu(refused=True)
    port = Rates(gpu, 0, 2, nbytes=SMALL, host_bytes=SMALL)  # type: ignore[arg-type]
    assert port.connect([b"", b""]) == {1: "cudaErrorPeerAccessUnsupported"}
    port.disconnect()
    port.close()
    port.close()
    assert not gpu.memory
    ports = joined(one := FakeGpu(), FakeGpu())
    for each in ports:
        each.disconnect()
        each.close()
    assert not one.memory
    assert not one.mapped
    assert NBYTES % PACK == 0
