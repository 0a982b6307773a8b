"""What a kernel that gave up leaves in the report of its rank, and what users read of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import BlinkError, CollectiveTimeout, MismatchError, PeerLost

LATE, DIFFERENT = 2, 3  # codes of a report, as in common.cuh; 1: aborted by another rank
FOR = {-1: "its entry into the call", -2: "the end of the call", -3: "packets"}
MASK, HALF = (1 << 32) - 1, 1 << 31


@dataclass(frozen=True)
class Failure:
    """Who waited for whom, and for what; the words of ``struct Report`` in common.cuh."""

    code: int
    seq: int
    peer: int
    stage: int
    chunk: int
    want: int
    seen: int

    def error(self, text: str, names: Sequence[int], rank: int, entered: Callable[[], Sequence[int]]) -> BlinkError:
        """The error to raise.

        Args:
            text: the call.
            names: of the ranks that share arenas, of which this one has number ``rank``.
            entered: gives the last call that each of them has entered, of whose number 32 bits are known.
        """
        what = FOR.get(self.stage, f"stage {self.stage}, chunk {self.chunk}")
        me, peer = names[rank], names[self.peer] if self.peer >= 0 else -1 - self.peer
        if self.code == DIFFERENT:
            return MismatchError(
                f"GPU call {self.seq}: rank {me} called {text}, rank {peer} something else "
                "(collective, count, type, op, root, or a registered buffer here and a plain one there); "
                "call the same on every rank. The communicator is dead"
            )
        if self.code == LATE:
            behind = [(self.seq - seq) & MASK for seq in entered()]
            absent = [str(names[r]) for r, lag in enumerate(behind) if r != rank and 0 < lag < HALF]
            if absent:
                what += f" (rank {', '.join(absent)} has not come to this call)"
            return CollectiveTimeout(
                f"GPU call {self.seq}, {text}: rank {me} waited in vain for rank {peer}, for {what}; look at that "
                "process; if it is only slow, raise timeout= (BLINKMPI_TIMEOUT). The communicator is dead"
            )
        return PeerLost(f"GPU call {self.seq}, {text}: another rank gave up; its error says why")
