"""Prove that a packing is valid and its bound true, in integers and Fractions; it is optimal if its rate is the bound.

Recomputes every tree, link load, sum and the certificate from the topology alone. The rules are the tables in
:mod:`~..tree` and :mod:`~..graph.loads`.
"""

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from typing import NoReturn

from ...errors import PlanError
from ...topology.model import Topology
from ..answer import SHARP
from ..graph.edge_table import WORTH_IT, EdgeTable
from ..graph.fabric import Arc, Fabric, capacity_across, capacity_leaving, core_rates, fabric, name_of
from ..graph.loads import core_loads, link_loads
from ..graph.shallow_arborescence import can_search
from ..tree import AGAINST, ALONG, COLLECTIVES, PER_RANK, ROOTED, Certificate, Edge, Packing, Tree
from .prices import FAR, PATHS, cheapest

REMEDY = "plan again with blinkmpi.trees.pack"
REMEDY_IN_SWITCH = "plan again with blinkmpi.trees.in_switch.packing.pack_in_switch"


def verify(packing: Packing, topology: Topology) -> Packing:
    """Return ``packing`` if it is valid for ``topology``: within all capacities, and with a proved bound.

    Raises:
        PlanError: naming the tree or link, what is there and what was expected.
    """
    check_head(packing, topology)
    f = fabric(topology, packing.links.split("+"))
    at_once = _proved_at_once(packing, f)
    for i, tree in enumerate(() if at_once else packing.trees):
        check_tree(packing, f, f"tree {i}", tree)
    check_sums(packing)
    if packing.n > 1 and packing.collective != "barrier" and not at_once:
        _check_memory(packing, topology) if packing.multicast else check_links(packing, f)
    _check_certificate(packing, f, packing.certificate)
    return packing


def verify_depth(packing: Packing, certificate: Certificate, depth: int, topology: Topology) -> None:
    """Check that a packing's trees have at most ``depth`` hops, and that none such are faster than a bound.

    Args:
        certificate: of prices of links at which no trees of so many hops cost less.

    Raises:
        PlanError: naming what is there and what was expected.
    """
    f, c = fabric(topology, packing.links.split("+")), certificate
    if packing.depth > depth:
        fail(packing, f"has trees of {packing.depth} hops, expected at most {depth}")
    if c.kind != "prices":
        fail(packing, f"certificate is a {c.kind}, expected prices")
    by_paths = packing.collective in PATHS
    if not by_paths and not can_search(packing.n, depth):
        fail(packing, f"certificate is for trees of at most {depth} hops of {packing.n} ranks, too many to look at")
    if (c.capacity_mbps, c.divisor) != (found := _prices(packing, f, c, depth)):
        fail(packing, f"certificate states {c.capacity_mbps} MB/s over {c.divisor}, the machine has {found}")
    if packing.rate > c.bound:
        fail(packing, f"rate {packing.rate} MB/s is above its bound {c.bound}")


def fail(packing: Packing, what: str) -> NoReturn:
    """Raise the PlanError that says what is wrong with a packing."""
    remedy = REMEDY_IN_SWITCH if packing.scheme == SHARP else REMEDY
    raise PlanError(f"{packing.collective} packing: {what}; {remedy}")


def _proved_at_once(p: Packing, f: Fabric) -> bool:
    """Check trees and links of a large packing by arrays; where this finds a fault, the loops below name it."""
    if p.multicast or p.collective in (*PATHS, "barrier") or not f.arcs or any(t.up for t in p.trees):
        return False
    if sum(len(t.edges) for t in p.trees) < WORTH_IT:
        return False
    if p.collective in ROOTED and any(t.root != p.root for t in p.trees):
        return False
    table = EdgeTable(p.n, p.trees)
    along, against = p.collective in ALONG, p.collective in AGAINST
    return table.spanning() and table.fits(f.arcs, along=along, against=against)


