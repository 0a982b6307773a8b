"""``Dispatcher``: the calls of a communicator, blocking, non-blocking and persistent, from its opening to its end.

1. C makes a call that is like an earlier one. Otherwise it comes here; in a group it is only noted (``grouping``).
2. ``making`` finds the call bound, or has its arguments checked and it is bound (``binding``): to a program on CPU
   ranks, a kernel on a GPU, or MPI's own collective.
3. ``sequence`` gives it the next number and starts it.
4. Unless it is only put on a stream, it is waited for, under its deadline.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ..errors import BlinkError, PeerLost
from ..transport.announcement import Called
from ..transport.host.repeated import Found
from ..transport.interface import Refused
from ..transport.network.bounded import Rendezvous
from .agreeing import agreed, agreed_alone
from .arguments import InBlocks, NeedsNumbers, Prepared, Read
from .binding import Binder
from .bootstrap import Options
from .buffers import DelegatedOp, DelegatedToMPI
from .calls_without_program import fallback_error
from .children import SPARE_BYTES, Child
from .collectives import CollectiveMethod, Invocation
from .context import Context
from .cuda.buffers import lies_on_device
from .entering import enter
from .grouping.group import Groups
from .making import CallMaker
from .process_exit import end_with_failure
from .ranks.interface import Ranks
from .requests import Persistent, persistent_on_host
from .sequence import CallSequence

if TYPE_CHECKING:
    from ..planning.diff import PlanDifference
    from .cuda.calls import CudaCalls

Args = tuple[Any, ...]
LEFT_BEHIND: list[object] = []  # buffers that MPI may still read or write for a call that was given up


class Dispatcher:
    """Makes the calls of one communicator; the arguments are those of its :class:`Context`."""

    def __init__(self, meet: Callable[[Rendezvous], Ranks], options: Options, child: Child | None = None) -> None:
        self.context, self.child = Context(meet, options, child), child
        self.sequence = CallSequence(self.context)
        self.sequence.owner = weakref.ref(self)
        self.repeated, enqueues = self.sequence.repeated, options.stream == "current"
        self.cuda: CudaCalls | None = None
        if self.context.gpus is not None:
            from .cuda.calls import CudaCalls
            from .cuda.watch import watch

            self.cuda = CudaCalls(self.context.gpus, self.sequence, enqueues=enqueues)
            watch(self.cuda)
        self.binder = Binder(self.sequence, self.cuda)
        self.maker = CallMaker(self.sequence, self.binder, self.cuda, enqueues=enqueues)
        self.groups = Groups(self.maker)

    # ---- blocking calls

    def make(self, method: CollectiveMethod, args: Args, stream: Any, timeout_s: float | None = None) -> None:
        """Make a blocking call: C does, if one like it was made before."""
        try:
            begun = self.repeated.again(method, args, stream, False, timeout_s)
            if begun is True:
                return
            if begun is not False:
                self.sequence.go_on(method, args, begun, timeout_s)
                return
        except BlinkError:
            raise
        except BaseException as interrupt:  # a signal's, in the middle of the call
            self.sequence.die(interrupt)
            raise
        self.call(method, args, timeout_s, stream)

    def call(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> None:
        """Make a blocking call through Python, or note it, if this thread has an open group."""
        groups = self.groups
        if groups.open and groups.note(method, args, timeout_s, stream):
            return
        if not groups.made(method, args, timeout_s, stream):
            self.maker.make(method, args, timeout_s, stream)

    def go_on(
        self, method: CollectiveMethod, args: Args, stream: Any, begun: Found, timeout_s: float | None = None
    ) -> None:
        """Make a blocking call that ``repeated`` has not made, or go on with one that it could not end by itself."""
        if isinstance(begun, bool):
            self.call(method, args, timeout_s, stream)
        else:
            self.sequence.go_on(method, args, begun, timeout_s)

    # ---- non-blocking and persistent calls

    def begin(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> MPI.Request:
        """Begin a non-blocking call: C does, if one like it was begun before."""
        request = self.repeated.begin(method, args, timeout_s) if stream is None else None
        if request is None:
            return self.start(method, args, timeout_s, stream)
        request.of = self
        return request  # type: ignore[no-any-return]

    def finish(self, left: tuple[Any, ...]) -> BaseException | None:
        """Bring a non-blocking call to its end that C cannot; returns what it has raised.

        A request asks this, and not the sequence, for it keeps all that the call works on.
        """
        return self.sequence.finish(left)

    def start(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> MPI.Request:
        """Begin a non-blocking call. Arguments are read now; what peers or time do wrong is raised by ``Wait``."""
        with self.sequence.inside():
            return self._start(method, args, timeout_s, stream)

    def _start(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> MPI.Request:
        self.groups.refuse(f"I{method.name}")
        sequence, cuda, invocation = self.sequence, self.cuda, Invocation(method, args)
        deadline = sequence.deadline(timeout_s)
        ready: Read = self.binder.prepare(invocation, timeout_s, stream)
        if isinstance(ready, Prepared | NeedsNumbers) and ready.on_device and cuda is not None:
            sequence.drain()
            ready = agreed(sequence, ready, method.name, deadline)
        if isinstance(ready, Prepared) and ready.on_device and cuda is not None:
            bound = sequence.guarded(partial(cuda.bind, ready, stream, deadline))
            sequence.launch(bound)
            return cuda.request(bound, args)
        alone = agreed_alone(self.context, ready)
        if alone is not None and self.binder.known_pending(alone, invocation):
            request = self.repeated.begin(method, args, timeout_s)
            if request is not None:
                request.of = self
                return request  # type: ignore[no-any-return]
        self.repeated.shut()  # until a call has waited for it
        begun, held = None, invocation
        if isinstance(ready, DelegatedOp):  # on every rank; the user may free the operation at once
            if error := fallback_error(self.context, invocation.name, str(ready)):
                raise error
            begun = invocation.begin(self.context.mpi.public)
        elif isinstance(ready, DelegatedToMPI):
            try:
                held = invocation.held()
            except Exception as error:  # an object that does not show its memory
                ready = error

        def work() -> None:
            try:
                sequence.drain_c()
                self.maker.make_prepared(ready, held, deadline, begun)
            finally:
                held.free()

        request = sequence.thread.begin(work, self.context.log_once)
        if isinstance(ready, Prepared | NeedsNumbers | InBlocks | DelegatedToMPI):
            return request
        raise ready  # as MPI does, and the peers learn of it

    def persist(self, method: CollectiveMethod, args: Args, stream: Any) -> Persistent | None:
        """A call to be started many times; None if its buffers lie in host memory, and MPI has such calls."""
        self.groups.refuse(f"{method.name}_init")
        sequence, cuda, timeout_s = self.sequence, self.cuda, self.context.timeout_s
        ready: Read = self.binder.prepare(Invocation(method, args), None, stream)
        ours = not self.context.has_mpi
        if isinstance(ready, Exception) and not isinstance(ready, DelegatedToMPI):
            if ours or any(map(lies_on_device, args)):
                raise ready
            return None
        if cuda is None or not isinstance(ready, Prepared) or not ready.on_device:
            return persistent_on_host(partial(self.begin, method, args, None, None)) if ours else None
        sequence.drain()
        ready = agreed(sequence, ready, method.name, timeout_s)
        if not isinstance(ready, Prepared):
            raise ready if isinstance(ready, Exception) else AssertionError("calls of blocks are on host memory")
        bound = cuda.bind(ready, stream, timeout_s)
        return Persistent(lambda: sequence.launch(bound), lambda: sequence.wait(bound), bound.test, args)

    # ---- another plan, what has gone wrong

    def replan(self) -> tuple[PlanDifference, ...]:
        """Probe the machine again, plan, and go on with the new plan; collective. Returns what is different."""
        self.sequence.drain()
        self.sequence.check_alive()
        if self.cuda is not None:
            self.cuda.thread.drain()
        enter(self.sequence, "replan()", lambda: None)
        changes: tuple[PlanDifference, ...] = self.sequence.guarded(self.context.replan)
        self._forget_all()
        return changes

    def check(self) -> None:
        """Raise what has gone wrong since the last call."""
        self.sequence.check_alive()
        if self.cuda is not None:
            self.sequence.guarded(self.cuda.check)

    def _forget_all(self) -> None:
        self.binder.forget()
        self.binder.programs.clear()

    # ---- the end

    def close(self) -> None:
        """Free everything: collectively, or, if the communicator is dead, only what is local.

        What another communicator of the same ranks can go on with is kept for that.
        """
        sequence, host = self.sequence, self.context.host
        sequence.thread.close()
        sequence.drain_c()
        if self.cuda is not None:
            from .cuda.watch import forget

            self.cuda.thread.close()
            forget(self.cuda)
        if sequence.dead is not None:
            self.repeated.close()
            host.helper.close()
            sequence.die(sequence.dead)
            return
        failed: BaseException | None = None
        try:
            if self.child is not None and self.context.may_be_spare:
                sequence.meet("free()")  # by C, where another communicator has gone before
            else:
                host.barrier(sequence.next(), Called("free()"), self.context.timeout_s)
        except BaseException as error:
            failed = error.error if isinstance(error, Refused) else error
        if failed is not None:
            sequence.die(failed)
            raise failed  # not in the except block: so Python shows an earlier error of the user's code, too
        wrong = self.cuda.finished() if self.cuda is not None else None
        if not self._spared(freed=True):
            self.end()
        if wrong is not None:  # for example of a graph's replay whose results may have been used
            atexit.register(end_with_failure, str(wrong))
            sequence.dead = wrong
            raise wrong

    def end(self) -> None:
        """Free everything; collective, when all have come."""
        self.repeated.close()
        self.context.close_spares()
        self._forget_all()
        self.context.close()

    def leave_behind(self) -> None:
        """Give back what is this process's of a communicator that is dead, and whose other ranks have another one.

        Between nodes MPI still writes into its memory, which stays until the process ends.
        """
        assert self.sequence.dead is not None, "its ranks have agreed on that"
        self.close()
        atexit.unregister(self.sequence.at_exit)
        if self.context.open_mpi_call or self.context.host.messages is not None:
            LEFT_BEHIND.append(self)
        else:
            self._forget_all()
        self.context.leave_behind()

    def rest(self) -> None:
        """Do nothing, until :meth:`wake`."""
        self.context.rest()

    def wake(self) -> None:
        """Be there for calls again."""
        self.context.wake()

    def _spared(self, *, freed: bool) -> bool:
        """Keep it for another communicator of the same ranks, if that may be; whether it is kept.

        Args:
            freed: by all ranks, and not only dropped by this one: then it may be kept on all of them or on none.
        """
        child, context = self.child, self.context
        asked = self.repeated.calls is not None  # whether a thread looks after calls that do not block
        if child is None or not context.may_be_spare or asked or self.groups.open:
            return False
        if context.host.window.held > SPARE_BYTES:
            if not freed:  # other ranks may still read its memory
                return False
            self._forget_all()
            context.host.give_back_slots()
        self.rest()
        return child.parent.spares.put(child.ranks, context.number, self)

    def serve(self, child: Child) -> None:
        """Make the calls of another communicator."""
        self.child = child
        self.context.serve(child)

    def drop(self) -> None:
        """Give back what is this process's, where the user holds the communicator no more and has not freed it.

        Not on GPUs or several nodes, whose memory only all ranks free together.
        """
        sequence = self.sequence
        if sequence.dead is None and self.cuda is None and self.context.host.messages is None:
            sequence.thread.behind(self._dropped, later=self.repeated.pending > 0)

    def _dropped(self) -> None:
        self.sequence.drain_c()
        if self.sequence.dead is None and not self._spared(freed=False):
            self.discard()

    def discard(self) -> None:
        """Give back what is this process's; nobody makes calls any more."""
        self.repeated.close()
        self.sequence.dead = PeerLost("it was dropped without Free()")
        self.sequence.thread.end()
        self._forget_all()
        self.context.drop()
