"""Work that all ranks do while a communicator is made: if it fails on one rank, all raise an error and none hangs.

What ranks tell each other are values of types that both ends name, as msgspec's bytes: what comes from another process,
or from a key-value store that others may write, is data and never code.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, TypeVar, cast

import msgspec

from ..errors import BlinkError, FormatError, RemoteError
from .text import brief

T = TypeVar("T")
MOST_GATHERED = 1 << 24  # bytes of a rank, where everybody hears everybody
MOST_SENT = 1 << 30  # bytes of what one rank tells all: twice the longest file of a plan
OWN_STORE = "start one version of blinkmpi on every rank, and let nobody else write into the store of the job"


class Comm(Protocol):
    """What is asked of a communicator where MPI is not imported. One of MPI's own is taken, too (:class:`OverBuffers`).

    Both exchanges raise FormatError, on every rank, for more bytes than the bounds above.
    """

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def size(self) -> int:
        """How many there are."""

    def allgather_bytes(self, body: bytes, /) -> list[bytes]:
        """Everybody's bytes, in rank order."""

    def bcast_bytes(self, body: bytes, root: int, /) -> bytes:
        """The root's bytes."""

    def Barrier(self) -> None:
        """Return when all have come."""


class OverBuffers:
    """A communicator of MPI's, by its methods for buffers; it waits as long as MPI does."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = comm, int(comm.Get_rank()), int(comm.Get_size())

    def allgather_bytes(self, body: bytes, /) -> list[bytes]:
        """Everybody's bytes."""
        import numpy as np

        lengths = np.empty(self.size, np.int64)
        self.comm.Allgather(np.array([len(body)], np.int64), lengths)
        counts = lengths.tolist()
        check_lengths(counts, MOST_GATHERED)
        found = np.empty(sum(counts), np.uint8)
        self.comm.Allgatherv(np.frombuffer(body, np.uint8), [found, counts])
        return cut(found, counts)

    def bcast_bytes(self, body: bytes, root: int, /) -> bytes:
        """The root's bytes."""
        import numpy as np

        length = np.array([len(body)], np.int64)
        self.comm.Bcast(length, root)
        check_lengths([int(length[0])], MOST_SENT, root)
        found = np.frombuffer(body, np.uint8) if self.rank == root else np.empty(int(length[0]), np.uint8)
        self.comm.Bcast(found, root)
        return body if self.rank == root else found.tobytes()


def check_lengths(lengths: Sequence[int], most: int, first: int = 0) -> None:
    """Raise FormatError if a rank tells more bytes than it may; ``first`` is the rank of the first length."""
    for rank, length in enumerate(lengths, first):
        if not 0 <= length <= most:
            raise FormatError(
                f"rank {rank} tells the others {length} bytes at once, at most {most} are taken; {OWN_STORE}"
            )


def cut(found: Any, counts: Sequence[int]) -> list[bytes]:
    """An array of bytes in parts of these lengths."""
    bodies, at = [], 0
    for count in counts:
        bodies.append(found[at : at + count].tobytes())
        at += count
    return bodies


def allgather(comm: Any, value: T, kind: Any) -> list[T]:
    """Everybody's value, in rank order; collective.

    Args:
        comm: a :class:`Comm`, or a communicator of MPI's.
        kind: the type of the values, of those that msgspec knows.

    Raises:
        FormatError: on every rank, if what a rank told is not of this type, or too long.
    """
    bodies = _road(comm).allgather_bytes(_encoder().encode(value))
    return [read(body, kind, f"rank {rank}") for rank, body in enumerate(bodies)]


def bcast(comm: Any, value: T | None, kind: Any, root: int = 0) -> T:
    """The root's value; collective, raises as :func:`allgather`. What other ranks pass is not looked at."""
    body = _encoder().encode(value) if comm.rank == root else b""
    return cast(T, read(_road(comm).bcast_bytes(body, root), kind, f"rank {root}"))


def read(body: bytes, kind: Any, who: str) -> Any:
    """A value of this type from what ``who`` has told.

    Raises:
        FormatError: if it is none.
    """
    try:
        return _decoder(kind).decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeError, RecursionError, OverflowError) as error:
        raise FormatError(f"what {who} told the others cannot be read ({brief(str(error))}); {OWN_STORE}") from error


def _road(comm: Any) -> Comm:
    return cast(Comm, comm if hasattr(comm, "allgather_bytes") else OverBuffers(comm))


@cache
def _encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_plain)


@cache
def _decoder(kind: Any) -> Any:
    return msgspec.msgpack.Decoder(kind)


def _plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's."""
    if hasattr(value, "dtype") and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is told to no other rank; give it a type that msgspec knows")


class Failure(msgspec.Struct, frozen=True, tag="failure", omit_defaults=True):
    """An error as it travels from rank to rank: the name of its class, its message, and the ranks that it says lost."""

    name: str
    message: str
    lost: tuple[int, ...] = ()

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


def from_root(
    comm: Comm, work: Callable[[], T], kind: Any, *, during: str = "", error: type[BlinkError] | None = None
) -> T:
    """Do ``work`` on rank 0 and return its result on every rank; its error is one on all, as in :func:`together`.

    Args:
        kind: the result's type, of those that msgspec knows.
    """
    own = attempt(work) if comm.rank == 0 else None
    failure = failure_of(own)
    result, failure = bcast(comm, (None if failure else own, failure), tuple[kind | None, Failure | None])
    agree([failure], own, during=during, error=error)
    return cast(T, own if comm.rank == 0 else result)


def together(comm: Comm, work: Callable[[], T], *, during: str = "", error: type[BlinkError] | None = None) -> T:
    """Do ``work`` on every rank and return its result here; collective.

    Args:
        during: when it happens, for the message.
        error: what to raise on every rank instead of the classes below.

    Raises:
        This rank's own error where it failed; RemoteError, naming rank and error, where only others did.
    """
    own = attempt(work)
    agree(allgather(comm, failure_of(own), Failure | None), own, during=during, error=error)
    return cast(T, own)


def gathered(
    comm: Comm, work: Callable[[], T], kind: Any, *, during: str = "", error: type[BlinkError] | None = None
) -> list[T]:
    """Do ``work`` on every rank and return everybody's result, in rank order; otherwise as :func:`together`.

    Args:
        kind: the results' type, of those that msgspec knows.
    """
    own = attempt(work)
    failure = failure_of(own)
    turns = allgather(comm, (failure, None if failure else own), tuple[Failure | None, kind | None])
    agree([failed for failed, _ in turns], own, during=during, error=error)
    return [cast(T, result) for _, result in turns]


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