def check_head(p: Packing, t: Topology) -> None:
    """Check what a packing is for: collective, root, ranks, links."""
    if p.collective not in COLLECTIVES:
        fail(p, f"collective is {p.collective!r}, expected one of {', '.join(COLLECTIVES)}")
    if p.n != t.n:
        fail(p, f"is for {p.n} ranks, but {t.name} has {t.n}")
    if p.collective in ROOTED and not 0 <= p.root < p.n:
        fail(p, f"root is {p.root}, expected 0..{p.n - 1}")
    if p.collective not in ROOTED and p.root != -1:
        fail(p, f"root is {p.root}, expected -1 for a collective without a root")
    if not p.trees:
        fail(p, "has no trees, expected at least one")
    unknown = [kind for kind in p.links.split("+") if kind and kind not in t.kinds()]
    if unknown:
        fail(p, f"uses {', '.join(unknown)} links, but {t.name} has {', '.join(t.kinds()) or 'none'}")


def check_tree(p: Packing, f: Fabric, where: str, tree: Tree, inner: frozenset[int] = frozenset()) -> None:
    """Check one tree, but for its load.

    Args:
        inner: switches that may be in it as ranks are.
    """
    if tree.weight <= 0:
        fail(p, f"{where} has weight {tree.weight}, expected more than 0")
    if not 0 <= tree.root < p.n or (p.collective in ROOTED and tree.root != p.root):
        fail(p, f"{where} has root {tree.root}, expected {p.root if p.collective in ROOTED else f'0..{p.n - 1}'}")
    if tree.up and (p.collective != "allreduce" or p.multicast):
        fail(p, f"{where} has another tree up, which is for an allreduce over links")
    along, against = p.collective in ALONG or p.collective == "barrier", p.collective in AGAINST and not tree.up
    hops = [(e.src, e.dst, e) for e in tree.edges]
    everybody = frozenset(range(p.n))
    able = everybody | inner
    reached = _check_edges(p, f, where, tree.root, hops, able, along=along, against=against)
    if p.collective in PATHS:
        if any(a.dst != b.src for a, b in pairwise(tree.edges)):
            fail(p, f"{where} must be a path from the root to one rank, got {[(e.src, e.dst) for e in tree.edges]}")
        reached = everybody
    elif tree.up:
        hops = [(e.dst, e.src, e) for e in reversed(tree.up)]
        reached &= _check_edges(p, f, f"{where} up", tree.root, hops, able, along=True, against=False)
    if missing := everybody - reached:
        fail(p, f"{where} does not reach ranks {sorted(missing)}, expected all {p.n}")


def _check_edges(
    p: Packing, f: Fabric, where: str, root: int, hops: list[tuple[int, int, Edge]], able: frozenset[int], *,
    along: bool, against: bool,
) -> frozenset[int]:  # fmt: skip
    """Check edges and the links that they use; returns what they join to the root.

    Args:
        hops: parent, child and edge, parents before children.
        able: the vertices that edges may join.
        along, against: the directions in which bytes cross the paths of the edges.
    """
    reached = {root}
    for parent, child, e in hops:
        if parent not in reached:
            fail(p, f"{where} edge {e.src}->{e.dst}: {parent} is not reached yet, expected parents before children")
        if child in reached or child not in able:
            fail(p, f"{where} edge {e.src}->{e.dst}: expected a rank of 0..{p.n - 1} that the tree does not have yet")
        reached.add(child)
        if len(e.path) < 2 or e.path[0] != e.src or e.path[-1] != e.dst:
            fail(p, f"{where} edge {e.src}->{e.dst}: path {e.path} must begin and end with the edge's ranks")
        if any(v < p.n for v in e.path[1:-1]) or len(set(e.path)) < len(e.path):
            fail(p, f"{where} edge {e.src}->{e.dst}: path {e.path} may cross switches alone, each once")
        for a, b in pairwise(e.path):
            for wanted, arc in ((along, (a, b)), (against, (b, a))):
                if wanted and arc not in f.arcs:
                    fail(p, f"{where} uses link {arc[0]}->{arc[1]}, which is not among the {p.links or 'no'} links")
    return frozenset(reached)


def check_sums(p: Packing) -> None:
    """Check that the weights sum to the rate, and that this is no more than the bound."""
    if p.n > 1 and p.collective == "alltoall":
        _check_pairs(p)
    else:
        _check_ranks(p)
    if p.rate > p.bound:
        fail(p, f"rate {p.rate} MB/s is above its bound {p.bound}")


