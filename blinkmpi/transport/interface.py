"""``BoundCall``, what all transports make: a collective call with program, buffers and deadline, ready to start."""

from typing import Protocol


class BoundCall(Protocol):
    """A collective call of which program, buffers and deadline are known; it may be made any number of times.

    Its number in the communicator (``seq``) is the same on every rank. A call that raises one of the two exceptions
    below has touched no data; after any other error the communicator is dead.
    """

    @property
    def reusable(self) -> bool:
        """Whether it may be kept and made again on the same buffers, which it does not keep alive."""

    def start(self, seq: int) -> None:
        """Announce the call and begin it; on a GPU, put it on its stream."""

    def test(self) -> bool:
        """Do what can be done now; returns whether the call has completed."""

    def wait(self) -> None:
        """Return when the call has completed."""

    def run(self, seq: int) -> None:
        """Start and wait."""


class Awaited(Protocol):
    """A call that was started."""

    def wait(self) -> None:
        """Return when it has completed."""


class Refused(Exception):
    """No rank makes this call, and every rank knows why: ``error`` is what to raise. The communicator lives on."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class PeerDelegates(Exception):
    """Some rank's arguments are such that MPI must do this call, so every rank makes MPI's."""


class Resumable(Protocol):
    """A call that C has begun and not ended."""

    def go_on(self, seq: int, status: int) -> None:
        """Complete it, from its number and C's status on."""
