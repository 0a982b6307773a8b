"""A call on GPU memory: put a kernel on its stream, wait for it, and raise what went wrong.

The ranks wait for one another in the kernel. On the host a rank only announces the call, so that a rank that waits can
recognise a peer that makes another call, or is gone. A call on a stream has the kernel's deadline, and what went wrong
is raised by the next call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from ...errors import CollectiveTimeout, DeviceError
from ...planning.chunk_search import ChunkSearch
from ...program.memory import DeviceArray
from ...transport.announcement import Called
from ...transport.control_pages import SEQ_BITS
from ...transport.cuda.loaded_kernel import LoadedKernel
from ...transport.interface import PeerDelegates, Refused
from ...transport.network.endpoints import Endpoints
from ..arguments import Prepared
from .copies import CopiesAround
from .history import CallHistory
from .in_flight import GRACE_S, CallInFlight


class Place(NamedTuple):
    """Where a buffer of a call lies: in which of the user's arrays, and how far behind its beginning, in bytes."""

    array: int
    offset: int


def place_of(buffer: DeviceArray, arrays: Sequence[DeviceArray]) -> Place | None:
    """The place of a buffer, in the array that begins there or else in one that holds it, as a block in place."""
    at, end = buffer.ptr, buffer.ptr + buffer.nbytes
    inside = [(at - a.ptr, i) for i, a in enumerate(arrays) if a.ptr <= at and end <= a.ptr + a.nbytes]
    if not inside:
        return None
    offset, array = min(inside)
    return Place(array, offset)


