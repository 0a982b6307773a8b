"""What a communicator's calls on GPU memory share: their numbers, the memory that they hold, and their counters."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Protocol

from ...errors import BlinkError, PeerLost
from ...transport.cuda.loaded_kernel import MASK
from .counting import StartedCalls

if TYPE_CHECKING:
    from ..sequence import CallSequence
    from .context import CudaContext

HELD = 64  # memory of ours is kept for so many started calls
SPREAD = 0x9E3779B1  # odd, so that histories that differ once never meet again through equal calls


class Started(Protocol):
    """A call that was put on a stream."""

    seq: int
    text: str


class CallHistory:
    """The calls so far.

    Attributes:
        last: the one that Python has started last.
        held: those whose memory may still be read when they are forgotten.
        in_graphs: likewise, of graphs: nobody knows how long they live.
        number: of the calls so far, in 32 bits.
    """

    def __init__(self, context: CudaContext, sequence: CallSequence) -> None:
        self.context, self.host, self._sequence = context, sequence.host, sequence
        self.started = StartedCalls(context, sequence.host)
        self.last: Started | None = None
        self.held: deque[Started] = deque(maxlen=HELD)
        self.in_graphs: list[Started] = []
        self.number = ctypes.c_uint64()

    def numbered(self, seq: int, fingerprint: int) -> int:
        """A number for a call that ranks have in common as long as all their calls here have been alike.

        Some ranks wait for nobody, as the root of a broadcast: their kernels cannot see that a peer calls something
        else. The next call does.
        """
        self.number.value = ((self.number.value ^ fingerprint) * SPREAD + seq) & MASK
        return self.number.value

    def error(self, text: str = "a call on a stream or in a graph", seq: int = 0) -> BlinkError:
        """What a kernel that gave up has left, in words; where a process has died, that is why.

        Args:
            text: the call.
            seq: its number, 0 if that is not known.
        """
        error, peers = self.context.transport.error(text), self.host.peers
        if isinstance(error, PeerLost) and (gone := peers.lost()):
            return PeerLost(f"{text}: {peers.states(gone, seq)}. The communicator is dead; {peers.remedy}", gone)
        return error

    def slowest(self, seconds: float) -> float:
        """The longest time of all ranks."""
        return max(self._sequence.number_of_each(int(seconds * 1e9))) * 1e-9
