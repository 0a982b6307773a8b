"""Peers: which call each rank is in, whether its process lives, the errors (mismatch, timeout, lost) and warnings.

It reads the control pages and never waits, but for a second when it asks a process for a warning.
"""

import os
import time
from collections.abc import Callable

from ..errors import (
    START_AGAIN,
    BlinkError,
    CollectiveTimeout,
    MismatchError,
    PeerLost,
    RemoteError,
    lost_ranks,
)
from ..util.text import error_text, ranks_text
from .announcement import ON_GPU, Announcement, Called, Delegated, Failed, Numbers, decode, decode_failure, short, some
from .control_pages import ControlPages
from .processes import JobProcess
from .slow_waits import SlowWaits, stacks_of

STATES = {
    "gone": "is gone (killed or crashed)",
    "left": "has left (Python ended there)",
    "dropped": "has dropped its communicator, which it did not free",
    "went on": "has gone on with others, by shrink()",
    "stopped": "is stopped (SIGSTOP or a debugger)",
    "blocked": "is in uninterruptible sleep (a disk or a network file system)",
    "running": "runs",
}
TURN_SECONDS = 0.4  # after which the next rank of a node warns, if none before it has
AWAY = ("left", "dropped", "went on")  # states of a rank that has completed its part of every call before
SILENT_NS = 1_000_000_000  # without a heartbeat, after which a rank is suspected first


