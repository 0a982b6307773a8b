"""Exchanges over a key-value store, such as torch's: for processes that MPI did not start. They need one node.

Every rank writes what it brings under a key of its own; rank 0 reads all of it and writes it again as one value, which
the others read. The keys of an exchange are deleted in the next one, to which a rank comes when it has done with the
last; so a communicator has never more than twice its ranks' keys in the store, and none when it has been closed. What
stays is a number for each rank: how many communicators it has made.

A store may be another process, which may be slow, stopped or gone. So all that is asked of it is asked in a thread of
its own, and the rank that waits for it does so as for anything else: with a deadline, and looking after the others.
Their processes are known from the first exchange, in which each says who it is.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import msgspec

from ...errors import ArgumentError, CollectiveTimeout, FormatError, PeerLost, TopologyError, lost_ranks
from ...util.together import MOST_GATHERED, MOST_SENT, OWN_STORE, Failure, check_lengths, read
from ..processes import JobProcess, own, see, state
from .bounded import LOOK_SECONDS, Begun, Bounded, Rendezvous

FIRST_PAUSE_S = 5e-5  # before the store is asked again; then twice as long each time
LONGEST_PAUSE_S = 5e-3  # for up to five ranks; more pause longer, so that all ask a thousand times a second together
MOMENT_S = 1e-3  # that one look at work in another thread waits
SILENT_S = 1.0  # after which a store that does not answer is mentioned
TELL_S = 0.5  # that a rank which gives up takes to tell the others
LEAVE_S = 5.0  # that a rank takes to leave the store in order
_made = itertools.count(1)
Known = dict[int, JobProcess]  # by rank


class Store(Protocol):
    """What is asked of a store, in the words of ``torch.distributed.Store``. ``delete_key`` may be missing."""

    def set(self, key: str, value: Any, /) -> object:
        """Write bytes."""

    def get(self, key: str, /) -> bytes:
        """Read them; asked only of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number that begins with 0; returns the sum."""


class Introduction(msgspec.Struct, frozen=True):
    """What a rank brings to the first exchange: its process, and a number that it gives no other communicator."""

    process: JobProcess
    number: int


class GivenUp(Exception):
    """Ends work for which nobody waits any longer."""


class StoreWork:
    """Work on a store in a thread, which is polled as a request of MPI's is."""

    def __init__(self, work: Callable[[StoreWork], list[bytes]]) -> None:
        self.result: list[bytes] = []
        self.given_up: BaseException | None = None  # set by who will not wait any longer, and why
        self.earlier: BaseException | None = None  # why another rank had given up before
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(work,), name="blinkmpi-store", daemon=True).start()

    def _run(self, work: Callable[[StoreWork], list[bytes]]) -> None:
        try:
            self.result = work(self)
        except BaseException as error:
            self._error = error
        self._done.set()

    def Test(self) -> bool:
        """Whether it is done, within a moment; raises what went wrong."""
        if not self.ended(MOMENT_S):
            return False
        if self._error is not None:
            raise self._error
        return True

    def ended(self, seconds: float) -> bool:
        """Whether it is done or has failed, within some time."""
        return self._done.wait(seconds)

    def check(self) -> None:
        """Raise GivenUp, in the thread, if nobody waits any longer."""
        if self.given_up is not None:
            raise GivenUp


