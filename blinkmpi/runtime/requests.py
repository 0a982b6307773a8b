"""The request of a non-blocking call: a generalized request that our progress thread completes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mpi4py import MPI

from ..errors import ArgumentError, BlinkError

if TYPE_CHECKING:
    from ..transport.host.pending_calls import Look, PendingCall

Work = Callable[[], None]
Finish = Callable[[BaseException | None], None]


class Request(MPI.Grequest):
    """Behaves as any ``MPI.Request``; ``Wait`` and ``Test`` raise the call's own error.

    In MPI's functions of several requests (``Waitall``) it can only be MPI_ERR_IN_STATUS, and is printed.
    """

    _base: MPI.Grequest  # the same handle, which the user can neither free nor complete
    _done: threading.Event
    _error: list[BaseException]

    def __new__(cls, tell: Callable[[MPI.Status], None] | None = None, cancel: Work | None = None) -> Request:
        """Start a request that :meth:`finish` ends.

        Args:
            tell: fills in the status when the request has ended (None: it has no data).
            cancel: tries to end it early; None: it cannot be.
        """
        error: list[BaseException] = []

        def query(status: MPI.Status, *_: Any) -> None:
            status.Set_elements(MPI.BYTE, 0)
            status.Set_cancelled(False)
            if tell is not None:
                tell(status)
            if error:
                raise error[0]

        def stop(completed: bool, *_: Any) -> None:
            if cancel is not None and not completed:
                cancel()

        base = MPI.Grequest.Start(query, None, stop)
        self = super().__new__(cls, base)
        self._base, self._done, self._error = base, threading.Event(), error
        return self

    def finish(self, error: BaseException | None) -> None:
        """Mark the call as ended (from any thread)."""
        if error is not None:
            self._error.append(error)
        self._base.Complete()
        self._done.set()

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the result is there.

        Raises:
            What the call itself would have raised.
        """
        self._done.wait()
        error = self._error.pop() if self._error else None
        super().Wait(status)
        if error is not None:
            raise error if isinstance(error, BlinkError) else BlinkError(f"the call failed: {error!r}") from error
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Whether the result is there; raises as :meth:`Wait` does."""
        return self._done.is_set() and self.Wait(status)

    def wait(self, status: MPI.Status | None = None) -> None:
        """As :meth:`Wait`, in the form of mpi4py's lower-case methods: there is no object to return."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """As :meth:`Test`, in the form of mpi4py's lower-case methods."""
        return self.Test(status), None


class Finisher(Protocol):
    """What a call was begun on."""

    def finish(self, left: tuple[Any, ...], /) -> BaseException | None:
        """Bring a call to its end that C cannot; returns what it has raised. ``left``: :class:`.Unfinished`."""


class HostRequest(MPI.Request):
    """The request of a call on host memory that C makes; to its user it is as :class:`Request`."""

    __slots__ = ("of", "pending")
    pending: PendingCall
    of: Finisher  # its communicator

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the result is there.

        Raises:
            What the call itself would have raised.
        """
        while (left := self.pending.wait(self, status)) is not True:
            self._go_on(left)
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Whether the result is there; raises as :meth:`Wait` does."""
        while not isinstance(left := self.pending.test(self, status), bool):
            self._go_on(left)
        return left

    def wait(self, status: MPI.Status | None = None) -> None:
        """As :meth:`Wait`, in the form of mpi4py's lower-case methods: there is no object to return."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """As :meth:`Test`, in the form of mpi4py's lower-case methods."""
        return self.Test(status), None

    def _go_on(self, left: Look) -> None:
        if isinstance(left, BaseException):
            raise left if isinstance(left, BlinkError) else BlinkError(f"the call failed: {left!r}") from left
        if isinstance(left, tuple):
            error = self.of.finish(left)
            if error is not None and not isinstance(error, Exception):
                raise error  # a signal's


class KeptPrequest(MPI.Prequest):
    """A persistent call of MPI's own; the user's buffers, datatypes and operation live as long as it does."""

    def __new__(cls, request: MPI.Prequest, operands: Any) -> KeptPrequest:
        """The same request to MPI."""
        return super().__new__(cls, request)

    def __init__(self, _: MPI.Prequest, operands: Any) -> None:
        self._operands = operands


class Persistent(MPI.Prequest):
    """A call of ours that is started again and again with the same buffers (MPI 4.1, section 6.13).

    To MPI itself it is a null request: functions of several requests (``Startall``) do not know it.

    On GPU memory ``Start`` enqueues it on its stream and returns; ``Wait`` returns when the result is there. A call
    that needs no waiting on the host may be started again at once: its stream keeps the order.
    """

    def __new__(cls, *_: object) -> Persistent:
        """A null request, as MPI sees it."""
        return super().__new__(cls)

    def __init__(
        self, start: Callable[[], None], wait: Callable[[], None], idle: Callable[[], bool], operands: Any
    ) -> None:
        self.Start = start  # type: ignore[method-assign]
        self.Wait = wait  # type: ignore[method-assign, assignment]
        self.Test = idle  # type: ignore[method-assign, assignment]
        self._operands = operands  # the user's buffers, which live until Free

    def Free(self) -> None:
        """Forget the buffers."""

        def gone() -> None:
            raise ArgumentError("this persistent call was freed; make it again")

        self._operands = None
        self.Start = self.Wait = gone  # type: ignore[method-assign, assignment]


def persistent_on_host(begin: Callable[[], MPI.Request]) -> Persistent:
    """A persistent call on host memory, each start of which is the non-blocking call that ``begin`` begins."""
    under_way: list[MPI.Request] = []

    def start() -> None:
        if under_way:
            raise ArgumentError("this persistent call was started and not completed; Wait for it first")
        under_way.append(begin())

    def wait() -> None:
        while under_way:
            under_way.pop().Wait()

    def test() -> bool:
        request = under_way.pop() if under_way else None
        if request is None or request.Test():
            return True
        under_way.append(request)
        return False

    return Persistent(start, wait, test, begin)


class ProgressThread:
    """One thread that makes non-blocking calls in the order in which the user began them."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Work, Finish] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = 0  # jobs that have not ended

    @cached_property
    def _idle(self) -> threading.Condition:
        """Made with the first job, before the thread: most communicators have none."""
        return threading.Condition()

    def begin(self, work: Work, say: Callable[[str], object]) -> Request:
        """Do ``work`` behind all earlier jobs, or here, which is said, if MPI takes calls of one thread alone."""
        request = Request()
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._put(work, request.finish)
        else:
            say("non-blocking calls complete at once, because MPI was not started with THREAD_MULTIPLE")
            request.finish(self._run(work))
        return request

    def _put(self, work: Work, finish: Finish) -> None:
        """Do ``work`` behind all earlier jobs, then call ``finish`` with the error that it raised."""
        with self._idle:
            self.busy += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="blinkmpi-progress", daemon=True)
            self._thread.start()
        self._jobs.put((work, finish))

    @staticmethod
    def _run(work: Work) -> BaseException | None:
        """Do ``work`` here and return the error that it raised: it belongs to the one who waits for the request."""
        try:
            work()
        except BaseException as error:
            return error
        return None

    def drain(self) -> None:
        """Wait until all jobs have ended; a blocking call must not overtake them."""
        if self.busy:
            with self._idle:
                self._idle.wait_for(lambda: self.busy == 0)

    def behind(self, work: Work, *, later: bool = False) -> None:
        """Do ``work`` behind all jobs, for which nobody waits; or here, if there are none and it may be now."""
        if self.busy or later:
            self._put(work, lambda _: None)
        else:
            work()

    def end(self) -> None:
        """Have the thread end behind its jobs, and do not wait for it."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def close(self) -> None:
        """Finish the jobs and end the thread. Safe to call twice."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        while (item := self._jobs.get()) is not None:
            work, finish = item
            error = self._run(work)
            del item, work  # drops the user's buffers before a waiter goes on
            with self._idle:  # a waiter that sees one of these two changes sees both
                self.busy -= 1
                finish(error)
                del error, finish
                self._idle.notify_all()
