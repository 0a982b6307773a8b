"""The tables of ``stages.cu`` on the device.

A table lives as long as somebody holds it: a kernel that is kept, or a bound call. Then its memory is used again for
another table, when the work that was on the GPU by then is through; nothing is freed while the communicator lives.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .device import Gpu

SMALLEST = 4096  # bytes of a table


@dataclass(eq=False)
class Table:
    """Rows on the device."""

    at: int


class TableMemory:
    """Device memory for tables.

    Args:
        last: the stream of the last call, behind which all earlier ones are; None if there is none, or if it is
            captured, where no event can be asked.
    """

    def __init__(self, gpu: Gpu, last: Callable[[], int | None]) -> None:
        self._gpu, self._last = gpu, last
        self._lock = threading.Lock()  # threads may make calls at once
        self._all: list[int] = []
        self._free: dict[int, list[int]] = {}  # by bytes
        self._dropped: deque[tuple[int, int]] = deque()  # (bytes, address) of what nobody holds
        self._pending: deque[tuple[Any, list[tuple[int, int]]]] = deque()  # events, and what is free behind them

    def put(self, data: bytes) -> Table:
        """Rows of a table, copied to the device; waits for the copy alone.

        Raises:
            DeviceError: if there is no room.
        """
        size = max(SMALLEST, 1 << (len(data) - 1).bit_length())
        with self._lock:
            self._collect()
            free = self._free.setdefault(size, [])
            if not free:
                free.append(self._gpu.allocate(size))
                self._all.append(free[-1])
            self._gpu.upload(free[-1], data)
            table = Table(free.pop())
        weakref.finalize(table, self._dropped.append, (size, table.at)).atexit = False
        return table

    def _collect(self) -> None:
        """Find out what may be used again."""
        if self._dropped and (stream := self._last()) is not None:
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            self._pending.append((self._gpu.mark(stream), dropped))
        while self._pending and self._gpu.idle(self._pending[0][0]):
            for size, at in self._pending.popleft()[1]:
                self._free.setdefault(size, []).append(at)

    def close(self) -> None:
        """Free all; the work must be done."""
        for at in self._all:
            self._gpu.free(at)
        self._all.clear()
