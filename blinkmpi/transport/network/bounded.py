"""Exchanges of some ranks under a deadline, whatever carries them: how a rank waits, looks after the others, gives up.

An exchange is begun without blocking and polled; meanwhile the process looks after the others, and says who is missing.
:mod:`.exchanges` makes exchanges of MPI's collectives, :mod:`.store` of keys and values in a store.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import START_AGAIN, CollectiveTimeout, PeerLost
from ...util.text import ranks_text
from ..announcement import some
from ..processes import WORDS, JobProcess, state
from ..python_stacks import ASK_SECONDS, CAME_TO, ask, close_service, open_service
from ..slow_waits import SlowWaits, stacks_of

if TYPE_CHECKING:
    from mpi4py import MPI

LOOK_SECONDS = 0.2  # how often a wait looks after the others
SPINS = 2048  # polls before the core is yielded, about a millisecond, where each rank has one
SPIN_SECONDS = 0.05  # a wait polls without sleeping for so long
GONE_SECONDS = 1.0  # after which a process that has ended counts as lost, if its part is still owed
WORK_SECONDS = 30.0  # that a rank may be at work between two exchanges of one rendezvous, whatever timeout= says
REMEMBERED = 256  # communicators whose exchanges a process can be asked about


class Begun(Protocol):
    """What has been begun, and is polled: a request of MPI's, or one like it."""

    def Test(self) -> bool:
        """Whether it is done."""


class Rendezvous:
    """What is being done by some exchanges, and how long the ranks may take: shared by the communicators that do it.

    A rank must come to the first exchange within ``timeout_s``. Then all are known to be there, and one that runs may
    compile or plan for ``work_s``, though ``timeout_s`` is less; one that is stopped may not.
    """

    def __init__(self, what: str, timeout_s: float, slow: SlowWaits) -> None:
        self.what, self.timeout_s, self.slow = what, timeout_s, slow
        self.give_up: Callable[[BaseException], object] = lambda _: None  # told of what ended an exchange
        self.check: Callable[[], object] = lambda: None  # raises what has ended it on another rank
        self.met = False  # whether all have come to the first exchange
        self.work_s = WORK_SECONDS
        self.remedy = START_AGAIN  # what the user can do when a rank is lost, in words

    @contextmanager
    def doing(self, what: str, timeout_s: float) -> Iterator[None]:
        """While the ranks, which have met, do this: who is stopped meanwhile has ``timeout_s`` to go on."""
        before = self.what, self.timeout_s, self.met
        self.what, self.timeout_s, self.met = what, timeout_s, True
        try:
            yield
        finally:
            self.what, self.timeout_s, self.met = before


