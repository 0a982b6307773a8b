"""Rings as NCCL builds them, as a packing: the largest set of rings through all ranks in which no two share a lane.

A rooted collective sends along each ring from the root on; AllGather and ReduceScatter send each rank's share around.
AllReduce is a ReduceScatter and an AllGather on each ring, at n / (2 (n - 1)) of its rate. A tree that is used both
ways loads the two directions of a link alike, so it takes rings in pairs of opposite directions: the n paths that a
ring falls into without one of its hops load both directions of every hop with n - 1 shares, as the two rings do, and
take the same 2 (n - 1) steps. Where no ring of NVLinks joins the ranks NCCL uses PCIe, and so does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from math import gcd

import numpy as np

from ..errors import TopologyError
from .enumerate import integer_program
from .fabric import FAST, SLOW, Arc, Fabric, Path, fabric
from .load import link_loads, scaled
from .shapes import depth_first
from .task import Planned, Task
from .tree import PER_RANK, Edge, Tree

Ring = tuple[int, ...]
MAX_RINGS = 20_000
STEPS = 400_000
NODES = 20_000


def fits(task: Task) -> int:
    """Any collective of spanning trees."""
    return int(not task.by_paths)


def plan(task: Task) -> Planned:
    """Rings on the links of the task; on PCIe where there are none.

    Raises:
        TopologyError: if no ring joins the ranks on either.
    """
    f, both = task.oriented, task.collective == "allreduce"
    direct = all(u < f.n and v < f.n for u, v in f.arcs)
    if not direct:
        return _around(task, "one ring in depth-first order through the switches, as wide as the links")
    lane = lane_mbps(f)
    room = {arc: mbps // lane for arc, mbps in f.arcs.items()}
    found, exact = largest_set(f.n, room, both_ways=both)
    if found:
        trees = [
            t for ring, k in found.items() for t in cut_open(ring, _hops(ring), task.collective, task.root, k * lane)
        ]
        count = sum(found.values())
        most = "the most that share no lane" if exact else f"the most found among {MAX_RINGS} rings or {STEPS} steps"
        why = f"{count} two-way rings of {lane / 1000:g} GB/s" if both else f"{count} rings of {lane / 1000:g} GB/s"
        rate = sum((t.weight for t in trees), Fraction(0))
        return Planned(tuple(trees), rate, f"{why}, {most}{_lost(f, room, count, both)}")
    slow = fabric(f.topology, SLOW)
    if set(f.kinds) & set(FAST) and slow.arcs and slow.serves(task.collective, task.root):
        there = Task(slow, task.collective, task.root)
        return _around(there, f"no ring of {'+'.join(f.kinds)} joins the ranks, so one over PCIe")._replace(fabric=slow)
    raise TopologyError(
        f"{f.topology.name}: no ring joins its {f.n} ranks on {'+'.join(f.kinds)}, and it has no PCIe that does; "
        "take method 'exact'"
    )


def lane_mbps(f: Fabric) -> int:
    """What one ring carries: the rate of a lane (a common divisor, if lanes differ)."""
    lanes = [k.lane_mbps for k in f.topology.links if k.kind in f.kinds]
    return gcd(*lanes, *f.arcs.values())


def largest_set(n: int, room: Mapping[Arc, int], *, both_ways: bool) -> tuple[dict[Ring, int], bool]:
    """How often to take each ring so that as many as possible fit into ``room`` lanes, and whether that is proved."""
    rings, complete = all_rings(n, room, both_ways=both_ways)
    if not rings:
        return {}, complete
    arcs = sorted({min(a, a[::-1]) if both_ways else a for ring in rings for a in lanes_of(ring)})
    row = {arc: i for i, arc in enumerate(arcs)}
    uses = np.zeros((len(arcs), len(rings)))
    for j, ring in enumerate(rings):
        for arc in lanes_of(ring):
            uses[row[min(arc, arc[::-1]) if both_ways else arc], j] = 1
    thick = np.array([min(room[a] for a in lanes_of(ring)) for ring in rings], float)
    limit = np.array([room[arc] for arc in arcs], float)
    x, proved = integer_program(-np.ones(len(rings)), [(uses, -np.inf, limit)], thick, np.ones(len(rings)), NODES)
    if x is None:
        return {rings[0]: int(thick[0])}, False
    taken = {ring: round(float(k)) for ring, k in zip(rings, x, strict=True) if k > 0.5}
    return taken, complete and proved


def all_rings(n: int, room: Mapping[Arc, int], *, both_ways: bool) -> tuple[list[Ring], bool]:
    """Rings through all ranks from rank 0 on, and whether these are all; one of each pair of directions.

    Args:
        both_ways: leave out the ring that is another one backwards.
    """
    near: dict[int, list[int]] = {v: [] for v in range(n)}
    for (u, v), lanes in sorted(room.items()):
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


def _around(task: Task, why: str) -> Planned:
    """One ring in the order in which a depth-first walk meets the ranks: it crosses a switch link once each way."""
    f = task.oriented
    ring = tuple(depth_first(f, 0))
    hops = {(u, v): path for u in range(f.n) for v, path in f.hops_from(u).items()}
    missing = [arc for arc in lanes_of(ring) if arc not in hops]
    if missing:
        raise TopologyError(
            f"{f.topology.name}: no path through switches alone leads from rank {missing[0][0]} to {missing[0][1]}, "
            "which are neighbours on the ring; take method 'exact'"
        )
    trees = cut_open(ring, hops, task.collective, task.root, 1)
    wide, _ = scaled(trees, link_loads(task.collective, trees), task.fabric.arcs)
    return Planned(wide, sum((t.weight for t in wide), Fraction(0)), why)


def _lost(f: Fabric, room: Mapping[Arc, int], count: int, both: bool) -> str:
    """What rings that need not come in pairs would add."""
    if not both or f.n == 2:
        return ""
    one_way, exact = largest_set(f.n, room, both_ways=False)
    single = sum(one_way.values())
    if single <= 2 * count:
        return ""
    return f" (one way {single}{'' if exact else ' or more'} would fit, which trees used both ways cannot take)"
