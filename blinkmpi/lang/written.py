"""``@lang.algorithm``: a function of the number of ranks becomes an :class:`Algorithm` for each number."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from operator import index
from typing import Any, NamedTuple

from ..errors import ArgumentError, PlanError
from ..program.call import collective_named
from ..trees.tree import ROOTED
from ..util.text import quoted
from .algorithms import Algorithm
from .flow import Contribution, Goal, check_size, goal_of
from .parameters import described
from .trace import Tracer, collected, collecting, whole

Chunks = int | Callable[..., int]


class CustomCollective(NamedTuple):
    """A collective of the user's own: see :func:`custom`."""

    given: Callable[[int, int], int]
    wanted: Callable[[int, int], Sequence[Sequence[Contribution]]]

    def goal(self, n: int, chunks: int) -> Goal:
        """What it gives and wants among ``n`` ranks.

        Raises:
            ArgumentError: for what names no chunks. PlanError: for contributions that there are not.
        """
        given = tuple(_given(n, rank, self.given(n, rank)) for rank in range(n))
        wanted = tuple(_wanted(n, rank, self.wanted(n, rank)) for rank in range(n))
        return Goal("custom", n, chunks, -1, given, wanted).checked()


def _given(n: int, rank: int, said: object) -> int:
    """What a user's function says that a rank gives, as a number."""
    number = whole(said)
    if number is None:
        raise ArgumentError(f"given({n}, {rank}) is {quoted(said)}; expected how many chunks the rank gives")
    return number


def _wanted(n: int, rank: int, said: Sequence[Sequence[Contribution]]) -> tuple[tuple[Contribution, ...], ...]:
    """What a user's function says that a rank wants, in ascending order."""
    try:
        return tuple(tuple(sorted((index(source), index(part)) for source, part in want)) for want in said)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"wanted({n}, {rank}) is {quoted(said)}; expected a list of (rank, chunk) for each chunk "
                            "of the rank's output") from error  # fmt: skip


def custom(
    *, given: Callable[[int, int], int], wanted: Callable[[int, int], Sequence[Sequence[Contribution]]]
) -> CustomCollective:
    """A collective by what it begins and ends with, which ``Communicator.Custom`` runs.

    Args:
        given: of the number of ranks and a rank: chunks of that rank's input.
        wanted: of the same: for each chunk of that rank's output, the (rank, chunk) of what is folded in it.
    """
    return CustomCollective(given, wanted)


class Written:
    """A function of the number of ranks; called, it gives an Algorithm. Made by :func:`algorithm`."""

    def __init__(
        self, body: Callable[..., object], collective: str | CustomCollective, chunks: Chunks, *, inplace: bool,
        ranks: Collection[int] | None, name: str, min_bytes: int, max_bytes: int, root: int,
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, body)
        self.body, self.collective, self.chunks, self.inplace = body, collective, chunks, inplace
        self.ranks, self.name, self.min_bytes, self.max_bytes, self.root = ranks, name, min_bytes, max_bytes, root

    def __repr__(self) -> str:
        return f"<lang.algorithm {self.name}>"

    def __call__(self, n: int, *args: Any, **params: Any) -> Algorithm:
        """Trace, prove and freeze it for ``n`` ranks.

        Raises:
            ArgumentError: for a number of ranks or parameters that it is not for.
            PlanError: naming the line of the program, or the result that is missing or wrong.
        """
        ranks = whole(n)
        if ranks is None or ranks < 1 or (self.ranks is not None and ranks not in self.ranks):
            some = ", at least 1" if self.ranks is None else f" of {sorted(self.ranks)}"
            raise ArgumentError(f"{self.name}({n!r}): expected a number of ranks{some}")
        n = ranks
        try:
            bound = inspect.signature(self.body).bind(n, *args, **params)
        except TypeError as error:
            raise ArgumentError(f"{self.name}{(n, *args)}: {error}; give its parameters: "
                                f"{described(self.body)}") from error  # fmt: skip
        bound.apply_defaults()
        tracer = Tracer(self.name, self._goal(n, bound), inplace=self.inplace)
        token = collecting(tracer)
        try:
            self.body(*bound.args, **bound.kwargs)
        finally:
            collected(token)
        return Algorithm.of(
            self.name, tracer.flow(), inplace=self.inplace, min_bytes=self.min_bytes, max_bytes=self.max_bytes
        )

    def _goal(self, n: int, bound: inspect.BoundArguments) -> Goal:
        chunks: object = self.chunks
        if callable(chunks):
            several = len(inspect.signature(chunks).parameters) > 1
            chunks = chunks(*bound.args, **bound.kwargs) if several else chunks(n)
        count = whole(chunks)
        if count is None or count < 1:
            raise ArgumentError(f"{self.name}: chunks={quoted(chunks)}; expected a number of at least 1")
        try:
            check_size(n, count)
        except PlanError as error:
            raise PlanError(f"{self.name}: {error}") from error
        if isinstance(self.collective, CustomCollective):
            return self.collective.goal(n, count)
        if self.collective not in ROOTED:
            return goal_of(self.collective, n, count)
        at = bound.arguments.get("root", self.root)
        root = whole(at)
        if root is None or not 0 <= root < n:
            raise ArgumentError(f"{self.name}: root {quoted(at)}; expected one of 0..{n - 1}")
        return goal_of(self.collective, n, count, root)


