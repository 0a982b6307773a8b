"""Method ``rings``: rings as NCCL builds them, the largest set of Hamiltonian rings in which no two share a lane.

A rooted collective sends along each ring from the root on; AllGather and ReduceScatter send each rank's share around.
AllReduce is a ReduceScatter and an AllGather on each ring, at n / (2 (n - 1)) of its rate. A tree that is used both
ways loads the two directions of a link alike, so the packing takes rings in pairs of opposite directions. A pair
becomes n paths, each the ring without one of its hops: they load both directions of every hop with n - 1 shares, as the
two rings do, and take the same 2 (n - 1) steps. Where no ring of NVLinks joins the ranks, NCCL uses PCIe, and so does
this method. Across boxes every ring of a box goes on to the next box, entering at any of its ranks, so that all network
cards are used.
"""

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from math import gcd

import numpy as np

from ...errors import TopologyError
from ..exact.weights import DENOMINATOR, integer_program
from ..graph.fabric import FAST, SLOW, Arc, Fabric, Path, fabric
from ..graph.loads import link_loads, scaled
from ..patterns.chains import depth_first
from ..problem import Problem, Solution
from ..tree import PER_RANK, ROOTED, Edge, Tree

Ring = tuple[int, ...]
MAX_RANKS = 64
MAX_RINGS = 20_000
STEPS = 400_000
NODES = 20_000


def fits(problem: Problem) -> bool:
    """Any collective of spanning trees, up to the number of ranks where n paths for each ring are still of use."""
    return not problem.by_paths and problem.n <= MAX_RANKS


