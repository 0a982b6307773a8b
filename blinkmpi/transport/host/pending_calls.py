"""Python's side of the non-blocking calls that C begins and advances (pending_calls.h), and their thread."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mpi4py import MPI

from ...errors import PeerLost
from ..interface import Resumable
from .mpi_functions import HOOK, POLLED, REQUESTS, address_if_any, addresses, handle, handles_are_pointers


class PendingCall(Protocol):
    """A call that was begun, as C has it. What it gives is :data:`Look`."""

    def wait(self, request: MPI.Request, status: MPI.Status | None, /) -> Look:
        """Wait until it has ended, and free its request."""

    def test(self, request: MPI.Request, status: MPI.Status | None, /) -> Look:
        """The same, if it has ended."""


class Unfinished(NamedTuple):
    """The first call, of which C waits to hear what becomes of it: it could not end it by itself."""

    pending: PendingCall
    bound: Resumable
    seq: int
    status: int
    timeout_s: float | None
    method: Any
    args: tuple[Any, ...]


# Whether it has ended; its error; None, if nothing has happened for a while, and signals are to be looked at; or the
# fields of Unfinished.
Look = bool | BaseException | tuple[Any, ...] | None
Finish = Callable[[Unfinished], BaseException | None]  # brings a call to its end; returns what it has raised

LEFT_S = 0.2  # time for the thread to end at the end of the process
_watched: weakref.WeakSet[PendingCalls] = weakref.WeakSet()


def why_not() -> str:
    """Why non-blocking calls cannot be C's in this process; empty if they can."""
    found = addresses(*REQUESTS)
    if isinstance(found, str):
        return found
    told = address_if_any(POLLED) or address_if_any(HOOK)
    return "" if told or MPI.Query_thread() == MPI.THREAD_MULTIPLE else "this MPI takes calls of one thread alone"


class PendingCalls:
    """The non-blocking calls of a communicator.

    Args:
        serve: C's function that makes the others.
        request: the type of requests, a subclass of MPI's; C sets the field ``pending``.
        finish: brings a call to its end that C cannot; None if nobody can any more.
    """

    def __init__(
        self, serve: Callable[..., tuple[Any, ...]], request: type[MPI.Request], finish: Callable[[], Finish | None]
    ) -> None:
        found = addresses(*REQUESTS)
        assert not isinstance(found, str), "why_not() is asked before"
        polled, hook = address_if_any(POLLED), address_if_any(HOOK)
        tells = not (polled or hook)
        self.begin, self._drain, self._finished, self._give_up, self._watch, self._stop = serve(
            request,
            *found,
            polled,
            0 if polled else hook,
            handles_are_pointers(),
            tells,
            int(MPI.ERR_OTHER),
            handle(MPI.BYTE),
        )
        self._thread = threading.Thread(
            target=_look_after, args=(self._watch, self._finished, finish), name="blinkmpi-progress", daemon=True
        )
        self._thread.start()
        _watched.add(self)

    def finish(self, given: tuple[Any, ...], by: Finish) -> BaseException | None:
        """Bring the first call to its end; returns what it has raised."""
        return _finish(given, by, self._finished)

    def drain(self, by: Finish) -> None:
        """Wait until no call is pending."""
        while (left := self._drain()) is not True:
            if left is not None:
                self.finish(left, by)

    def give_up(self, error: BaseException) -> None:
        """Let all calls fail but one that is being made."""
        self._give_up(error)

    def stop(self, timeout_s: float | None = None) -> None:
        """End the thread, and wait for it so long: it may be in a call that has to end first. Safe to call twice."""
        self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)


def _look_after(watch: Callable[[], Any], finished: Callable[..., None], finish: Callable[[], Finish | None]) -> None:
    """The thread: it refers to nothing that its communicator would have to let go of."""
    while (left := watch()) is not None:
        by = finish()
        if by is None:
            return
        _finish(left, by, finished)
        del left, by


def _finish(given: tuple[Any, ...], by: Finish, finished: Callable[..., None]) -> BaseException | None:
    left = Unfinished(*given)
    error: BaseException | None = PeerLost("an interrupt came while it was brought to its end")
    try:
        error = by(left)
    finally:
        finished(left.pending, error)
    return error


def _stop_all() -> None:
    """At the end of the process nobody waits for a rank that does not come."""
    for calls in list(_watched):
        calls.stop(LEFT_S)


atexit.register(_stop_all)
