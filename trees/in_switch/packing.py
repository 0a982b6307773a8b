"""Pack an AllReduce with sums in the switches, and say how fast it can be at most: :func:`pack_in_switch`.

Partial results rise along a tree to a rank and the result goes down the same tree. Its inner vertices may be switches
that reduce and multicast (``Switch.sharp``), which fold what comes from below and copy what comes from above: a link of
a tree of weight w carries w each way, however many ranks are behind it. The root is a rank, as with NVLink SHARP, where
a GPU has the switch add up a part and hand the sum to all; a switch that turns the sum round itself, as InfiniBand's
do, loads links alike.

The packing is a linear program over such trees, by column generation. Only AllReduce is packed: what bounds the other
collectives are cuts, which hold whoever folds and copies, so that their trees lose no rate by leaving that to ranks.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np

from ...errors import NoPackingError
from ...topology.model import Topology
from ..answer import SHARP, check_call
from ..bounds.certify import certify, partition_certificate
from ..bounds.prices import FAR
from ..deadline import NEVER, Deadline
from ..exact.basis import Floats, exact_basis, exact_prices, fits, lowered
from ..graph.fabric import Arc, Fabric, Ints, Path, choose_links
from ..graph.logical import arcs_from, neighbours_of
from ..tree import Certificate, Edge, Packing, Tree, depth_of, trivial
from .joined import Joined, SharpGraph
from .verify import cost_of_cheapest, verify_in_switch

MOST_RANKS = 256
WARM_TREES, ROUNDS = 48, 200
CLOSE = 1e-9  # to the bound, where a search in floats ends
GRAIN = 10**6
SIMPLE = 720  # a denominator that the weights of alike trees have


def pack_in_switch(topology: Topology, *, seconds: float | None = None, deadline: Deadline = NEVER) -> Packing:
    """The fastest AllReduce found whose trees may fold and copy in the switches that can; nothing here executes it.

    >>> from blinkmpi.topology import machine
    >>> packing = pack_in_switch(machine("hgx-h100"))
    >>> packing.rate, packing.optimal, [edge.path for edge in packing.trees[0].edges][:2]
    (Fraction(450000, 1), True, [(0, 8), (8, 1)])

    Returns:
        A packing of scheme ``sharp``, proved. An edge's ends are ranks or switches that fold and copy, and the depth
        counts the hops to and from these. Its bound is for every schedule on these links if its certificate is a cut,
        else for all such trees.

    Raises:
        NoPackingError: where no switch of the links that are used folds and copies, for too many ranks, or where links
            that lead both ways do not join them; ``why`` says which.
        TopologyError: if no links join the ranks.
    """
    check_call(topology, "allreduce", 0)
    f = choose_links(topology, "allreduce", 0)
    sharp = tuple(v for v in topology.sharp if v in f.vertices)
    if not sharp:
        raise _nothing(topology, f"no switch on its {'+'.join(f.kinds)} links reduces and multicasts",
                       "say which do (--sharp nvswitch, net), or take method auto")  # fmt: skip
    if f.n > MOST_RANKS:
        raise _nothing(topology, f"{f.n} ranks; expected at most {MOST_RANKS}", "take fewer")
    if not f.two_way.serves("allreduce", 0):
        raise _nothing(topology, "links that lead both ways do not join all ranks", "add the missing links")
    until = deadline.within(seconds)
    proof = bound_in_switch(f, until)
    graph = SharpGraph(f.two_way, sharp)
    if f.n == 1:
        return verify_in_switch(_packing(f, (Tree(0, (), Fraction(1)),), proof), topology)
    trees, prices = _Program(graph, float(proof.bound)).solved(until)
    rate = sum((tree.weight for tree in trees), Fraction(0))
    if rate < proof.bound:
        priced = _priced(f, graph, prices) if f.even and graph.exact else []
        proof = min([proof, *_between_nodes(f, sharp), *priced], key=lambda c: c.bound)
    return verify_in_switch(_packing(f, trees, proof), topology)


def _nothing(t: Topology, why: str, remedy: str) -> NoPackingError:
    error = NoPackingError(f"allreduce on {t.name} with sums in switches: {why}; {remedy}")
    error.why = why
    return error


def _packing(f: Fabric, trees: tuple[Tree, ...], proof: Certificate) -> Packing:
    rate = sum((tree.weight for tree in trees), Fraction(0))
    part = "meets the bound" if rate == proof.bound else f"{float(rate / proof.bound):.2%} of the bound"
    count = len({e.dst for tree in trees for e in tree.edges if e.dst >= f.n})
    why = f"{SHARP}: sums in {count} switch{'es' * (count != 1)}; {part}; not executed here"
    return Packing(
        collective="allreduce", root=-1, n=f.n, scheme=SHARP, links="+".join(f.kinds), trees=trees, rate=rate,
        bound=proof.bound, certificate=proof, reason=why,
    )  # fmt: skip


def bound_in_switch(f: Fabric, deadline: Deadline = NEVER) -> Certificate:
    """The least cut that some ranks' sum has to leave: no AllReduce is faster, whoever folds and copies.

    Any cut is a bound; after the deadline the least one that was found is taken.
    """
    if f.n == 1:
        return trivial("one rank")
    ways = ["broadcast"] if f.even else ["broadcast", "reduce"]
    least = min((certify(f, way, 0, deadline) for way in ways), key=lambda c: c.capacity_mbps)
    return Certificate("cut", least.parts, least.capacity_mbps, Fraction(1), f"{least.text}, whoever folds and copies")


def _between_nodes(f: Fabric, sharp: Sequence[int]) -> list[Certificate]:
    """The bound of the nodes as classes, if all switches that fold and copy are in one: trees join k of them k - 1
    times."""
    t = f.topology
    if len(t.nodes) < 2 or any(t.homes[v] not in t.nodes for v in sharp):
        return []
    return [partition_certificate(f, [tuple(some) for some in f.by_node().values()])]


class _Program:
    """The trees found so far, and the linear program over their weights; links are rows."""

    def __init__(self, graph: SharpGraph, bound: float) -> None:
        self.graph, self.bound = graph, bound
        self.row = {pair: i for i, pair in enumerate(graph.pairs)}
        self.unit = graph.fabric.unit
        self.capacity = np.array([c // self.unit for c in graph.pairs.values()], np.int64)
        self.trees: list[tuple[Path, ...]] = []
        self.known: set[frozenset[Path]] = set()

    def solved(self, deadline: Deadline) -> tuple[tuple[Tree, ...], Floats]:
        """Trees with their weights, and the prices of the links at the end."""
        y: Floats = 1.0 / self.capacity
        for _ in range(WARM_TREES):  # multiplicative weights give trees to begin with
            if self.trees and deadline.late():
                break
            tree = min(self._at(y, all_choices=False), key=lambda t: t.cost)
            self._add(tree)
            rows = self._rows(tree.paths)
            np.multiply.at(y, rows, 1 + 0.5 * self.capacity.min() / self.capacity[rows])
        x, y = self._solve()
        for _ in range(ROUNDS):
            value = float(x.sum())
            if value * self.unit >= self.bound * (1 - CLOSE) or deadline.late():
                break
            new = self._add_cheap(y, all_choices=False)
            if not (new or (self.graph.exact and self._add_cheap(y, all_choices=True))):
                break
            x, y = self._solve()
        return self._weighted(x, y), y

    def _at(self, y: Floats, *, all_choices: bool) -> list[Joined]:
        prices = dict(zip(self.row, y.tolist(), strict=True))
        return list(self.graph.trees(prices, all_choices=all_choices))

    def _add_cheap(self, y: Floats, *, all_choices: bool) -> int:
        """Add the trees that cost less than what the program has; how many were new."""
        return sum(self._add(tree) for tree in self._at(y, all_choices=all_choices) if tree.cost < 1 - CLOSE)

    def _add(self, tree: Joined) -> bool:
        key = frozenset(tree.paths)
        if key in self.known:
            return False
        self.known.add(key)
        self.trees.append(tree.paths)
        return True

    def _rows(self, paths: Sequence[Path]) -> list[int]:
        return [self.row[min(hop), max(hop)] for path in paths for hop in pairwise(path)]

    def _matrix(self, trees: Sequence[tuple[Path, ...]]) -> Ints:
        uses = np.zeros((len(self.row), len(trees)), np.int64)
        for j, paths in enumerate(trees):
            np.add.at(uses[:, j], self._rows(paths), 1)
        return uses

    def _solve(self) -> tuple[Floats, Floats]:
        """The weights that sum to the most, and what a unit of each link is worth."""
        from scipy.optimize import linprog

        uses = self._matrix(self.trees)
        found: Any = linprog(-np.ones(len(self.trees)), A_ub=uses, b_ub=self.capacity, method="highs")
        return np.asarray(found.x), np.maximum(-np.asarray(found.ineqlin.marginals), 0.0)

    def _weighted(self, x: Floats, y: Floats) -> tuple[Tree, ...]:
        """The trees in use, with exact weights: the corner's, or near ones that fit."""
        used = np.flatnonzero(x > CLOSE * x.max())
        trees = [self.trees[j] for j in used]
        uses = self._matrix(trees)
        weights = exact_basis(uses, self.capacity, x[used], prices=y)
        if weights is None:
            simple = [Fraction(v).limit_denominator(SIMPLE) for v in x[used].tolist()]
            weights = simple if fits(uses, simple, self.capacity) else lowered(x[used], GRAIN)
        made = (self._tree(paths, w * self.unit) for paths, w in zip(trees, weights, strict=True) if w)
        return tuple(sorted(made, key=lambda t: (-t.weight, t.root, [e.path for e in t.edges])))

    def _tree(self, paths: Sequence[Path], weight: Fraction) -> Tree:
        """The tree from the rank from which it is shallowest."""
        between = {(path[0], path[-1]): path for path in paths}
        between |= {(v, u): path[::-1] for (u, v), path in between.items()}
        near = neighbours_of((path[0], path[-1]) for path in paths)
        n = self.graph.fabric.n
        if not paths:
            return Tree(0, (), weight)
        arcs = {root: arcs_from(root, near) for root in near if root < n}
        root = min(arcs, key=lambda r: (depth_of(r, arcs[r]), r))
        return Tree(root, tuple(Edge(u, v, between[u, v]) for u, v in arcs[root]), weight)


