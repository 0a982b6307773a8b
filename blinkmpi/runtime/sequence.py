"""``CallSequence``: numbers and orders the calls of a communicator, and ends it after a failed one.

A call takes the next number where it is started; every transport compares it with the peers' before data is touched.
Non-blocking calls that were begun before are waited for, so that no call overtakes another. After an error in the
middle of a call the communicator is dead; a call that all ranks refused together changes nothing.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ArgumentError
from ..transport.announcement import NUMBERS, Called, Delegated, Numbers
from ..transport.host.host_call import HostCall, entry
from ..transport.host.repeated import Found, RepeatedCalls
from ..transport.interface import Awaited, BoundCall, PeerDelegates, Refused
from ..transport.liveness import died_of
from .bootstrap import is_time
from .calls_without_program import EntryCall, MpiCall
from .collectives import CollectiveMethod, Invocation
from .delegation import BY_A_PEER, delegated_in_group
from .process_exit import end_with_process, in_child
from .requests import ProgressThread

if TYPE_CHECKING:
    from ..transport.host.pending_calls import Unfinished
    from .context import Context

KEPT_CALLS = 8192  # calls that are kept to be repeated
T = TypeVar("T")


class Fatal:
    """A part of a call: what it raises kills the communicator.

    If all ranks refused the call together, nothing is killed, and the reason is raised.

    Args:
        but: exceptions that leave the communicator alive.
    """

    def __init__(self, sequence: CallSequence, *but: type[BaseException]) -> None:
        self._sequence, self._but = sequence, but

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Look at what was raised."""
        if isinstance(error, Refused):
            raise error.error from None
        if error is not None and not isinstance(error, self._but):
            self._sequence.die(error)


