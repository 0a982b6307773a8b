"""Find the survivors of a communicator: the ranks of a node that come to ``shrink``.

A rank says in its control pages that it has come. A process that has died owes nothing, nor one that has left; one that
is stopped is counted out at the deadline. The ranks of other nodes are not seen here: MPI waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from ...errors import ArgumentError, CannotShrink, CollectiveTimeout, PeerLost
from ...transport.announcement import Called
from ...transport.liveness import AWAY, Peers
from ...util.numbers import rank_of
from ...util.text import quoted, ranks_text
from ..sequence import CallSequence, Fatal

PAUSE_S = 1e-3  # between two looks


@dataclass(frozen=True)
class Meeting:
    """Who has come.

    Args:
        rest: the ranks that are left, in their order.
        gone: those whose processes have died.
        alive: those that are not among the rest, and whose processes live: excluded, stopped, or they have left.
    """

    rest: tuple[int, ...]
    gone: tuple[int, ...]
    alive: tuple[int, ...]


def excluded(exclude: object, rank: int, n: int) -> frozenset[int]:
    """The ranks that the user names.

    Raises:
        ArgumentError: for what is no sequence of ranks, or names this one.
    """
    if isinstance(exclude, str | bytes) or not isinstance(exclude, Collection):
        raise ArgumentError(f"exclude={quoted(exclude)}: expected ranks, such as [2]; pass a list of them")
    found = frozenset(rank_of(each, n, "exclude") for each in exclude)
    if rank in found:
        raise ArgumentError(f"rank {rank} excludes itself: shrink(exclude=) is called by the ranks that stay alone")
    return found


def check_not_left_behind(peers: Peers) -> None:
    """Raise CannotShrink if the others have gone on without this rank, which was stopped or late."""
    before = [r for r in range(peers.n) if peers.pages.state(r) == "went on"]
    if before:
        raise CannotShrink(
            f"shrink(): {ranks_text(before)} went on without rank {peers.rank}, which did not come in time: it was "
            "stopped, or late; end this process"
        )


def enter(sequence: CallSequence, timeout_s: float) -> None:
    """End a communicator that is to shrink: in order, as a call of all ranks, where none has failed yet.

    Raises:
        MismatchError, RemoteError: if others make another call; then it lives.
    """
    if sequence.dead is None:
        with suppress(CollectiveTimeout, PeerLost):  # lost ranks are why the others shrink
            sequence.drain()
            with Fatal(sequence):
                sequence.host.barrier(sequence.next(), Called("shrink()"), timeout_s)
    sequence.die(PeerLost("it was shrunk"))


def meet(peers: Peers, without: frozenset[int], timeout_s: float) -> Meeting:
    """Say that this rank has come, and wait for the others of its node but ``without``.

    What it has said stays when it gives up: others that have seen it count on it, and have a deadline.

    Raises:
        CannotShrink: if they have gone on without this rank.
        CollectiveTimeout: if one that runs does not come before the deadline.
    """
    pages, since = peers.pages, time.monotonic()
    pages.shrinks(True)
    while True:
        check_not_left_behind(peers)
        states = {r: pages.state(r) for r in range(peers.n) if r != peers.rank}
        out = without.union(r for r, state in states.items() if state == "gone" or state in AWAY)
        owed = [r for r in pages.here if r in states and r not in out and not pages.comes_to_shrink(r)]
        if owed and time.monotonic() - since >= timeout_s:
            if any(states[r] != "stopped" for r in owed):
                raise CollectiveTimeout(
                    f"shrink(): {peers.states(owed)}. Rank {peers.rank} has waited {timeout_s:.1f} s for them to "
                    "call it, too; raise timeout=, or go on without them: comm.shrink(exclude=[...])"
                )
            out, owed = out.union(owed), []
        if not owed:
            gone = tuple(sorted(r for r in out if states[r] == "gone"))
            rest = tuple(r for r in range(peers.n) if r not in out)
            return Meeting(rest, gone, tuple(sorted(out.difference(gone))))
        time.sleep(PAUSE_S)
