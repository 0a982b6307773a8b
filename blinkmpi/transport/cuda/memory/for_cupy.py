"""CuPy's arrays in a pool."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ....errors import PoolExhausted
from ..device import cupy
from .pool import MemoryPool

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, at which CuPy's pools give back what they keep, and ask again

_kept: list[Any] = []  # CuPy's pools: one that is gone would take the memory of its arrays with it


@contextmanager
def cupy_memory(pool: MemoryPool) -> Iterator[None]:
    """CuPy arrays that this thread makes within lie in the pool.

    CuPy's own pool lies over it, so arrays are made as fast as ever.
    """
    if "cupy" not in pool.fronts:
        pool.fronts["cupy"] = _front(pool)
    with cupy().cuda.using_allocator(pool.fronts["cupy"]):
        yield


def _front(pool: MemoryPool) -> Any:
    """An allocator as CuPy wants it."""
    cp = cupy()

    def malloc(nbytes: int, device: int) -> int:
        try:
            return pool.malloc(nbytes, cp.cuda.get_current_stream().ptr)
        except PoolExhausted as error:
            raise cp.cuda.runtime.CUDARuntimeError(OUT_OF_MEMORY) from error

    def free(at: int, device: int) -> None:
        pool.free(at)

    front = cp.cuda.MemoryPool(cp.cuda.PythonFunctionAllocator(malloc, free).malloc)

    def allocate(nbytes: int) -> Any:
        try:
            return front.malloc(nbytes)
        except MemoryError as error:  # CuPy's OutOfMemoryError
            error.add_note(f"blinkmpi: {pool.why_full()}")
            raise

    _kept.append(front)
    pool.releases.append(front.free_all_blocks)
    return allocate
