"""A call's buffers as flat, contiguous arrays: NumPy's in host memory, ``DeviceArray`` in GPU memory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ..errors import ArgumentError
from .reduction import Array


class DeviceArray(msgspec.Struct, frozen=True):
    """A flat, contiguous piece of GPU memory: ``size`` elements of ``itemsize`` bytes at ``ptr``.

    ``stream`` is the one that its producer used (an address; 0 is CUDA's default stream); ``owner`` keeps it alive.
    ``copy_of`` is the address that its content is copied from before each call, or 0; ``device`` the GPU's number in
    this process, or -1 where the owner does not say.
    """

    ptr: int
    size: int
    itemsize: int
    stream: int
    owner: Any
    copy_of: int = 0
    device: int = -1

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.itemsize

    def __getitem__(self, part: slice) -> DeviceArray:
        """A contiguous part."""
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ArgumentError(f"a part of GPU memory with step {step}; only contiguous parts can be sent")
        at, size = self.ptr + start * self.itemsize, max(0, stop - start)
        return replace(self, ptr=at, size=size, copy_of=0)


class Segments(msgspec.Struct, frozen=True):
    """Many pieces of GPU memory, and their places in a bucket, which one kernel copies in either direction.

    ``pieces`` has, for each, its address, its place in the bucket's first block (16 bytes divide it), and the bytes of
    one of its ``blocks``, which lie one behind another; in the bucket they are ``stride`` bytes apart.
    """

    bucket: int
    stride: int
    blocks: int
    pieces: tuple[tuple[int, int, int], ...]


class Buffer(msgspec.Struct, frozen=True):
    """A flat, contiguous view of the user's memory."""

    array: Array | DeviceArray
    dtype: str

    @property
    def count(self) -> int:
        """Elements."""
        return self.array.size


def overlap(one: Array | DeviceArray, other: Array | DeviceArray) -> bool:
    """Whether two pieces of memory share a byte."""
    if isinstance(one, DeviceArray) and isinstance(other, DeviceArray):
        return one.ptr < other.ptr + other.nbytes and other.ptr < one.ptr + one.nbytes
    if isinstance(one, DeviceArray) or isinstance(other, DeviceArray):
        return False
    return np.may_share_memory(one, other)


def address(array: Array | DeviceArray) -> int:
    """Where a piece of memory begins."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return array.ptr
