"""Prove a packing with sums in switches: its trees, its loads, and that nothing is faster than its bound.

Everything is recomputed from the machine. Three kinds of certificates hold, the last two for trees in which ranks and
the machine's sharp switches fold and copy:

``cut``        what the ranks of ``parts[1]`` add up is as long as the vector, and those of ``parts[0]`` need it. That
               is so whoever folds and copies, so no way of any kind is faster.
``partition``  classes that share all ranks and all sharp switches: a tree has k - 1 edges between k of them, and each
               leaves two, one each way
``prices``     all links together are worth so much, and no tree that joins all ranks costs less than so much each way
"""

from fractions import Fraction
from itertools import pairwise
from typing import NoReturn

from ...errors import PlanError
from ...topology.model import Topology
from ..bounds.prices import FAR
from ..graph.fabric import Arc, Fabric, capacity_across, capacity_leaving, fabric
from ..graph.loads import link_loads
from ..tree import Certificate, Packing, Tree
from .joined import SharpGraph

REMEDY = "plan again with blinkmpi.trees.in_switch.packing.pack_in_switch"


def verify_in_switch(packing: Packing, topology: Topology) -> Packing:
    """Return ``packing`` if it is an AllReduce for ``topology`` whose trees fold and copy where that can be done.

    Raises:
        PlanError: naming the tree or link, what is there and what was expected.
    """
    p, t = packing, topology
    if (p.collective, p.root, p.n, p.multicast) != ("allreduce", -1, t.n, False):
        _fail(f"is for {p.collective} of {p.n} ranks, root {p.root}, expected allreduce of {t.n}, root -1")
    unknown = [kind for kind in p.links.split("+") if kind not in t.kinds()]
    if unknown or not p.trees:
        _fail(f"has {len(p.trees)} trees over {p.links or 'nothing'}, but {t.name} has {', '.join(t.kinds())}")
    f = fabric(t, p.links.split("+"))
    for i, tree in enumerate(p.trees):
        _check_tree(f, i, tree)
    for (u, v), load in sorted(link_loads("allreduce", p.trees).items()):
        if load > f.arcs[u, v]:
            _fail(f"link {u}->{v} carries {load} MB/s, expected at most {f.arcs[u, v]}")
    total = sum((tree.weight for tree in p.trees), Fraction(0))
    if total != p.rate or p.rate > p.bound:
        _fail(f"the weights sum to {total} MB/s, its rate is {p.rate} and its bound {p.bound}")
    found = _capacity(f, p.certificate)
    if (p.certificate.capacity_mbps, p.certificate.divisor) != found or p.bound != found[0] / found[1]:
        stated = f"{p.certificate.capacity_mbps} MB/s over {p.certificate.divisor}"
        _fail(f"certificate states {stated} for a bound of {p.bound}, the machine has {found[0]} over {found[1]}")
    return p


def _fail(what: str) -> NoReturn:
    raise PlanError(f"packing with sums in switches: {what}; {REMEDY}")


def _check_tree(f: Fabric, number: int, tree: Tree) -> None:
    """A tree on ranks and switches that fold and copy, which joins all ranks, and whose leaves are ranks."""
    t, where = f.topology, f"tree {number}"
    inner, reached = set(t.sharp), {tree.root}
    if tree.weight <= 0 or not 0 <= tree.root < t.n or tree.up:
        _fail(f"{where} has weight {tree.weight} and root {tree.root}, expected more than 0, a rank, and one tree")
    for e in tree.edges:
        here = f"{where} edge {e.src}->{e.dst}"
        if e.src not in reached or e.dst in reached:
            _fail(f"{here}: expected an edge from what the tree has to what it does not have yet")
        if not (0 <= e.dst < t.n or e.dst in inner):
            _fail(f"{here}: {t.vertex_label(e.dst)} neither folds nor copies, expected a rank or a sharp switch")
        if len(e.path) < 2 or e.path[0] != e.src or e.path[-1] != e.dst or len(set(e.path)) < len(e.path):
            _fail(f"{here}: path {e.path} must begin and end with the edge's vertices, and cross each once")
        if any(v < t.n for v in e.path[1:-1]):
            _fail(f"{here}: path {e.path} may cross switches alone")
        for a, b in pairwise(e.path):
            if (a, b) not in f.arcs or (b, a) not in f.arcs:
                _fail(f"{here}: no link {a}->{b} and back")
        reached.add(e.dst)
    missing = set(range(t.n)) - reached
    leaves = {e.dst for e in tree.edges if e.dst >= t.n} - {e.src for e in tree.edges}
    if missing or leaves:
        _fail(f"{where} does not reach ranks {sorted(missing)}, and ends at switches {sorted(leaves)}; expected none")


