"""Numbers of the job's processes, by which communicators of different ranks know that they mean the same process.

A process that the launcher started with the job has its rank in MPI's world. One that is started later has a world of
its own. It gets a number of the job when it joins a communicator of it; before that its number is below 0, and means
something in its own world alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from mpi4py import MPI

_joined: list[tuple[MPI.Group, tuple[int, ...]]] = []  # of communicators with processes that came later: their numbers


@cache
def started_later() -> bool:
    """Whether this process was started by others of its job; asked before it parts from them."""
    return MPI.Comm.Get_parent() != MPI.COMM_NULL


def of_world(rank: int) -> int:
    """The number of a process of this one's world, before it has joined."""
    return -1 - rank if started_later() else rank


def numbers_of(comm: MPI.Intracomm) -> list[int | None]:
    """The numbers of the processes of ``comm``; None for one that has joined no communicator of this process's."""
    mine, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found: list[int | None] = [None] * mine.size
    for group, numbers in (*reversed(_joined), (world, [of_world(rank) for rank in range(world.size)])):
        open_ = [at for at, number in enumerate(found) if number is None]
        for at, there in zip(open_, MPI.Group.Translate_ranks(mine, open_, group), strict=True):
            found[at] = None if there == MPI.UNDEFINED else numbers[there]
    mine.Free()
    world.Free()
    return found


def own_number() -> int:
    """This process's number."""
    number = numbers_of(MPI.COMM_SELF)[0]
    assert number is not None, "a process is in its world"
    return number


def highest() -> int:
    """The highest number that this process knows of; -1 for none."""
    own = -1 if started_later() else MPI.COMM_WORLD.size - 1
    return max([own, *(max(numbers) for _, numbers in _joined)])


def next_numbers(told: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The numbers of processes that meet, of which each has told its :func:`own_number` and :func:`highest`.

    Who has none of the job's gets the next that nobody knows of.
    """
    free = max(high for _, high in told) + 1
    found = []
    for number, _ in told:
        found.append(number if number >= 0 else free)
        free += number < 0
    return tuple(found)


def note(comm: MPI.Intracomm, numbers: tuple[int, ...]) -> None:
    """Learn the numbers of the processes of ``comm``."""
    for old, known in list(_joined):
        if set(known) <= set(numbers):
            _joined.remove((old, known))
            old.Free()
    _joined.append((comm.Get_group(), numbers))
