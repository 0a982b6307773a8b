"""Calls whose ranks tell one another lengths before they can be made: the exchange, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..transport.announcement import NUMBERS, Numbers
from ..transport.interface import PeerDelegates, Refused
from .arguments import Prepared, Unsettled
from .buffers import DelegatedToMPI

if TYPE_CHECKING:
    from .dispatch import Dispatcher


class DelegatedByPeer(DelegatedToMPI):
    """Another rank's arguments are MPI's; all ranks have entered the call and know."""


def exchange(
    dispatcher: Dispatcher, numbers: Sequence[int], timeout_s: float, collective: str = ""
) -> tuple[tuple[int, ...], ...]:
    """Every rank's numbers (each brings as many); as many calls as a record has to be filled."""
    found: list[tuple[int, ...]] = [()] * dispatcher.context.n
    for at in range(0, len(numbers), NUMBERS):
        said = Numbers(tuple(numbers[at : at + NUMBERS]), collective)
        dispatcher.check_alive()
        dispatcher.seq += 1
        try:
            told = dispatcher.host.exchange(dispatcher.seq, said, timeout_s)
        except Refused as refused:
            raise refused.error from None
        except PeerDelegates:
            raise
        except BaseException as fatal:
            dispatcher.die(fatal)
            raise
        found = [(*before, *now) for before, now in zip(found, told, strict=True)]
    return tuple(found)


def settled(
    dispatcher: Dispatcher, ready: Prepared | Unsettled | Exception, collective: str, timeout_s: float
) -> Prepared | Exception:
    """A call whose lengths are known, if need be after an exchange; or an error that the peers have to learn of.

    Raises:
        MismatchError, RemoteError, CollectiveTimeout, PeerLost: which all ranks know.
    """
    if not isinstance(ready, Unsettled):
        return ready
    try:
        rows = exchange(dispatcher, ready.numbers, timeout_s, collective)
    except PeerDelegates:
        dispatcher.seq -= 1  # of the call that is made: the one that was entered
        return DelegatedByPeer("another rank's arguments are MPI's")
    try:
        return ready.settle(rows)
    except Exception as error:
        return error
