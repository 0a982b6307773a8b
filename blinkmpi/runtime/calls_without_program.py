"""Calls that run no program of ours: MPI's own collectives, calls without data, and calls that a rank refuses."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpi4py import MPI

from ..errors import FallbackError, PeerLost
from ..transport.announcement import Announcement, Called, Delegated, Failed
from ..transport.host.transport import LOOK_SECONDS, HostTransport
from ..transport.interface import PeerDelegates, Refused
from ..util.together import failure_of
from .collectives import Invocation
from .delegation import BY_A_PEER, told

if TYPE_CHECKING:
    from .context import Context


class EntryCall:
    """A call that is complete when all ranks have entered it: a barrier, or a collective of no elements.

    Args:
        nbytes: of the user's call, to be counted with it; -1 for a meeting that no user has called.
    """

    reusable = True

    protocol = ""  # the protocol under which it is counted

    def __init__(self, host: HostTransport, announcement: Announcement, timeout_s: float, nbytes: int = -1) -> None:
        self.host, self.announcement, self.timeout_s, self.nbytes = host, announcement, timeout_s, nbytes
        self.seq = self.began_ns = 0

    def start(self, seq: int) -> None:
        """Announce the call."""
        self.seq, self.began_ns = seq, time.monotonic_ns()
        self.host.records.announce(seq, self.announcement, self.timeout_s)

    def test(self) -> bool:
        """Whether all ranks have announced it; then this completes it."""
        if self.host.peers.absent(self.seq):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait for all ranks, and compare what they announced."""
        self._enter()
        self.completed()

    def _enter(self) -> None:
        self.host.wait_for_all(self.seq, self.timeout_s)

    def completed(self) -> None:
        """Count the call."""
        said = self.announcement
        text = said.words if isinstance(said, Called) else said.collective if isinstance(said, Delegated) else ""
        if text and self.nbytes >= 0:
            self.host.recorder.completed(text, self.protocol, self.nbytes, self.seq, self.began_ns)

    def run(self, seq: int) -> None:
        """Start and wait."""
        self.start(seq)
        self.wait()


class EmptyCall(EntryCall):
    """A call on GPU memory of no elements: nothing to wait for."""

    reusable = False
    captured = False

    def start(self, seq: int) -> None:
        """Announce it."""
        self.began_ns = time.monotonic_ns()
        self.host.records.announce_kernel(seq, *self.host.records.encode(self.announcement), self.timeout_s)
        self.completed()

    def test(self) -> bool:
        """It has completed."""
        return True

    def wait(self) -> None:
        """It has completed."""

    def pending(self) -> EmptyCall:
        """What a request waits for."""
        return self


class RefusedCall(EntryCall):
    """A call that this rank cannot make, so that no rank makes it."""

    reusable = False

    def __init__(self, host: HostTransport, error: Exception, timeout_s: float) -> None:
        failure = failure_of(error)
        assert failure is not None
        super().__init__(host, Failed(failure), timeout_s)
        self._error = error

    def start(self, seq: int) -> None:
        """Tell the peers, and raise the error."""
        super().start(seq)
        self.wait()

    def wait(self) -> None:
        """Raise the error when the peers know it."""
        # this rank raises its own error, whatever the others announced
        with contextlib.suppress(Refused, PeerDelegates):
            super().wait()
        raise Refused(self._error)

    def run(self, seq: int) -> None:
        """Tell the peers, and raise the error."""
        self.start(seq)


class MpiCall(EntryCall):
    """MPI's own collective, under our deadline: it is begun when all ranks have entered the same call.

    Where some ranks came with a call of ours, and others with one that is MPI's alone, all tell what MPI must find
    equal in a call of its own, and none begins unless it is.

    Args:
        again: gives the number of that call.
        begun: MPI's request, if it was begun when the user called: an operation may be freed before all have come.
        nbytes: of the call's largest buffer, if that is known.
        why: the reason, if the plan's table is not.
        entered: whether all ranks have entered the call already, with a program, and one of them delegates it.
    """

    protocol = "mpi"

    def __init__(
        self,
        context: Context,
        invocation: Invocation,
        announcement: Announcement,
        timeout_s: float,
        why: str = "",
        *,
        again: Callable[[], int],
        begun: MPI.Request | None = None,
        entered: bool = False,
        nbytes: int = 0,
    ) -> None:
        super().__init__(context.host, announcement, timeout_s, nbytes)
        self.context, self.invocation, self.why, self.entered = context, invocation, why, entered
        self.again, self.begun = again, begun
        self.reusable = not why

    def start(self, seq: int) -> None:
        """Announce the call, unless that is done."""
        if self.entered:
            self.seq, self.began_ns = seq, time.monotonic_ns()
        else:
            super().start(seq)

    def wait(self) -> None:
        """Make MPI's collective when all ranks are there."""
        try:
            why = self._compared()
            self.host.raise_abort(self.seq)
            if why and (error := fallback_error(self.context, self.invocation.name, why)):
                raise Refused(error)  # strict=True: every rank refuses the delegation
        except Refused as refused:
            if self.begun is not None:  # MPI's own call was begun, and will never end
                raise refused.error from None
            raise
        try:
            request = self.begun if self.begun is not None else self.invocation.begin(self.context.mpi.private)
        except Exception as error:  # MPI wants other arguments: it has not begun
            raise Refused(error) from error
        self._complete(request)
        self.completed()

    def _compared(self) -> str:
        """Wait for all ranks, and compare what MPI must find equal; returns why the call is MPI's, if that is said."""
        why, differ = self.why, self.entered
        if not self.entered:
            try:
                self._enter()
            except PeerDelegates:
                why, differ = why or BY_A_PEER, True
        if differ:
            self.seq = self.again()
            said = Delegated(self.invocation.name, told(self.invocation, self.context.rank, self.context.n))
            self.host.barrier(self.seq, said, self.timeout_s)
        return why

    def _complete(self, request: MPI.Request) -> None:
        """Poll MPI's request; look after the peers now and then."""
        what = self.context.open_mpi_call = self.invocation.name
        since = looked = now = time.monotonic()
        polls = 0
        try:
            while not request.Test():
                polls += 1
                if polls % 64:
                    os.sched_yield()
                    continue
                now = time.monotonic()
                if now - looked > LOOK_SECONDS or now - since >= self.timeout_s:
                    looked = now
                    self._look(what, now - since)
                if now - since > 0.05:
                    time.sleep(1e-4)
            self.context.open_mpi_call = ""
        except MPI.Exception as error:
            if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                self._look(what, now - since)
                peers = self.host.peers
                text = f"call {self.seq}, MPI's own {what}: {error}; {peers.remedy}"
                raise PeerLost(text, peers.lost()) from error
            raise

    def _look(self, what: str, waited_s: float) -> None:
        peers = self.host.peers.owing(f"its part of MPI's own {what}")
        self.host.look(self.seq, lambda: peers, waited_s, self.timeout_s)


def fallback_error(context: Context, name: str, why: str) -> FallbackError | None:
    """Say once that a call is MPI's, and why; the error to raise if the communicator is strict."""
    text = f"{name}: MPI's own, because {why}"
    if context.options.strict:
        return FallbackError(f"strict=True: {text}; pass arguments that blinkmpi takes, or leave strict out")
    if context.rank == 0:
        context.log_once(text, "INFO")
    return None
