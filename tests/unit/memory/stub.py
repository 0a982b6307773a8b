"""A libcuda on host memory (tests/data/cuda-memory-stub.c), and a Gpu that uses it."""

import contextlib
import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from blinkmpi.errors import DeviceError
from blinkmpi.transport.cuda.memory.blocks import FLAGS, SOURCE
from blinkmpi.transport.host.native import built

STUB = Path(__file__).parents[2] / "data" / "cuda-memory-stub.c"
MIB = 1 << 20
VARIABLES = ("total", "allocated", "mapped", "reserved", "waits", "capturing")


@cache
def library() -> Path:
    """blocks.c, compiled as jobs do."""
    path, why = built(SOURCE, FLAGS)
    assert path is not None, why
    return path


def make_stub(folder: Path) -> Path:
    """The compiled stub: one of its own for each folder."""
    target = folder / "libcuda-stub.so"
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", target, STUB], check=True)
    return target


class Stub:
    """The stub as a driver, with its variables."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Any:
        if name in VARIABLES:
            return ctypes.c_int64.in_dll(self._library, f"stub_{name}").value
        return getattr(self._library, name)

    def set(self, name: str, value: int) -> None:
        """Set a variable."""
        ctypes.c_int64.in_dll(self._library, f"stub_{name}").value = value

    @contextlib.contextmanager
    def failing(self, function: str) -> Any:
        """Let a function fail meanwhile."""
        name = (ctypes.c_char * 64).in_dll(self._library, "stub_fails")
        name.value = function.encode()
        yield
        name.value = b""

    def segment(self, sizes: Sequence[int]) -> int:
        """Memory in parts one behind another, as torch's expandable segments are; its address."""
        at = ctypes.c_uint64()
        assert self.cuMemAddressReserve(ctypes.byref(at), _size(sum(sizes)), _size(2 * MIB), _u64(0), _u64(0)) == 0
        place = at.value
        for size in sizes:
            handle = ctypes.c_uint64()
            assert self.cuMemCreate(ctypes.byref(handle), _size(size), None, _u64(0)) == 0
            assert self.cuMemMap(_u64(place), _size(size), _size(0), handle, _u64(0)) == 0
            assert self.cuMemSetAccess(_u64(place), _size(size), None, _size(1)) == 0
            self.cuMemRelease(handle)
            place += size
        return at.value

    @property
    def counts(self) -> tuple[int, int, int]:
        """What is to be as before when all is given back."""
        return self.allocated, self.mapped, self.reserved


_u64, _size = ctypes.c_uint64, ctypes.c_size_t


@dataclass
class StubGpu:
    """A device whose memory is the stub's; its handle of an allocation is the address, as ranks are threads here."""

    driver: Stub
    device: int = 0
    context_address: int = 77
    opened: list[int] = field(default_factory=list)
    refuses: str = ""  # the operation that fails

    @property
    def runtime(self) -> Any:
        """CuPy's, as far as it is used."""
        return SimpleNamespace(deviceSynchronize=lambda: self._may("synchronize"))

    def use(self) -> None:
        """Nothing to do."""

    def upload(self, to: int, data: bytes) -> None:
        """What the kernels would read."""

    def allocate(self, nbytes: int) -> int:
        """Memory of cudaMalloc."""
        at = ctypes.c_uint64()
        if code := self.driver.cuMemAlloc_v2(ctypes.byref(at), _size(nbytes)):
            raise DeviceError(f"{nbytes} bytes on GPU {self.device}: CUDA error {code}; free memory, or take less")
        return at.value

    def free(self, at: int) -> None:
        """Give it back."""
        assert self.driver.cuMemFree_v2(_u64(at)) == 0

    def allocation(self, at: int) -> tuple[int, int]:
        """What lies at an address."""
        begin, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        if self.driver.cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(nbytes), _u64(at)):
            raise DeviceError(f"address {at:#x} is no memory of this GPU")
        return begin.value, nbytes.value

    def export(self, at: int) -> bytes:
        """Its handle, for memory of cudaMalloc."""
        if not self.driver.stub_is_allocated(_u64(at)):
            raise DeviceError("cudaIpcGetMemHandle: no")
        return at.to_bytes(8, "little")

    def open(self, handle: bytes) -> int:
        """A peer's."""
        self._may("open")
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def shut(self, at: int) -> None:
        """Unmap a peer's."""
        self.opened.remove(at)

    def _may(self, what: str) -> None:
        if self.refuses == what:
            raise DeviceError(f"no {what}")
