"""Packings for CPU ranks that share one memory: one rank writes a slot, and all read it.

Links do not matter for the cost: every operation passes the bytes through the core of the rank that does it, at that
rank's copy rate (:func:`~..graph.loads.core_loads`). The bounds count passes: each rank reads its own contribution
once, and every rank but the one that produced a result reads that result.

=============== ============================== ===================================================
broadcast       min B                          a star: one slot that all read
allgather       min B                          a star per rank
gather, scatter n B(root)/(n-1), n B(v)        the root's core handles every block that travels
alltoall        min n B/(2(n-1))               every core handles all blocks that it sends or receives
reduce          min B                          one chain; ``direct`` shares the work in parallel
reduce_scatter  min B                          one chain per rank; ``direct`` is n B / (2(n-1))
allreduce       min over S of B(S)/(2|S|-1)    n chains, exact for unequal cores; ``direct`` has stars
=============== ============================== ===================================================

``direct`` is the default although it makes more passes: its sums are in the order of the ranks, it has no pipeline to
fill, and no rank waits for the rank before it.
"""

from fractions import Fraction
from itertools import pairwise

from ...topology.model import Topology
from ..graph.fabric import core_rates, name_of, star
from ..graph.loads import core_loads, scaled
from ..tree import Certificate, Edge, Tree

CHAINED = ("reduce", "allreduce", "reduce_scatter")
WHY = {
    "chain": "chains in depth-first order, which cross a switch link at most once each way",
    "direct": "every rank works on its share and reads the others', in few steps and the order of the ranks",
}


def copies(topology: Topology, rates: dict[int, int], collective: str, root: int) -> Certificate:
    """The bound from how often each core must touch the vector; the bound is capacity / divisor."""
    n = topology.n
    slowest = min(range(n), key=lambda r: (rates[r], r))
    ascending = sorted(range(n), key=lambda r: (rates[r], r))
    if collective == "allreduce":
        groups = [(tuple(sorted(ascending[:k])), Fraction(2 * k - 1)) for k in range(1, n + 1)]
    elif collective in ("gather", "scatter"):
        groups = [((r,), Fraction(n - 1 if r == root else 1, n)) for r in range(n)]
    else:
        groups = [((slowest,), Fraction(2 * (n - 1), n) if collective == "alltoall" else Fraction(1))]
    return min((copies_certificate(topology, rates, *g) for g in groups), key=lambda c: c.bound)


def copies_certificate(
    topology: Topology, rates: dict[int, int], ranks: tuple[int, ...], passes: Fraction
) -> Certificate:
    """The certificate that these ranks together must pass over ``passes`` vectors."""
    capacity = sum(rates[r] for r in ranks)
    amount = "1 pass" if passes == 1 else f"{passes} passes"
    text = f"{name_of(topology, ranks)}: {amount} over the vector, {capacity / 1000:g} GB/s of copying"
    return Certificate("copies", (ranks,), Fraction(capacity), passes, text)


def share_memory(
    topology: Topology, memory: int, collective: str, root: int, method: str
) -> tuple[tuple[Tree, ...], Fraction, Certificate]:
    """Trees for one collective on one shared memory, their rate, and the bound; ``direct`` or ``chain``."""
    rates = core_rates(topology, memory)
    certificate = copies(topology, rates, collective, root)
    if method == "chain":
        bound = certificate.bound
        shapes = _chains(topology.n, memory, collective, root, bound, rates)
    else:
        shapes = _stars(topology.n, memory, collective, root)
    return *scaled(shapes, core_loads(collective, shapes), rates), certificate


def star_tree(n: int, memory: int) -> Tree:
    """The tree in which every rank is one hop from rank 0."""
    return _tree(0, star(n, 0), memory, Fraction(1))


def _stars(n: int, memory: int, collective: str, root: int) -> list[Tree]:
    """``direct``, for a rate of 1: every rank works on its own share and reads the others."""
    if collective == "broadcast":
        return [_tree(root, star(n, root), memory, Fraction(1))]
    if collective in ("gather", "scatter"):
        return [_tree(root, [(root, v)], memory, Fraction(1, n)) for v in range(n) if v != root]
    if collective == "alltoall":
        return [_tree(r, [(r, v)], memory, Fraction(1, n)) for r in range(n) for v in range(n) if v != r]
    if collective != "reduce":
        return [_tree(r, star(n, r), memory, Fraction(1, n)) for r in range(n)]
    if n == 2:
        return [_tree(root, star(n, root), memory, Fraction(1))]
    # Rank i reduces its share (n - 2 passes), the root takes part with a smaller one (n - 1 passes): equal work.
    own = Fraction(n - 3, n - 2)
    parts = {r: own if r == root else Fraction(1) for r in range(n)}
    trees = [
        _tree(root, star(n, root) if r == root else [(root, r), *star(n, r, leave_out=root)], memory, part)
        for r, part in parts.items()
    ]
    whole = sum(parts.values())
    return [Tree(t.root, t.edges, t.weight / whole) for t in trees if t.weight]


def _chains(n: int, memory: int, collective: str, root: int, bound: Fraction, rates: dict[int, int]) -> list[Tree]:
    """Chains that reduce from the far end on, for a rate of 1: every core passes over its bytes once."""
    if collective == "reduce":
        return [_rotation(n, root, memory, Fraction(1))]
    if collective == "reduce_scatter":
        return [_rotation(n, r, memory, Fraction(1, n)) for r in range(n)]
    # A core does 2 R - s passes if it produces the share s; what is left of R goes to everybody.
    shares = [max(Fraction(0), 2 * bound - rates[r]) for r in range(n)]
    spare = (bound - sum(shares)) / n
    return [_rotation(n, r, memory, (share + spare) / bound) for r, share in enumerate(shares) if share + spare]


def _rotation(n: int, root: int, memory: int, weight: Fraction) -> Tree:
    order = [(root + i) % n for i in range(n)]
    return _tree(root, list(pairwise(order)), memory, weight)


def _tree(root: int, arcs: list[tuple[int, int]], memory: int, weight: Fraction) -> Tree:
    return Tree(root, tuple(Edge(u, v, (u, memory, v)) for u, v in arcs), weight)
