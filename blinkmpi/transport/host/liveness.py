"""What a rank knows of the others, from the memory of its node, and the errors that it makes of that."""

from __future__ import annotations

import os
import time

from ...errors import BlinkError, CollectiveTimeout, MismatchError, PeerLost, RemoteError
from ...util.text import ranks_text
from ..announcement import short, some
from .shared_window import SharedWindow

FOREIGN = "MPI's "  # a rank whose arguments only MPI understands enters with this and the collective
FAILED = "failed: "  # a rank that cannot take part enters with this and its error


class Witness:
    """Reads, and never waits.

    Args:
        hosts: the name of every rank's machine.
    """

    def __init__(self, window: SharedWindow, hosts: list[str]) -> None:
        self.window, self.hosts = window, hosts
        self.n, self.rank = window.n, window.rank

    def text(self, rank: int, seq: int) -> str:
        """What ``rank`` wrote about call ``seq``, if its record still holds it."""
        return self.window.read(self.window.record(rank, seq)).decode(errors="replace") if seq else ""

    def heard(self, seq: int) -> BlinkError:
        """The error that another rank left."""
        window = self.window
        first = int(window.abort[0]) - 1
        words = window.read(window.last_words(first)).decode(errors="replace")
        name, _, message = words.partition(": ")
        kind = {k.__name__: k for k in (CollectiveTimeout, PeerLost)}.get(name)
        if kind is not None:
            return kind(f"{message} (found by rank {first}; rank {self.rank} left call {seq} too)")
        return PeerLost(
            f"call {seq}, {short(self.text(self.rank, seq))}: rank {first} (process {int(window.pids[first])}) "
            f"gave up with {short(words)}; rank {self.rank} left, too. The communicator is dead; start the job again"
        )

    def stray(self, seq: int, text: str) -> BlinkError | None:
        """The error for a rank that came to call ``seq`` with something else than ``text``, if there is one."""
        if int(self.window.abort[0]):
            return self.heard(seq)
        here = [r for r in range(self.n) if int(self.window.seqs[r]) == seq]
        prints: list[int] = self.window.column(self.window.record(0, seq) // 8).tolist()
        here = [r for r in here if int(self.window.seqs[r]) == seq]  # who went on meanwhile may have written another
        if len({prints[r] for r in here}) > 1:
            return MismatchError(
                f"call {seq}: rank {self.rank} called {short(text)}, "
                + some([f"rank {r} {short(self.text(r, seq))}" for r in here if r != self.rank])
                + "; call the same on every rank. The communicator is dead"
            )
        return None

    def ended(self) -> list[int]:
        """The other ranks whose processes have ended."""
        return [r for r in range(self.n) if r != self.rank and self.window.life(r) in ("left", "gone")]

    def lost(self) -> list[int]:
        """The ranks whose processes have died."""
        return [r for r in range(self.n) if self.window.life(r) == "gone"]

    def disagreement(self, seq: int, prints: list[int]) -> BlinkError | None:
        """The error for a call that the ranks made differently, the same text on every rank; None if it is MPI's."""
        texts = {p: self.text(prints.index(p), seq) for p in dict.fromkeys(prints)}
        who = {p: [r for r in range(self.n) if prints[r] == p] for p in texts}
        failed = next((p for p, text in texts.items() if text.startswith(FAILED)), None)
        if failed is not None:
            return RemoteError(f"call {seq}: {ranks_text(who[failed])} failed: {texts[failed].removeprefix(FAILED)}")
        names = {text.removeprefix(FOREIGN).partition("(")[0] for text in texts.values()}
        if len(names) == 1 and any(text.startswith(FOREIGN) for text in texts.values()):
            return None
        sides = some([f"{ranks_text(who[p])}: {short(text)}" for p, text in texts.items()])
        return MismatchError(
            f"call {seq}: the ranks disagree. {sides}. "
            "Every rank must make the same calls in the same order with equal arguments"
        )

    def late(self, seq: int, waits: dict[int, str], lost: list[int], waited_s: float) -> BlinkError:
        """The error for a wait that ended: who waited for whom, for what, and what is known of the suspects."""
        now = time.monotonic_ns()
        others = [r for r in range(self.n) if r != self.rank and (r in waits or int(self.window.done[r]) < seq)]
        stopped = [r for r in others if self.window.life(r) == "stopped"]
        silent = [r for r in others if now - int(self.window.beats[r]) > 1_000_000_000]
        suspects = lost or stopped or [r for r in silent if r in waits] or silent or sorted(waits)
        owed: dict[str, list[int]] = {}
        for r in sorted(set(waits).intersection(suspects) or waits):
            owed.setdefault(waits[r], []).append(r)
        details = some([f"{ranks_text(ranks)} for {what}" for what, ranks in owed.items()])
        text = f"call {seq}, {short(self.text(self.rank, seq))}: {self.states(suspects, seq)}. "
        text += f"Rank {self.rank} on {self.hosts[self.rank]} waited {waited_s:.1f} s without progress on {details}. "
        if lost:
            return PeerLost(f"{text}The communicator is dead; start the job again")
        return CollectiveTimeout(f"{text}Look at that process; if it is only slow, raise timeout= (BLINKMPI_TIMEOUT)")

    def states(self, ranks: list[int], seq: int = -1) -> str:
        """What is known of some ranks, in words; ``seq`` is the call that the reader knows of."""
        known = {
            "gone": "is gone (killed or crashed)",
            "left": "has left (Python ended there)",
            "stopped": "is stopped (SIGSTOP or a debugger)",
            "running": "runs",
        }
        found = []
        for r in ranks:
            entered = int(self.window.seqs[r])
            last = f"last entered call {entered} {short(self.text(r, entered))}" if entered else "entered no call yet"
            last = "in the same call" if entered == seq else last
            life = known.get(self.window.life(r), "cannot be seen from here")
            life += f" (host {self.hosts[r]})" if r not in self.window.here else ""
            found.append(f"rank {r} (process {int(self.window.pids[r])}) {life}, {last}")
        return some(found)

    def unread(self, seq: int, rank: int, peer: int, fault: int) -> PeerLost:
        """The error for memory of ``peer`` that ``rank`` could not read in a call; ``fault`` is errno."""
        return PeerLost(
            f"call {seq}, {short(self.text(rank, seq))}: {self.states([peer], seq)}. Rank {rank} on {self.hosts[rank]} "
            f"cannot read its memory any more: {os.strerror(fault)}. "
            "The communicator is dead; start the job again"
        )

    def cut(self, seq: int, error: Exception) -> PeerLost:
        """The error for a rank of another node that MPI cannot reach any more."""
        gone = self.lost()
        who = self.states(gone, seq) if gone else f"MPI cannot reach a rank of another node: {error}"
        return PeerLost(f"call {seq}, {short(self.text(self.rank, seq))}: {who}. Rank {self.rank} on "
                        f"{self.hosts[self.rank]} left. The communicator is dead; start the job again")  # fmt: skip