class CallSequence:
    """The calls of one communicator, in their order.

    Attributes:
        repeated: the number of the last call, and the calls that C makes again by itself.
        thread: makes non-blocking calls that C cannot.
        dead: what has ended the communicator.
        owner: gives the object that has all memory of the calls. MPI may still use that when the communicator is dead.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.host = context, context.host
        self.repeated, self.thread = RepeatedCalls(context.host.native, KEPT_CALLS), ProgressThread()
        self.dead: BaseException | None = None
        self._inside = 0  # the thread that makes a call through Python
        self.owner: Callable[[], object] = lambda: None
        context.rendezvous.give_up = self.die
        context.rendezvous.check = lambda: self.host.raise_abort(self.seq)
        end_with_process(self)

    # ---- the number of a call

    @property
    def seq(self) -> int:
        """The number of the last call."""
        return self.repeated.seq

    @seq.setter
    def seq(self, number: int) -> None:
        self.repeated.seq = number

    def next(self) -> int:
        """The number of a call that goes with the one that is made."""
        self.seq += 1
        return self.seq

    def numbered(self, work: Callable[[int], T]) -> T:
        """Make the next call. It gets its number here, where an interrupt between the two ends the communicator."""
        self.seq += 1
        return work(self.seq)

    # ---- one call at a time

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within it, this thread makes a call through Python.

        Raises:
            ArgumentError: if another one does. Which of the two calls the peers have made is nobody's to know then.
        """
        me, earlier = get_ident(), self._inside
        if (earlier and earlier != me) or self.repeated.inside:
            error = ArgumentError(
                f"rank {self.context.rank}: two threads are inside calls of one communicator, which MPI forbids; make "
                "calls one after another, or give each thread a communicator of its own (comm.Dup()). This one is dead"
            )
            self.die(error)
            raise error
        self._inside = me
        try:
            yield
        finally:
            self._inside = earlier

    def drain(self) -> None:
        """Wait until all non-blocking calls have ended; another call must not overtake them."""
        if self.thread.busy:
            self.thread.drain()
        self.drain_c()

    def drain_c(self) -> None:
        """Wait until those have ended that C makes."""
        if self.repeated.calls is not None and self.repeated.pending:
            with Fatal(self):
                self.repeated.calls.drain(self.end_pending)

    # ---- making calls that are bound

    def run(self, work: Callable[[], None], method: CollectiveMethod, args: Any, timeout_s: float | None) -> None:
        """Do what makes a call, or MPI's own where a peer delegates it; see :class:`Fatal`."""
        try:
            with Fatal(self, PeerDelegates):
                work()
        except PeerDelegates:
            self._delegate(Invocation(method, args), timeout_s)

    def guarded(self, work: Callable[[], T]) -> T:
        """Do a part of a call: what it raises kills the communicator, unless all ranks refused the call together."""
        with Fatal(self):
            return work()

    def again(self, method: CollectiveMethod | str, args: tuple[Any, ...], stream: Any) -> Found:
        """Let C make a blocking call that was made before: True; else what :meth:`go_on` does the rest of."""
        try:
            return self.repeated.again(method, args, stream)
        except BaseException as interrupt:  # a signal's, in the middle of the call
            self.die(interrupt)
            raise

    def go_on(
        self, method: CollectiveMethod, args: tuple[Any, ...], begun: tuple[Any, int, int], timeout_s: float | None
    ) -> None:
        """Go on with a call that C has begun and could not end by itself."""
        with self.inside():
            self._go_on(*begun, method, args, timeout_s)

    def _go_on(
        self, bound: Any, seq: int, status: int, method: CollectiveMethod, args: Any, timeout_s: float | None
    ) -> None:
        own = () if timeout_s is None else (timeout_s,)
        host = bound if isinstance(bound, HostCall) else None
        try:
            if host is not None:
                host.made = Invocation(method, args)
            self.run(partial(bound.go_on, seq, status, *own), method, args, timeout_s)
        finally:
            if host is not None:
                host.made = None  # it would keep the user's buffers alive

    def launch(self, bound: BoundCall) -> None:
        """Give a bound call its number and start it, behind all non-blocking calls on host memory."""
        with self.inside():
            self.drain()
            self.check_alive()
            self.guarded(partial(self.numbered, bound.start))

    def wait(self, started: Awaited) -> None:
        """Wait for a call that was started."""
        self.guarded(started.wait)

    def _delegate(self, invocation: Invocation, timeout_s: float | None) -> None:
        """Make MPI's collective in a call that another rank delegated; all ranks have entered it."""
        self.check_delegated(invocation)
        said, deadline = Delegated(invocation.name), self.deadline(timeout_s)
        call = MpiCall(self.context, invocation, said, deadline, BY_A_PEER, again=self.next, entered=True)
        self.guarded(lambda: call.run(self.seq))

    def check_delegated(self, invocation: Invocation) -> None:
        """Raise MismatchError if a group has met a call of another rank's that is MPI's, which is another call."""
        if invocation.method.grouped:
            error = delegated_in_group(invocation.name)
            self.die(error)
            raise error

    def deadline(self, timeout_s: float | None) -> float:
        """The time that a call may wait; a bad one is an error that the peers are told of, in the time of all."""
        return float(timeout_s) if timeout_s is not None and is_time(timeout_s) else self.context.timeout_s

    # ---- non-blocking calls that C has begun

    def finish(self, left: tuple[Any, ...]) -> BaseException | None:
        """Bring a non-blocking call to its end that C cannot; returns what it has raised."""
        assert self.repeated.calls is not None
        with Fatal(self):
            return self.repeated.calls.finish(left, self.end_pending)

    def end_pending(self, left: Unfinished) -> BaseException | None:
        """Go on with a non-blocking call; returns what it has raised."""
        try:
            self.check_alive()
            self._go_on(left.bound, left.seq, left.status, left.method, left.args, left.timeout_s)
        except BaseException as error:
            return error
        return None

    # ---- meeting

    def meet(self, what: str) -> None:
        """Wait until all ranks are about to do ``what``; C makes this call, too, where it was made before."""
        begun = self.again(what, (), None)
        if begun is True:
            return
        if begun is not False:
            with self.inside(), Fatal(self):
                begun[0].go_on(*begun[1:])
            return
        said, timeout_s = Called(what), self.context.timeout_s
        call = entry(self.host, said, timeout_s, counted=False) or EntryCall(self.host, said, timeout_s)
        self.launch(call)
        self.wait(call)
        if isinstance(call, HostCall):
            self.repeated.keep(call, what, ())
            self.repeated.open()

    def entered(self, work: Callable[[int], T]) -> T:
        """Make a call that all ranks make before another one, of which a peer may not be the maker.

        Raises:
            PeerDelegates: which leaves the communicator alive; the number is that of the call which MPI makes then.
        """
        self.check_alive()
        with Fatal(self, PeerDelegates):
            return self.numbered(work)

    def numbers_of_all(
        self, numbers: Sequence[int], timeout_s: float, collective: str = ""
    ) -> tuple[tuple[int, ...], ...]:
        """Every rank's numbers (each brings as many); as many calls as a record has to be filled."""
        found: list[tuple[int, ...]] = [()] * self.context.n
        for at in range(0, len(numbers), NUMBERS):
            said = Numbers(tuple(numbers[at : at + NUMBERS]), collective)
            told = self.entered(partial(self.host.exchange, said=said, timeout_s=timeout_s))
            found = [(*before, *now) for before, now in zip(found, told, strict=True)]
        return tuple(found)

    def number_of_each(self, number: int) -> tuple[int, ...]:
        """Every rank's number, behind all calls that were begun."""
        self.drain()
        return tuple(row[0] for row in self.numbers_of_all((number,), self.context.timeout_s))

    # ---- the end

    def check_alive(self) -> None:
        """Raise PeerLost if an earlier call left the communicator dead."""
        if self.dead is not None:
            raise died_of(self.dead, self.host.peers.remedy) from self.dead

    def die(self, error: BaseException) -> None:
        """Never use the communicator again, and tell the peers why. Safe to call twice."""
        self.dead = self.dead or error
        self.repeated.shut()
        self.repeated.give_up(died_of(self.dead, self.host.peers.remedy))
        if in_child():  # a forked child must not tell its parent's peers
            return
        if self.context.gpus is not None:
            self.context.gpus.transport.abort()
        self.host.abort(self.dead)
        self.context.end_trace()
        kept = self.owner()
        atexit.unregister(self.at_exit)
        atexit.register(self.at_exit, kept)

    def at_exit(self, _kept: object) -> None:
        """At Python's end: the process of a communicator that is dead."""
        context = self.context
        context.ranks.leave(context.host, context.timeout_s, lambda: context.open_mpi_call, context.settings)
