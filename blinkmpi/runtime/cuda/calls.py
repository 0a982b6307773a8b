"""The calls of a communicator on GPU memory: bind them, reuse earlier ones, and keep their operands alive."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from mpi4py import MPI
from msgspec.structs import replace

from ...errors import BlinkError
from ...program.memory import DeviceArray
from ...transport.announcement import ON_GPU, Called
from ...transport.interface import BoundCall
from ...util.lru import LRU
from ..arguments import Prepared
from ..calls_without_program import EmptyCall
from ..collectives import announced
from ..requests import ProgressThread, Request
from .buffers import device_array, device_parts, stream_address, types_for_c
from .call import CudaCall
from .context import CudaContext
from .copies import Buckets
from .history import CallHistory
from .operands import OperandsInFlight
from .other_counts import KNOWN, TRIED, OtherCounts
from .repeating import Repeating

if TYPE_CHECKING:
    from ..sequence import CallSequence

KINDS = 1024  # kinds of calls that are known to have been made before


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
        self._made: LRU[tuple[Any, ...], int] = LRU(KINDS)  # by kind: how often C could not make such a call

    @staticmethod
    def makes(bound: BoundCall | None) -> TypeGuard[CudaCall]:
        """Whether a bound call is a kernel's."""
        return isinstance(bound, CudaCall)

    def bind(self, ready: Prepared, stream: Any, timeout_s: float, args: tuple[Any, ...] = ()) -> CudaCall | EmptyCall:
        """A call of which all is known but the moment.

        Args:
            stream: CuPy's, torch's or an address; None for the stream that the buffers were made on.
            args: the user's, if C may make others of it.
        """
        said = ready.blocks.moves.text if ready.blocks else ready.said
        called = Called(said) if said else announced(ready.call)
        called = replace(called, text=f"{called.text}{ON_GPU}")
        if not ready.call.total and not ready.blocks:
            return EmptyCall(self.host, called, timeout_s, nbytes=0)
        context = self.context
        holder = context.gpu.current_stream() if stream is None else stream  # keeps the stream alive
        told = stream_address(stream)
        with context.gpu.entered():
            on = context.stream_of(ready) if told is None else told
            ready, kernel, search = context.fill(ready, called, on, timeout_s)
            bound = CudaCall(self.history, kernel, called, ready, on, holder, search, timeout_s)
        alike = {b.stream for b in (ready.send, ready.recv) if isinstance(b, DeviceArray)}
        if args and (told is not None or len(alike) == 1):
            counted = ready.blocks is not None and ready.blocks.counts is not None  # whose lengths do not move
            parts = [spec[0] for spec in args] if counted else [*device_parts(args)]
            if types_for_c().issuperset(map(type, parts)):
                bound.learn_places(ready, [*map(device_array, parts)])
        return bound

    def request(self, bound: CudaCall | EmptyCall, operands: tuple[Any, ...]) -> MPI.Request:
        """The request of a call that was started, whose operands live until it is through."""
        if bound.captured:  # captured: the replays of the graph make the call
            request = Request()
            request.finish(None)
            return request
        pending = bound.pending()

        def work(_operands: tuple[Any, ...] = operands) -> None:
            with self.context.gpu.entered():
                self.sequence.wait(pending)

        return self.thread.begin(work, self.sequence.context.log_once)

    def keep(self, bound: CudaCall, args: tuple[Any, ...], method: object, stream: Any) -> None:
        """Have C make a call like this one, which was just made of these arguments, if it was made twice.

        One of a count that never comes again costs less so.
        """
        if not bound.places:
            return
        counts = bound.blocks.counts if bound.blocks else None
        if bound.blocks and not counts:
            self._keep_blocks(bound, args, method, stream)
            return
        form: tuple[Any, ...] = (*bound.places, *map(type, args))
        if counts:  # lengths in GPU memory are found where they are
            form += (bound.nbytes, *(array.ptr for array in counts.arrays))
        kind = (method, stream_address(stream), bound.stream, bound.call, *bound.registered, *form)
        tried = self._made.find(kind)
        if tried is None:
            self.other_counts.offer(bound, method, args, stream)
            self._made.put(kind, 0)
        elif tried < TRIED:
            known = self.repeating.keep(bound, method, args, stream)
            self._made.put(kind, 0 if known else tried + 1)

    def _keep_blocks(self, bound: CudaCall, args: tuple[Any, ...], method: object, stream: Any) -> None:
        """Have C make calls like this one, of whatever lengths."""
        kind = (method, stream_address(stream), bound.stream, bound.text, *bound.registered, *map(type, args))
        tried = self._made.find(kind) or 0
        if 0 <= tried < TRIED:
            tried = -KNOWN if self.repeating.keep_blocks(bound, method, args, stream) else tried
        self._made.put(kind, tried + 1)

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
        self._made.clear()
        self.other_counts.forget()

    @property
    def last(self) -> LastCall | None:
        """The call that was started last."""
        own, found = self.history.last, self.sequence.repeated.last_launch
        if found is not None and (own is None or found[1] > own.seq):
            return LastCall(found[1], found[0].text)
        return LastCall(own.seq, own.text) if own is not None else None

    @property
    def wrong(self) -> BlinkError | None:
        """What a kernel has reported, of a call or of a graph's replay."""
        transport = self.context.transport
        return self.history.error() if transport.aborted else None

    def check(self) -> None:
        """Raise what :attr:`wrong` says, if it says anything."""
        if (error := self.wrong) is not None:
            raise error

    def finished(self) -> BlinkError | None:
        """What :attr:`wrong` says when all work on the GPU is through, for which this waits."""
        with self.context.gpu.entered():
            self.context.gpu.runtime.deviceSynchronize()
        return self.wrong
