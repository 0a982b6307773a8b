"""A call on GPU memory: put a kernel on its stream, wait for it, and raise what went wrong.

The ranks wait for one another in the kernel. On the host a rank only announces the call, so that a rank that waits can
recognise a peer that makes another call, or is gone. A call on a stream has the kernel's deadline, and what went wrong
is raised by the next call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from mpi4py import MPI

from ...errors import BlinkError, CollectiveTimeout, DeviceError, MismatchError, PeerLost
from ...planning.chunk_search import ChunkSearch
from ...program.memory import DeviceArray
from ...transport.announcement import Called
from ...transport.control_pages import SEQ_BITS
from ...transport.cuda.loaded_kernel import LoadedKernel, copied
from ...transport.host.transport import LOOK_SECONDS
from ...transport.interface import PeerDelegates, Refused
from ...transport.network.endpoints import Endpoints
from ..arguments import Prepared
from .copies import CopiesAround
from .history import CallHistory

GRACE_S = 1.0  # after which a peer whose process has ended counts as lost, if its part is still owed
SHORT_S = 0.001  # a wait polls without sleeping for so long


class Place(NamedTuple):
    """Where a buffer of a call lies: in which of the user's arrays, how far behind its beginning, and its bytes."""

    array: int
    offset: int
    nbytes: int

    def address(self, places: Sequence[tuple[int, int]]) -> int:
        """Its address, if the arrays lie there."""
        return places[self.array][0] + self.offset