class Peers:
    """The other ranks of a communicator.

    Args:
        hosts: the name of every rank's machine.
        slow: when to warn of a wait.
        processes: of each rank, where that is known.

    Attributes:
        remedy: what the user can do when a rank is lost, in words.
    """

    def __init__(
        self,
        pages: ControlPages,
        hosts: list[str],
        slow: SlowWaits | None = None,
        processes: dict[int, JobProcess] | None = None,
    ) -> None:
        self.pages, self.hosts = pages, hosts
        self.slow, self._processes = slow or SlowWaits(), processes or {}
        self.n, self.rank = pages.n, pages.rank
        self.remedy = START_AGAIN

    def announced(self, rank: int, seq: int) -> Announcement | None:
        """What ``rank`` announced of call ``seq``, if its record still holds it."""
        return decode(self.pages.read(self.pages.record(rank, seq))) if seq else None

    def text(self, rank: int, seq: int) -> str:
        """The same in words."""
        said = self.announced(rank, seq)
        return "" if said is None else str(said)

    def ended(self) -> list[int]:
        """The other ranks whose processes have ended."""
        return [r for r in range(self.n) if r != self.rank and self.pages.state(r) in (*AWAY, "gone")]

    def lost(self) -> list[int]:
        """The ranks whose processes have died."""
        return [r for r in range(self.n) if self.pages.state(r) == "gone"]

    def owing(self, what: str) -> dict[int, str]:
        """All other ranks that may still owe ``what``."""
        return {r: what for r in range(self.n) if r != self.rank and self.pages.state(r) not in AWAY}

    def absent(self, seq: int) -> dict[int, str]:
        """The ranks that have not announced call ``seq``."""
        return {r: f"its call {seq}" for r in range(self.n) if int(self.pages.announced[r]) < seq}

    def raise_abort(self, seq: int) -> None:
        """Raise the error of a rank that aborted, if one did; ``seq`` is the call that this rank leaves."""
        if int(self.pages.abort[0]):
            raise self.abort_error(seq)

    def abort_error(self, seq: int) -> BlinkError:
        """The error of the rank that aborted."""
        pages = self.pages
        first = int(pages.abort[0]) - 1
        failure = decode_failure(pages.read(pages.error_record(first)))
        kind = {k.__name__: k for k in (CollectiveTimeout, MismatchError, PeerLost)}.get(failure.name)
        text = f"{failure.message} (found by rank {first}; rank {self.rank} left call {seq} too)"
        if kind is PeerLost:
            return PeerLost(text, failure.lost)
        if kind is not None:
            return kind(text)
        return PeerLost(
            f"call {seq}, {self.text(self.rank, seq)}: rank {first} (process {int(pages.pids[first])}) "
            f"gave up with {short(str(failure))}; rank {self.rank} left, too. "
            f"The communicator is dead; {self.remedy}"
        )

    def mismatch_so_far(self, seq: int, text: str) -> BlinkError | None:
        """The error if a rank that has announced call ``seq`` announced another one than ``text``, or aborted."""
        pages = self.pages
        if int(pages.abort[0]):
            return self.abort_error(seq)
        here = [r for r in range(self.n) if int(pages.announced[r]) == seq]
        fingerprints = pages.fingerprints(seq)
        here = [r for r in here if int(pages.announced[r]) == seq]  # a rank that went on may have written another one
        behind = [r for r in range(self.n) if int(pages.announced[r]) == seq + 1]
        here += [r for r in behind if isinstance(self.announced(r, seq), Failed)]  # it made no part of the call
        if len({fingerprints[r] for r in here}) > 1:
            return MismatchError(
                f"call {seq}: rank {self.rank} called {short(text)}, "
                + some([f"rank {r} {self.text(r, seq)}" for r in here if r != self.rank])
                + "; call the same on every rank. The communicator is dead"
            )
        return None

    def different(self, seq: int) -> str:
        """In words, what the ranks called in the first of the last two calls in which they differ, if it is known."""
        near = [r for r in range(self.n) if abs(int(self.pages.announced[r]) - seq) <= 1]
        for number in (seq - 1, seq):
            known = [r for r in near if int(self.pages.announced[r]) in (number, number + 1)]
            texts = {r: self.text(r, number) for r in known} if number else {}
            if len(set(texts.values()) - {""}) > 1:
                return f"call {number}: " + some([f"rank {r} called {text}" for r, text in texts.items() if text])
        return ""

    def in_kernels(self, seq: int) -> bool:
        """Whether some rank waits for the others in a kernel: no refusal reaches it there."""
        said = (self.announced(r, seq) for r in range(self.n))
        return any(isinstance(a, Called) and a.text.endswith(ON_GPU) for a in said)

    def mismatch_error(self, seq: int, fingerprints: list[int]) -> BlinkError | None:
        """The error for a call that the ranks announced differently, the same on every rank.

        None if all announced the same collective, and some ranks' arguments, but not all, delegate it to MPI.
        """
        said = {f: self.announced(fingerprints.index(f), seq) for f in dict.fromkeys(fingerprints)}
        who = {f: [r for r in range(self.n) if fingerprints[r] == f] for f in said}
        for f, announcement in said.items():
            if isinstance(announcement, Failed):
                return RemoteError(f"call {seq}: {ranks_text(who[f])} failed: {announcement.failure}")
        delegate = [isinstance(a, Delegated) for a in said.values()]
        if any(delegate) and not all(delegate) and len({_collective(a) for a in said.values()}) == 1:
            return None
        sides = some([f"{ranks_text(who[f])}: {announcement}" for f, announcement in said.items()])
        return MismatchError(
            f"call {seq}: the ranks disagree. {sides}. "
            "Every rank must make the same calls in the same order with equal arguments"
        )

    # ---- long waits

    def warn(self, seq: int, owed: Callable[[], dict[int, str]], waited_s: float, timeout_s: float) -> None:
        """Warn of a wait in call ``seq`` if it is time, and no other rank of this node has.

        Args:
            owed: gives what each rank that is waited for owes.
        """
        pages, now = self.pages, time.monotonic_ns()
        pages.beat()
        turn = sum(int(pages.announced[r]) >= seq for r in pages.here if r < self.rank)
        if not self.slow.due(seq, waited_s - turn * TURN_SECONDS):
            return
        recent = self.slow.settings.warn_after_s * 1e9
        if any(int(pages.warned[r]) == seq and now - int(pages.warned_at[r]) < recent for r in pages.here):
            return
        pages.warned[self.rank], pages.warned_at[self.rank] = seq, now
        waits = owed()
        suspects = self._suspects(seq, waits)
        text = f"call {seq}, {self.text(self.rank, seq)}: rank {self.rank} on {self.hosts[self.rank]} has waited "
        text += f"{waited_s:.0f} s without progress on {_details(waits, suspects)}. {self.states(suspects, seq)}"
        text += f" ({some([self._last_sign(r, now) for r in suspects])})"
        self.slow.say(text + stacks_of(suspects, self._processes), timeout_s)

    def _last_sign(self, rank: int, now_ns: int) -> str:
        """Where a rank is, and when it last waited."""
        beat = int(self.pages.heartbeats[rank]) if rank in self.pages.here else 0
        since = f", last seen to wait {(now_ns - beat) / 1e9:.0f} s ago" if beat else ""
        return f"rank {rank} on {self.hosts[rank]}{since}"

    def _suspects(self, seq: int, waits: dict[int, str]) -> list[int]:
        """Of those that hold up call ``seq``, the likeliest: who is stopped, or shows no sign of waiting itself."""
        pages, now = self.pages, time.monotonic_ns()
        late = [r for r in waits if r in pages.here and int(pages.announced[r]) < seq]
        if late:  # before these come, nothing is heard of other nodes
            waits = {r: waits[r] for r in late}
        owing = (r for r in range(self.n) if r in waits or (not late and int(pages.finished[r]) < seq))
        others = [r for r in owing if r != self.rank]
        stopped = [r for r in others if pages.state(r) == "stopped"]
        silent = [r for r in others if now - int(pages.heartbeats[r]) > SILENT_NS]
        return stopped or [r for r in silent if r in waits] or silent or sorted(waits)

    def timeout_error(self, seq: int, waits: dict[int, str], lost: list[int], waited_s: float) -> BlinkError:
        """The error for a wait that ended: who waited for whom, for what, and what is known of the suspects."""
        suspects = lost or self._suspects(seq, waits)
        details = _details(waits, suspects)
        text = f"call {seq}, {self.text(self.rank, seq)}: {self.states(suspects, seq)}. "
        text += f"Rank {self.rank} on {self.hosts[self.rank]} waited {waited_s:.1f} s without progress on {details}. "
        if lost:
            return PeerLost(f"{text}The communicator is dead; {self.remedy}", lost)
        return CollectiveTimeout(f"{text}Look at that process; if it is only slow, raise timeout= (BLINKMPI_TIMEOUT)")

    def states(self, ranks: list[int], seq: int = -1) -> str:
        """What is known of some ranks, in words; ``seq`` is the call that the reader knows of."""
        found = []
        for r in ranks:
            entered = int(self.pages.announced[r])
            last = f"last entered call {entered} {self.text(r, entered)}" if entered else "entered no call yet"
            last = "in the same call" if entered == seq else last
            state = STATES.get(self.pages.state(r), "cannot be seen from here")
            state += f" (host {self.hosts[r]})" if r not in self.pages.here else ""
            found.append(f"rank {r} (process {int(self.pages.pids[r])}) {state}, {last}")
        return some(found)

    def unreadable_error(self, seq: int, rank: int, peer: int, fault: int) -> PeerLost:
        """The error for memory of ``peer`` that ``rank`` could not read in a call; ``fault`` is errno."""
        return PeerLost(
            f"call {seq}, {self.text(rank, seq)}: {self.states([peer], seq)}. Rank {rank} on {self.hosts[rank]} "
            f"cannot read its memory any more: {os.strerror(fault)}. "
            f"The communicator is dead; {self.remedy}",
            [peer],
        )

    def network_error(self, seq: int, error: Exception) -> PeerLost:
        """The error for a rank of another node that MPI cannot reach any more."""
        gone = self.lost()
        who = self.states(gone, seq) if gone else f"MPI cannot reach a rank of another node: {error}"
        return PeerLost(f"call {seq}, {self.text(self.rank, seq)}: {who}. Rank {self.rank} on "
                        f"{self.hosts[self.rank]} left. The communicator is dead; {self.remedy}", gone)  # fmt: skip


def died_of(error: BaseException, remedy: str = START_AGAIN) -> PeerLost:
    """The error of a call on a communicator that an earlier one left dead; it names the ranks that this one did."""
    return PeerLost(f"the communicator died earlier; {remedy}. It was {error_text(error)}", lost_ranks(error))


def _details(waits: dict[int, str], suspects: list[int]) -> str:
    """Who is waited for, and for what; of the suspects alone if they are among them."""
    owed: dict[str, list[int]] = {}
    for r in sorted(set(waits).intersection(suspects) or waits):
        owed.setdefault(waits[r], []).append(r)
    return some([f"{ranks_text(ranks)} for {what}" for what, ranks in owed.items()])


def _collective(announcement: Announcement | None) -> str:
    """The collective that a rank announced."""
    if isinstance(announcement, Called):
        return announcement.text.partition("(")[0]
    return announcement.collective if isinstance(announcement, Delegated | Numbers) else ""
