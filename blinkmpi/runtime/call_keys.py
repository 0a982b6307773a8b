"""The cache key of a call in Python: cheaper than parsing its arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import ArgumentError
from ..lang.algorithms import Algorithm
from ..program.reduction import Array
from ..transport.host.host_program import HostProgram
from .arguments import Prepared
from .cuda.buffers import current_stream_of_torch, is_plain_tensor, lies_on_device, stream_address, tensor_types
from .foreign import imported


class KeptMemory:
    """Counts, and limits, the memory of our own that kept calls hold; a kept call can be made again."""

    LITTLE = 64 << 10  # a call is kept if it holds at most so many bytes of our memory
    MOST = 64 << 20  # bytes that all longer calls may hold together

    def __init__(self) -> None:
        self._bytes = 0

    def may_have(self, nbytes: int) -> bool:
        """Whether one more call may keep so much."""
        if nbytes <= self.LITTLE:
            return True
        room = self._bytes + nbytes <= self.MOST
        self._bytes += nbytes if room else 0
        return room


class Keyed:
    """A type of argument that is blinkmpi's; ``key`` identifies it among kept calls. None: no call of it is kept."""

    __slots__ = ()
    key: int | None


class OwnMemory:
    """Memory of our own for calls, which later calls use again; earlier ones keep what they had."""

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, np.uint8)

    def room(self, nbytes: int) -> Array:
        """So many bytes."""
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(max(nbytes, 2 * self._memory.nbytes), np.uint8)
        return self._memory[:nbytes]


def own_bytes(ready: Prepared, program: HostProgram | None = None) -> int:
    """Memory of our own that a call needs, by a program on host memory; launches of groups share a bucket."""
    own = (ready.before or ready.after) and not ready.said
    return ready.call.nbytes if own or (program is not None and program.aside) else 0


def spread_out(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arrays on a GPU in arguments that are lists or tuples of such, and how they lie; None for other arguments."""
    found: list[Any] = []
    for arg in args:
        if not isinstance(arg, list | tuple):
            return None
        parts = [part for item in arg for part in (item if isinstance(item, tuple) else (item,))]
        if not all(map(lies_on_device, parts)):
            return None
        found += len(parts), *parts
    return tuple(found)


def key_of(prepare: Any, args: tuple[Any, ...], stream: Any, buffers: int) -> tuple[Any, ...] | None:
    """What makes two calls the same but for the content of their buffers; None where an argument is no simple one.

    A C-contiguous NumPy array is identified by its address, whether it is read-only, bytes and type; a CuPy array or
    a torch tensor on a GPU by address, elements and type, and by the stream, which without ``stream`` is the current
    one of CuPy or torch.

    Args:
        buffers: bit i is set where argument i is a buffer of data. Another array has counts, which may change.
    """
    key: list[Any] = [prepare]
    cupy, device = imported("cupy"), False
    device_array = cupy.ndarray if cupy is not None else None
    torch, tensor_on = imported("torch"), -1
    tensors = tensor_types() if torch is not None else ()
    for place, arg in enumerate(args):
        kind = type(arg)
        if kind is np.ndarray:
            # no buffer: the numbers in an array may change between calls, so Python does not keep such a call
            if not arg.flags.c_contiguous or not buffers >> place & 1:
                return None
            memory = MPI.buffer(arg)  # four times as fast as __array_interface__
            key += memory.address, memory.readonly, memory.nbytes, arg.dtype
        elif kind is device_array:
            if not arg._c_contiguous:  # six times as fast as arg.flags.c_contiguous
                return None
            key += arg.data.ptr, arg.size, arg.dtype.num
            device = True
        elif kind in tensors:
            if not is_plain_tensor(arg, torch):
                return None
            key += arg.data_ptr(), arg.numel(), arg.dtype
            tensor_on = arg.get_device()
        elif arg is None or kind is int or kind is str:
            key.append(arg)
        elif isinstance(arg, np.integer | np.bool_ | bool):
            key.append(int(arg))
        elif kind is MPI.Op:
            key.append(arg.handle)
        elif kind is Algorithm:
            key.append(arg.identity)
        elif isinstance(arg, Keyed) and arg.key is not None:
            key.append(arg.key)
        elif arg is MPI.IN_PLACE:
            key.append("in place")
        else:
            return None
    if stream is not None:
        try:
            key += stream_address(stream), False
        except ArgumentError:  # binding the call raises it again, and tells the peers
            return None
    else:
        if device:
            key += cupy.cuda.get_current_stream().ptr, True
        if tensor_on >= 0:
            key += current_stream_of_torch(torch, tensor_on), "torch"
    return tuple(key)
