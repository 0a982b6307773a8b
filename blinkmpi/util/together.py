"""Work that all ranks do while a communicator is made: if it fails on one rank, all raise an error and none hangs."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import msgspec

from ..errors import BlinkError, RemoteError

T = TypeVar("T")


class Comm(Protocol):
    """What is asked of a communicator where MPI is not imported: mpi4py's methods for Python objects."""

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def size(self) -> int:
        """How many there are."""

    def allgather(self, sendobj: Any, /) -> list[Any]:
        """Everybody's object, in rank order."""

    def bcast(self, obj: Any, root: int, /) -> Any:
        """The root's object."""

    def Barrier(self) -> None:
        """Return when all have come."""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """An error as it travels from rank to rank: the name of its class, and its message."""

    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}" if self.message else self.name


def failure_of(result: object) -> Failure | None:
    """What the others are told of a result: nothing, or the error that it is."""
    return Failure(type(result).__name__, str(result)) if isinstance(result, BaseException) else None


def attempt(work: Callable[[], T]) -> T | Exception:
    """Do ``work`` and return its result, or its error for the next exchange."""
    try:
        return work()
    except Exception as error:
        return error


def result_of(own: T | Exception) -> T:
    """What :func:`attempt` returned, or raise its error."""
    if isinstance(own, Exception):
        raise own
    return own


def from_root(comm: Comm, work: Callable[[], T], *, during: str = "", error: type[BlinkError] | None = None) -> T:
    """Do ``work`` on rank 0 and return its result on every rank; its error is one on all, as in :func:`together`."""
    own = attempt(work) if comm.rank == 0 else None
    failure = failure_of(own)
    found: tuple[T, Failure | None] = comm.bcast((None if failure else own, failure), 0)
    result, failure = found
    agree([failure], own, during=during, error=error)
    return result


def together(comm: Comm, work: Callable[[], T], *, during: str = "", error: type[BlinkError] | None = None) -> T:
    """Do ``work`` on every rank and return its result here; collective.

    Args:
        during: when it happens, for the message.
        error: what to raise on every rank instead of the classes below.

    Raises:
        This rank's own error where it failed; RemoteError, naming rank and error, where only others did.
    """
    own = attempt(work)
    agree(comm.allgather(failure_of(own)), own, during=during, error=error)
    return cast(T, own)


def gathered(comm: Comm, work: Callable[[], T], *, during: str = "", error: type[BlinkError] | None = None) -> list[T]:
    """Do ``work`` on every rank and return everybody's result, in rank order; otherwise as :func:`together`."""
    own = attempt(work)
    failure = failure_of(own)
    turns: list[tuple[Failure | None, T]] = comm.allgather((failure, None if failure else own))
    agree([failed for failed, _ in turns], own, during=during, error=error)
    return [result for _, result in turns]


def agree(
    failures: list[Failure | None], own: object, *, during: str = "", error: type[BlinkError] | None = None
) -> None:
    """Raise if some rank failed; ``failures`` are in rank order, ``own`` is this rank's result or error."""
    failed = [rank for rank, failure in enumerate(failures) if failure is not None]
    if isinstance(own, Exception) and error is None:
        raise own
    if failed:
        more = f" (so did ranks {failed[1:]})" if len(failed) > 1 else ""
        when = f" {during}" if during else ""
        cause = own if isinstance(own, Exception) else None
        raise (error or RemoteError)(f"rank {failed[0]} failed{when}{more}: {failures[failed[0]]}") from cause
