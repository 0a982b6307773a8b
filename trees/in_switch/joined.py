"""The ranks and the switches that fold and copy, and the cheapest trees that join all ranks over them (Steiner trees).

A switch that folds and copies may be an inner vertex of a tree, or be left out. Once it is said which of them are
inner vertices, the cheapest tree is a minimum spanning tree of these and the ranks, whose edges are cheapest paths
through the switches that only forward. So the cheapest tree of all is that of the best choice: exact where all choices
are tried, which is up to :data:`MOST_CHOICES` switches.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import msgspec
import numpy as np

from ...topology.model import Device, Topology
from ..bounds.prices import CheapestPaths
from ..graph.arborescence import Costs, minimum_spanning_tree
from ..graph.fabric import Arc, Fabric, Path

MOST_CHOICES = 8  # switches, of which all sets are tried


class Joined(NamedTuple):
    """A tree that joins all ranks: what its edges cost together, and their paths."""

    cost: float
    paths: tuple[Path, ...]


class SharpGraph(msgspec.Struct, frozen=True, dict=True):
    """Links that are equally fast both ways, on ranks and switches, some of which fold and copy.

    Attributes:
        fabric: the links; each is one resource, as a tree of AllReduce loads both its directions alike.
        sharp: the switches that fold and copy.
    """

    fabric: Fabric
    sharp: tuple[int, ...]

    @cached_property
    def pairs(self) -> dict[Arc, int]:
        """MB/s each way of every pair of joined vertices, the lower one first."""
        return {(u, v): c for (u, v), c in self.fabric.arcs.items() if u < v}

    @cached_property
    def exact(self) -> bool:
        """Whether the cheapest tree is found for certain."""
        return len(self.sharp) <= MOST_CHOICES

    @cached_property
    def _order(self) -> list[int]:
        """The vertices: ranks, switches that fold and copy, switches that only forward."""
        f = self.fabric
        return [*range(f.n), *self.sharp, *(v for v in f.vertices[f.n :] if v not in self.sharp)]

    @cached_property
    def _inner(self) -> Fabric:
        """The same links among vertices numbered by :attr:`_order`, where who folds and copies counts as a rank."""
        at = {v: i for i, v in enumerate(self._order)}
        t, count = self.fabric.topology, self.fabric.n + len(self.sharp)
        switches = tuple(t.switches[v - t.n] for v in self._order[count:])
        like = Topology(t.name, tuple(Device("gpu", 0, i) for i in range(count)), switches)
        arcs = sorted((at[u], at[v]) for u, v in self.fabric.arcs)
        return Fabric(like, (), {(u, v): self.fabric.arcs[self._order[u], self._order[v]] for u, v in arcs})

    def trees(self, prices: Mapping[Arc, float], *, all_choices: bool) -> Iterator[Joined]:
        """The cheapest tree for each choice of inner switches, or for a few likely ones.

        Args:
            prices: of every pair of :attr:`pairs`, all integers or all floats.
        """
        order, whole = self._order, all(isinstance(price, int) for price in prices.values())
        ends = ((order[u], order[v]) for u, v in self._inner.arcs)
        by_arc = np.array([prices[min(pair), max(pair)] for pair in ends], np.int64 if whole else np.float64)
        metric = CheapestPaths(self._inner, by_arc)
        for chosen in self._choices(metric.cost) if not all_choices else self._all_choices():
            found = self._spanning(metric.cost, chosen)
            if found is not None:
                cost, edges = found
                paths = ((order[w] for w in metric.path(u, v)) for u, v in edges)
                yield Joined(cost, tuple(tuple(path) for path in paths))

    def _all_choices(self) -> Iterator[tuple[int, ...]]:
        n = self.fabric.n
        some = range(n, n + len(self.sharp))
        for count in range(len(some) + 1):
            yield from combinations(some, count)

    def _choices(self, cost: Costs) -> Iterator[tuple[int, ...]]:
        """All switches, then those that a tree over all of them needs, and none."""
        n = self.fabric.n
        chosen = tuple(range(n, n + len(self.sharp)))
        seen: set[tuple[int, ...]] = set()
        while chosen not in seen:
            seen.add(chosen)
            yield chosen
            found = self._spanning(cost, chosen)
            ends = {v for edge in found[1] for v in edge} if found else ()
            chosen = tuple(v for v in chosen if v in ends)
        if () not in seen:
            yield ()

    def _spanning(self, cost: Costs, chosen: Iterable[int]) -> tuple[float, list[Arc]] | None:
        """The minimum spanning tree of the ranks and the chosen switches, less switches that end up as leaves."""
        vertices = np.array([*range(self.fabric.n), *chosen], np.int64)
        edges = minimum_spanning_tree(cost[np.ix_(vertices, vertices)])
        if edges is None:
            return None
        found = [(int(vertices[u]), int(vertices[v])) for u, v in edges]
        while True:
            degree = np.bincount([v for edge in found for v in edge], minlength=len(cost))
            kept = [e for e in found if all(v < self.fabric.n or degree[v] > 1 for v in e)]
            if len(kept) == len(found):
                return sum(cost[u, v].item() for u, v in found), found
            found = kept
