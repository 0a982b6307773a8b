"""``grow`` among processes that share a key-value store: others come to the store by themselves, and ask to join.

Who asks draws a number, and writes who it is under it. The first rank takes those that live, in the order of their
numbers, tells the ranks that are there, and writes an answer to each: its rank, and under which name all meet then. All
of it goes through keys that the old communicator does not use, so that this one lives on if it comes to nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from ...errors import BlinkError, CollectiveTimeout, PeerLost
from ...transport.network.bounded import Rendezvous
from ...transport.network.store import Store
from ...transport.processes import JobProcess, own, see, state
from ...util.together import from_root, read
from ..bootstrap import check_timeout, first_deadline, is_time
from ..dispatch import Dispatcher
from ..entering import enter
from ..in_thread import InThread
from ..ranks.store import StoreRanks
from .wanted import check_growable, encoded, number_of, options_of, shared

PAUSE_S = 0.01  # between two looks at the store
TELL_S = 5.0  # that the other ranks wait longer than the first one, which tells them how it went
T = TypeVar("T")


class Asking(msgspec.Struct, frozen=True):
    """Who asks to join, and under which number."""

    number: int
    process: JobProcess


class Answer(msgspec.Struct, frozen=True):
    """What a process is told that may join.

    Args:
        name: of all, which no others have.
        processes: all, in rank order; the one that is told is among them.
        options: what it takes over, as bytes.
    """

    name: str
    processes: list[JobProcess]
    options: bytes


class Door:
    """The keys of a store by which processes ask to join, and are answered.

    Args:
        name: of the communicator that they join, where several grow in one store.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._space = store, "/".join(filter(None, ("blinkmpi", name, "join")))

    def ask(self) -> int:
        """Draw a number, and say who asks."""
        number = self._store.add(self._key("drawn"), 1)
        self._store.set(self._key(number, "asks"), msgspec.msgpack.encode(own()))
        return number

    def asking(self) -> list[Asking]:
        """Who asks and has no answer, of those that are seen to live on this machine."""
        drawn = self._store.add(self._key("drawn"), 0)
        found = []
        for number in range(1, drawn + 1):
            if self._there(number, "asks") and not self._there(number, "answer"):
                body = bytes(self._store.get(self._key(number, "asks")))
                found.append(Asking(number, read(body, JobProcess, f"the process that asks as number {number}")))
        see(one.process for one in found)
        return [one for one in found if state(one.process) in ("running", "blocked")]

    def answer(self, number: int, answer: Answer) -> None:
        """Let one in."""
        self._store.set(self._key(number, "answer"), msgspec.msgpack.encode(answer))

    def answered(self, number: int) -> Answer | None:
        """The answer, if it is there."""
        if not self._there(number, "answer"):
            return None
        found: Answer = read(bytes(self._store.get(self._key(number, "answer"))), Answer, "the first rank")
        return found

    def leave(self, number: int) -> None:
        """Ask no more. A store that cannot delete keeps the keys, and nobody takes this process for one that asks."""
        try:
            for what in ("asks", "answer"):
                self._store.delete_key(self._key(number, what))  # type: ignore[attr-defined]
        except Exception:  # it cannot
            self._store.set(self._key(number, "answer"), b"")

    def _there(self, number: int, what: str) -> bool:
        return self._store.check([self._key(number, what)])

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._space, *parts)))