class StoreComm(Bounded):
    """``size`` processes of one node that share a store; :meth:`introduce` comes first.

    Args:
        store: read and written by nobody else under keys that begin with ``blinkmpi/``.
        name: of this communicator, if others of the same size but of other processes share the store.
        known: who the other ranks are, where that is known before they come.
    """

    unseen = ("has not come to the store", "have not come to the store")

    def __init__(
        self, store: Store, rank: int, size: int, rendezvous: Rendezvous, *, name: str = "", known: Known | None = None
    ) -> None:
        super().__init__(rank, rendezvous, "not introduced yet", range(size))
        self._store, self._space = store, "/".join(filter(None, ("blinkmpi", name, str(size))))
        self._number = 0  # of this communicator, among those of its size
        self._known: Known = dict(known or {})
        self._asked_at = 0.0  # when the store was asked what it has not answered yet; 0: it has
        self._deletes = True

    @property
    def known(self) -> Known:
        """Who the other ranks are, of those that have come."""
        return self._known

    @property
    def unique(self) -> str:
        """The name of this communicator, which no other one has."""
        return self._name

    # ---- the exchanges

    def introduce(self) -> None:
        """Tell each other who the processes are: the first exchange.

        Raises:
            ArgumentError: on every rank, if a process has two ranks.
        """
        mine = Introduction(own(), next(_made))
        found = [
            _introduction(body, rank)
            for rank, body in enumerate(self._exchange(msgspec.msgpack.encode(mine), MOST_GATHERED))
        ]
        self._learn(dict(enumerate(found)))
        first = found[0]
        self._name = f"{first.process.boot}.{first.process.pid}.{first.process.start}.{first.number}"
        processes = [f.process for f in found]
        for rank, process in enumerate(processes):
            if (other := processes.index(process)) != rank:
                raise ArgumentError(
                    f"ranks {other} and {rank} are one process ({process}); give every process a rank of its own, "
                    "and communicators that share a store and a size, but no processes, a name= each"
                )

    def allgather_bytes(self, body: bytes, /) -> list[bytes]:
        """Everybody's bytes, in rank order."""
        return self._exchange(body, MOST_GATHERED)

    def bcast_bytes(self, body: bytes, root: int, /) -> bytes:
        """The root's bytes; returns when all have come."""
        return self._exchange(body if self.rank == root else b"", MOST_SENT)[root]

    def Barrier(self) -> None:
        """Return when all have come."""
        self._exchange(b"", 0)

    def Dup(self) -> NoReturn:
        """There are no messages here."""
        raise TopologyError(NO_MESSAGES)

    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int, /) -> NoReturn:
        """There are no messages here."""
        raise TopologyError(NO_MESSAGES)

    def _exchange(self, body: bytes, most: int) -> list[bytes]:
        if self.size == 1:
            return [body]
        work = StoreWork(partial(self._swap, self._turn + 1, body, most))
        self.wait(work)
        return work.result

    # ---- in the thread

    def _swap(self, turn: int, body: bytes, most: int, work: StoreWork) -> list[bytes]:
        """Write what this rank brings, and read what all have brought."""
        try:
            check_lengths([len(body)], most, self.rank)
            if not self._number:
                self._number = self._ask("add", f"{self._space}/made/{self.rank}", 1)
            self._ask("set", self._key(turn, self.rank), body)
            if self.rank == 0:
                return self._collect(turn, most, work)
            self._await([self._key(turn, "all")], work)
            found: list[bytes] = read(self._ask("get", self._key(turn, "all")), list[bytes], "rank 0")
            self._check(found, most)
            return found
        except GivenUp:
            work.earlier = self._tell(work.given_up)
            raise
        except FormatError as error:
            self._tell(error)
            raise

    def _check(self, found: list[bytes], most: int) -> None:
        """Raise FormatError for what cannot be all that the ranks have brought."""
        if len(found) != self.size:
            raise FormatError(f"rank 0 tells what {len(found)} ranks have brought, there are {self.size}; {OWN_STORE}")
        check_lengths([len(body) for body in found], most)

    def _collect(self, turn: int, most: int, work: StoreWork) -> list[bytes]:
        """On rank 0: all that the ranks have brought, which the others then read; delete the last exchange."""
        keys = self._keys(turn)
        self._await(keys, work)
        self._look_around()  # or it would go on alone
        found = [bytes(self._ask("get", key)) for key in keys]
        self._check(found, most)
        self._ask("set", self._key(turn, "all"), msgspec.msgpack.encode(found))
        if turn > 1:
            self._forget([*self._keys(turn - 1), self._key(turn - 1, "all")])
        return found

    def _await(self, keys: list[str], work: StoreWork) -> None:
        """Wait until these keys are there; meanwhile see who has come, and whether somebody has given up."""
        pause, looked = FIRST_PAUSE_S, time.monotonic()
        while not self._ask("check", keys):
            work.check()
            if time.monotonic() - looked > LOOK_SECONDS:
                self._look_around()
                looked = time.monotonic()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S * max(1.0, self.size / 5))

    def _look_around(self) -> None:
        """Learn of those who have come to the first exchange; raise the error of one that has given up."""
        if (error := self._given_up()) is not None:
            raise error
        unknown = [r for r in range(self.size) if r != self.rank and r not in self._known]
        come = [r for r in unknown if self._ask("check", [self._key(1, r)])]
        self._learn({r: _introduction(self._ask("get", self._key(1, r)), r) for r in come})

    def _given_up(self) -> BaseException | None:
        """The error with which another rank has given up."""
        if not self._ask("check", [self._key("given-up")]):
            return None
        rank, failure = read(self._ask("get", self._key("given-up")), tuple[int, Failure], "a rank that gave up")
        text = f"{failure.message} (found by rank {rank}; rank {self.rank} left, too)"
        kind = next((kind for kind in (CollectiveTimeout, FormatError) if failure.name == kind.__name__), None)
        return PeerLost(text, failure.lost) if kind is None else kind(text)

    def _tell(self, error: BaseException | None) -> BaseException | None:
        """Tell those who still wait, or come later, that this rank has given up, unless another has: returns why."""
        try:
            earlier = self._given_up()
        except FormatError:  # of nobody who gives up
            earlier = None
        if earlier is None:
            failure = Failure(type(error).__name__, str(error) or type(error).__name__, lost_ranks(error))
            self._ask("set", self._key("given-up"), msgspec.msgpack.encode((self.rank, failure)))
        return earlier

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Ask the store, which may take its time.

        Raises:
            PeerLost: if it fails.
        """
        self._asked_at = time.monotonic()
        try:
            return getattr(self._store, name)(*arguments)
        except Exception as error:
            raise PeerLost(
                f"{self.rendezvous.what}: the key-value store failed in {name}() on rank {self.rank}: {error!r}; "
                "the process that serves it may have ended: start the job again"
            ) from error
        finally:
            self._asked_at = 0.0

    def _forget(self, keys: Sequence[str]) -> None:
        """Delete keys, if the store can; one that cannot keeps them, and one that has gone is noticed when asked."""
        for key in keys if self._deletes else ():
            try:
                self._store.delete_key(key)  # type: ignore[attr-defined]
            except Exception:
                self._deletes = False

    def _key(self, turn: int | str, what: int | str = "") -> str:
        return f"{self._space}/{self._number}/{turn}/{what}".rstrip("/")

    def _keys(self, turn: int | str) -> list[str]:
        return [self._key(turn, r) for r in range(self.size)]

    # ---- the others

    def processes(self) -> dict[int, JobProcess]:
        """Who the other ranks are: of those who have come to the first exchange."""
        return dict(self._known)

    def _learn(self, found: dict[int, Introduction]) -> None:
        see(f.process for f in found.values())
        self._known = {**self._known, **{r: f.process for r, f in found.items() if r != self.rank}}

    def _has_come(self, process: JobProcess | None) -> bool:
        """Whether a process has come to this exchange: to the first, if it is known."""
        return state(process) == "running" if self._turn == 1 else super()._has_come(process)

    def _words(self, ranks: list[int]) -> str:
        asked_at = self._asked_at
        silent_s = time.monotonic() - asked_at if asked_at else 0.0
        silent = f"the key-value store has not answered for {silent_s:.1f} s; " if silent_s > SILENT_S else ""
        return silent or super()._words(ranks)

    def _abandon(self, begun: Begun, memory: object, error: BaseException) -> BaseException:
        """End the work, which tells the others why, or finds that one of them has said so already."""
        assert isinstance(begun, StoreWork), "what it waits for is its own"
        begun.given_up = error
        begun.ended(TELL_S)
        return begun.earlier if begun.earlier is not None and isinstance(error, CollectiveTimeout | PeerLost) else error

    # ---- the end

    def close(self) -> None:
        """Leave the store when all is done; rank 0, whose process often serves it, when the others have.

        What fails here is nobody's loss any more: keys stay in the store then.
        """
        if self.size > 1 and self._known:
            work = StoreWork(self._leave)
            if not work.ended(LEAVE_S):
                work.given_up = PeerLost("not all ranks have left the store")

    def _leave(self, work: StoreWork) -> list[bytes]:
        if self.rank:
            self._ask("set", self._key("left", self.rank), b"")
            return []
        pause, waiting = FIRST_PAUSE_S, set(range(1, self.size))
        while True:
            ended = set(self._ended())  # before the store is asked: who has left may end then
            waiting = {r for r in waiting - ended if not self._ask("check", [self._key("left", r)])}
            if not waiting:
                break
            work.check()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self._forget([*self._keys(self._turn), self._key(self._turn, "all"), *self._keys("left")[1:]])
        return []

    def clear(self, first: int) -> None:
        """Delete the keys of a communicator that is dead, if this rank is the first one that goes on.

        What fails here is nobody's loss: keys stay in the store then.
        """
        if self.rank == first:
            work = StoreWork(self._clear)
            if not work.ended(LEAVE_S):
                work.given_up = PeerLost("the keys of a dead communicator stay in the store")

    def _clear(self, _: StoreWork) -> list[bytes]:
        for turn in range(max(1, self._turn - 1), self._turn + 2):  # another rank may be one exchange ahead
            self._forget([*self._keys(turn), self._key(turn, "all")])
        self._forget([self._key("given-up")])
        return []


NO_MESSAGES = (
    "processes that MPI did not start send each other no messages, which ranks of several nodes need; "
    "start them with mpirun or srun"
)


def _introduction(body: bytes, rank: int) -> Introduction:
    found: Introduction = read(body, Introduction, f"rank {rank}")
    return found