def _check_ranks(p: Packing) -> None:
    """Check what the trees carry together: all of them, those of every root, or those to every rank."""
    sums: dict[int, Fraction] = {}
    by_end = p.collective in ("gather", "scatter")
    for tree in p.trees:
        at = tree.edges[-1].dst if by_end and tree.edges else tree.root
        sums[at] = sums.get(at, Fraction(0)) + tree.weight
    if p.n > 1 and (by_end or p.collective in PER_RANK):
        for rank in range(p.n):
            wanted = Fraction(0) if by_end and rank == p.root else p.rate / p.n
            if sums.get(rank, Fraction(0)) != wanted:
                kind = "paths to" if by_end else "trees rooted at"
                fail(p, f"{kind} rank {rank} carry {sums.get(rank, 0)} MB/s, expected rate / n = {wanted}")
    elif sum(sums.values()) != p.rate:
        fail(p, f"the weights sum to {sum(sums.values())} MB/s, but its rate is {p.rate}")


def _check_pairs(p: Packing) -> None:
    """Check what the paths of an alltoall carry from each rank to each other one."""
    sums = {(src, dst): Fraction(0) for src in range(p.n) for dst in range(p.n) if src != dst}
    for i, tree in enumerate(p.trees):
        if not tree.edges:
            fail(p, f"tree {i} must be a path from rank {tree.root} to another one, got no edge")
        sums[tree.root, tree.edges[-1].dst] += tree.weight
    for (src, dst), total in sums.items():
        if total != p.rate / p.n:
            fail(p, f"paths from rank {src} to rank {dst} carry {total} MB/s, expected rate / n = {p.rate / p.n}")


def check_links(p: Packing, f: Fabric) -> None:
    """Check that no link is overloaded."""
    for (u, v), load in sorted(link_loads(p.collective, p.trees).items()):
        if load > f.arcs[u, v]:
            users = [i for i, t in enumerate(p.trees) if any({u, v} <= set(e.path) for e in (*t.edges, *t.up))]
            fail(p, f"link {u}->{v} carries {load} MB/s of trees {users}, expected at most {f.arcs[u, v]}")


def _check_memory(p: Packing, t: Topology) -> None:
    memory = t.memory_of(t.nodes[0])
    if memory is None or len(t.nodes) > 1:
        fail(p, f"says that the ranks share one memory, but {t.name} has none that all share")
    for i, tree in enumerate(p.trees):
        for e in tree.edges:
            if e.path != (e.src, memory, e.dst):
                fail(p, f"tree {i} edge {e.src}->{e.dst}: path {e.path}, expected through the memory {memory}")
    rates = core_rates(t, memory)
    for rank, load in sorted(core_loads(p.collective, p.trees).items()):
        if load > rates[rank]:
            fail(p, f"the core of rank {rank} copies {load} MB/s, expected at most {rates[rank]}")


def _check_certificate(p: Packing, f: Fabric, c: Certificate) -> None:
    """Check that the certificate holds on this machine and implies the bound for this collective."""
    kinds = {"broadcast": "cut", "reduce": "cut", "allreduce": "partition", "barrier": "trivial"}
    kind = "trivial" if p.n == 1 else "copies" if p.multicast and p.collective != "barrier" else None
    kind = kind or kinds.get(p.collective, "ratio-cut")
    if kind not in ("trivial", "copies") and p.collective not in ("gather", "scatter") and c.kind == "prices":
        kind = "prices"
    if c.kind != kind:
        fail(p, f"certificate is a {c.kind}, expected a {kind}")
    if kind == "trivial":
        check_stated(p, Fraction(1), Fraction(1))
    elif kind == "copies":
        check_stated(p, *_copies(p, f.topology, c))
    elif kind == "prices":
        check_stated(p, *_prices(p, f, c))
    else:
        check_stated(p, *crossing(p, f, c))


def check_stated(p: Packing, capacity: Fraction, divisor: Fraction) -> None:
    """Check that a packing's certificate and bound are what the machine has."""
    c = p.certificate
    if (c.capacity_mbps, c.divisor) != (capacity, divisor):
        fail(
            p, f"certificate states {c.capacity_mbps} MB/s over {c.divisor}, the machine has {capacity} over {divisor}"
        )
    if p.bound != capacity / divisor:
        fail(p, f"bound is {p.bound} MB/s, but its certificate gives {capacity / divisor}")