def grown_by_store(dispatcher: Dispatcher, ranks: StoreRanks, n: object, timeout_s: float | None) -> Dispatcher:
    """What makes the calls of these processes and of ``n`` that ask to join.

    Raises:
        ArgumentError, CannotGrow, MismatchError, RemoteError, CollectiveTimeout: on every rank; the old communicator
            lives, unless a rank of its own does not come.
        PeerLost: if a process dies.
    """
    context, sequence, together = dispatcher.context, dispatcher.sequence, ranks.together
    sequence.check_alive()
    deadline = timeout_s if timeout_s is not None and is_time(timeout_s) else context.timeout_s

    def asked() -> int:
        if timeout_s is not None:
            check_timeout(timeout_s)
        check_growable(context)
        return number_of(n)

    new = enter(sequence, f"grow({n})", asked, deadline)
    what, door, until = f"grow({new})", Door(ranks.store, ranks.asked_at), time.monotonic() + deadline

    def taken() -> list[Asking]:
        found = _in_time(partial(_asking, door, new, until), until, what)
        if len(found) < new:
            raise CollectiveTimeout(
                f"{what}: after {deadline:.1f} s {len(found)} of {new} processes of this machine ask to join; start as "
                "many that call StoreCommunicator.join(store) with the same store and name=, or raise timeout="
            )
        return found

    with context.rendezvous.doing(what, deadline + TELL_S):
        chosen = from_root(together, taken, list[Asking])
    known = {**together.known, **{context.n + at: one.process for at, one in enumerate(chosen)}}
    text = f"{together.unique} and {[one.number for one in chosen]}"
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    told = encoded(shared(context, context.n + new))
    if context.rank == 0:
        processes = [own(), *(known[rank] for rank in range(1, context.n + new))]
        _in_time(partial(_answer, door, chosen, Answer(name, processes, told)), until, what)

    def all_of_them(rendezvous: Rendezvous) -> StoreRanks:
        rendezvous.timeout_s = max(until - time.monotonic(), 1.0)
        return StoreRanks(
            ranks.store, context.rank, context.n + new, name, rendezvous, known, what=what, asked_at=ranks.asked_at
        )

    return Dispatcher(all_of_them, options_of(told))


def joined_by_store(store: Store, name: str, timeout_s: float | None) -> tuple[int, int, Dispatcher]:
    """Rank and size of this process among those that it has joined, and what makes their calls.

    Raises:
        CollectiveTimeout: if nobody lets it in. BlinkError: what kept a rank from opening it.
    """
    deadline = first_deadline(timeout_s)
    until, what, door, drawn = time.monotonic() + deadline, "StoreCommunicator.join()", Door(store, name), [0]

    def let_in() -> Answer | None:
        drawn[0] = door.ask()
        found = None
        while found is None and time.monotonic() < until:
            time.sleep(PAUSE_S)
            found = door.answered(drawn[0])
        door.leave(drawn[0])
        return found

    answer = _in_time(let_in, until, what)
    if answer is None:
        raise CollectiveTimeout(
            f"{what}: this process has waited {deadline:.1f} s as number {drawn[0]} of those that ask; call grow() on "
            "the ranks that are there, with the same store and name=, or raise timeout="
        )
    rank = answer.processes.index(own())
    known = {r: process for r, process in enumerate(answer.processes) if r != rank}

    def all_of_them(rendezvous: Rendezvous) -> StoreRanks:
        rendezvous.timeout_s = max(until - time.monotonic(), 1.0)
        return StoreRanks(store, rank, len(answer.processes), answer.name, rendezvous, known, what=what, asked_at=name)

    return rank, len(answer.processes), Dispatcher(all_of_them, options_of(answer.options))


def _asking(door: Door, n: int, until: float) -> list[Asking]:
    """The first ``n`` that ask; fewer, at the end of the time."""
    found = door.asking()
    while len(found) < n and time.monotonic() < until:
        time.sleep(PAUSE_S)
        found = door.asking()
    return found[:n]


def _answer(door: Door, chosen: list[Asking], answer: Answer) -> None:
    for one in chosen:
        door.answer(one.number, answer)


def _in_time(work: Callable[[], T], until: float, what: str) -> T:
    """What is asked of the store, in a thread of its own, which is left if the store does not answer.

    Raises:
        CollectiveTimeout, PeerLost: if the store does not answer, or fails.
    """
    running = InThread(work, "blinkmpi-grow")
    while not running.ended():
        if time.monotonic() > until + TELL_S / 2:
            raise CollectiveTimeout(f"{what}: the key-value store does not answer; look at the process that serves it")
    try:
        return running.result()
    except BlinkError:
        raise
    except Exception as error:
        raise PeerLost(
            f"{what}: the key-value store failed: {error!r}; the process that serves it may have ended: start the job "
            "again"
        ) from error