class Bounded(ABC):
    """Ranks whose exchanges raise CollectiveTimeout or PeerLost, for :mod:`...util.together`.

    Args:
        name: the same on every rank, and no other object's; by it a process says which exchange it has come to.
        among: the ranks that make this object, in the same order on each, as they are called in words; here they have
            numbers from 0.
    """

    unseen = ("may be missing, and cannot be seen from here",) * 2  # said of a rank, and of several, that are not known

    def __init__(self, rank: int, rendezvous: Rendezvous, name: str, among: Sequence[int]) -> None:
        self.rank, self.size, self.rendezvous, self.among = rank, len(among), rendezvous, among
        self._name, self._turn = name, 0
        self._peers: list[int] | None = None
        self._answers = False

    # ---- the exchanges

    @abstractmethod
    def allgather_bytes(self, body: bytes, /) -> list[bytes]:
        """Everybody's bytes, in rank order."""

    @abstractmethod
    def bcast_bytes(self, body: bytes, root: int, /) -> bytes:
        """The root's bytes."""

    @abstractmethod
    def Barrier(self) -> None:
        """Return when all have come."""

    @abstractmethod
    def Dup(self) -> MPI.Intracomm:
        """A communicator of MPI's of the same ranks, for messages between nodes."""

    @abstractmethod
    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int, /) -> None:
        """Send one buffer and receive another."""

    @abstractmethod
    def processes(self) -> dict[int, JobProcess]:
        """Who the other ranks are, as far as that is known."""

    @abstractmethod
    def _abandon(self, begun: Begun, memory: object, error: BaseException) -> BaseException:
        """Give up what is not done; returns the error to raise: another rank's, if that is why this one waited."""

    # ---- waiting

    def wait(self, begun: Begun, memory: object = None, *, peers: list[int] | None = None) -> None:
        """Wait until it is done; ``memory`` is kept if it is given up.

        Args:
            peers: who is waited for; None in a collective, in which every rank is.

        Raises:
            CollectiveTimeout, PeerLost: after which the communicator must not be used, nor freed.
        """
        self._peers = peers
        if peers is None:
            self.come()
        try:
            self._poll(begun)
        except BaseException as error:
            reason = self._abandon(begun, memory, error)
            self.rendezvous.give_up(reason)
            if reason is not error:
                raise reason from error
            raise
        self.rendezvous.met = self.rendezvous.met or peers is None
        if self._answers:  # while it waited; who has given up goes on answering
            self._answers = False
            close_service()

    def come(self) -> None:
        """Note, for those who ask, that this rank has come to the next exchange."""
        self._turn += 1
        CAME_TO.pop(self._name, None)  # the newest is the last
        CAME_TO[self._name] = self._turn
        if len(CAME_TO) > REMEMBERED:
            del CAME_TO[next(iter(CAME_TO))]

    def _poll(self, begun: Begun) -> None:
        since = looked = time.monotonic()
        polls, gone_since, slow = 0, 0.0, False
        spins = SPINS if self.size <= len(os.sched_getaffinity(0)) else 0
        while not begun.Test():
            polls += 1
            if polls % 64 and not slow:
                if polls > spins:
                    os.sched_yield()
                continue
            now = time.monotonic()
            slow = now - since > SPIN_SECONDS
            if slow:
                time.sleep(1e-4 if now - since < 1 else 1e-3)
            if now - looked < min(LOOK_SECONDS, self.rendezvous.timeout_s):
                continue
            looked = now
            ended = self._ended()
            gone_since = (gone_since or now) if ended else 0.0
            self._look(now - since, ended if gone_since and now - gone_since > GONE_SECONDS else [])

    def _look(self, waited_s: float, gone: list[int]) -> None:
        """Warn, or raise, as it is time."""
        if not self._answers:
            self._answers = True
            open_service()
        rendezvous, me = self.rendezvous, self.among[self.rank]
        rendezvous.check()
        if gone:
            lost = [self.among[r] for r in gone]
            raise PeerLost(f"{rendezvous.what}: {self._words(gone)}{rendezvous.remedy}", lost)
        late = waited_s >= rendezvous.timeout_s
        if late and rendezvous.met and waited_s < rendezvous.work_s and not self._stopped():
            late = False
        if late:
            missing = self.missing()
            text = f"{rendezvous.what}: rank {me} waited {waited_s:.1f} s, all that the timeout allows; "
            text += self._words(missing)
            raise CollectiveTimeout(
                f"{text}look at that process; if it is only slow, raise timeout= (BLINKMPI_TIMEOUT). No communicator "
                f"can be made of these ranks any more: {rendezvous.remedy}"
            )
        if rendezvous.slow.due((self._name, self._turn), waited_s) and self.rank == self._speaker():
            missing = self.missing()
            text = f"{rendezvous.what}: rank {me} has waited {waited_s:.0f} s; {self._words(missing)}"
            known = {self.among[r]: process for r, process in self.processes().items()}
            text = f"{text}it goes on waiting{stacks_of([self.among[r] for r in missing], known)}"
            rendezvous.slow.say(text, rendezvous.timeout_s)

    # ---- the others

    def _ended(self) -> list[int]:
        return [r for r, process in self.processes().items() if state(process) == "gone"]

    def _stopped(self) -> bool:
        return any(state(process) == "stopped" for process in self.processes().values())

    def missing(self) -> list[int]:
        """The ranks that have not come to this exchange, or cannot be asked, as far as that shows within seconds."""
        if self._peers is not None:
            return self._peers
        known, until = self.processes(), time.monotonic() + 2 * ASK_SECONDS
        others = [r for r in range(self.size) if r != self.rank]
        found = [r for r in others if time.monotonic() < until and not self._has_come(known.get(r))]
        seen = [r for r in found if state(known.get(r))]
        return seen or found

    def _speaker(self) -> int:
        """The rank that warns: the lowest one here that waits, as far as they can be asked."""
        known = self.processes()
        return next((r for r in range(self.rank) if self._has_come(known.get(r))), self.rank)

    def _has_come(self, process: JobProcess | None) -> bool:
        """Whether a process says that it has come to this exchange."""
        if process is None or state(process) != "running":
            return False
        answer = ask(process)
        return not isinstance(answer, str) and answer.came_to.get(self._name, 0) >= self._turn

    def _words(self, ranks: list[int]) -> str:
        known = self.processes()
        by = {self.among[r]: known.get(r) for r in ranks}
        found = [f"rank {r} ({p or 'not known yet'}) {WORDS[state(p)]}" for r, p in by.items()]
        unknown = [r for r, p in by.items() if p is None]
        if len(unknown) == len(ranks) and ranks:
            return f"{ranks_text(list(by))} {self.unseen[len(ranks) > 1]}; "
        return f"{some(found)}, and {'have' if len(ranks) > 1 else 'has'} not come; " if ranks else "all have come; "
