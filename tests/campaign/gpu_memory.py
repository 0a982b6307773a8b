"""Buffers of calls on a GPU: CuPy arrays and torch tensors, registered or not, and calls in CUDA graphs."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

import blinkmpi
from blinkmpi.program.reduction import dtype_of
from blinkmpi.transport.cuda.device import cupy
from tests.campaign.memory import MARGIN, UNTOUCHED
from tests.conformance import Array

POOL_BYTES = 160 << 20  # of registered memory: two buffers of 64 MiB, or the twelve of six requests


def memories() -> tuple[str, ...]:
    """Where calls may have their buffers: torch's only where it is installed."""
    found = ("cupy", "cupy", "registered", "registered", "numpy")
    return (*found, "torch") if importlib.util.find_spec("torch") else found


class Pool:
    """Registered memory of one communicator, handed out from the front; all is free again with each step."""

    def __init__(self, comm: blinkmpi.Communicator) -> None:
        self._whole, self._next = comm.empty((POOL_BYTES,), "uint8"), 0

    def take(self, nbytes: int) -> Any:
        """Give some bytes, aligned as an allocation is."""
        start = self._next
        self._next = (start + nbytes + 255) // 256 * 256
        if self._next > POOL_BYTES:
            raise MemoryError(f"{self._next} bytes of registered memory are wanted in one step, {POOL_BYTES} are there")
        return self._whole[start : start + nbytes]

    def clear(self) -> None:
        """Take everything back."""
        self._next = 0


class GpuBuffer:
    """A vector in GPU memory, from an allocation of its own or from a pool."""

    def __init__(self, count: int, dtype: str, skew: int, memory: str, pool: Pool | None) -> None:
        cp, kind = cupy(), dtype_of(dtype)
        self._dtype = dtype
        start, nbytes = MARGIN + skew * kind.itemsize, count * kind.itemsize
        total = start + nbytes + MARGIN
        self._whole = cp.empty(total, "uint8") if pool is None else pool.take(total)
        self._host = np.full(total, UNTOUCHED, np.uint8)  # the same as it was written or read last
        self._start, self._stop = start, start + nbytes
        self._bytes = self._whole[start : start + nbytes]
        if memory == "torch":
            torch = importlib.import_module("torch")
            self.given: Any = torch.from_dlpack(self._bytes).view(getattr(torch, dtype))
        else:
            self.given = self._bytes.view(dtype)

    def write(self, data: Array) -> None:
        self._host[:] = UNTOUCHED
        self._host[self._start : self._stop] = np.ascontiguousarray(data).view(np.uint8)
        self._whole.set(self._host)
        cupy().cuda.Stream.null.synchronize()  # a stream that does not block would not wait for it

    def read(self) -> Array:
        self._whole.get(out=self._host)
        return self._host[self._start : self._stop].view(dtype_of(self._dtype))

    def intact(self) -> bool:
        self._whole.get(out=self._host)
        return bool((self._host[: self._start] == UNTOUCHED).all() and (self._host[self._stop :] == UNTOUCHED).all())


class Stream:
    """A stream on which calls are only put, and graphs captured."""

    def __init__(self) -> None:
        self.stream = cupy().cuda.Stream(non_blocking=True)

    def captured(self, enqueue: Callable[[Any], None]) -> Callable[[], None]:
        """Enqueue once, which compiles and finds memory, then capture; gives what launches the graph and waits."""
        enqueue(self.stream)
        self.stream.synchronize()
        self.stream.begin_capture()
        enqueue(self.stream)
        graph = self.stream.end_capture()

        def launch() -> None:
            graph.launch(self.stream)
            self.stream.synchronize()

        return launch
