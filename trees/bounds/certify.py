"""The upper bound: the best rate that any trees can reach on a fabric, as an exact fraction with its certificate.

=============== ========================================================================================
broadcast       Edmonds 1973: every cut that separates the root from some rank must pass the whole vector
reduce          the same against the arcs
allgather       ratio cut: the blocks of S leave S, rate * |S| / n <= capacity out of S
reduce_scatter  the same against the arcs: partial sums of the blocks of S enter S
gather          ratio cut over the sets S without the root
scatter         the same against the arcs
allreduce       Tutte 1961, Nash-Williams 1961: k classes of ranks exchange at least k - 1 tree edges, each of
                which carries the vector once each way: 2 (k - 1) rate <= sum of capacities out of the classes
alltoall        S sends a block from each rank to each of the others, rate * |S| (n - |S|) / n <= capacity out of S; or
                equal prices on all links; method ``paths`` finds better prices where these are not the best bound
=============== ========================================================================================

Graphs of up to 18 vertices are solved over all subsets at once (:mod:`~..graph.cuts`), larger ones by maximum flows and
discrete Newton steps (:mod:`~..graph.cuts_by_flow`). :func:`quick` is the best of a few likely cuts: it is a true
bound, and where a packing meets it, the best one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from math import lcm
from typing import NamedTuple

import numpy as np

from ...topology.model import Topology
from ...util.text import plural
from ..deadline import NEVER, Deadline
from ..graph import cuts, cuts_by_flow
from ..graph.fabric import Arc, Fabric, capacity_across, capacity_leaving, leaving, name_of, subset_of
from ..tree import ROOTED, Certificate, trivial
from .prices import FAR, PATHS, cheapest

MOST_SHOWN = 64  # classes that a text names
AWAY = ("broadcast", "allgather", "gather")  # bounded by what leaves a side; the others by what enters it


class CutSide(NamedTuple):
    """A set of vertices, its number of ranks, and the MB/s that leave and enter it."""

    vertices: frozenset[int]
    ranks: int
    out: int
    into: int


Families = Sequence[Sequence[tuple[int, ...]]]


def certify(
    f: Fabric, collective: str, root: int, deadline: Deadline = NEVER, groups: Families = ()
) -> Certificate:  # fmt: skip
    """The best bound for ``collective``, which must be possible on this fabric: ``capacity_mbps / divisor``.

    Args:
        groups: of vertices, each family with all ranks, whose cuts may be the least ones: see :func:`quick`.
    """
    if collective == "barrier":
        return trivial("a barrier moves no bytes")
    if collective == "alltoall":
        return _all_pairs(f)
    if len(f.vertices) > cuts.MAX_VERTICES:
        return _by_flows(f, collective, root, deadline, groups)
    if collective == "allreduce":
        leaving = cuts.out_cuts(f.matrix()).reshape(-1, 1 << f.n)
        switch_side = leaving.argmin(axis=0)  # the best switches to join to each set of ranks
        _, classes = cuts.strength(leaving.min(axis=0))
        masks = [c | int(switch_side[c]) << f.n for c in classes]
        return partition_certificate(f, [subset_of(m, f.vertices) for m in masks])
    away = collective in AWAY
    cap = f.matrix() if away else np.ascontiguousarray(f.matrix().T)
    if collective in ("broadcast", "reduce"):
        return _cut(f, set(subset_of(cuts.min_cut(cap, f.n, root)[0], f.vertices)), away=away)
    mask, _ = cuts.ratio_cut(cap, f.n, root if collective in ("gather", "scatter") else None)
    return _ratio(f, set(subset_of(mask, f.vertices)), outward=away)


def _by_flows(f: Fabric, collective: str, root: int, deadline: Deadline, groups: Families) -> Certificate:
    """The best cut that flows find in time, or the likely one that they began with."""
    start = quick(f, collective, root, groups)
    if collective == "allreduce":
        return partition_certificate(f, cuts_by_flow.partition(f, list(start.parts), deadline))
    away = collective in AWAY
    if collective in ("broadcast", "reduce"):
        found = _cut(f, cuts_by_flow.min_cut_side(f, root, deadline, reverse=not away), away=away)
    else:
        only = root if collective in ("gather", "scatter") else None
        side = cuts_by_flow.ratio_side(f, only, set(start.parts[0]), deadline, reverse=not away)
        found = _ratio(f, side, outward=away)
    return min(found, start, key=lambda c: c.bound)


def quick(f: Fabric, collective: str, root: int, groups: Families = ()) -> Certificate:
    """The best of a few cuts or partitions: single ranks, nodes, groups, and what is left without one of them.

    Args:
        groups: families of sets of vertices; each family has every rank once.
    """
    if collective == "barrier":
        return trivial("a barrier moves no bytes")
    families = _likely(f, groups)
    if collective == "allreduce":
        return _quick_partition(f, families)
    away, rooted = collective in AWAY, collective in ROOTED
    whole_vector = collective in ("broadcast", "reduce")
    best: tuple[Fraction, bool, CutSide] | None = None
    for side in chain.from_iterable(families):
        for value, ranks, rest in (
            (side.out if away else side.into, side.ranks, False),
            (side.into if away else side.out, f.n - side.ranks, True),
        ):
            if rooted and ((root in side.vertices) != rest) != whole_vector:
                continue
            if not 0 < ranks < f.n:
                continue
            ratio = Fraction(value, 1 if whole_vector else ranks)
            if best is None or ratio < best[0]:
                best = ratio, rest, side
    assert best is not None
    some = set(f.vertices) - best[2].vertices if best[1] else set(best[2].vertices)
    return _cut(f, some, away=away) if whole_vector else _ratio(f, some, outward=away)


def _all_pairs(f: Fabric) -> Certificate:
    """The best of a few cuts for an alltoall, and of equal prices on all links."""
    sides = [
        (side, outward)
        for side in chain.from_iterable(_likely(f, ()))
        if 0 < side.ranks < f.n
        for outward in (True, False)
    ]
    side, outward = min(sides, key=lambda s: Fraction(s[0].out if s[1] else s[0].into, s[0].ranks * (f.n - s[0].ranks)))
    cut = _ratio(f, set(side.vertices) if outward else set(_rest(f, side)), outward=True, to_each=True)
    priced = prices_certificate(f, "alltoall", -1, dict.fromkeys(f.arcs, 1))
    assert priced is not None
    return min(cut, priced, key=lambda c: c.bound)


def _quick_partition(f: Fabric, families: list[list[CutSide]]) -> Certificate:
    values = [(Fraction(sum(s.out for s in some), 2 * len(some) - 2), some) for some in families if len(some) > 1]
    value, some = min(values, key=lambda pair: pair[0])
    least = min((s for s in chain.from_iterable(families) if s.ranks < f.n), key=lambda s: s.out + s.into)
    if Fraction(least.out + least.into, 2) < value:
        return partition_certificate(f, [tuple(sorted(least.vertices)), _rest(f, least)])
    return partition_certificate(f, [tuple(sorted(s.vertices)) for s in some])


def _rest(f: Fabric, side: CutSide) -> tuple[int, ...]:
    return tuple(v for v in f.vertices if v not in side.vertices)


def _likely(f: Fabric, groups: Families) -> list[list[CutSide]]:
    """Every rank alone, then the vertices of every node if there are several, then the groups."""
    found: list[list[CutSide]] = []
    ranks: Sequence[tuple[int, ...]] = [(r,) for r in range(f.n)]
    nodes = [[tuple(some) for some in f.by_node().values()]] if len(f.topology.nodes) > 1 else []
    for some in (ranks, *nodes, *groups):
        at = {v: i for i, group in enumerate(some) for v in group}
        out, into = [0] * len(some), [0] * len(some)
        for (u, v), c in f.arcs.items():
            i, j = at.get(u, -1), at.get(v, -1)
            if i != j:
                if i >= 0:
                    out[i] += c
                if j >= 0:
                    into[j] += c
        found.append(
            [CutSide(frozenset(g), sum(v < f.n for v in g), o, i) for g, o, i in zip(some, out, into, strict=True)]
        )
    return found


def _cut(f: Fabric, side: set[int], *, away: bool) -> Certificate:
    """Bytes leave the root's side (``away``) or enter it."""
    rest = set(f.vertices) - side
    source, entered = (side, rest) if away else (rest, side)
    capacity = Fraction(capacity_across(f.arcs, source))
    parts = (tuple(sorted(entered)), tuple(sorted(source)))
    text = f"{_sides(f.topology, parts)}: {_crossing(f, [source], Fraction(1))}"
    return Certificate("cut", parts, capacity, Fraction(1), text)


