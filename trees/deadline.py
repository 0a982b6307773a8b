"""The time that planning may take: whoever is late stops with what it has, which is valid, and its gap is stated.

Every cut is a bound, trees that have grown are a packing, and so are the weights of a linear program between two of its
rounds. So a deadline changes how good a plan is, and how close its bound, never whether they are right.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..util.settings import PLAN_S

SECONDS = PLAN_S  # where nobody says otherwise
_end: ContextVar[float] = ContextVar("the end of the time for planning", default=math.inf)


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Plan within so many seconds, but no longer than is given further out; None: so long, or :data:`SECONDS`."""
    outer = _end.get()
    if seconds is None:
        seconds = SECONDS if outer == math.inf else math.inf
    token = _end.set(min(outer, time.monotonic() + seconds))
    try:
        yield
    finally:
        _end.reset(token)


def late() -> bool:
    """Whether the time is over."""
    return time.monotonic() >= _end.get()


def left() -> float:
    """Seconds until the time is over; infinite where there is no limit."""
    return _end.get() - time.monotonic()
