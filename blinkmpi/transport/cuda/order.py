"""One order of all calls of this process on its GPU, whatever their streams, communicators and graphs.

A kernel waits for the kernels of the peers, and two that each fill the GPU must not wait for each other's peers. So a
call on another stream than the last one waits for that one, by an event. Where streams alternate, as FSDP2's do, the
event was recorded behind the last call: a call that has followed another stream records it behind itself, since the
next one is likely to change the stream again. Behind other calls nothing is recorded, and who follows one of those
records the event there first. So work that came behind a recorded call on its stream holds up nobody, and neither a
capture of that stream nor its end matters.

The handle of a thread's default stream names another stream in each thread, so a call there counts as one on another
stream each time.

Nobody says when a graph is launched. So once a call has been captured, all calls are chained by that event: each waits
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
PER_THREAD = 2  # CU_STREAM_PER_THREAD: each thread's default stream has this handle


class OrderState(ctypes.Structure):
    """``order_t`` of launches.h: what C reads and writes, too.

    Attributes:
        event: stands for the last call, where it was recorded behind that; 0 before the first that needs it.
        chained: whether every call waits for it and records it, as what is captured does.
        stands: whether it was recorded behind the last call.
        made: whether there was a call outside of graphs.
        stream: of the last one.
    """

    _fields_ = (
        ("event", ctypes.c_void_p), ("chained", ctypes.c_int64), ("stands", ctypes.c_int64), ("made", ctypes.c_int64),
        ("stream", ctypes.c_uint64),
    )  # fmt: skip


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
        state: of the calls so far; who changes it holds the lock.
        holders: what keeps the stream of the last call outside of graphs; nothing before the first.
    """

    def __init__(self) -> None:
        self.lock, self.state = threading.Lock(), OrderState()
        self.holders: list[Any] = []
        self._records = False  # whether the event is to be recorded behind the call that has begun
        self._captures: LRU[int, Captured] = LRU(CAPTURES)  # by CUDA's number of a capture

    @property
    def last(self) -> int | None:
        """The stream of the last call outside of graphs; None before the first."""
        return int(self.state.stream) if self.state.made else None

    def event(self, gpu: Gpu) -> ctypes.c_void_p:
        """The event, made if there is none yet."""
        if not self.state.event:
            self.state.event = gpu.event().value
        return ctypes.c_void_p(self.state.event)

    def chain_from_now(self, gpu: Gpu) -> None:
        """Chain all calls, whether one has been captured or not."""
        self.event(gpu)
        self.state.chained = 1

    def begin(self, gpu: Gpu, stream: int, holder: object, *, mixes: bool) -> None:
        """Let a stream wait for all calls before; who calls this holds the lock.

        Args:
            holder: keeps the stream alive.
            mixes: whether what is captured is chained, too.
        """
        state, self._records = self.state, False
        capture = gpu.capture(stream) if gpu.capturing(stream) else None
        if capture is not None:
            known = self._captures.find(capture.number)
            if known is not None and known.stream != stream:
                gpu.after(stream, known.stream)
                known.stream = stream
            elif known is None:
                if mixes:
                    self._chain(gpu)
                    gpu.wait(stream, self.event(gpu), external=True)
                self._captures.put(capture.number, Captured(stream))
            return
        again = self.last == stream != PER_THREAD
        self._records = not again
        if state.chained or (self._records and self._stands(gpu)):
            gpu.wait(stream, self.event(gpu))
        state.stands = 0
        if not again:
            state.made, state.stream = 1, stream
            self.holders[:] = [holder]

    def end(self, gpu: Gpu, stream: int, *, mixes: bool) -> None:
        """Let all later calls wait for what is now on a stream; who calls this holds the lock."""
        state = self.state
        if not state.chained:
            if self._records and self.last == stream:
                gpu.record(stream, self.event(gpu))
                state.stands = 1
            return
        capture = gpu.capture(stream) if gpu.capturing(stream) else None
        if capture is None:
            gpu.record(stream, self.event(gpu))
        elif mixes and (known := self._captures.find(capture.number)) is not None:
            known.record = known.record or gpu.add_record(capture, self.event(gpu))
            gpu.move_node(capture, known.record, known.before)
            known.before = capture.before

    def _chain(self, gpu: Gpu) -> None:
        """Chain all calls from now on.

        The event stands for the last call then, but not if it was not recorded behind that, whose stream is captured
        now. Whoever captures that stream first of all, launches the graph on another one and has not synchronised
        before makes kernels overlap, which they report.
        """
        if not self.state.chained:
            self._stands(gpu)
            self.state.chained = 1

    def _stands(self, gpu: Gpu) -> bool:
        """Whether the event stands for the last call; it is recorded behind that, if need be and if CUDA lets it."""
        state = self.state
        if state.made and not state.stands and not gpu.capturing(state.stream):
            gpu.record(state.stream, self.event(gpu))
            state.stands = 1
        return bool(state.stands)


ORDER = Order()
