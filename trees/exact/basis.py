"""From the floats in which a solver answers a linear program to fractions: its corner, and the prices that prove it.

The floats say which variables are in use and which rows are full. The equations of these are solved again in integers
(:mod:`.rational`), and what comes out is compared with all rows in integers. Where there is no such corner, the program
rounds its floats by :func:`lowered` and repairs what must be equal; only the program knows how.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import floor, inf, lcm

import numpy as np
from numpy.typing import NDArray

from ..graph.fabric import Ints
from .rational import solve

Floats = NDArray[np.float64]
IN_USE = 1e-9  # a smaller part of the largest value is none
FULL = 1e-7  # slack that is a smaller part of what a row adds up is none
GRAIN = 10**9  # of prices that are rounded
SMALL = 1000  # the denominator of prices that are rounded to simple fractions


def exact_basis(
    rows: Ints, right: Ints, x: Floats, *, equal: int = 0, prices: Floats | None = None, most: float = inf
) -> list[Fraction] | None:
    """The corner of ``rows @ x <= right``, ``x >= 0`` at which a solver stopped with ``x``, in fractions.

    Args:
        equal: so many of the last rows hold with equality.
        prices: of the first rows. Where a degenerate corner has full rows that contradict one another, those that cost
            nothing are left out.
        most: equations or unknowns that are solved for.

    Returns:
        A value for every variable; None if the equations have no solution, one below 0 or one that breaks a row, or if
        there are too many of them.
    """
    support = np.flatnonzero(x > IN_USE * x.max())
    used, values = rows[:, support], x[support]
    full = right - used @ values <= FULL * (np.abs(used) @ values + np.abs(right))
    full[len(rows) - equal :] = True
    tries = [full]
    if prices is not None:
        paid = np.concatenate([prices > IN_USE, np.ones(len(rows) - len(prices), bool)])
        tries += [full & paid] if (full & ~paid).any() else []
    for some in tries:
        equations = np.unique(np.column_stack([used, right])[some], axis=0)
        if max(equations.shape) > most:
            return None
        exact = solve(equations[:, :-1], equations[:, -1].tolist())
        if exact and min(exact) >= 0 and fits(used, exact, right):
            found = [Fraction(0)] * len(x)
            for j, value in zip(support.tolist(), exact, strict=True):
                found[j] = value
            return found
    return None


def lowered(x: Floats, grain: int) -> list[Fraction]:
    """Floats as multiples of 1 / ``grain`` that are a little lower, so that rounding fills no row."""
    return [Fraction(floor(max(v, 0.0) * (1 - 1 / grain) * grain), grain) for v in x.tolist()]


def exact_prices(equations: Ints, norm: Ints, prices: Floats, *, late: bool = False) -> Iterator[list[Fraction]]:
    """Prices >= 0 near a solver's: if it can be the solution of ``equations @ p = 0``, ``norm @ p = 1``, then rounded.

    Any prices bound the rate; the exact ones bound it by what the corner carries. Only ratios count.

    Args:
        prices: of the first unknowns; rounded prices are for these alone.
        late: leave the equations out, which may take long.
    """
    exact = None if late else solve(np.vstack([equations, norm]), [0] * len(equations) + [1])
    if exact and min(exact) >= 0:
        yield exact
    parts = (prices / prices.max()).tolist()
    yield [Fraction(v).limit_denominator(SMALL) for v in parts]
    yield [Fraction(round(v * GRAIN), GRAIN) for v in parts]


def fits(rows: Ints, x: Sequence[Fraction], right: Ints) -> bool:
    """Whether ``rows @ x <= right``, in integers."""
    scale = lcm(*(value.denominator for value in x))
    amounts = [int(value * scale) for value in x]
    sums = (sum(int(row[j]) * amounts[j] for j in np.flatnonzero(row).tolist()) for row in rows)
    return all(total <= b * scale for total, b in zip(sums, right.tolist(), strict=True))