def _priced(f: Fabric, graph: SharpGraph, y: Floats) -> list[Certificate]:
    """The bounds that the program's prices give, where they fit 58 bits."""
    found: list[Certificate] = []
    none = np.zeros((1, len(y)), np.int64)  # no equations: any prices bound the rate, and rounded ones are tight enough
    for prices in exact_prices(none, none, y, late=True):
        scale = lcm(*(price.denominator for price in prices))
        whole = {pair: int(price * scale) for pair, price in zip(graph.pairs, prices, strict=True) if price}
        arcs: dict[Arc, int] = {arc: price for (u, v), price in whole.items() for arc in ((u, v), (v, u))}
        capacity = sum(f.arcs[arc] * price for arc, price in arcs.items())
        if not arcs or capacity >= FAR or sum(arcs.values()) * len(f.vertices) >= FAR:
            continue
        cost = cost_of_cheapest(f, arcs)
        text = (f"prices on {len(arcs)} of {len(f.arcs)} links: together {capacity} MB/s, and no tree with sums in the "
                f"switches costs less than {cost} for each unit of the rate")  # fmt: skip
        parts = tuple((u, v, price) for (u, v), price in sorted(arcs.items()))
        found.append(Certificate("prices", parts, Fraction(capacity), cost, text))
    return found
