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

from ...errors import PlanError
from ...topology.model import Topology
from ..bounds.verify import check_head, check_links, check_prices, check_stated, check_sums, check_tree, crossing, fail
from ..graph.fabric import Arc, Fabric, fabric
from ..tree import Certificate, Packing
from .joined import SharpGraph


def verify_in_switch(packing: Packing, topology: Topology) -> Packing:
    """Return ``packing`` if it is an AllReduce for ``topology`` whose trees fold and copy where that can be done.

    Raises:
        PlanError: naming the tree or link, what is there and what was expected.
    """
    p, t = packing, topology
    if p.collective != "allreduce" or p.multicast or any(tree.up for tree in p.trees):
        fail(p, "has sums in switches, expected allreduce over links, and trees that are used both ways")
    check_head(p, t)
    f, sharp = fabric(t, p.links.split("+")), frozenset(t.sharp)
    for i, tree in enumerate(p.trees):
        ends = {e.dst for e in tree.edges if e.dst >= t.n}
        for v in sorted(ends - sharp):
            fail(p, f"tree {i}: {t.vertex_label(v)} neither folds nor copies, expected a rank or a sharp switch")
        check_tree(p, f, f"tree {i}", tree, sharp)
        if leaves := ends - {e.src for e in tree.edges}:
            fail(p, f"tree {i} ends at switches {sorted(leaves)}, expected ranks")
    check_links(p, f)
    check_sums(p)
    check_stated(p, *_capacity(p, f, p.certificate))
    return p


def _capacity(p: Packing, f: Fabric, c: Certificate) -> tuple[Fraction, Fraction]:
    """Capacity and divisor of a certificate, recomputed."""
    if c.kind == "trivial" and f.n == 1:
        return Fraction(1), Fraction(1)
    if c.kind == "prices":
        prices, capacity = check_prices(p, f, c, len(f.vertices))
        if not f.even or any(prices.get((v, u)) != price for (u, v), price in prices.items()):
            fail(p, "certificate has prices of links that are not equally fast both ways, or not of both ways")
        return capacity, cost_of_cheapest(f, prices)
    if c.kind not in ("cut", "partition"):
        fail(p, f"certificate is a {c.kind}, expected a cut, a partition or prices")
    held = sorted(v for part in c.parts for v in part if v in f.topology.sharp)
    if held != [v for v in f.topology.sharp if v in f.vertices]:
        fail(p, f"certificate parts {c.parts} must share out the sharp switches {list(f.topology.sharp)}")
    return crossing(p, f, c)


def cost_of_cheapest(f: Fabric, prices: dict[Arc, int]) -> Fraction:
    """What the cheapest tree that joins all ranks costs at these prices, once up and once down.

    Raises:
        PlanError: if more switches fold and copy than choices of them can be tried, or such a tree costs nothing.
    """
    graph = SharpGraph(f, tuple(v for v in f.topology.sharp if v in f.vertices))
    by_pair = {pair: prices.get(pair, 0) for pair in graph.pairs}
    cost = min(int(tree.cost) for tree in graph.trees(by_pair, all_choices=True)) if graph.exact else 0
    if not cost:
        raise PlanError(f"prices on {len(prices)} links: a tree may cost nothing, or {len(graph.sharp)} switches fold "
                        "and copy, too many to try all sets; plan again")  # fmt: skip
    return Fraction(2 * cost)
