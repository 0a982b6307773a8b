"""Exact cuts and partitions of graphs too large for :mod:`.cuts`: maximum flows and discrete Newton steps.

A ratio that is too large yields a cut (or partition) that proves it, and the ratio of that one is the next try
(Dinkelbach 1967). The partition problem runs the greedy algorithm of :func:`.cuts.truncate` with a flow for each of
its minima (Cunningham 1985). Flows are scipy's where the capacities fit its 32 bits, else :class:`.max_flow.MaxFlow`.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..deadline import Deadline
from .fabric import Fabric
from .max_flow import MaxFlow

FLOW_LIMIT = (1 << 31) - 1
Side = Callable[[], set[int]]  # the vertices on one side of a cut


class CutNetwork:
    """The arcs of a fabric between a super-source and a super-sink that are joined to every rank.

    ``f.vertices`` are numbered 0.. in their order; then come the source and the sink.
    """

    def __init__(self, f: Fabric, *, reverse: bool = False) -> None:
        at = {v: i for i, v in enumerate(f.vertices)}
        self.n, self.size = f.n, len(at) + 2
        self.source, self.sink = self.size - 2, self.size - 1
        ends = np.array([(at[u], at[v]) for u, v in f.arcs], np.int64).reshape(len(f.arcs), 2)
        self.ends = ends[:, ::-1] if reverse else ends
        self.cap = np.array([c // f.unit for c in f.arcs.values()], np.int64)
        ranks = np.arange(f.n)
        tails = np.concatenate([self.ends[:, 0], np.full(f.n, self.source), ranks])
        heads = np.concatenate([self.ends[:, 1], ranks, np.full(f.n, self.sink)])
        self.order = np.lexsort((heads, tails))
        self.heads, self.tails = heads[self.order].astype(np.int32), tails[self.order]
        self.starts = np.searchsorted(self.tails, np.arange(self.size + 1)).astype(np.int32)

    def run(self, scale: int, supply: Sequence[int], demand: Sequence[int], s: int, t: int) -> tuple[int, Side]:
        """The maximum flow from ``s`` to ``t``, and the source's side of its minimum cut, computed on demand.

        Args:
            scale: multiplies the capacities of the fabric.
            supply, demand: capacities from the super-source to each rank, and from each rank to the super-sink.
        """
        amounts = [c * scale for c in self.cap.tolist()] + [*supply, *demand]
        if sum(amounts) <= FLOW_LIMIT:
            return self.flow(np.array(amounts, np.int32), s, t)
        flow = MaxFlow(self.size)
        for u, v, i in zip(self.tails.tolist(), self.heads.tolist(), self.order.tolist(), strict=True):
            if amounts[i]:
                flow.arc(u, v, amounts[i])
        return flow.run(s, t), lambda: flow.source_side(s)

    def flow(self, amounts: NDArray[np.int32], s: int, t: int) -> tuple[int, Side]:
        """The same for the capacities of all arcs: the fabric's, those from the source, and those to the sink."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_flow

        graph = csr_array((amounts[self.order], self.heads, self.starts), shape=(self.size, self.size))
        found = maximum_flow(graph, s, t)
        return int(found.flow_value), lambda: _reached(graph - found.flow, s)

    def leaving(self, side: set[int]) -> int:
        """Units that leave a set of vertices of the fabric."""
        inside = np.zeros(self.size, bool)
        inside[sorted(side)] = True
        return int(self.cap[inside[self.ends[:, 0]] & ~inside[self.ends[:, 1]]].sum())


def min_cut_side(f: Fabric, root: int, deadline: Deadline, *, reverse: bool) -> set[int]:
    """The root's side of the minimum cut between it and any rank."""
    net = CutNetwork(f, reverse=reverse)
    nothing = [0] * f.n
    best, side = -1, set[int]()
    for sink in range(f.n):
        if sink != root and (best < 0 or not deadline.late()):
            value, cut = net.run(1, nothing, nothing, root, sink)
            if best < 0 or value < best:
                best, side = value, cut()
    return _vertices(f, side)