def algorithm(
    collective: str | CustomCollective, *, chunks: Chunks, inplace: bool = False, ranks: Collection[int] | None = None,
    name: str | None = None, min_bytes: int = 0, max_bytes: int | None = None, root: int = 0,
) -> Callable[[Callable[..., object]], Written]:  # fmt: skip
    """Turn a function of the number of ranks, and of parameters, into one that gives an :class:`Algorithm`.

    >>> from blinkmpi.lang import algorithm, chunk
    >>> @algorithm("broadcast", chunks=1)
    ... def star(n):
    ...     for rank in range(n):
    ...         chunk(0, "input", 0).copy(rank, "output", 0)
    >>> print(star(4).explain())
    star: broadcast from rank 0 of 4 ranks, 1 chunk, proved
      messages   3 of a chunk, 3 from the rank that sends the most
      bytes      that rank sends 3 of the vector
      steps      1 message

    Args:
        collective: MPI's, NCCL's or our name of it, or one made by :func:`custom`.
        chunks: equal parts of the vector, or of each rank's block where a call has blocks: a number, or a function of
            the number of ranks, or of all the arguments.
        inplace: whether ``output`` is another name of ``input``, in which results then are; an allgather's input is
            the rank's block of the output, a reduce_scatter's output the rank's block of the input.
        ranks: the numbers of ranks that it is for, if not any.
        name: in plans; the function's own, if not given.
        min_bytes, max_bytes: the vectors that it is meant for.
        root: of a rooted collective; a parameter of the function that is called ``root`` wins.

    Raises:
        ArgumentError: for options that mean nothing. SettingsError: for an unknown collective.
    """
    if not isinstance(collective, str | CustomCollective):
        raise ArgumentError(f"collective {quoted(collective)}; expected a name, or what lang.custom() makes")
    kind = collective_named(collective) if isinstance(collective, str) else collective
    if name is not None and not isinstance(name, str):
        raise ArgumentError(f"name {quoted(name)}; expected a text")
    if ranks is not None and not isinstance(ranks, Collection):
        raise ArgumentError(f"ranks={quoted(ranks)}; expected the numbers of ranks that it is for, as in [2, 4, 8]")
    least, most = whole(min_bytes), 0 if max_bytes is None else whole(max_bytes)
    if least is None or most is None or least < 0 or (most and most < least):
        raise ArgumentError(f"min_bytes={quoted(min_bytes)}, max_bytes={quoted(max_bytes)}; expected numbers of bytes, "
                            "the second not below the first")  # fmt: skip

    def decorate(body: Callable[..., object]) -> Written:
        return Written(
            body, kind, chunks, inplace=inplace, ranks=ranks, name=name or body.__name__, min_bytes=least,
            max_bytes=most, root=root,
        )  # fmt: skip

    return decorate
