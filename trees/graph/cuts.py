"""Cuts and partitions of small graphs, exact and vectorised: one int64 per subset of at most 18 vertices.

Subset S is the number whose bit v says whether vertex v is in it. Larger graphs go through :mod:`.cuts_by_flow`.
The partition problem (Tutte 1961, Nash-Williams 1961) is solved by Dinkelbach's method; each step is the greedy
algorithm for the Dilworth truncation of an intersecting submodular function, whose minima are vectorised.
"""

from fractions import Fraction

import numpy as np

from .fabric import Ints

MAX_VERTICES = 18
HUGE = np.iinfo(np.int64).max


def subset_sums(values: list[int]) -> Ints:
    """The sum of ``values`` over every subset."""
    sums = np.zeros(1, np.int64)
    for value in values:
        sums = np.concatenate([sums, sums + value])
    return sums


def out_cuts(cap: Ints) -> Ints:
    """The capacity that leaves each subset; reversed, the vector holds what enters it."""
    cuts = np.zeros(1, np.int64)
    for v in range(len(cap)):
        touch = subset_sums((cap[:v, v] + cap[v, :v]).tolist())
        cuts = np.concatenate([cuts, cuts + int(cap[v].sum()) - touch])
    return cuts


def inner(cap: Ints) -> Ints:
    """The capacity between members of each subset, each arc counted once."""
    sums = np.zeros(1, np.int64)
    for v in range(len(cap)):
        sums = np.concatenate([sums, sums + subset_sums((cap[:v, v] + cap[v, :v]).tolist())])
    return sums


def members(bits: int, count: int) -> Ints:
    """How many of the vertices ``0..count-1`` each subset of ``bits`` vertices holds."""
    return subset_sums([1] * count + [0] * (bits - count))


def has(bits: int, vertex: int) -> Ints:
    """1 for the subsets that hold ``vertex``."""
    return subset_sums([int(v == vertex) for v in range(bits)])


def min_cut(cap: Ints, n: int, root: int) -> tuple[int, int]:
    """The subset with ``root`` and without some rank that the least capacity leaves, and that capacity."""
    bits = len(cap)
    cuts = out_cuts(cap)
    cuts[(has(bits, root) == 0) | (members(bits, n) == n)] = HUGE
    best = int(cuts.argmin())
    return best, int(cuts[best])


def ratio_cut(cap: Ints, n: int, root: int | None) -> tuple[int, int]:
    """The subset S with the least (capacity leaving S) / (ranks in S), and that capacity.

    S misses at least one rank: ``root`` if it is given.
    """
    bits = len(cap)
    cuts = out_cuts(cap)
    count = members(bits, n)
    if root is not None:
        cuts[has(bits, root) == 1] = HUGE
    least: list[tuple[Fraction, int, int]] = []  # for each number of ranks: the ratio, the subset, its capacity
    for k in range(1, n):
        some = np.flatnonzero(count == k)
        best = int(some[cuts[some].argmin()])
        least.append((Fraction(int(cuts[best]), k), best, int(cuts[best])))
    return min(least)[1:]


def truncate(f: Ints) -> tuple[list[int], list[int]]:
    """Greedy for the Dilworth truncation of an intersecting submodular ``f`` (f of the empty set is not used).

    Returns:
        the values y(v), greatest in their order with y(A) <= f(A) for every subset A, and the partition with
        sum of f over its classes = sum of y, the least of all partitions.
    """
    y: list[int] = []
    classes: list[int] = []
    sums = np.zeros(1, np.int64)
    for v in range(len(f).bit_length() - 1):
        gap = f[1 << v : 2 << v] - sums
        with_v = int(gap.argmin())
        y.append(int(gap[with_v]))
        sums = np.concatenate([sums, sums + y[-1]])
        tight = with_v | 1 << v
        for c in [c for c in classes if c & tight]:
            classes.remove(c)
            tight |= c
        classes.append(tight)
    return y, sorted(classes, key=lambda c: c & -c)


def strength(cuts: Ints) -> tuple[Fraction, list[int]]:
    """The least of sum of cuts(A) / (2 (classes - 1)) over all partitions with two classes or more.

    For the cuts of a symmetric graph this is the Tutte/Nash-Williams number.

    Args:
        cuts: a submodular function of the subsets, 0 for the whole set.
    """
    bits = len(cuts).bit_length() - 1
    classes = [1 << v for v in range(bits)]
    while True:
        ratio = Fraction(sum(int(cuts[c]) for c in classes), 2 * (len(classes) - 1))
        y, found = truncate(cuts * ratio.denominator - 2 * ratio.numerator)
        if sum(y) + 2 * ratio.numerator >= 0:
            return ratio, classes
        classes = found