def crossing(p: Packing, f: Fabric, c: Certificate) -> tuple[Fraction, Fraction]:
    """Capacity and divisor of a cut, ratio cut or partition, recomputed."""
    ranks = [frozenset(v for v in part if v < p.n) for part in c.parts]
    unknown = [v for part in c.parts for v in part if v not in f.vertices]
    if unknown or len(c.parts) < 2 or not all(ranks) or sorted(r for part in ranks for r in part) != list(range(p.n)):
        fail(p, f"certificate parts {c.parts} must part the {p.n} ranks into at least two classes, each not empty")
    if c.kind == "partition":
        return Fraction(capacity_leaving(f.arcs, c.parts), 2), Fraction(len(c.parts) - 1)
    if len(c.parts) != 2 or set(c.parts[0]) & set(c.parts[1]) or len(c.parts[0] + c.parts[1]) != len(f.vertices):
        fail(p, f"certificate parts {c.parts} must be the two sides of a cut through all vertices {f.vertices}")
    first, rest = c.parts
    at_first = p.root in (rest if p.collective == "reduce" else first)
    if p.collective in ROOTED and at_first:
        fail(p, f"certificate has root {p.root} on the wrong side: {name_of(f.topology, first)} are parts[0]")
    if c.kind == "cut":
        return Fraction(capacity_across(f.arcs, rest)), Fraction(1)
    outward = p.collective in ("allgather", "gather", "alltoall")
    blocks = len(ranks[0]) * (len(ranks[1]) if p.collective == "alltoall" else 1)
    return Fraction(capacity_across(f.arcs, first if outward else rest)), Fraction(blocks, p.n)


def _prices(p: Packing, f: Fabric, c: Certificate, depth: int = 0) -> tuple[Fraction, Fraction]:
    """The total price of all links and the cost of the cheapest trees, recomputed."""
    prices, capacity = check_prices(p, f, c, p.n)
    cost = cheapest(f, p.collective, p.root, prices, depth)
    if not cost:
        fail(p, "certificate has prices at which what the rate needs may cost nothing")
    return capacity, cost


def check_prices(p: Packing, f: Fabric, c: Certificate, most: int) -> tuple[dict[Arc, int], Fraction]:
    """The prices of a certificate, and what all links are worth together, if ``most`` of them can be summed."""
    prices: dict[Arc, int] = {part[:2]: part[2] for part in c.parts if len(part) == 3 and part[2] > 0}
    if not prices or len(prices) < len(c.parts) or any(arc not in f.arcs for arc in prices):
        fail(p, f"certificate parts {c.parts} must be links of the machine, each with one price above 0")
    capacity = sum(f.arcs[arc] * price for arc, price in prices.items())
    if capacity >= FAR or sum(prices.values()) * most >= FAR:
        fail(p, "certificate has prices that do not fit 58 bits")
    return prices, Fraction(capacity)


def _copies(p: Packing, t: Topology, c: Certificate) -> tuple[Fraction, Fraction]:
    """Capacity and passes of the named cores, recomputed."""
    group: Iterable[int] = c.parts[0] if len(c.parts) == 1 else ()
    ranks = sorted(set(group))
    memory = t.memory_of(t.nodes[0])
    if not ranks or memory is None or not all(0 <= r < p.n for r in ranks):
        fail(p, f"certificate parts {c.parts} must be one class of ranks 0..{p.n - 1}")
    passes = Fraction(len(ranks))  # each of these cores touches the whole vector once
    if p.collective == "allreduce":
        passes = Fraction(2 * len(ranks) - 1)
    elif p.collective == "alltoall":
        passes = Fraction(len(ranks) * 2 * (p.n - 1), p.n)
    elif p.collective in ("gather", "scatter"):
        passes = sum((Fraction(p.n - 1 if r == p.root else 1, p.n) for r in ranks), Fraction(0))
    rates = core_rates(t, memory)
    return Fraction(sum(rates[r] for r in ranks)), passes
