"""The calls of a communicator on GPU memory: bind them, or make them of earlier ones, and keep what they need."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from mpi4py import MPI

from ...program.memory import DeviceArray
from ...transport.announcement import ON_GPU, Called
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
from .history import CallHistory
from .operands import OperandsInFlight
from .other_counts import OtherCounts
from .repeating import Repeating

if TYPE_CHECKING:
    from ..sequence import CallSequence

SIGNATURES = 1024  # of calls that others are made of


class LastCall(NamedTuple):
    """A call that was started."""

    seq: int
    text: str


class CudaCalls:
    """Binds calls on GPU memory of one communicator.

    Args:
        enqueues: whether calls without a stream go on the current one, and are not waited for.
    """

    def __init__(self, context: CudaContext, sequence: CallSequence, *, enqueues: bool) -> None:
        self.context, self.host, self.sequence, self._enqueues = context, sequence.host, sequence, enqueues
        self.thread = ProgressThread()
        self.operands = OperandsInFlight(context.gpu)
        self.buckets = Buckets(sequence)
        self.history = CallHistory(context, sequence)
        self.by_signature: LRU[tuple[Any, ...], CudaCall] = LRU(SIGNATURES)  # a call of each, which others are made of

    @staticmethod
    def makes(bound: BoundCall | None) -> TypeGuard[CudaCall]:
        """Whether a bound call is a kernel's."""
        return isinstance(bound, CudaCall)

    def rebound(self, signature: Signature) -> CudaCall | None:
        """A call that an earlier one differs from in the addresses of its buffers alone; None if there is none."""
        like, places = self.by_signature.find(signature.common), signature.places
        if like is None:
            return None
        one, other = places[0], places[-1]
        if other[0] - one[0] != like.apart and one[0] < sum(other) and other[0] < sum(one):
            return None  # they overlap, and not as its buffers do: it is judged where arguments are read
        if any(self.context.gpu.why_not_here(at) for at, _ in places):
            return None
        return like.rebound_to(places)

    def bind(
        self, ready: Prepared, stream: Any, timeout_s: float, signature: Signature | None = None
    ) -> CudaCall | EmptyCall:
        """A call of which all is known but the moment.

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
            bound = CudaCall(self.history, kernel, called, ready, on, holder, search, timeout_s)
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
                self.sequence.wait(pending)

        return self.thread.begin(work, self.sequence.context.log_once)

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
        else:
            self.other_counts.offer(bound, method, operands, stream)
        bound.again = True  # also of others that are made of it

    @cached_property
    def repeating(self) -> Repeating:
        """What makes calls on streams known to C."""
        given = self.sequence.repeated, self.context, self.operands, self._enqueues
        return Repeating(*given, self.host.executor_reason, self.sequence.context.log_once)

    @cached_property
    def other_counts(self) -> OtherCounts:
        """What tells C of calls of other counts."""
        return OtherCounts(self.context, self.repeating)

    def forget(self) -> None:
        """Bind every call anew."""
        self.by_signature.clear()
        self.other_counts.forget()

    @property
    def last(self) -> LastCall | None:
        """The call that was started last."""
        own, found = self.history.last, self.sequence.repeated.last_launch
        if found is not None and (own is None or found[1] > own.seq):
            return LastCall(found[1], found[0].text)
        return LastCall(own.seq, own.text) if own is not None else None

    def check(self) -> None:
        """Raise what a kernel has reported, of a call or of a graph's replay."""
        if self.context.transport.aborted:
            raise self.context.transport.error("a call on a stream or in a graph")
