"""The time that planning may take: whoever is late stops with what it has, which is valid, and its gap is stated.

Every cut is a bound, trees that have grown are a packing, and so are the weights of a linear program between two of its
rounds. So a deadline changes how good a plan is, and how close its bound, never whether they are right.

What counts is the CPU time of the thread that plans, so that a plan is as good on a loaded machine as on an idle one. A
deadline is for the thread that made it. Work of others does not count: no method of ours starts threads or processes,
linear programs of scipy run in the thread that calls them.
"""

import math
import time
from fractions import Fraction

import msgspec

from ..util.settings import PLAN_S

SECONDS = PLAN_S  # where nobody says otherwise
TRIAL = 0.1  # of its time, for which work is not judged by its pace
SLACK = 1.2  # times its time, that work may seem to need: it does not go on at one pace


class Deadline(msgspec.Struct, frozen=True):
    """The end of the time for planning, by ``time.thread_time``.

    Attributes:
        end: infinite where there is no limit.
        others_wait: whether another method waits for what time is left.
        began: when it was made, by ``time.thread_time`` and ``time.monotonic``.
    """

    end: float = math.inf
    others_wait: bool = False
    began: tuple[float, float] = (0.0, 0.0)

    def within(self, seconds: float | None) -> "Deadline":
        """So many seconds from now, but no later than this one; None: as long, or :data:`SECONDS` if it has no end."""
        if seconds is None:
            seconds = SECONDS if self.end == math.inf else math.inf
        now = time.thread_time()
        return Deadline(min(self.end, now + seconds), self.others_wait, (now, time.monotonic()))

    def late(self) -> bool:
        """Whether the time is over."""
        return time.thread_time() >= self.end

    def left(self) -> float:
        """Seconds of CPU time until the time is over; infinite where there is no limit."""
        return self.end - time.thread_time()

    def left_on_the_clock(self) -> float:
        """How long the rest takes at the pace at which this thread got CPU time so far: for a solver with a clock."""
        cpu, clock = time.thread_time() - self.began[0], time.monotonic() - self.began[1]
        return self.left() * max(1.0, clock / max(cpu, 1e-3))

    def hopeless(self, part: Fraction, since: float) -> bool:
        """Whether work will not be done in time at its pace, so that those who wait should have what is left.

        Args:
            part: what is done of it.
            since: when it began, by ``time.thread_time``.
        """
        used, whole = time.thread_time() - since, self.end - since
        return self.others_wait and whole * TRIAL < used and whole * SLACK * float(part) < used


NEVER = Deadline()  # no limit