def ratio_side(f: Fabric, root: int | None, start: set[int], deadline: Deadline, *, reverse: bool) -> set[int]:
    """The set S, without some rank (or without ``root``), with the least capacity out of S for each rank in S.

    Args:
        start: the set of the first Newton step.
    """
    net = CutNetwork(f, reverse=reverse)
    at = {v: i for i, v in enumerate(f.vertices)}
    side = {at[v] for v in start}
    ratio = Fraction(net.leaving(side), sum(v < f.n for v in side))
    nothing = [0] * f.n
    for sink in range(f.n) if root is None else [root]:
        while root is not None or not deadline.late():  # paths need the exact value, which takes one sink
            supply = [ratio.numerator] * f.n
            value, cut = net.run(ratio.denominator, supply, nothing, net.source, sink)
            if value == f.n * ratio.numerator:
                break
            side = cut() - {net.source}
            ratio = Fraction(net.leaving(side), sum(v < f.n for v in side))
    return _vertices(f, side)


def partition(f: Fabric, start: list[tuple[int, ...]], deadline: Deadline) -> list[tuple[int, ...]]:
    """Classes of ranks, each with its best set of switches, with the least (capacity out) / (classes - 1).

    Args:
        start: the classes of the first Newton step.
    """
    net = CutNetwork(f)
    at = {v: i for i, v in enumerate(f.vertices)}
    classes = [{at[v] for v in part} for part in start]
    while not deadline.late():
        ratio = Fraction(sum(map(net.leaving, classes)), len(classes) - 1)
        values, tights = greedy(net, ratio.numerator, ratio.denominator, deadline)
        if not values or sum(values) + ratio.numerator >= 0:
            break
        # Merged classes may share switches; each is cut again for its own ranks.
        classes = [_tighten(net, {u for u in c if u < net.n}) for c in sorted(tights, key=min)]
    return [tuple(sorted(_vertices(f, side))) for side in classes]


def greedy(net: CutNetwork, less: int, scale: int, deadline: Deadline) -> tuple[list[int], list[set[int]]]:
    """The greedy of :func:`.cuts.truncate` for ``scale * leaving - less``: the largest y with y(X) at most that.

    Returns:
        y, whose every value is the largest that those before it allow, and the sets that are tight, merged; nothing
        if the time is over.
    """
    y: list[int] = []
    tights: list[set[int]] = []
    n = net.n
    most = int(net.cap.sum()) * scale + 1
    for v in range(n):
        if deadline.late():
            return [], []
        supply = [max(0, x) for x in y] + [0] * (n - v)
        demand = [max(0, -x) for x in y] + [0] + [most] * (n - v - 1)
        supply[v] = most + sum(supply)
        value, cut = net.run(scale, supply, demand, net.source, net.sink)
        side = cut() - {net.source}
        if v not in side:  # nothing but the arc to v was cut
            raise AssertionError("the source's side of a cut lost its rank")
        y.append(value - sum(supply[:v]) - less)
        ranks = {u for u in side if u < n}
        for other in [c for c in tights if not ranks.isdisjoint(c)]:
            tights.remove(other)
            side |= other
            ranks |= {u for u in other if u < n}
        tights.append(side)
    return y, tights


def _tighten(net: CutNetwork, ranks: set[int]) -> set[int]:
    """These ranks with the switches that minimise the capacity out of the set."""
    most = int(net.cap.sum()) + 1
    supply = [most if v in ranks else 0 for v in range(net.n)]
    demand = [0 if v in ranks else most for v in range(net.n)]
    return net.run(1, supply, demand, net.source, net.sink)[1]() - {net.source}


def _reached(rest: Any, start: int) -> set[int]:
    """The vertices to which a sparse graph leads from ``start``."""
    from scipy.sparse.csgraph import breadth_first_order

    rest.eliminate_zeros()
    return set(breadth_first_order(rest, start, return_predecessors=False).tolist())


def _vertices(f: Fabric, side: set[int]) -> set[int]:
    return {f.vertices[i] for i in side}
