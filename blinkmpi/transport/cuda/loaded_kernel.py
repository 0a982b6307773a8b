"""A compiled kernel with its launch shape and its arguments."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..network.endpoints import Endpoints
from .device import Kernel


@dataclass
class LoadedKernel:
    """A kernel with its arguments; only buffers, fingerprint and deadline change from call to call."""

    kernel: Kernel
    grid: int
    block: int
    args: ctypes.Array[ctypes.c_uint64]
    params: ctypes.Array[ctypes.c_void_p]
    protocol: str
    text: str
    keep: tuple[int, ...] = ()  # device memory that belongs to it
    endpoints: Endpoints | None = None  # of channels to other nodes
    begin: int = 0  # of the result, in bytes of the receive buffer
    then: LoadedKernel | None = None  # what is started behind it, on the receive buffer alone


def fingerprint(text: str) -> int:
    """32 bits of what a rank calls; never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") or 1


def load_kernel(
    kernel: Kernel, grid: int, block: int, args: Sequence[int], protocol: str, text: str, keep: tuple[int, ...] = ()
) -> LoadedKernel:
    """A kernel whose arguments are packed as the driver wants them."""
    packed = (ctypes.c_uint64 * len(args))(*(a & 0xFFFFFFFFFFFFFFFF for a in args))
    params = (ctypes.c_void_p * 1)(ctypes.addressof(packed))
    return LoadedKernel(kernel, grid, block, packed, params, protocol, text, keep)
