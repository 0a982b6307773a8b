"""The calls of a communicator on GPU memory: bind them, or make them of earlier ones, and keep what they need."""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from mpi4py import MPI

from ...program.memory import DeviceArray
from ...transport.announcement import ON_GPU, Called
from ...transport.cuda.loaded_kernel import MASK
from ...transport.host.transport import HostTransport
from ...transport.interface import BoundCall
from ...util.lru import LRU
from ..arguments import Prepared
from ..call_keys import Signature
from ..calls_without_program import EmptyCall
from ..collectives import describe
from ..requests import ProgressThread, Request
from .buffers import stream_address
from .call import CudaCall
from .context import CudaContext
from .copies import Buckets
from .counting import StartedCalls
from .operands import OperandsInFlight
from .repeating import Repeating
from .watch import forget

if TYPE_CHECKING:
    from ..dispatch import Dispatcher

SIGNATURES = 1024  # of calls that others are made of
HELD = 64  # started calls whose own memory is kept
SPREAD = 0x9E3779B1  # odd, so that histories that differ once never meet again through equal calls


class LastCall(NamedTuple):
    """A call that was started."""

    seq: int
    text: str


class CudaCalls:
    """Binds calls on GPU memory of one communicator."""

    def __init__(self, context: CudaContext, host: HostTransport, dispatcher: Dispatcher) -> None:
        self.context, self.host, self._dispatcher = context, host, dispatcher
        self.thread = ProgressThread()
        self.operands = OperandsInFlight(context.gpu)
        self.started = StartedCalls(context, host)
        self.buckets = Buckets(dispatcher)
        self._last: CudaCall | None = None  # the one that Python started last
        self.held: deque[CudaCall] = deque(maxlen=HELD)  # whose memory may still be read when they are forgotten
        self.in_graphs: list[CudaCall] = []  # likewise, of graphs: nobody knows how long they live
        self.by_signature: LRU[tuple[Any, ...], CudaCall] = LRU(SIGNATURES)  # a call of each, which others are made of
        self.history = ctypes.c_uint64()  # of the calls so far, in 32 bits

    @staticmethod
    def makes(bound: BoundCall | None) -> TypeGuard[CudaCall]:
        """Whether a bound call is a kernel's."""
        return isinstance(bound, CudaCall)

    def elsewhere(self, signature: Signature) -> CudaCall | None:
        """A call that an earlier one differs from in the addresses of its buffers alone; None if there is none."""
        like, places = self.by_signature.find(signature.common), signature.places
        if like is None:
            return None
        one, other = places[0], places[-1]
        if other[0] - one[0] != like.apart and one[0] < sum(other) and other[0] < sum(one):
            return None  # they overlap, and not as its buffers do: it is judged where arguments are read
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
        text = ready.said or describe(ready.call)
        called = Called(f"{text}{ON_GPU}")
        if not ready.call.total:
            return EmptyCall(self.host, called, timeout_s, nbytes=0)
        context = self.context
        holder = context.gpu.current_stream() if stream is None else stream  # keeps the stream alive
        told = stream_address(stream)
        with context.gpu.entered():
            on = context.stream_of(ready) if told is None else told
            ready, kernel, search = context.fill(ready, text, on, timeout_s)
            bound = CudaCall(self, kernel, called, ready, on, holder, search, timeout_s)
        alike = {b.stream for b in (ready.send, ready.recv) if isinstance(b, DeviceArray)}
        if signature is not None and (told is not None or len(alike) == 1) and bound.moves_to(ready, signature.places):
            self.by_signature.put(signature.common, bound)
        return bound

    def request(self, bound: CudaCall | EmptyCall, operands: tuple[Any, ...]) -> MPI.Request:
        """The request of a call that was started, whose operands live until it is through."""
        if bound.captured:  # into a graph, whose replays make the call
            request = Request()
            request.finish(None)
            return request
        pending = bound.pending()

        def work(_operands: tuple[Any, ...] = operands) -> None:
            with self.context.gpu.entered():
                self._dispatcher.wait(pending)

        return self.thread.begin(work, self._dispatcher.context.log_once)

    def close(self) -> None:
        """End the threads' work for this communicator."""
        self.thread.close()
        forget(self._dispatcher)

    def keep(self, bound: BoundCall, operands: tuple[Any, ...], method: object = None, stream: Any = None) -> None:
        """Keep the operands of a call that was put on its stream until it is through.

        Args:
            method: of a call that may be made again, with the stream that it was told: by C itself, if it was made
                twice. A call of a count that never comes again costs less so.
        """
        if not isinstance(bound, CudaCall):
            return
        self.operands.keep(operands, bound.nbytes, bound.stream)
        if method is None:
            return
        if bound.again:
            self.repeating.keep(bound, method, operands, stream)
        bound.again = True  # also of others that are made of it

    @cached_property
    def repeating(self) -> Repeating:
        """What makes calls on streams known to C."""
        dispatcher = self._dispatcher
        given = dispatcher.repeated, self.context, self.operands, dispatcher.enqueues
        return Repeating(*given, self.host.executor_reason, dispatcher.context.log_once)

    def numbered(self, seq: int, fingerprint: int) -> int:
        """A number for a call that ranks have in common as long as all their calls here have been alike.

        Some ranks wait for nobody, as the root of a broadcast: their kernels cannot see that a peer calls something
        else. The next call does.
        """
        self.history.value = ((self.history.value ^ fingerprint) * SPREAD + seq) & MASK
        return self.history.value

    @property
    def last(self) -> LastCall | None:
        """The call that was started last."""
        own, found = self._last, self._dispatcher.repeated.last_launch
        if found is not None and (own is None or found[1] > own.seq):
            return LastCall(found[1], found[0].text)
        return LastCall(own.seq, own.text) if own is not None else None

    def started_here(self, call: CudaCall) -> None:
        """Note the call that Python starts last."""
        self._last = call

    def check(self) -> None:
        """Raise what a kernel has reported, of a call or of a graph's replay."""
        if self.context.transport.aborted:
            raise self.context.transport.error("a call on a stream or in a graph")

    def slowest(self, seconds: float) -> float:
        """The longest time of all ranks."""
        return max(self._dispatcher.exchange(int(seconds * 1e9))) * 1e-9
