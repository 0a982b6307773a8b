"""The report that an aborted kernel leaves for the host, and the error that users get from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import ArgumentError, BlinkError, CollectiveTimeout, DeviceError, MismatchError, PeerLost

ABORTED, TIMEOUT, MISMATCH, OVERLAP, COUNTS = range(1, 6)  # codes of a report; ABORTED: by another rank
ANNOUNCEMENT, FINISH, PACKET = -1, -2, -3  # what a kernel waited for, in place of a stage
SEND, RECEIVE = -4, -5  # likewise, of a message
SEND_BLOCK, RECEIVE_BLOCK = -6, -7  # and of a block
WAITED_FOR = {
    ANNOUNCEMENT: "for its entry into the call", FINISH: "for the end of the call", PACKET: "for packets",
}  # fmt: skip
MASK, HALF = (1 << 32) - 1, 1 << 31


@dataclass(frozen=True)
class AbortReport:
    """Who waited for whom, and for what: ``struct Report`` of layout.cuh, without its first word."""

    code: int
    seq: int
    peer: int
    stage: int
    chunk: int
    want: int
    seen: int

    def error(self, text: str, names: Sequence[int], rank: int, announced: Callable[[], Sequence[int]]) -> BlinkError:
        """The error to raise.

        Args:
            text: the call.
            names: of the ranks of the node, of which this one has number ``rank``.
            announced: gives the last call that each of them has announced, by the low 32 bits of its number.
        """
        what = WAITED_FOR.get(self.stage, f"for stage {self.stage}, chunk {self.chunk}")
        if self.stage in (SEND_BLOCK, RECEIVE_BLOCK):
            does = "take" if self.stage == SEND_BLOCK else "send"
            what = f"to {does} a block of {self.chunk} bytes"
        me, peer = names[rank], names[self.peer] if self.peer >= 0 else -1 - self.peer
        if self.stage in (SEND, RECEIVE) and self.code in (TIMEOUT, MISMATCH):
            return self._of_message(me, peer)
        if self.code == COUNTS:
            return self._of_counts(me, peer, text)
        if self.code == MISMATCH and self.stage in (SEND_BLOCK, RECEIVE_BLOCK):
            own, other = ("sends", "expects") if self.stage == SEND_BLOCK else ("expects", "sends")
            way = "to" if self.stage == SEND_BLOCK else "from"
            return MismatchError(
                f"GPU call {self.seq}, {text}: rank {me} {own} {self.want} bytes {way} rank {peer}, which {other} "
                f"{self.seen}; make the counts equal. The communicator is dead"
            )
        if self.code == MISMATCH:
            return MismatchError(
                f"GPU call {self.seq}: rank {me} called {text}, rank {peer} something else "
                "(collective, count, type, op, root, or a registered buffer here and a plain one there), now or in an "
                "earlier call; call the same on every rank, and let graphs of several streams run one after another, "
                "in one order everywhere. The communicator is dead"
            )
        if self.code == OVERLAP:
            return DeviceError(
                f"GPU call {self.seq}, {text}: rank {me} ran two calls of one communicator at the same time; leave "
                "BLINKMPI_GRAPH_MIXING at 1, its default, and synchronise before the first capture of a graph; or put "
                "an event between them. Their results are wrong, and the communicator is dead"
            )
        if self.code == TIMEOUT:
            behind = [(self.seq - seq) & MASK for seq in announced()]
            absent = [str(names[r]) for r, lag in enumerate(behind) if r != rank and 0 < lag < HALF]
            if absent:
                what += f" (rank {', '.join(absent)} has not come to this call)"
            return CollectiveTimeout(
                f"GPU call {self.seq}, {text}: rank {me} waited too long for rank {peer}, {what}; look at that "
                "process; if it is only slow, raise timeout= (BLINKMPI_TIMEOUT). The communicator is dead"
            )
        return PeerLost(f"GPU call {self.seq}, {text}: another rank aborted; its error says why")

    def _of_counts(self, me: int, peer: int, text: str) -> BlinkError:
        """The error of a block whose count in GPU memory does not fit its buffer; ``chunk`` is its first element."""
        if self.stage == SEND_BLOCK:
            whose, remedy = f"counts[{peer}] of rank {me} is {self.seen}", "pass counts that the send buffer has"
        else:
            whose, remedy = f"rank {me} gets {self.seen} elements from rank {peer}", "make the receive buffer longer"
        return ArgumentError(
            f"GPU call {self.seq}, {text}: {whose}, from element {self.chunk} on, of a buffer of {self.want}; "
            f"{remedy}. Nothing was written; the communicator is dead"
        )

    def _of_message(self, me: int, peer: int) -> BlinkError:
        """The error of a message, of whose tag and bytes the kernel has made ``seq`` and ``chunk``."""
        here = f"{self.chunk} bytes with tag {self.seq}"
        if self.code == MISMATCH:
            return MismatchError(
                f"rank {me} receives {here} from rank {peer}, which has sent {self.want} bytes with tag {self.seen}; "
                "messages of two ranks meet in the order of the calls: pass tensors of one length, and the same tag. "
                "The communicator is dead"
            )
        wants = f"to receive {here} from" if self.stage == RECEIVE else f"to send {here} to"
        does = "send them" if self.stage == RECEIVE else "receive what was sent before"
        return CollectiveTimeout(
            f"rank {me} waited too long {wants} rank {peer}, which did not {does}; look at that process, whose tensor "
            "must be on its GPU, too; if it is only slow, raise timeout= (BLINKMPI_TIMEOUT). The communicator is dead"
        )
