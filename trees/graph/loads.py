"""What the trees of a packing put on links, or on the cores of ranks that share a memory.

The rules are the table in :mod:`~..tree`; for one shared memory they count how often each rank's core passes over the
tree's bytes. Planners scale their trees with these sums, and :mod:`~..bounds.verify` counts the result again.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import TypeVar

import msgspec

from ..tree import AGAINST, ALONG, Tree
from .fabric import Arc

Resource = TypeVar("Resource", Arc, int)  # a link or a core


def link_loads(collective: str, trees: Iterable[Tree]) -> dict[Arc, Fraction]:
    """MB/s on every directed link."""
    trees = list(trees)
    scale = lcm(*{t.weight.denominator for t in trees})
    loads: dict[Arc, int] = {}
    for tree in trees:
        weight = tree.weight.numerator * (scale // tree.weight.denominator)
        paths = [edge.path for edge in tree.edges] if collective in ALONG else []
        if collective in AGAINST:
            paths += [edge.path for edge in tree.up] or [edge.path[::-1] for edge in tree.edges]
        for path in paths:
            for arc in pairwise(path):
                loads[arc] = loads.get(arc, 0) + weight
    return {arc: Fraction(load, scale) for arc, load in loads.items()}


def core_loads(collective: str, trees: Iterable[Tree]) -> dict[int, Fraction]:
    """MB/s that every rank's core passes over when the ranks share one memory.

    Reducing: a rank with c children reads their slots and writes its own in c passes, a leaf copies in one; the root's
    c passes write the result and the slot that all read. Broadcasting: every other rank reads that slot once. Without
    a reduction the root writes the slot in one pass.
    """
    loads: dict[int, Fraction] = {}
    for tree in trees:
        if not tree.edges:
            continue
        for rank in {tree.root} | {e.dst for e in tree.edges}:
            children = sum(e.src == rank for e in tree.edges)
            passes = 0
            if collective in AGAINST:
                passes += children if rank == tree.root else max(1, children)
            if collective in ALONG and (rank != tree.root or collective not in AGAINST):
                passes += 1
            loads[rank] = loads.get(rank, Fraction(0)) + passes * tree.weight
    return loads


def scaled(
    trees: list[Tree], loads: Mapping[Resource, Fraction], capacity: Mapping[Resource, int]
) -> tuple[tuple[Tree, ...], Fraction]:
    """Scale trees, whose weights are for a rate of 1, to the highest rate that fits; and that rate in MB/s."""
    rate = min(capacity[at] / load for at, load in loads.items() if load)
    return tuple(msgspec.structs.replace(t, weight=t.weight * rate) for t in trees), rate