def _ratio(f: Fabric, side: set[int], *, outward: bool, to_each: bool = False) -> Certificate:
    """Blocks of one side leave it, or enter it; in an alltoall one ``to_each`` rank of the other side."""
    rest = set(f.vertices) - side
    parts = (tuple(sorted(side)), tuple(sorted(rest)))
    source = side if outward else rest
    blocks = sum(v < f.n for v in side)
    what = f"{blocks} of {f.n} blocks"
    if to_each:
        what = f"{blocks} x {f.n - blocks} blocks of 1/{f.n}"
        blocks *= f.n - blocks
    text = f"{_sides(f.topology, parts)}: {_crossing(f, [source], Fraction(1))} for {what}"
    return Certificate("ratio-cut", parts, Fraction(capacity_across(f.arcs, source)), Fraction(blocks, f.n), text)


def partition_certificate(f: Fabric, parts: Sequence[tuple[int, ...]]) -> Certificate:
    """The bound that these classes give: half of what leaves them, shared by ``len(parts) - 1`` tree edges."""
    capacity = Fraction(capacity_leaving(f.arcs, parts), 2)
    edges = "1 tree edge" if len(parts) == 2 else f"{len(parts) - 1} tree edges"
    text = f"{_sides(f.topology, parts)}: {_crossing(f, parts, Fraction(1, 2))} each way for {edges}"
    return Certificate("partition", tuple(parts), capacity, Fraction(len(parts) - 1), text)


