"""Calls on GPU memory: put a kernel on its stream, wait for it, and raise what went wrong.

The ranks wait for one another in the kernel. On the host a rank only announces the call, so that a rank that waits can
recognise a peer that makes another call, or is gone. A call on a stream has the kernel's deadline, and what went wrong
is raised by the next call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from mpi4py import MPI

from ...errors import BlinkError, CollectiveTimeout, DeviceError, MismatchError, PeerLost
from ...planning.chunk_search import ChunkSearch
from ...program.memory import DeviceArray, address
from ...transport.announcement import ON_GPU, Called
from ...transport.control_pages import SEQ_BITS
from ...transport.cuda.loaded_kernel import MASK, LoadedKernel, copied
from ...transport.host.transport import LOOK_SECONDS, HostTransport
from ...transport.interface import BoundCall, PeerDelegates, Refused
from ...transport.network.endpoints import Endpoints
from ...util.lru import LRU
from ..arguments import Copy, Prepared
from ..call_keys import Signature
from ..calls_without_program import EmptyCall
from ..collectives import describe
from ..requests import ProgressThread, Request
from .buffers import stream_address
from .context import CudaContext
from .counting import StartedCalls
from .operands import OperandsInFlight
from .watch import forget

if TYPE_CHECKING:
    from ..dispatch import Dispatcher

SIGNATURES = 1024  # of calls that others are made of
HELD = 64  # started calls whose own memory is kept
GRACE_S = 1.0  # after which a peer whose process has ended counts as lost, if its part is still owed
SPREAD = 0x9E3779B1  # odd, so that histories that differ once never meet again through equal calls
SHORT_S = 0.001  # a wait polls without sleeping for so long


class CudaCalls:
    """Binds calls on GPU memory of one communicator."""

    def __init__(self, context: CudaContext, host: HostTransport, dispatcher: Dispatcher) -> None:
        self.context, self.host, self._dispatcher = context, host, dispatcher
        self.thread = ProgressThread()
        self.operands = OperandsInFlight(context.gpu)
        self.started = StartedCalls(context, host)
        self.last: CudaCall | None = None  # the one that was started last
        self.held: deque[CudaCall] = deque(maxlen=HELD)  # whose memory may still be read when they are forgotten
        self.by_signature: LRU[tuple[Any, ...], CudaCall] = LRU(SIGNATURES)  # a call of each, which others are made of
        self._history = 0  # of the calls so far, in 32 bits

    def elsewhere(self, signature: Signature) -> CudaCall | None:
        """A call that an earlier one differs from in the addresses of its buffers alone; None if there is none."""
        like, places = self.by_signature.find(signature.common), signature.places
        if like is None:
            return None
        one, other = places[0], places[-1]
        if one[0] != other[0] and one[0] < sum(other) and other[0] < sum(one):
            return None  # they overlap, which is refused where arguments are read
        if any(self.context.gpu.why_not_here(at) for at, _ in places):
            return None
        return like.elsewhere(places)

    def bind(
        self, ready: Prepared, stream: Any, timeout_s: float, signature: Signature | None = None
    ) -> CudaCall | EmptyCall:
        """A call with everything settled but the moment.

        Args:
            stream: CuPy's, torch's or an address; None for the stream that the buffers were made on.
            signature: if others may be made of it.
        """
        text = describe(ready.call)
        called = Called(f"{text}{ON_GPU}")
        if not ready.call.total:
            return EmptyCall(self.host, called, timeout_s, nbytes=0)
        context = self.context
        holder = context.gpu.current_stream() if stream is None else stream  # keeps the stream alive
        told = stream_address(stream)
        with context.gpu.entered():
            on = context.stream_of(ready) if told is None else told
            kernel, search = context.fill(ready, text, on, timeout_s)
            bound = CudaCall(self, kernel, called, ready, on, holder, search, timeout_s)
        alike = {b.stream for b in (ready.send, ready.recv) if isinstance(b, DeviceArray)}
        if signature is not None and (told is not None or len(alike) == 1) and bound.moves_to(ready, signature.places):
            self.by_signature.put(signature.common, bound)
        return bound

    def request(self, bound: CudaCall | EmptyCall, operands: tuple[Any, ...]) -> MPI.Request:
        """The request of a call that was started, whose operands live until it is through."""
        request = Request()
        if bound.captured:  # into a graph, whose replays make the call
            request.finish(None)
            return request
        pending = bound.pending()

        def work(_operands: tuple[Any, ...] = operands) -> None:
            with self.context.gpu.entered():
                self._dispatcher.wait(pending)

        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self.thread.put(work, request.finish)
        else:
            text = "non-blocking calls complete at once: MPI was not started with THREAD_MULTIPLE"
            self._dispatcher.context.log_once(text)
            request.finish(self.thread.run(work))
        return request

    def close(self) -> None:
        """End the threads' work for this communicator."""
        self.thread.close()
        forget(self._dispatcher)

    def keep(self, bound: BoundCall, operands: tuple[Any, ...]) -> None:
        """Keep the operands of a call that was put on its stream until it is through."""
        if isinstance(bound, CudaCall):
            self.operands.keep(operands, bound.nbytes, bound.stream)

    def numbered(self, seq: int, fingerprint: int) -> int:
        """A number for a call that ranks have in common as long as all their calls here have been alike.

        Some ranks wait for nobody, as the root of a broadcast: their kernels cannot see that a peer calls something
        else. The next call does.
        """
        self._history = ((self._history ^ fingerprint) * SPREAD + seq) & MASK
        return self._history

    def check(self) -> None:
        """Raise what a kernel has reported, of a call or of a graph's replay."""
        if self.context.transport.aborted:
            raise self.context.transport.error("a call on a stream or in a graph")

    def slowest(self, seconds: float) -> float:
        """The longest time of all ranks."""
        return max(self._dispatcher.exchange(int(seconds * 1e9))) * 1e-9


