"""Buffers of calls: between poisoned margins, at odd offsets, in host memory, freed when they are dropped."""

from typing import Any, Protocol

import numpy as np

from blinkmpi.program.reduction import dtype_of
from tests.conformance import Array

MARGIN = 64  # bytes on either side that nobody may touch
UNTOUCHED = 0xA5


class Buffer(Protocol):
    """A vector that a call is given, and what its test may do to it."""

    given: Any  # what is passed to the call

    def write(self, data: Array) -> None:
        """Make it this."""

    def read(self) -> Array:
        """Give it on the host."""

    def intact(self) -> bool:
        """Whether what lies around it is untouched."""


class Tensor:
    """A vector of which a call sees DLPack alone, as of a tensor."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class HostBuffer:
    """A vector in host memory of its own."""

    def __init__(self, count: int, dtype: str, skew: int, memory: str) -> None:
        kind = dtype_of(dtype)
        start, nbytes = MARGIN + skew * kind.itemsize, count * kind.itemsize
        self._whole = np.empty(start + nbytes + MARGIN, np.uint8)
        self._before, self._behind = self._whole[:start], self._whole[start + nbytes :]
        self._before[:] = UNTOUCHED
        self._behind[:] = UNTOUCHED
        self.array: Array = self._whole[start : start + nbytes].view(kind)
        self.given: Any = self.array
        if memory == "spec":
            self.given = [self.array, count]
        elif memory == "dlpack" and kind.isbuiltin == 1:  # what DLPack has no name for goes as an array
            self.given = Tensor(self.array)

    def write(self, data: Array) -> None:
        self.array.view(np.uint8)[:] = data.view(np.uint8)

    def read(self) -> Array:
        return self.array

    def intact(self) -> bool:
        return bool((self._before == UNTOUCHED).all() and (self._behind == UNTOUCHED).all())
