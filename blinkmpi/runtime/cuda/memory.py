"""A communicator's pool of memory that all its GPUs have mapped."""

from collections.abc import Callable
from pathlib import Path

from ...errors import ArgumentError, DeviceError
from ...transport.cuda.memory.blocks import FLAGS, SOURCE
from ...transport.cuda.memory.pool import MemoryPool
from ...transport.host.native import built
from ...util.together import together
from .context import CudaContext


def pool_of(gpus: CudaContext | None) -> MemoryPool:
    """The pool.

    Raises:
        ArgumentError: if there is none.
    """
    if gpus is None or gpus.pool is None or gpus.pool.closed:
        raise ArgumentError(
            "this communicator has no memory pool; make one before, with comm.memory_pool(bytes) on all ranks"
        )
    return gpus.pool


def make_pool(gpus: CudaContext, nbytes: int, enter: Callable[[str], None]) -> MemoryPool:
    """Make the pool; collective.

    Raises:
        DeviceError: on every rank, if one has no C compiler, or no room.
    """
    enter("memory_pool()")

    def library() -> Path:
        if gpus.pool is not None and not gpus.pool.closed:
            size = gpus.pool.state.size
            raise ArgumentError(f"there is a memory pool of {size} bytes; call comm.memory_pool().grow(bytes) instead")
        path, lost = built(SOURCE, FLAGS)
        if path is None:
            raise DeviceError(f"the memory pool's allocator was not compiled: {lost}; install a C compiler, or set CC")
        return path

    path = together(gpus.comm, library)
    pool = together(gpus.comm, lambda: MemoryPool(gpus.comm, gpus.gpu, gpus.transport.regions, path, enter))
    pool.grow(nbytes)
    gpus.pool = pool
    return pool
