"""The edges of many trees as integer arrays, to verify packings of a thousand ranks in a fraction of a second.

Trees share :class:`~..tree.Edge` objects; each is read once. Weights are scaled to integers, and nothing is rounded: a
packing whose numbers do not fit 62 bits is left to the loops of :mod:`~..bounds.verify`.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import lcm

import numpy as np

from ..tree import Edge, Tree
from .fabric import Arc, Ints

WORTH_IT = 4096  # edges; loops are as fast below
LARGEST = 1 << 62


class EdgeTable:
    """``edges`` are the distinct ones; entry i of ``tree`` and ``edge`` is one use of an edge by a tree."""

    def __init__(self, n: int, trees: Sequence[Tree]) -> None:
        self.n, self.trees = n, trees
        self.counts = np.fromiter((len(t.edges) for t in trees), np.int64, len(trees))
        uses: list[Edge] = list(chain.from_iterable(t.edges for t in trees))
        number: dict[int, int] = {}  # by identity, which is enough to read each object once
        self.edge = np.fromiter((number.setdefault(i, len(number)) for i in map(id, uses)), np.int64, len(uses))
        first = np.full(len(number), -1, np.int64)
        first[self.edge[::-1]] = np.arange(len(uses) - 1, -1, -1)
        self.edges = [uses[i] for i in first.tolist()]
        self.tree = np.repeat(np.arange(len(trees)), self.counts)
        self.src = np.fromiter((e.src for e in self.edges), np.int64, len(self.edges))
        self.dst = np.fromiter((e.dst for e in self.edges), np.int64, len(self.edges))

    def spanning(self) -> bool:
        """Whether every tree has every rank once, parents before children."""
        n, roots = self.n, np.fromiter((t.root for t in self.trees), np.int64, len(self.trees))
        ends = np.concatenate([self.src, self.dst, roots])
        if (self.counts != n - 1).any() or ends.min() < 0 or ends.max() >= n:
            return False
        place = np.full((len(self.trees), n), -1, np.int64)
        src, dst = self.src[self.edge], self.dst[self.edge]
        place[self.tree, dst] = np.arange(len(self.edge))
        rows = np.arange(len(self.trees))
        if (place[rows, roots] >= 0).any() or ((place >= 0).sum(axis=1) != n - 1).any():
            return False
        return bool((place[self.tree, src] < place[self.tree, dst]).all())

    def fits(self, arcs: Mapping[Arc, int], *, along: bool, against: bool) -> bool:
        """Whether paths join their ends over switches and existing links, and no link is overloaded."""
        scale = lcm(*{t.weight.denominator for t in self.trees})
        weights = [t.weight.numerator * (scale // t.weight.denominator) for t in self.trees]
        if min(weights) <= 0 or 2 * sum(weights) >= LARGEST or max(arcs.values()) * scale >= LARGEST:
            return False
        top = 1 + max(max(arc) for arc in arcs)
        codes = np.fromiter((u * top + v for u, v in arcs), np.int64, len(arcs))
        order = np.argsort(codes)
        codes, room = codes[order], np.fromiter(arcs.values(), np.int64, len(arcs))[order] * scale
        amount = np.zeros(len(self.edges), np.int64)
        np.add.at(amount, self.edge, np.array(weights, np.int64)[self.tree])
        load = np.zeros(len(arcs), np.int64)
        for length, chosen in self._by_length().items():
            paths = np.array([self.edges[i].path for i in chosen], np.int64).reshape(len(chosen), length)
            if length < 2 or not self._joins(paths, chosen):
                return False
            for a, b in ((paths[:, i], paths[:, i + 1]) for i in range(length - 1)):
                for wanted, code in ((along, a * top + b), (against, b * top + a)):
                    at = np.minimum(np.searchsorted(codes, code), len(codes) - 1)
                    if wanted and (codes[at] != code).any():
                        return False
                    if wanted:
                        np.add.at(load, at, amount[chosen])
        return bool((load <= room).all())

    def _by_length(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for i, e in enumerate(self.edges):
            found.setdefault(len(e.path), []).append(i)
        return found

    def _joins(self, paths: Ints, chosen: list[int]) -> bool:
        """Whether the paths begin and end with their edge's ranks and cross only switches, each once."""
        ends = (paths[:, 0] == self.src[chosen]) & (paths[:, -1] == self.dst[chosen])
        inner = np.sort(paths[:, 1:-1], axis=1)
        return bool(ends.all() and (inner >= self.n).all() and (inner[:, 1:] != inner[:, :-1]).all())
