"""The time that planning may take: whoever is late stops with what it has, which is valid, and its gap is stated.

Every cut is a bound, trees that have grown are a packing, and so are the weights of a linear program between two of its
rounds. So a deadline changes how good a plan is, and how close its bound, never whether they are right.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction

from ..util.settings import PLAN_S

SECONDS = PLAN_S  # where nobody says otherwise
TRIAL = 0.1  # of its time, for which work is not judged by its pace
SLACK = 1.2  # times its time, that work may seem to need: it does not go on at one pace
_end: ContextVar[float] = ContextVar("the end of the time for planning", default=math.inf)
_others: ContextVar[bool] = ContextVar("whether another method waits for what time is left", default=False)


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


@contextmanager
def others_wait(wait: bool) -> Iterator[None]:
    """While other methods wait for what time is left, or not."""
    token = _others.set(wait)
    try:
        yield
    finally:
        _others.reset(token)


def hopeless(part: Fraction, since: float) -> bool:
    """Whether work will not be done in time at its pace, so that those who wait should have what is left.

    Args:
        part: what is done of it.
        since: when it began, by ``time.monotonic``.
    """
    used, whole = time.monotonic() - since, _end.get() - since
    return _others.get() and whole * TRIAL < used and whole * SLACK * float(part) < used


def late() -> bool:
    """Whether the time is over."""
    return time.monotonic() >= _end.get()


def left() -> float:
    """Seconds until the time is over; infinite where there is no limit."""
    return _end.get() - time.monotonic()
