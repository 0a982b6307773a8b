"""Tensors in memory that all ranks have mapped: ``with blinkmpi.torch.memory(): model = Model().cuda()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import DeviceError
from ..transport.cuda.memory.pool import MemoryPool
from .group import communicator

_kept: list[Any] = []  # allocators that torch may call as long as the process lives


def memory_pool(nbytes: int, comm: Any = None) -> MemoryPool:
    """Make the pool of GPU memory that :func:`memory` takes tensors from, as ``comm.memory_pool(nbytes)``; collective.

    Args:
        nbytes: of this rank; the ranks' may differ.
        comm: a Communicator, or a process group of backend ``blink``; by default the default group.
    """
    found: MemoryPool = communicator(comm, "memory").memory_pool(nbytes)
    return found


@contextmanager
def memory(comm: Any = None) -> Iterator[None]:
    """A block within which tensors that this thread makes on its GPU lie in the memory pool, and are registered. Local.

    They are tensors like others, made and dropped at any time on any rank. Only the thread that enters is meant, so
    not autograd's, which makes gradients: make them before (``torch.zeros_like``), or let DDP or FSDP do.

    Args:
        comm: a Communicator, or a process group of backend ``blink``; by default the default group.

    Raises:
        ArgumentError: if it has no pool.
        DeviceError: for an old torch.
        torch.OutOfMemoryError: as torch does, if the pool has no room, with a note of its state and of what helps.
    """
    pool = communicator(comm, "memory").memory_pool()
    with in_pool(pool, mem_pool(pool)):
        yield


def mem_pool(pool: MemoryPool) -> Any:
    """The ``torch.cuda.MemPool`` over a pool."""
    if not hasattr(torch.cuda, "use_mem_pool"):
        raise DeviceError(f"torch {torch.__version__} has no torch.cuda.use_mem_pool; take torch 2.5 or newer")
    if "torch" not in pool.fronts:
        allocator = torch.cuda.memory.CUDAPluggableAllocator(pool.library, *pool.functions)
        _kept.append(allocator)
        pool.fronts["torch"] = torch.cuda.MemPool(allocator.allocator())

        def release() -> None:
            pool.fronts.pop("torch", None)  # torch keeps what a MemPool has as long as that is there
            torch.cuda.empty_cache()
            pool.releases.remove(release)

        pool.releases.append(release)
    return pool.fronts["torch"]


@contextmanager
def in_pool(pool: MemoryPool, front: Any) -> Iterator[None]:
    """Tensors of this thread come from the pool."""
    with pool.explained(), torch.cuda.use_mem_pool(front, device=pool.device):
        yield
