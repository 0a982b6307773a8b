"""Every error that blinkmpi raises on purpose.

One base class, one subclass per kind of trouble. A message names the rank and
the value that was wrong, says what was expected, and ends with the remedy.
"""
# It imports nothing of the package, so that every layer may raise.

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

START_AGAIN = "start the job again"
SHRINK = f"{START_AGAIN}, or go on with the others: comm.shrink()"  # where ranks that are left can go on
NO_MPI = "load your site's MPI, or pip install 'blinkmpi[mpi]'"


class BlinkError(RuntimeError):
    """Base of all errors of blinkmpi."""


class FormatError(BlinkError, ValueError):
    """A file or JSON text is malformed; the message holds the path of the wrong field."""


class TopologyError(BlinkError, ValueError):
    """A machine is unknown, inconsistent or not connected."""


class PlanError(BlinkError, ValueError):
    """A packing, plan or program is impossible or fails its check."""


class ArgumentError(BlinkError, ValueError):
    """A call got a bad value: count, root, op, buffer layout."""


class NoPackingError(ArgumentError):
    """A planning method that was asked for by name finds nothing on this machine; ``why`` says the reason alone."""

    why = ""


class BufferTypeError(BlinkError, TypeError):
    """A call got a buffer or element type that cannot take part."""


class DeviceError(BlinkError):
    """A GPU, its driver or its compiler cannot do what is asked."""


class PoolExhausted(BlinkError, MemoryError):
    """A memory pool has no room for an allocation."""


class PoolInUse(DeviceError):
    """A memory pool is to be closed while arrays lie in it."""


class SettingsError(BlinkError, ValueError):
    """An environment variable of ours holds an impossible value."""


class TraceError(BlinkError, OSError):
    """A trace cannot be written."""


class MismatchError(BlinkError):
    """The ranks disagree about the call that they are in."""


class CollectiveTimeout(BlinkError, TimeoutError):
    """A peer did not do its part of a collective before the deadline."""


class PeerLost(BlinkError):
    """A peer's process is gone, or the communicator died earlier.

    Args:
        ranks: those known to take part no more, by their numbers in the communicator; empty where none is known.
    """

    def __init__(self, text: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(sorted(set(ranks)))


def lost_ranks(error: BaseException | None) -> tuple[int, ...]:
    """The ranks of a :class:`PeerLost`; of another error none."""
    return error.ranks if isinstance(error, PeerLost) else ()


class CannotShrink(BlinkError):
    """The ranks that are left cannot go on together: the launcher, GPUs, or that they have done so already forbid."""


class CannotGrow(BlinkError):
    """The ranks cannot get further ones: the launcher, GPUs, or a description of so many ranks forbid."""


class RemoteError(BlinkError):
    """Another rank failed; this is its error, raised here too."""


class FallbackError(BlinkError):
    """``strict=True`` and the call would have fallen back to a slower protocol."""


@contextmanager
def no_mpi_has_a_remedy() -> Iterator[None]:
    """Add the remedy to mpi4py's error, if it finds no MPI library when it is imported."""
    try:
        yield
    except RuntimeError as error:
        if "MPI library" in str(error):
            error.add_note(f"There is no MPI here: {NO_MPI}.")
        raise
