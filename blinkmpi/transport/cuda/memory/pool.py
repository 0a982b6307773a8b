"""``MemoryPool``: memory that all ranks of the node have mapped before anything lies in it.

Its chunks are made by all ranks together, when the pool is made and when it grows; each is an allocation of cudaMalloc
that is registered as any other buffer (``regions``). Arrays are cut from them by each rank for itself, at any time:
where they lie may differ from rank to rank, and kernels name a place by its chunk and offset.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ....errors import ArgumentError, DeviceError, PoolExhausted, PoolInUse
from ....util.together import Comm, together
from ..device import Gpu
from ..regions import Region, Regions
from .blocks import PoolBlocks, PoolState

GRANULE = 2 << 20  # bytes in which the driver allocates


class MemoryPool:
    """A pool, without memory before :meth:`grow`.

    Args:
        comm: of the node's ranks.
        library: blocks.c, compiled.
        enter: waits until all ranks are about to do what it names, and has every call bound anew.
    """

    def __init__(self, comm: Comm, gpu: Gpu, regions: Regions, library: Path, enter: Callable[[str], None]) -> None:
        self._comm, self._gpu, self._regions, self._enter = comm, gpu, regions, enter
        self.blocks = PoolBlocks(library, gpu)
        self._chunks: list[tuple[Region, tuple[int, int]]] = []
        self.fronts: dict[str, Any] = {}  # what torch and CuPy have made of it
        self.releases: list[Callable[[], None]] = []  # which have such a library give back what it keeps
        self.closed = False

    # ---- of all ranks together

    def grow(self, nbytes: int) -> None:
        """Add so many bytes, when the kernels that run on all ranks are through; collective.

        No array lies across the border to what was there before. CUDA graphs stay as they are.

        Args:
            nbytes: of this rank; the ranks' may differ.

        Raises:
            DeviceError: if a GPU has no room, or one is captured; the other ranks get a RemoteError, and the pool stays
                as it was.
        """
        self._check_open()
        self._enter("memory_pool().grow()")
        made: list[int] = []

        def own() -> tuple[int, int]:
            size = -(-positive(nbytes) // GRANULE) * GRANULE
            try:
                self._gpu.runtime.deviceSynchronize()  # before any rank maps what is new
            except Exception as error:  # CuPy's CUDARuntimeError
                raise DeviceError(f"no memory is made while a stream is captured or has failed: {error}") from error
            made.append(self._gpu.allocate(size))
            return made[0], size

        try:
            region = self._regions.register(self._comm, own)
        except Exception:
            for at in made:
                self._gpu.free(at)
            raise
        self._chunks.append((region, region.parts[0]))
        self.blocks.add(region.begin, region.nbytes)

    def close(self) -> None:
        """Give the memory back; collective. CUDA graphs of calls on it are invalid then.

        It begins with :meth:`trim`; arrays and tensors are the user's to drop.

        Raises:
            PoolInUse: on all ranks, if an array or tensor lies in it on one; the pool stays as it was.
        """
        self._check_open()
        self._enter("memory_pool().close()")

        def seal() -> None:
            self.trim()
            if not self.blocks.seal():
                raise PoolInUse(f"{self.in_use()}; drop them on all ranks, then close the pool")

        try:
            together(self._comm, seal, error=PoolInUse)
        except PoolInUse:
            self.blocks.unseal()
            raise
        self._gpu.runtime.deviceSynchronize()
        self._comm.Barrier()
        for region, part in self._chunks:
            self._regions.deregister(self._comm, region, part)
        self.leave()

    # ---- of this rank

    def trim(self) -> None:
        """Take back what torch and CuPy keep for later arrays. Not inside of ``memory`` and ``cupy_memory``."""
        gc.collect()  # arrays in cycles, and what communicators that are freed have kept
        self._gpu.use()
        for release in list(self.releases):
            release()

    def leave(self, *, mapped: bool = False) -> None:
        """End when nothing lies in it any more; with ``mapped``, by peers perhaps, when the process ends."""
        self.closed, self._chunks = True, []
        self._enter = _nowhere  # whose communicator is of no more use
        if not mapped:
            self.blocks.leave()
            self.trim()

    @property
    def state(self) -> PoolState:
        """How much of it is used."""
        return self.blocks.state

    @property
    def device(self) -> int:
        """CUDA's number of this rank's GPU."""
        return self._gpu.device

    @property
    def library(self) -> str:
        """The compiled allocator, for torch's ``CUDAPluggableAllocator``."""
        return self.blocks.path

    @property
    def functions(self) -> tuple[str, str]:
        """The names of its functions, for the same."""
        return self.blocks.functions

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """Memory of this many bytes for work on any stream; returns its address.

        Raises:
            PoolExhausted: if there is no room.
        """
        self._check_open()
        at = self.blocks.malloc(nbytes, stream)
        if not at:
            raise PoolExhausted(self.why_full())
        return at

    def free(self, at: int) -> None:
        """Give it back."""
        self.blocks.free(at)

    def in_use(self) -> str:
        """What lies in it."""
        state = self.state
        return f"{state.blocks} blocks of {state.used} bytes of the memory pool on GPU {self.device} are in use"

    def why_full(self) -> str:
        """Why a malloc has failed, and what helps."""
        state = self.state
        if self.closed:
            return f"{state.asked} bytes were asked of a memory pool that is closed; make another one"
        return (
            f"{state.asked} bytes were asked of the memory pool on GPU {self.device}, which has {state.size} bytes, "
            f"of which {state.used} are in use and at most {state.longest} are free in one place; drop arrays, or call "
            "comm.memory_pool().grow(bytes) on all ranks"
        )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What torch or CuPy raise within for want of memory says why there was none."""
        failures = self.state.failures
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if type(error).__name__ == "OutOfMemoryError" and self.state.failures > failures:
                error.add_note(f"blinkmpi: {self.why_full()}")
            raise

    def _check_open(self) -> None:
        if self.closed:
            raise DeviceError("this memory pool is closed; make another one with comm.memory_pool(bytes)")


def _nowhere(what: str) -> None:
    """Where a pool that is closed would meet its peers."""


def positive(nbytes: object) -> int:
    """A number of bytes.

    Raises:
        ArgumentError: for what is none.
    """
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes <= 0:
        raise ArgumentError(f"memory_pool of {nbytes!r} bytes: expected a positive integer")
    return nbytes
