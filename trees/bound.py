"""The best rate that any trees can reach on a fabric, as an exact fraction with its certificate.

=============== ========================================================================================
broadcast       Edmonds 1973: every cut that parts the root from some rank lets the whole vector through
reduce          the same against the arcs
allgather       ratio cut: the blocks of S leave S, rate * |S| / n <= capacity out of S
reduce_scatter  the same against the arcs: partial sums of the blocks of S enter S
gather          ratio cut over the sets S without the root
scatter         the same against the arcs
allreduce       Tutte 1961, Nash-Williams 1961: k classes of ranks exchange at least k - 1 tree edges, each of
                which carries the vector once each way: 2 (k - 1) rate <= sum of capacities out of the classes
=============== ========================================================================================

Graphs of up to 18 vertices are solved over all subsets at once (:mod:`.cuts`), larger ones by maximum flows and
discrete Newton steps. For AllReduce a larger graph gets the best of a few partitions: a true bound, maybe not tight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from ..topology.model import Topology
from . import cuts
from .fabric import Fabric, Ints, capacity_across, name_of, subset_of
from .flow import Flow
from .tree import Certificate


def trivial(text: str) -> Certificate:
    """The certificate where no byte travels; its bound of 1 MB/s stands for "no limit"."""
    return Certificate("trivial", (), Fraction(1), Fraction(1), text)


def certify(f: Fabric, collective: str, root: int) -> Certificate:
    """The bound for ``collective`` on this fabric; it must serve the collective.

    The bound is ``capacity_mbps / divisor`` of the result.
    """
    if collective == "barrier":
        return trivial("a barrier moves no bytes")
    if collective == "allreduce":
        return _partition(f)
    away = collective in ("broadcast", "allgather", "gather")
    cap = f.matrix() if away else np.ascontiguousarray(f.matrix().T)
    if collective in ("broadcast", "reduce"):
        side = _min_cut(cap, f, root)
        entered = set(f.vertices) - side if away else side
        return _cut(f, entered)
    side = _ratio_cut(cap, f, root if collective in ("gather", "scatter") else None)
    return _ratio(f, side, outward=away)


def _min_cut(cap: Ints, f: Fabric, root: int) -> set[int]:
    """The side of the root of the least cut that some rank is beyond."""
    if len(cap) <= cuts.MAX_VERTICES:
        mask, _ = cuts.min_cut(cap, f.n, root)
        return set(subset_of(mask, f.vertices))
    best, side = -1, set[int]()
    for sink in range(f.n):
        if sink != root:
            flow = _network(cap, 1, 0)
            value = flow.run(root, sink)
            if best < 0 or value < best:
                best, side = value, flow.source_side(root)
    return {f.vertices[i] for i in side}


def _ratio_cut(cap: Ints, f: Fabric, root: int | None) -> set[int]:
    """The set S, without some rank (or without ``root``), with the least capacity out of S per rank in S."""
    if len(cap) <= cuts.MAX_VERTICES:
        mask, _ = cuts.ratio_cut(cap, f.n, root)
        return set(subset_of(mask, f.vertices))
    n, source = f.n, len(cap)
    best: Fraction | None = None
    side: set[int] = set()
    for sink in range(n) if root is None else [root]:
        entering = Fraction(int(cap[:, sink].sum()), n - 1)
        if best is None or entering < best:
            best, side = entering, set(range(source)) - {sink}
        while True:  # discrete Newton: a cut that is too small gives the next, smaller ratio
            flow = _network(cap, best.denominator, 1)
            for v in range(n):
                flow.arc(source, v, best.numerator)
            if flow.run(source, sink) == n * best.numerator:
                break
            side = flow.source_side(source) - {source}
            best = Fraction(_leaving(cap, side), sum(v < n for v in side))
    return {f.vertices[i] for i in side}


def _network(cap: Ints, scale: int, spare: int) -> Flow:
    flow = Flow(len(cap) + spare)
    for u, v in np.argwhere(cap).tolist():
        flow.arc(u, v, int(cap[u, v]) * scale)
    return flow


def _leaving(cap: Ints, side: Iterable[int]) -> int:
    mask = np.zeros(len(cap), bool)
    mask[list(side)] = True
    return int(cap[mask][:, ~mask].sum())


def _partition(f: Fabric) -> Certificate:
    """The least sum of capacities out of the classes over 2 (classes - 1), over all partitions if that is cheap."""
    if len(f.vertices) <= cuts.MAX_VERTICES:
        leaving = cuts.out_cuts(f.matrix()).reshape(-1, 1 << f.n)
        switch_side = leaving.argmin(axis=0)  # the switches that are best taken along with each set of ranks
        _, classes = cuts.strength(leaving.min(axis=0))
        masks = [c | int(switch_side[c]) << f.n for c in classes]
        return partition_certificate(f, [subset_of(m, f.vertices) for m in masks])
    ranks, everything = range(f.n), set(f.vertices)
    candidates: list[list[tuple[int, ...]]] = [[(r,) for r in ranks]]
    for forward in (f, f.backwards):
        side = _min_cut(forward.matrix(), f, 0)
        candidates.append([tuple(sorted(side)), tuple(sorted(everything - side))])
    nodes = f.topology.nodes
    if len(nodes) > 1:
        candidates.append([_of_node(f, node) for node in nodes])
    return min((partition_certificate(f, parts) for parts in candidates), key=lambda c: c.capacity_mbps / c.divisor)


def _of_node(f: Fabric, node: int) -> tuple[int, ...]:
    t = f.topology
    inside = (v for v in f.vertices if (t.devices[v].node if v < t.n else t.switches[v - t.n].node) == node)
    return tuple(v for v in inside if v < t.n or t.switches[v - t.n].kind != "net")


def _cut(f: Fabric, entered: set[int]) -> Certificate:
    rest = set(f.vertices) - entered
    capacity = Fraction(capacity_across(f.arcs, rest))
    parts = (tuple(sorted(entered)), tuple(sorted(rest)))
    text = f"{_sides(f.topology, parts)}: {_crossing(f, [rest], Fraction(1))}"
    return Certificate("cut", parts, capacity, Fraction(1), text)


def _ratio(f: Fabric, side: set[int], *, outward: bool) -> Certificate:
    rest = set(f.vertices) - side
    parts = (tuple(sorted(side)), tuple(sorted(rest)))
    source = side if outward else rest
    blocks = sum(v < f.n for v in side)
    text = f"{_sides(f.topology, parts)}: {_crossing(f, [source], Fraction(1))} for {blocks} of {f.n} blocks"
    return Certificate("ratio-cut", parts, Fraction(capacity_across(f.arcs, source)), Fraction(blocks, f.n), text)


def partition_certificate(f: Fabric, parts: Sequence[tuple[int, ...]]) -> Certificate:
    """The bound that these classes give: half of what leaves them, shared by ``len(parts) - 1`` tree edges."""
    capacity = Fraction(sum(capacity_across(f.arcs, part) for part in parts), 2)
    edges = "1 tree edge" if len(parts) == 2 else f"{len(parts) - 1} tree edges"
    text = f"{_sides(f.topology, parts)}: {_crossing(f, parts, Fraction(1, 2))} each way for {edges}"
    return Certificate("partition", tuple(parts), capacity, Fraction(len(parts) - 1), text)


def _sides(t: Topology, parts: Iterable[Iterable[int]]) -> str:
    """``GPU 1 | GPUs 4,5,6``: the ranks of each part, switches left out."""
    return " | ".join(name_of(t, [v for v in part if v < t.n]) for part in parts)


def _crossing(f: Fabric, parts: Iterable[Iterable[int]], factor: Fraction) -> str:
    """``2 nvlink lanes, 50 GB/s``: what leaves ``parts``, times ``factor``."""
    lanes: dict[str, Fraction] = {}
    mbps = Fraction(0)
    for part in parts:
        side = set(part)
        for k in f.topology.links:
            if k.kind in f.kinds and k.src in side and k.dst not in side:
                lanes[k.kind] = lanes.get(k.kind, Fraction(0)) + k.lanes * factor
                mbps += k.mbps * factor
    words = [f"{float(count):g} {kind} lane{'' if count == 1 else 's'}" for kind, count in sorted(lanes.items())]
    return f"{' + '.join(words) or 'nothing'}, {float(mbps) / 1000:g} GB/s"