class CudaCall:
    """A bound call on a stream: see :class:`...transport.interface.BoundCall`."""

    def __init__(
        self,
        calls: CudaCalls,
        kernel: LoadedKernel,
        called: Called,
        ready: Prepared,
        stream: int,
        holder: object,
        search: ChunkSearch | None,
        timeout_s: float,
    ) -> None:
        context = calls.context
        self.calls, self.context, self.host = calls, context, calls.host
        self.kernel, self.called, self.stream, self.search, self.timeout_s = kernel, called, stream, search, timeout_s
        self.text, self.nbytes = called.text, ready.call.nbytes
        self.reusable = search is None  # not while its chunk is still looked for
        self.seq = self._number = 0
        self._on: Any = stream  # what is waited for: the stream, or an event on it
        self._launch = context.transport.starter(kernel, stream, holder)
        self._before, self._after = _before(ready), _copies(ready.after)
        self._keep = (holder, ready) if self._before or self._after else (holder,)
        self._call = ready.call
        self._starts = calls.started.of(ready.call, kernel.protocol)
        self._fingerprint, self._record = self.host.records.encode(called)
        self._report = context.transport.report
        self._plain = search is None and not context.here and not self._before and not self._after
        self._places: list[int | None] = []  # which of the user's buffers is sent, which received
        self._registered: list[bool] = []  # whether they are

    def moves_to(self, ready: Prepared, places: Sequence[tuple[int, int]]) -> bool:
        """Whether :meth:`elsewhere` can make others of it, which was called with buffers at ``places``."""
        buffers, at = (ready.send, ready.recv), [at for at, _ in places]
        fixed = not self._plain or ready.final is not None or ready.plain
        if fixed or any(not isinstance(b, DeviceArray) or b.ptr not in at for b in buffers if b is not None):
            return False
        self._places = [None if b is None else at.index(address(b)) for b in buffers]
        self._registered = [self._ref(which, places) > 0 for which in self._places]
        return True

    def elsewhere(self, places: Sequence[tuple[int, int]]) -> CudaCall | None:
        """The same call of other buffers; None if these are registered and its own are not, or the other way round."""
        refs = [self._ref(which, places) for which in self._places]
        if [ref > 0 for ref in refs] != self._registered:
            return None
        other = object.__new__(CudaCall)
        other.__dict__.update(self.__dict__)
        other.kernel, transport = copied(self.kernel), self.context.transport
        send, recv = (0 if which is None else places[which][0] for which in self._places)
        transport.fill(other.kernel, send, recv, refs[0], refs[1], self.timeout_s)
        other._launch = transport.starter(other.kernel, self.stream, self._keep[0])
        return other

    def _ref(self, which: int | None, places: Sequence[tuple[int, int]]) -> int:
        return 0 if which is None else self.context.transport.regions.ref(*places[which])

    def start(self, seq: int) -> None:
        """Announce the call and put it on its stream; between nodes, see it through."""
        self.seq, self._number = seq, self.calls.numbered(seq, self._fingerprint)
        self.calls.last = self
        if not self._starts.known:
            self._starts = self.calls.started.of(self._call, self.kernel.protocol)
        self._starts.number += 1
        if self._report[1]:  # a kernel has aborted
            raise self.failure()
        if self._plain:
            self.host.records.announce_elsewhere(seq, self._fingerprint, self._record, self.timeout_s)
            self._launch(self._number)
            return
        with self.context.gpu.entered():
            if self.search is not None and not self.context.gpu.capturing(self.stream):
                self._search_chunk(self.search)
            elif self.context.here:
                self._run_between_nodes()
            else:
                self.host.records.announce_elsewhere(seq, self._fingerprint, self._record, self.timeout_s)
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
        for copy in self._before:
            self.context.gpu.copy(*copy, self.stream)
        if self._before or self._after:
            self.calls.held.append(self)
        self._launch(self._number)
        for copy in self._after:
            self.context.gpu.copy(*copy, self.stream)

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
        self.host.records.announce_elsewhere(self.seq, self._fingerprint, self._record, self.timeout_s)
        with self.context.gpu.timed(self.stream) as seconds:
            self._put_on_stream()
        self.wait()
        search.learn(self.calls.slowest(seconds()))

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
            endpoints.start((self.context.transport.calls + 1) << SEQ_BITS)
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


def _before(ready: Prepared) -> list[tuple[int, int, int]]:
    """(to, from, bytes) of what is copied before a call."""
    send, copies = ready.send, _copies(ready.before)
    if isinstance(send, DeviceArray) and send.copy_of:
        copies.insert(0, (send.ptr, send.copy_of, send.nbytes))
    return copies


def _copies(copies: Sequence[Copy]) -> list[tuple[int, int, int]]:
    """(to, from, bytes) of copies that have any."""
    return [(address(to), address(source), to.nbytes) for to, source in copies if to.nbytes]