def plan(problem: Problem) -> Solution:
    """Rings on the links of the task; on PCIe where there are none.

    Raises:
        TopologyError: if no ring joins the ranks on either.
    """
    f, both = problem.oriented, problem.collective == "allreduce"
    direct = all(u < f.n and v < f.n for u, v in f.arcs)
    if not direct:
        return _around(problem, "rings in depth-first order through the switches, as wide as the links")
    lane = lane_mbps(f)
    capacity = {arc: mbps // lane for arc, mbps in f.arcs.items()}
    found, exact = largest_set(f.n, capacity, both_ways=both)
    if found:
        trees = [
            t
            for ring, k in found.items()
            for t in cut_open(ring, _hops(ring), problem.collective, problem.root, k * lane)
        ]
        count = sum(found.values())
        most = "the most that share no lane" if exact else f"the most found among {MAX_RINGS} rings or {STEPS} steps"
        why = f"{count} two-way rings of {lane / 1000:g} GB/s" if both else f"{count} rings of {lane / 1000:g} GB/s"
        rate = sum((t.weight for t in trees), Fraction(0))
        return Solution(tuple(trees), rate, f"{why}, {most}{_lost(f, capacity, count, both)}")
    slow = fabric(f.topology, SLOW)
    if set(f.kinds) & set(FAST) and slow.arcs and slow.serves(problem.collective, problem.root):
        there = problem.on(slow)
        return _around(
            there, f"no ring of {'+'.join(f.kinds)} joins the ranks, so over PCIe in depth-first order"
        )._replace(fabric=slow)
    raise TopologyError(
        f"{f.topology.name}: no ring joins its {f.n} ranks on {'+'.join(f.kinds)}, and it has no PCIe that does; "
        "take method 'exact'"
    )


def lane_mbps(f: Fabric) -> int:
    """The rate of one ring in MB/s: that of a lane, or the greatest common divisor where lanes differ."""
    lanes = [k.lane_mbps for k in f.topology.links if k.kind in f.kinds]
    return gcd(*lanes, *f.arcs.values())


def largest_set(n: int, capacity: Mapping[Arc, int], *, both_ways: bool) -> tuple[dict[Ring, int], bool]:
    """How often to take each ring so that as many as possible fit into these lanes, and whether that is proved."""
    rings, complete = all_rings(n, capacity, both_ways=both_ways)
    if not rings:
        return {}, complete
    arcs = sorted({min(a, a[::-1]) if both_ways else a for ring in rings for a in lanes_of(ring)})
    row = {arc: i for i, arc in enumerate(arcs)}
    uses = np.zeros((len(arcs), len(rings)))
    for j, ring in enumerate(rings):
        for arc in lanes_of(ring):
            uses[row[min(arc, arc[::-1]) if both_ways else arc], j] = 1
    bottleneck = np.array([min(capacity[a] for a in lanes_of(ring)) for ring in rings], float)
    limit = np.array([capacity[arc] for arc in arcs], float)
    x, proved = integer_program(-np.ones(len(rings)), [(uses, -np.inf, limit)], bottleneck, np.ones(len(rings)), NODES)
    if x is None:
        return {rings[0]: int(bottleneck[0])}, False
    taken = {ring: round(float(k)) for ring, k in zip(rings, x, strict=True) if k > 0.5}
    return taken, complete and proved


def all_rings(n: int, capacity: Mapping[Arc, int], *, both_ways: bool) -> tuple[list[Ring], bool]:
    """Rings through all ranks from rank 0 on, and whether these are all; one of each pair of directions.

    Args:
        both_ways: leave out rings that are the reverse of another one.
    """
    near: dict[int, list[int]] = {v: [] for v in range(n)}
    for (u, v), lanes in sorted(capacity.items()):
        if lanes:
            near[u].append(v)
    rings: list[Ring] = []
    stack: list[Ring] = [(0,)]
    steps = 0
    while stack:
        steps += 1
        if steps > STEPS or len(rings) >= MAX_RINGS:
            return rings, False
        way = stack.pop()
        if len(way) < n:
            stack += [(*way, v) for v in reversed(near[way[-1]]) if v not in way]
        elif 0 in near[way[-1]] and not (both_ways and n > 2 and way[1] > way[-1]):
            rings.append(way)
    return rings, True


def lanes_of(ring: Ring) -> list[Arc]:
    """The arcs around a ring."""
    return list(pairwise((*ring, ring[0])))


def cut_open(ring: Ring, hops: Mapping[Arc, Path], collective: str, root: int, mbps: Fraction | int) -> list[Tree]:
    """A ring of this rate as paths: from the root, or from every rank with its share."""
    n = len(ring)
    if collective in ("broadcast", "reduce"):
        return [_path(ring, ring.index(root), hops, Fraction(mbps))]
    shares = 2 if n == 2 and collective not in PER_RANK else n - 1  # paths that cross one hop
    return [_path(ring, ring.index(r), hops, Fraction(mbps) / shares) for r in range(n)]


def _path(ring: Ring, start: int, hops: Mapping[Arc, Path], weight: Fraction) -> Tree:
    order = ring[start:] + ring[:start]
    return Tree(order[0], tuple(Edge(u, v, hops[u, v]) for u, v in pairwise(order)), weight)


def _hops(ring: Ring) -> dict[Arc, Path]:
    return {arc: arc for arc in lanes_of(ring)}


def _around(problem: Problem, why: str) -> Solution:
    """Rings through switches and from box to box, with the best shares.

    Raises:
        TopologyError: if two neighbours have no path through switches alone.
    """
    f = problem.oriented
    hops = f.hops
    every = _through_boxes(f, both_ways=problem.collective == "allreduce")
    rings = [ring for ring in every if all(arc in hops for arc in lanes_of(ring))]
    if not rings:
        u, v = next(arc for arc in lanes_of(every[0]) if arc not in hops)
        raise TopologyError(
            f"{f.topology.name}: no path through switches alone leads from rank {u} to {v}, "
            "which are neighbours on the ring; take method 'exact'"
        )
    shares = _best_shares(problem, rings, hops)
    trees = [t for ring, k in shares.items() for t in cut_open(ring, hops, problem.collective, problem.root, k)]
    wide, _ = scaled(trees, link_loads(problem.collective, trees), problem.fabric.arcs)
    rate = sum((t.weight for t in wide), Fraction(0))
    return Solution(wide, rate, f"{why}: {len(shares)} of {len(rings)} ways" if len(rings) > 1 else why)


def _through_boxes(f: Fabric, *, both_ways: bool) -> list[Ring]:
    """Rings that visit box after box, by every ring of a box's own links, entering at every rank.

    A box without such a ring, and a machine of one box, is crossed in depth-first order.
    """
    order, t = depth_first(f, 0), f.topology
    boxes = [[r for r in order if t.devices[r].node == node] for node in t.nodes]
    if len(boxes) == 1:
        return [tuple(order)]
    ways = [_inside(f, box, both_ways=both_ways) for box in boxes]
    rings: dict[Ring, None] = {}
    for k in range(max(map(len, ways))):
        for turn in range(max(map(len, boxes))):
            chosen = [way[k % len(way)] for way in ways]
            rings[tuple(r for w in chosen for r in w[turn % len(w) :] + w[: turn % len(w)])] = None
    return list(rings)


def _inside(f: Fabric, box: list[int], *, both_ways: bool) -> list[Ring]:
    """The largest set of rings on the direct links of a box, else its depth-first order."""
    lane = lane_mbps(f)
    capacity = {(i, j): f.arcs[u, v] // lane for i, u in enumerate(box) for j, v in enumerate(box) if (u, v) in f.arcs}
    found, _ = largest_set(len(box), capacity, both_ways=both_ways) if capacity else ({}, True)
    return [tuple(box[i] for i in ring) for ring in found] or [tuple(box)]


def _best_shares(problem: Problem, rings: list[Ring], hops: Mapping[Arc, Path]) -> dict[Ring, Fraction]:
    """The share of each ring; the caller scales the shares to the links."""
    from scipy.optimize import linprog

    if len(rings) == 1:
        return {rings[0]: Fraction(1)}
    caps = problem.oriented.arcs
    row = {arc: i for i, arc in enumerate(caps)}
    uses = np.zeros((len(caps), len(rings)))
    for k, ring in enumerate(rings):
        rooted = problem.collective in ROOTED
        start = ring.index(problem.root) if rooted else 0
        arcs = lanes_of(ring[start:] + ring[:start])
        for arc in arcs[:-1] if rooted else arcs:
            for step in pairwise(hops[arc]):
                uses[row[step], k] += 1
                if problem.collective == "allreduce":
                    uses[row[step[::-1]], k] += 1
    unit = max(caps.values())
    solved = linprog(-np.ones(len(rings)), A_ub=uses, b_ub=np.array(list(caps.values())) / unit, method="highs-ds")
    shares = {
        ring: Fraction(float(x)).limit_denominator(DENOMINATOR)
        for ring, x in zip(rings, np.asarray(solved.x), strict=True)
    }
    return {ring: x for ring, x in shares.items() if x}


def _lost(f: Fabric, capacity: Mapping[Arc, int], count: int, both: bool) -> str:
    """The gain of one-way rings that need not come in pairs, as a remark."""
    if not both or f.n == 2:
        return ""
    one_way, exact = largest_set(f.n, capacity, both_ways=False)
    single = sum(one_way.values())
    if single <= 2 * count:
        return ""
    return f" (one way {single}{'' if exact else ' or more'} would fit, which trees used both ways cannot take)"
