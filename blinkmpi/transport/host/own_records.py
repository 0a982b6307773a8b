"""The records in which a rank announces its calls: two, of its last calls of even and of odd number.

A record is used again two calls later, and by then every peer must have read it. A call on the host waits for all to
have entered it, and so all have read the records of those before. A call whose ranks meet in kernels waits for nobody.
"""

from collections.abc import Callable

import numpy as np

from ..announcement import Announcement, encode
from ..control_pages import BODY, ControlPages
from .numpy_executor import Outcome, repeat

Repeat = Callable[[Callable[[float], tuple[Outcome, bool]], Callable[[], dict[int, str]], int, float], Outcome]


class OwnRecords:
    """This rank's records in the control pages.

    Args:
        wait: repeats an attempt, in slices of a deadline, and looks after the peers between them.
    """

    def __init__(self, pages: ControlPages, wait: Repeat) -> None:
        self._pages, self._rank, self._wait = pages, pages.rank, wait
        self._fence, self._announced, self._finished = pages.fence, pages.announced, pages.finished
        self.in_kernels = np.zeros(2, np.uint64)  # the number of the call, if its ranks met there

    @staticmethod
    def encode(announcement: Announcement) -> tuple[int, bytes]:
        """The fingerprint of an announcement, and its body for a record."""
        return encode(announcement, BODY)

    def fingerprint(self, seq: int) -> int:
        """What this rank has written of call ``seq``."""
        return int(self._pages.words[self._pages.record(self._rank, seq) // 8])

    def write(self, seq: int, fingerprint: int, body: bytes, timeout_s: float) -> None:
        """Write what this rank is about to announce of call ``seq``, unless its record says so already."""
        if self.fingerprint(seq) != fingerprint:
            self._await_readers(seq, timeout_s)
            self._pages.write(self._pages.record(self._rank, seq), body, fingerprint)

    def announce(self, seq: int, announcement: Announcement, timeout_s: float) -> None:
        """Say which call this rank enters."""
        self.write(seq, *self.encode(announcement), timeout_s)
        if self._fence:
            self._fence()  # the record comes before the number, which the peers read first
        self._announced[self._rank] = seq

    def announce_kernel(self, seq: int, fingerprint: int, body: bytes, timeout_s: float) -> None:
        """Say which call this rank enters, whose ranks wait for one another in kernels."""
        self._await_readers(seq, timeout_s)
        self.in_kernels[seq & 1] = seq
        if self.fingerprint(seq) != fingerprint:
            self.write(seq, fingerprint, body, timeout_s)
        if self._fence:
            self._fence()
        self._announced[self._rank] = self._finished[self._rank] = seq

    def _await_readers(self, seq: int, timeout_s: float) -> None:
        """Wait until this node's ranks have read what this rank announced of call ``seq - 2``, if they may have not."""
        read, in_kernels = seq - 2, self.in_kernels.tolist()
        if in_kernels[~seq & 1] != seq - 1 or in_kernels[seq & 1] >= read:
            return
        announced, finished = self._announced, self._finished

        def behind() -> dict[int, str]:
            late = (r for r in self._pages.here if int(announced[r]) <= read and int(finished[r]) < read)
            return dict.fromkeys(late, f"its call {read}, which it has not completed")

        def turn() -> tuple[Outcome, bool]:
            return (Outcome.EXPIRED if behind() else Outcome.DONE), False

        if behind():
            self._wait(lambda slice_s: repeat(turn, self._pages, slice_s), behind, seq, timeout_s)
