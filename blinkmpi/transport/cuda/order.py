"""One order of all calls of this process on its GPU, whatever their streams, communicators and graphs.

A kernel waits for the kernels of the peers, and two that each fill the GPU must not wait for each other's peers. So a
call on another stream than the last one waits for that one.

Nobody says when a graph is launched. So once a call has been captured, all calls are chained by one event: each waits
for it and records it anew behind itself. In a graph both are nodes. CUDA takes the event as it is when the graph is
launched, so graphs and calls run in the order in which they are launched. NCCL does the same (its ``graphUsageMode``
2), with a record behind each call. Here a graph has one wait, before its first call, and one record, behind its last:
with each call that is captured the record moves behind that.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

from ...util.lru import LRU
from .device import Gpu

CAPTURES = 64  # of which it is known what was captured last


@dataclass
class Captured:
    """The last call of a capture: its stream, the node that records the chain, if there is one, what that follows."""

    stream: int
    record: int = 0
    before: tuple[int, ...] = ()


class Order:
    """The order.

    Attributes:
        lock: held by who puts a call on a stream. C takes it, too.
        last: the stream of the last call outside of graphs, and what keeps it. C reads it.
        chain: the event, 0 before the first capture. C reads it, and waits for it and records it by itself.
    """

    def __init__(self) -> None:
        self.lock, self.chain = threading.Lock(), ctypes.c_void_p()
        self.last: list[Any] = []
        self._captures: LRU[int, Captured] = LRU(CAPTURES)  # by CUDA's number of a capture

    def chain_from_now(self, gpu: Gpu) -> None:
        """Chain all calls, whether one has been captured or not."""
        self.chain.value = gpu.event().value

    def begin(self, gpu: Gpu, stream: int, holder: object, *, mixes: bool) -> None:
        """Let a stream wait for all calls before; who calls this holds the lock.

        Args:
            holder: keeps the stream alive.
            mixes: whether what is captured is chained, too.
        """
        capture = gpu.capture(stream) if gpu.capturing(stream) else None
        if capture is not None:
            known = self._captures.find(capture.number)
            if known is not None and known.stream != stream:
                gpu.after(stream, known.stream)
                known.stream = stream
            elif known is None:
                if mixes:
                    gpu.wait(stream, self._chain(gpu), external=True)
                self._captures.put(capture.number, Captured(stream))
            return
        if self.chain:
            gpu.wait(stream, self.chain)
        elif self.last and self.last[0] != stream and not gpu.capturing(self.last[0]):
            gpu.after(stream, self.last[0])
        if not self.last or self.last[0] != stream:
            self.last[:] = [stream, holder]

    def end(self, gpu: Gpu, stream: int, *, mixes: bool) -> None:
        """Let all later calls wait for what is now on a stream; who calls this holds the lock."""
        if not self.chain:
            return
        capture = gpu.capture(stream) if gpu.capturing(stream) else None
        if capture is None:
            gpu.record(stream, self.chain)
        elif mixes and (known := self._captures.find(capture.number)) is not None:
            known.record = known.record or gpu.add_record(capture, self.chain)
            gpu.move_node(capture, known.record, known.before)
            known.before = capture.before

    def _chain(self, gpu: Gpu) -> ctypes.c_void_p:
        """The event. When it is made it stands for the last call, but not if that is on a stream that is captured now.

        Whoever captures that stream first of all, launches the graph on another one and has not synchronised before
        makes kernels overlap, which they report.
        """
        if not self.chain:
            event = gpu.event()
            if self.last and not gpu.capturing(self.last[0]):
                gpu.record(self.last[0], event)
            self.chain.value = event.value
        return self.chain


ORDER = Order()
