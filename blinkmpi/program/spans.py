"""Where trees cut a vector, or each rank's block of it: in proportion to their weights. Pure."""

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from .call import Call
from .reduction import dtype_of

ALIGN_BYTES = 64


class Cut(NamedTuple):
    """A tree's part of its block, from ``first`` to ``end``, and how many trees share that block."""

    trees: int
    first: Fraction
    end: Fraction


def border(part: Fraction, trees: int, count: int, align: int) -> int:
    """Where a part of a block ends that so many trees share.

    >>> border(Fraction(1, 3), 2, 100, 16)
    32
    """
    at = part.numerator * count // part.denominator
    return at // align * align if count >= align * trees else at


def spans(count: int, weights: Sequence[Fraction], align: int) -> list[tuple[int, int]]:
    """Cut ``count`` elements in proportion to ``weights``: (start, length) each, borders on multiples of ``align``.

    >>> spans(100, [Fraction(1), Fraction(2)], 16)
    [(0, 32), (32, 68)]
    """
    total = sum(weights, Fraction(0))
    done = itertools.accumulate(weights[:-1])
    borders = [0, *(border(part / total, len(weights), count, align) for part in done), count]
    return [(a, b - a) for a, b in itertools.pairwise(borders)]


def align_of(call: Call) -> int:
    """Elements between the places where spans may begin."""
    return max(1, ALIGN_BYTES // dtype_of(call.dtype).itemsize)
