"""Exact solutions of linear equations over the integers, for bases that a floating-point solver has found.

Elimination modulo primes in int64, the Chinese remainder theorem, and rational reconstruction; the result is checked
against the equations in integers before it is returned.
"""

from fractions import Fraction
from math import isqrt

import numpy as np

from ..graph.fabric import Ints

GAPS = (1, 19, 61, 69, 85, 99, 105, 151, 159, 171, 225, 249, 295, 325, 379, 399, 411, 469)
PRIMES = tuple((1 << 31) - gap for gap in GAPS)  # products of two residues fit int64


def solve(matrix: Ints, right: list[int]) -> list[Fraction] | None:
    """The solution of ``matrix @ x = right``, undetermined unknowns set to 0; None if there is no solution."""
    columns = len(matrix.T)
    modulus, residues = 1, [0] * columns
    pivots: list[int] | None = None
    for prime in PRIMES:
        found = _modulo(matrix, right, prime)
        if found is None:
            return None
        values, chosen = found
        if pivots is None or len(chosen) > len(pivots):
            pivots, modulus, residues = chosen, 1, [0] * columns  # earlier primes were unlucky
        if chosen != pivots:
            continue
        inverse = pow(modulus, -1, prime)
        residues = [r + modulus * ((v - r) * inverse % prime) for r, v in zip(residues, values, strict=True)]
        modulus *= prime
        fractions = _reconstruct(residues, modulus)
        if fractions is not None and _holds(matrix, right, fractions):
            return fractions
    return None


def _modulo(matrix: Ints, right: list[int], prime: int) -> tuple[list[int], list[int]] | None:
    """Gauss-Jordan elimination; the values of the unknowns and the pivot columns."""
    work = np.concatenate([matrix % prime, np.array([[b % prime] for b in right], np.int64)], axis=1)
    rows, columns = len(matrix), len(matrix.T)
    pivots: list[int] = []
    for column in range(columns):
        at = len(pivots)
        if at == rows:
            break
        candidates = np.flatnonzero(work[at:, column])
        if not len(candidates):
            continue
        swap = at + int(candidates[0])
        work[[at, swap]] = work[[swap, at]]
        work[at] = work[at] * pow(int(work[at, column]), -1, prime) % prime
        others = np.flatnonzero(work[:, column])
        others = others[others != at]
        work[others] = (work[others] - work[others, column][:, None] * work[at] % prime) % prime
        pivots.append(column)
    if work[len(pivots) :, -1].any():
        return None
    values = [0] * columns
    for row, column in enumerate(pivots):
        values[column] = int(work[row, -1])
    return values, pivots


def _reconstruct(residues: list[int], modulus: int) -> list[Fraction] | None:
    """The fractions with small terms that have these residues (Wang 1981)."""
    limit = isqrt(modulus // 2)
    found: list[Fraction] = []
    for residue in residues:
        a, b, s, t = modulus, residue, 0, 1
        while b > limit:
            quotient = a // b
            a, b, s, t = b, a - quotient * b, t, s - quotient * t
        if t == 0 or abs(t) > limit:
            return None
        found.append(Fraction(b, t))
    return found


def _holds(matrix: Ints, right: list[int], x: list[Fraction]) -> bool:
    for row, wanted in zip(matrix, right, strict=True):
        if sum((int(row[j]) * x[j] for j in np.flatnonzero(row).tolist()), Fraction(0)) != wanted:
            return False
    return True
