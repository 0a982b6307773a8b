"""The edges of many trees as integer arrays, to verify packings of a thousand ranks in a fraction of a second.

Trees share :class:`~..tree.Edge` objects; each is read once. Weights are scaled to integers, and nothing is rounded: a
packing whose numbers do not fit 62 bits is left to the loops of :mod:`~..bounds.verify`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import lcm

import numpy as np
from numpy.typing import NDArray

from ..tree import Edge, Tree
from .fabric import Arc, Ints

WORTH_IT = 4096  # edges; loops are as fast below
LARGEST = 1 << 62
BLOCK = 1 << 20  # uses of edges that are looked at together, so that memory grows with the trees alone


class EdgeTable:
    """``edges`` are the distinct ones; ``edge`` has the number of one for each use by a tree, tree after tree."""

    def __init__(self, n: int, trees: Sequence[Tree]) -> None:
        self.n, self.trees = n, trees
        self.counts = np.fromiter((len(t.edges) for t in trees), np.int64, len(trees))
        self.starts = [0, *accumulate(self.counts.tolist())]
        self.edges: list[Edge] = []
        number: dict[int, int] = {}  # by identity, which is enough to read each object once
        blocks: list[NDArray[np.int32]] = []
        for some in self._blocks():
            uses = list(chain.from_iterable(t.edges for t in trees[some]))
            ids, first, block = np.unique(np.fromiter(map(id, uses), np.int64), return_index=True, return_inverse=True)
            fresh = [i for i, known in zip(first.tolist(), ids.tolist(), strict=True) if known not in number]
            number |= {id(uses[i]): at for at, i in enumerate(fresh, len(number))}
            self.edges += [uses[i] for i in fresh]
            blocks.append(np.array([number[i] for i in ids.tolist()], np.int32)[block])
        self.edge = np.concatenate(blocks)
        self.src = np.fromiter((e.src for e in self.edges), np.int64, len(self.edges))
        self.dst = np.fromiter((e.dst for e in self.edges), np.int64, len(self.edges))

    def spanning(self) -> bool:
        """Whether every tree has every rank once, parents before children."""
        n, roots = self.n, np.fromiter((t.root for t in self.trees), np.int64, len(self.trees))
        ends = np.concatenate([self.src, self.dst, roots])
        if (self.counts != n - 1).any() or ends.min() < 0 or ends.max() >= n:
            return False
        return all(self._spanning(roots[some], self._rows(some)) for some in self._blocks())

    def _blocks(self) -> Iterator[slice]:
        """The trees in blocks."""
        step = max(1, BLOCK // max(1, self.n - 1))
        return (slice(i, i + step) for i in range(0, len(self.trees), step))

    def _rows(self, some: slice) -> NDArray[np.int32]:
        """The edges of each of these trees, which have n - 1."""
        return self.edge[some.start * (self.n - 1) : some.stop * (self.n - 1)].reshape(-1, self.n - 1)

    def _spanning(self, roots: Ints, rows: NDArray[np.int32]) -> bool:
        src, dst, at = self.src[rows], self.dst[rows], np.arange(len(rows))
        place = np.full((len(rows), self.n), -1, np.int32)
        place[at[:, None], dst] = np.arange(rows.shape[1], dtype=np.int32)
        if (place[at, roots] >= 0).any() or ((place >= 0).sum(axis=1) != self.n - 1).any():
            return False
        return bool((place[at[:, None], src] < place[at[:, None], dst]).all())

    def fits(self, arcs: Mapping[Arc, int], *, along: bool, against: bool) -> bool:
        """Whether paths join their ends over switches and existing links, and no link is overloaded."""
        scale = lcm(*{t.weight.denominator for t in self.trees})
        weights = [t.weight.numerator * (scale // t.weight.denominator) for t in self.trees]
        if min(weights) <= 0 or 2 * sum(weights) >= LARGEST or max(arcs.values()) * scale >= LARGEST:
            return False
        top = 1 + max(max(arc) for arc in arcs)
        codes = np.fromiter((u * top + v for u, v in arcs), np.int64, len(arcs))
        order = np.argsort(codes)
        codes, capacity = codes[order], np.fromiter(arcs.values(), np.int64, len(arcs))[order] * scale
        amount = np.zeros(len(self.edges), np.int64)
        for weight, start, stop in zip(weights, self.starts, self.starts[1:], strict=False):
            np.add.at(amount, self.edge[start:stop], weight)
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
        return bool((load <= capacity).all())

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