class CudaCall:
    """A bound call on a stream: see :class:`...transport.interface.BoundCall`."""

    def __init__(
        self,
        history: CallHistory,
        kernel: LoadedKernel,
        called: Called,
        ready: Prepared,
        stream: int,
        holder: object,
        search: ChunkSearch | None,
        timeout_s: float,
    ) -> None:
        context = history.context
        self.history, self.context, self.host, self.holder = history, context, history.host, holder
        self.launch: object = None  # the launch_t by which C repeats the call, if it can
        self.kernel, self.called, self.stream, self.search, self.timeout_s = kernel, called, stream, search, timeout_s
        self.text, self.nbytes, self.blocks = called.words, (ready.blocks or ready.call).nbytes, ready.blocks
        self.reusable = search is None  # not while the best chunk is still being searched for
        self.seq = self._number = 0
        self._launch = context.transport.starter(kernel, stream, holder, self.nbytes)
        self.around = CopiesAround(context, ready, stream, holder)
        self._keep = (holder, ready) if self.around.any else (holder,)
        self.call = ready.call
        self.starts = history.started.of(ready.call, kernel.protocol)
        self.fingerprint, self.record = self.host.records.encode(called)
        self._report = context.transport.report
        self.repeats = search is None and not context.here and not self.around.plain  # whether C may make it again
        self._plain = self.repeats and not self.around.any
        self.places: list[Place | None] = []  # of the send and the receive buffer, if another call may have others
        self.registered: list[bool] = []  # whether each of ``places`` is registered

    def learn_places(self, ready: Prepared, arrays: Sequence[DeviceArray]) -> None:
        """Find where its buffers lie in the user's arrays, if the kernel's arguments can be moved to other arrays."""
        buffers = ready.send, ready.recv
        found = [place_of(b, arrays) if isinstance(b, DeviceArray) else None for b in buffers]
        fixed = not self._plain or ready.final is not None or ready.plain
        if fixed or any(place is None for b, place in zip(buffers, found, strict=True) if b is not None):
            return
        ref = self.context.transport.regions.ref
        self.places = found
        self.registered = [isinstance(b, DeviceArray) and ref(b.ptr, b.nbytes) > 0 for b in buffers]

    def start(self, seq: int) -> None:
        """Announce the call and put it on its stream; between nodes, see it through."""
        self.seq, self._number = seq, self.history.numbered(seq, self.fingerprint)
        self.history.last = self
        if not self.starts.known:
            self.starts = self.history.started.of(self.call, self.kernel.protocol)
        self.starts.number += 1
        if self.blocks:
            self.starts.nbytes += self.nbytes
        if self._report[1]:  # a kernel has aborted
            raise self.in_flight().failure()
        if self._plain:
            self.host.records.announce_kernel(seq, self.fingerprint, self.record, self.timeout_s)
            self._launch(self._number)
            return
        with self.context.gpu.entered():
            if self.search is not None and not self.context.gpu.capturing(self.stream):
                self._search_chunk(self.search)
            elif self.context.here:
                self._run_between_nodes()
            else:
                self.host.records.announce_kernel(seq, self.fingerprint, self.record, self.timeout_s)
                self._put_on_stream()

    def run(self, seq: int) -> None:
        """Start and wait; in a graph that is captured there is nothing to wait for."""
        ring = self.host.recorder.ring
        began_ns = time.monotonic_ns() if ring is not None else 0
        self.start(seq)
        if not self.captured:
            self.wait()
            if ring is not None:
                ring.call(self.text, seq, began_ns, time.monotonic_ns())

    def in_flight(self, on: Any = None) -> CallInFlight:
        """The call as it was started last.

        Args:
            on: what is waited for; None for its stream.
        """
        return CallInFlight(self.history, self.seq, self.text, self.timeout_s, self.stream if on is None else on)

    def test(self) -> bool:
        """Whether the stream is through."""
        return self.in_flight().test()

    @property
    def captured(self) -> bool:
        """Whether the stream is being captured into a graph, whose replays make the call."""
        return self.context.gpu.capturing(self.stream)

    def pending(self) -> CallInFlight:
        """The call as started now, to be waited for while later calls use the stream."""
        return self.in_flight(self.context.gpu.mark(self.stream))

    def wait(self, progress: Callable[[], bool] = lambda: False) -> None:
        """As :meth:`.CallInFlight.wait`."""
        self.in_flight().wait(progress)

    def _put_on_stream(self) -> None:
        self.around.before()
        if self.around.any:
            (self.history.in_graphs if self.captured else self.history.held).append(self)
        self._launch(self._number)
        self.around.after()

    def _search_chunk(self, search: ChunkSearch) -> None:
        """Make the call while its chunk is still looked for: wait for it, and tell each other how long it took."""
        self.host.records.announce_kernel(self.seq, self.fingerprint, self.record, self.timeout_s)
        with self.context.gpu.timed(self.stream) as seconds:
            self._put_on_stream()
        self.wait()
        search.learn(self.history.slowest(seconds()))

    # ---- between nodes

    def _run_between_nodes(self) -> None:
        """Enter the call on the host, start the kernel, and carry its chunks until it is through."""
        seq, host = self.seq, self.host
        if self.context.gpu.capturing(self.stream):
            text = f"{self.text}: calls between nodes cannot be captured in a graph; make them outside of it"
            raise Refused(DeviceError(text))
        try:
            host.barrier(seq, self.called, self.timeout_s)
        except PeerDelegates as delegated:
            raise Refused(host.peers.mismatch_error(seq, host.pages.fingerprints(seq)) or delegated) from None
        if self.context.transport.aware:
            self._warm_up()
        endpoints = self.kernel.endpoints
        if endpoints:
            endpoints.start((self.context.transport.kernels_started.value + 1) << SEQ_BITS)
        self._put_on_stream()
        since = time.monotonic()

        def progress() -> bool:
            nonlocal since
            if self.context.transport.aborted:
                return False
            more, moved = host.progress(seq, endpoints or Endpoints())
            now = time.monotonic()
            if moved or not more:
                since = now
            elif now - since > self.timeout_s + GRACE_S:  # the kernel would have given up if it waited for a chunk
                raise CollectiveTimeout(
                    f"{self.text}: nothing went between the nodes for {now - since:.0f} s; look at the other nodes, "
                    "or, if they are only slow, raise timeout= (BLINKMPI_TIMEOUT). The communicator is dead"
                )
            return more

        self.wait(progress)

    def _warm_up(self) -> None:
        """Let MPI do what it does with GPU memory that it sees for the first time, before a kernel runs."""
        messages, endpoints = self.host.messages, self.kernel.endpoints
        try:
            first = messages.warm_up(endpoints) if messages and endpoints else []
            until = time.monotonic() + self.timeout_s
            while not MPI.Request.Testall(first):
                self.host.raise_abort(self.seq)
                if time.monotonic() > until:
                    raise CollectiveTimeout(
                        f"{self.text}: the first messages from GPU memory took more than {self.timeout_s:g} s; look "
                        "at the other nodes, or stage them (BLINKMPI_CUDA_AWARE=0). The communicator is dead"
                    )
        except MPI.Exception as error:
            raise self.host.peers.network_error(self.seq, error) from error
