"""``CallMaker`` makes blocking calls through Python: it finds a bound call or binds one, and runs it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ..transport.host.host_call import HostCall
from .agreeing import agreed
from .arguments import Read
from .binding import Binder
from .bootstrap import is_time
from .call_keys import key_of, spread_out
from .collectives import CollectiveMethod, Invocation
from .sequence import CallSequence

if TYPE_CHECKING:
    from .cuda.calls import CudaCalls

Args = tuple[Any, ...]


class CallMaker:
    """Makes the blocking calls of a communicator that C does not make by itself.

    Args:
        enqueues: whether calls on GPU memory return before they are through.
    """

    def __init__(self, sequence: CallSequence, binder: Binder, cuda: CudaCalls | None, *, enqueues: bool) -> None:
        self.sequence, self.context, self.binder, self.cuda, self.enqueues = (
            sequence, sequence.context, binder, cuda, enqueues,
        )  # fmt: skip

    def make(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> None:
        """Make a call; with ``stream``, or on the current one if calls are so made, only put it there."""
        sequence = self.sequence
        with sequence.inside():
            sequence.drain()
            if stream is None and (timeout_s is None or is_time(timeout_s)):
                found = sequence.repeated.find(method, args)
                if found is not None:
                    self._make_host(found, method, args, timeout_s)
                    return
            self._make_bound(method, args, timeout_s, stream)

    def _make_bound(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> None:
        sequence, cuda = self.sequence, self.cuda
        repeats = method.repeats(args)
        given = args if repeats else spread_out(args) if cuda is not None else None  # of lengths in GPU memory
        key = key_of(method.prepare, given, stream, method.buffers) if given and timeout_s is None else None
        bound = self.binder.calls.find(key) if key is not None else None
        if bound is None:
            bound = self.binder.bind(Invocation(method, args), timeout_s, stream, key, repeats=repeats)
        if isinstance(bound, HostCall):
            self._make_host(bound, method, args, timeout_s)
            return
        sequence.check_alive()
        starts = stream is not None or (self.enqueues and cuda is not None and cuda.makes(bound))
        sequence.run(partial(sequence.numbered, bound.start if starts else bound.run), method, args, timeout_s)
        if cuda is None or not cuda.makes(bound):
            return
        if starts:
            cuda.operands.keep(args, bound.nbytes, bound.stream)
        if (repeats or bound.blocks) and timeout_s is None:
            cuda.keep(bound, args, method, stream)

    def _make_host(self, bound: HostCall, method: CollectiveMethod, args: Args, timeout_s: float | None) -> None:
        """Make a call on host memory that is bound; C may make the next one."""
        sequence = self.sequence
        sequence.check_alive()
        run = partial(bound.run, timeout_s=timeout_s)
        sequence.run(partial(sequence.numbered, run), method, args, timeout_s)
        sequence.repeated.open()

    def make_prepared(
        self,
        ready: Read,
        invocation: Invocation,
        deadline: float,
        begun: MPI.Request | None = None,
    ) -> None:
        """Bind and make a call whose arguments were checked, in the progress thread; ``begun`` by MPI, if it is so."""
        sequence = self.sequence
        sequence.check_alive()
        made = agreed(sequence, ready, invocation.name, deadline)
        bound = self.binder.bind_host(made, invocation, deadline, blocking=False, owns=True, begun=begun)
        sequence.run(partial(sequence.numbered, bound.run), invocation.method, invocation.args, deadline)