def place_of(buffer: DeviceArray, places: Sequence[tuple[int, int]]) -> Place | None:
    """The place of a buffer, in the array that begins there or else in one that holds it, as a block in place."""
    at, nbytes = buffer.ptr, buffer.nbytes
    inside = [i for i, (begin, length) in enumerate(places) if begin <= at and at + nbytes <= begin + length]
    if not inside:
        return None
    array = min(inside, key=lambda i: at - places[i][0])
    return Place(array, at - places[array][0], nbytes)


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
        self.launch: object = None  # the call as C makes it again, if it does
        self.again = False  # whether such a call was made before
        self.kernel, self.called, self.stream, self.search, self.timeout_s = kernel, called, stream, search, timeout_s
        self.text, self.nbytes = called.text, ready.call.nbytes
        self.reusable = search is None  # not while its chunk is still looked for
        self.seq = self._number = 0
        self._on: Any = stream  # what is waited for: the stream, or an event on it
        self._launch = context.transport.starter(kernel, stream, holder)
        self.around = CopiesAround(context, ready, stream, holder)
        self._keep = (holder, ready) if self.around.any else (holder,)
        self.call = ready.call
        self.starts = history.started.of(ready.call, kernel.protocol)
        self.fingerprint, self.record = self.host.records.encode(called)
        self._report = context.transport.report
        self.repeats = search is None and not context.here and not self.around.plain  # whether C may make it again
        self._plain = self.repeats and not self.around.any
        self.places: list[Place | None] = []  # of what is sent and of what is received
        self.registered: list[bool] = []  # whether they are
        self.apart = 0  # how far the second one lies behind the first

    def moves_to(self, ready: Prepared, places: Sequence[tuple[int, int]]) -> bool:
        """Whether :meth:`rebound_to` can make others of it, which was called with buffers at ``places``."""
        buffers = ready.send, ready.recv
        fixed = not self._plain or ready.final is not None or ready.plain
        found = [place_of(b, places) if isinstance(b, DeviceArray) else None for b in buffers]
        if fixed or any(place is None for b, place in zip(buffers, found, strict=True) if b is not None):
            return False
        self.places = found
        self.registered = [self._ref(place, places) > 0 for place in found]
        self.apart = places[-1][0] - places[0][0]
        return True

    def rebound_to(self, places: Sequence[tuple[int, int]]) -> CudaCall | None:
        """The same call of other buffers; None if these are registered and its own are not, or the other way round."""
        refs = [self._ref(place, places) for place in self.places]
        if [ref > 0 for ref in refs] != self.registered:
            return None
        other = object.__new__(CudaCall)
        other.__dict__.update(self.__dict__)
        other.kernel, transport = copied(self.kernel), self.context.transport
        send, recv = (0 if place is None else place.address(places) for place in self.places)
        transport.fill(other.kernel, send, recv, refs[0], refs[1], self.timeout_s)
        other._launch = transport.starter(other.kernel, self.stream, self.holder)
        other.launch = None
        return other

    def _ref(self, place: Place | None, places: Sequence[tuple[int, int]]) -> int:
        return 0 if place is None else self.context.transport.regions.ref(place.address(places), place.nbytes)

    def start(self, seq: int) -> None:
        """Announce the call and put it on its stream; between nodes, see it through."""
        self.seq, self._number = seq, self.history.numbered(seq, self.fingerprint)
        self.history.last = self
        if not self.starts.known:
            self.starts = self.history.started.of(self.call, self.kernel.protocol)
        self.starts.number += 1
        if self._report[1]:  # a kernel has aborted
            raise self.failure()
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

    def test(self) -> bool:
        """Whether the stream is through."""
        return self.context.gpu.idle(self._on)

    @property
    def captured(self) -> bool:
        """Whether the stream is being captured into a graph, whose replays make the call."""
        return self.context.gpu.capturing(self.stream)

    def pending(self) -> CudaCall:
        """The call as started now, to be waited for while later calls use the stream."""
        other = object.__new__(CudaCall)
        other.__dict__.update(self.__dict__)
        other._on = self.context.gpu.mark(self.stream)
        return other

    def wait(self, progress: Callable[[], bool] = lambda: False) -> None:
        """Wait until the stream is through; look after the peers now and then.

        Args:
            progress: does meanwhile what is to be done on the host, and says whether there may be more of it.

        Raises:
            CollectiveTimeout, MismatchError, PeerLost: after which the communicator is dead.
        """
        peers = self.host.peers
        began = looked = time.monotonic()
        polls, lost_since = 0, 0.0
        found: BlinkError | None = None
        while (found is None and progress()) | (not self._idle()):
            polls += 1
            if polls % 64:
                continue
            now = time.monotonic()
            if now - began > SHORT_S:
                time.sleep(2e-5)
            if found is not None or now - looked < LOOK_SECONDS:
                continue
            looked = now
            found = peers.mismatch_so_far(self.seq, self.text)
            peers.warn(self.seq, self._owed, now - began, self.timeout_s)
            gone = peers.ended()
            lost_since = (lost_since or now) if gone else 0.0
            if found is None and lost_since and now - lost_since > GRACE_S:
                found = PeerLost(f"GPU call {self.text}: {peers.states(gone, self.seq)}; start the job again")
            if found is not None:
                self.context.transport.abort()
        if self.context.transport.aborted or (found is not None and progress()):
            raise found or self.failure()

    def _owed(self) -> dict[int, str]:
        """The ranks that have not come; where all have, one of them may not go on, or this GPU has other work."""
        return self.host.peers.absent(self.seq) or self.host.peers.owing("its kernel, or other work on the streams")

    def failure(self) -> BlinkError:
        """What a kernel that gave up has left, or the error of the rank that made it give up."""
        error = self.context.transport.error(self.text)
        if isinstance(error, MismatchError) and (different := self.host.peers.different(self.seq)):
            return MismatchError(f"{different}; call the same on every rank. The communicator is dead")
        until = time.monotonic() + GRACE_S
        try:
            while isinstance(error, PeerLost) and time.monotonic() < until:  # the first to give up knows why
                self.host.raise_abort(self.seq)
                time.sleep(0.01)
        except BlinkError as known:
            return known
        return error

    def _put_on_stream(self) -> None:
        self.around.before()
        if self.around.any:
            (self.history.in_graphs if self.captured else self.history.held).append(self)
        self._launch(self._number)
        self.around.after()

    def _idle(self) -> bool:
        """As :meth:`test`; what breaks the GPU's work may be that a peer's memory is gone."""
        try:
            return self.test()
        except DeviceError as broken:
            peers, error = self.host.peers, cast(BlinkError, broken)
            until = time.monotonic() + GRACE_S
            while time.monotonic() < until and not peers.ended():
                time.sleep(0.01)
            if gone := peers.ended():
                error = PeerLost(f"GPU call {self.text}: {peers.states(gone, self.seq)}; {broken}")
            raise error from broken

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
