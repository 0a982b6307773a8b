"""What each rank sends in a call of a campaign, and what is wrong with what it received.

Up to :data:`PERIOD` elements are random as in the conformance suite. Longer vectors repeat so many, a prime number, so
that their reduction is worked out once for a period, and data that arrive in another place still differ.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from blinkmpi.program.reduction import dtype_of
from tests.campaign.kinds import FOLDED, KINDS, Part
from tests.conformance import Array, Case, expected, inputs, mistakes, same

PERIOD = 65521
POISON = 0x5A


def length(case: Case) -> int:
    """Elements of the longest vector that a rank sends."""
    return max(KINDS[case.collective].sends(case, rank) for rank in range(case.n))


def period(case: Case) -> Case:
    """The case whose inputs are one period of this one's, and whose result is one of the fold."""
    folds = KINDS[case.collective].folds
    return replace(case, collective=folds, count=min(length(case), PERIOD), in_place=False, root=0)


def fill(case: Case, rank: int, target: Array) -> None:
    """Write what ``rank`` sends."""
    row = inputs(period(case))[rank]
    for at in range(0, target.size, PERIOD):
        target[at : at + PERIOD] = row[: target.size - at]


def prepare(case: Case, rank: int, recv: Array) -> None:
    """Write what the receive buffer holds before the call: poison, and this rank's vector if in place."""
    kind = KINDS[case.collective]
    recv.view(np.uint8)[:] = POISON
    own = kind.own(case, rank) if case.in_place and kind.in_place else None
    if own is not None:
        fill(case, rank, recv[own : own + kind.sends(case, rank)])


def wrong(case: Case, rank: int, recv: Array, *, behind: bool = True) -> str:
    """Say what is wrong in the receive buffer after the call, or nothing. ``behind``: look behind the result, too."""
    kind, at = KINDS[case.collective], 0
    for part in kind.parts(case, rank):
        found = sum(_differences(case, rank, part, recv[at : at + part.count]))
        if found:
            what = "the fold" if part.source == FOLDED else f"rank {part.source}'s"
            return f"{found} of {part.count} elements are wrong, of {what} from {part.start} on"
        at += part.count
    if behind and at < recv.size:
        before = np.empty_like(recv)
        prepare(case, rank, before)
        if not same(before[at:], recv[at:]):
            return "what lies behind the result was changed"
    return ""


def changed(case: Case, rank: int, send: Array) -> bool:
    """Whether a send buffer is no longer what it was before the call."""
    row = inputs(period(case))[rank]
    return not all(same(send[at : at + PERIOD], row[: send.size - at]) for at in range(0, send.size, PERIOD))


def _differences(case: Case, rank: int, part: Part, got: Array) -> Iterator[int]:
    """Count the wrong elements of a part, period by period."""
    one = period(case)
    if part.source == FOLDED:
        want = expected(one, rank)
        assert want is not None
        right = want.astype(dtype_of(case.dtype))
    else:
        want = right = inputs(one)[part.source]
    for at, start, stop in _stretches(part, one.count):
        piece = got[at : at + stop - start]
        if part.source != FOLDED:
            if not same(piece, right[start:stop]):
                yield max(1, int((piece != right[start:stop]).sum()))
        elif stop - start == one.count:
            yield mistakes(one, piece, want, rank)
        else:
            whole = right.copy()  # what the part lacks of a period is right
            whole[start:stop] = piece
            yield mistakes(one, whole, want, rank)


def _stretches(part: Part, every: int) -> Iterator[tuple[int, int, int]]:
    """Cut a part where periods end: (where in the part, from and to where in the period)."""
    at = 0
    while at < part.count:
        start = (part.start + at) % every
        stop = min(every, start + part.count - at)
        yield at, start, stop
        at += stop - start
