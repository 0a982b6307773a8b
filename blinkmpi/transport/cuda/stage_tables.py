"""The tables of ``stages.cu`` on the device, and those that serve calls of many counts.

A table lives as long as somebody holds it: a kernel that is kept, or a bound call. Then its memory is used again for
another table, when the work that was on the GPU by then is through; nothing is freed while the communicator lives.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from ...program.call import Call
from ...program.template import Template
from .codegen import item_bytes, scale
from .device import Gpu, Kernel
from .kernel_layout import spans_for

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


@dataclass(frozen=True)
class LoadedTemplate:
    """What calls share that differ in their counts: kernel and table, ready on this GPU.

    ``kernel`` and ``table`` are None at a rank without stages. ``stages`` has the tree of each stage, and what its
    offsets are: 2 is the tree's offset in its block, 3 that in the vector of all blocks, 4 none. The kernel takes
    ``spans`` of them.
    """

    template: Template
    kernel: Kernel | None
    table: Table | None
    rows: int
    stages: tuple[tuple[int, int, int], ...]
    spans: int

    @classmethod
    def of(cls, template: Template, rank: int, kernel: Kernel | None, table: Table | None, rows: int) -> Self:
        """For a rank's stages."""
        kinds = {0: 2, 1: 3, None: 4}
        stages = tuple((s.tree, kinds[s.local], kinds[s.store]) for s in template.program.of(rank))
        return cls(template, kernel, table, rows, stages, spans_for(len(stages)))

    def words(self, call: Call) -> list[int]:
        """What the kernel's arguments say of a call's count: COUNT, CHUNK, OWN and STORE of each stage."""
        times = scale(call)
        item = item_bytes(call)[0] * times
        cut, chunks = self.template.cut(call)
        found = {
            tree: (length * times, chunks[length] * times, first * item, (start + first) * item, -1)
            for tree, start, first, length in cut
        }
        words: list[int] = []
        for tree, own, store in self.stages:
            span = found[tree]
            words += span[0], span[1], span[own], span[store]
        return words