def _capacity(f: Fabric, c: Certificate) -> tuple[Fraction, Fraction]:
    """Capacity and divisor of a certificate, recomputed."""
    if c.kind == "trivial" and f.n == 1:
        return Fraction(1), Fraction(1)
    if c.kind == "cut":
        return Fraction(_crossing(f, c.parts)), Fraction(1)
    if c.kind == "partition":
        return _between(f, c.parts)
    if c.kind != "prices":
        _fail(f"certificate is a {c.kind}, expected a cut, a partition or prices")
    return _prices(f, c.parts)


def _crossing(f: Fabric, parts: tuple[tuple[int, ...], ...]) -> int:
    sides = [set(part) for part in parts]
    ranks = [any(v < f.n for v in side) for side in sides]
    whole = len(sides) == 2 and sorted((*parts[0], *parts[1])) == list(f.vertices)
    if not whole or not all(ranks):
        _fail(f"certificate parts {parts} must be the two sides of a cut through {f.vertices}, each with a rank")
    return capacity_across(f.arcs, sides[1])


def _between(f: Fabric, parts: tuple[tuple[int, ...], ...]) -> tuple[Fraction, Fraction]:
    inner = {v for v in f.topology.sharp if v in f.vertices}
    held = sorted(v for part in parts for v in part if v < f.n or v in inner)
    ranks = [any(v < f.n for v in part) for part in parts]
    if len(parts) < 2 or held != [*range(f.n), *sorted(inner)] or not all(ranks):
        _fail(f"certificate parts {parts} must share out the {f.n} ranks and the switches {sorted(inner)}, each part "
              "with a rank")  # fmt: skip
    return Fraction(capacity_leaving(f.arcs, parts), 2), Fraction(len(parts) - 1)


def _prices(f: Fabric, parts: tuple[tuple[int, ...], ...]) -> tuple[Fraction, Fraction]:
    prices: dict[Arc, int] = {part[:2]: part[2] for part in parts if len(part) == 3 and part[2] > 0}
    both = all(prices.get((v, u)) == price for (u, v), price in prices.items())
    if not f.even or not prices or len(prices) < len(parts) or not both or any(arc not in f.arcs for arc in prices):
        _fail("certificate parts must be links that are equally fast both ways, each with one price above 0 both ways")
    capacity = sum(f.arcs[arc] * price for arc, price in prices.items())
    if capacity >= FAR or sum(prices.values()) * len(f.vertices) >= FAR:
        _fail("certificate has prices that do not fit 58 bits")
    return Fraction(capacity), cost_of_cheapest(f, prices)


def cost_of_cheapest(f: Fabric, prices: dict[Arc, int]) -> Fraction:
    """What the cheapest tree that joins all ranks costs at these prices, once up and once down.

    Raises:
        PlanError: if more switches fold and copy than choices of them can be tried, or such a tree costs nothing.
    """
    graph = SharpGraph(f, tuple(v for v in f.topology.sharp if v in f.vertices))
    if not graph.exact:
        _fail(f"certificate is of prices, for {len(graph.sharp)} switches that fold and copy, too many to try all sets")
    by_pair = {pair: prices.get(pair, 0) for pair in graph.pairs}
    cost = min(int(tree.cost) for tree in graph.trees(by_pair, all_choices=True))
    if not cost:
        _fail("certificate has prices at which a tree may cost nothing")
    return Fraction(2 * cost)