def prices_certificate(
    f: Fabric, collective: str, root: int, prices: Mapping[Arc, int | Fraction], depth: int = 0
) -> Certificate | None:
    """The bound of prices of links; None where trees cost nothing at them, or as integers they do not fit 58 bits.

    Args:
        depth: the bound is for trees of at most so many hops; 0: for any.
    """
    scale = lcm(*(price.denominator for price in prices.values()))
    whole = {arc: int(price * scale) for arc, price in prices.items() if price}
    capacity = sum(f.arcs[arc] * price for arc, price in whole.items())
    if capacity >= FAR or sum(whole.values()) * f.n >= FAR:
        return None
    cost = cheapest(f, collective, root, whole, depth)
    if not cost:
        return None
    kind = "paths" if collective in PATHS else "trees"
    within = f" of at most {plural(depth, 'hop')}" if depth else ""
    text = (
        f"prices on {len(whole)} of {len(f.arcs)} links: together {capacity} MB/s, "
        f"and no {kind}{within} cost less than {cost} for each unit of the rate"
    )
    parts = tuple((u, v, price) for (u, v), price in sorted(whole.items()))
    return Certificate("prices", parts, Fraction(capacity), cost, text)


def best_of_prices(
    f: Fabric, collective: str, root: int, tries: Iterable[Mapping[Arc, int | Fraction]], rate: Fraction, depth: int
) -> Certificate | None:
    """The least bound that some prices give for trees of at most so many hops, or the first that equals ``rate``."""
    best: Certificate | None = None
    for prices in tries:
        found = prices_certificate(f, collective, root, prices, depth)
        if found is not None and (best is None or found.bound < best.bound):
            best = found
        if best is not None and best.bound == rate:
            break
    return best


def _sides(t: Topology, parts: Iterable[Iterable[int]]) -> str:
    """``GPU 1 | GPUs 4,5,6``: the ranks of each part, switches left out."""
    some = [[v for v in part if v < t.n] for part in parts]
    shown = some if len(some) <= MOST_SHOWN else some[: MOST_SHOWN // 4]
    words = [name_of(t, part) for part in shown]
    return " | ".join(words + [f"{len(some) - len(shown)} more"] * (len(shown) < len(some)))


def _crossing(f: Fabric, parts: Iterable[Iterable[int]], factor: Fraction) -> str:
    """``2 nvlink lanes, 50 GB/s``: what leaves ``parts``, times ``factor``."""
    times, lanes, mbps = leaving(parts), Counter[str](), 0
    for k in f.topology.links:
        if k.kind in f.kinds and (many := times(k.src, k.dst)):
            lanes[k.kind] += k.lanes * many
            mbps += k.mbps * many
    counts = {kind: count * factor for kind, count in sorted(lanes.items())}
    words = [f"{float(count):g} {kind} lane{'' if count == 1 else 's'}" for kind, count in counts.items()]
    return f"{' + '.join(words) or 'nothing'}, {float(mbps * factor) / 1000:g} GB/s"
