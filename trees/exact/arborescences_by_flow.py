"""Method ``flows``: exact packings of arborescences into larger graphs, a maximum flow for each test (Lovasz 1976).

As in :mod:`.arborescences`, a tree may take the arc (u, v) with weight w while every set X that holds v, and neither u
nor the super-source, keeps enough for the remaining trees: with the tree's own arcs lowered by w, that much must flow
from u and the super-source to v. A test that fails yields a cut, and the cut gives the weight to try next; it is kept,
since it bounds that of other arcs, too, which then need no test. Nor do those that short paths prove.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..deadline import NEVER, Deadline
from ..graph import cuts_by_flow
from ..graph.cuts_by_flow import CutNetwork
from ..graph.fabric import Arc, Fabric, Ints, capacity_across
from ..graph.logical import LogicalGraph, WeightedTree, logical_graph, place, recentre
from ..problem import OUT_OF_TIME, Problem, Solution
from ..tree import PER_RANK
from .arborescences import MAX_RANKS
from .orientation import directed

MOST_RANKS, MOST_JOINED = 256, 1024  # of any fabric, and of one without switches, whose ranks have few neighbours
MOST_CUTS = 64  # that are kept


def fits(problem: Problem) -> bool:
    """All but paths, on graphs too large for :mod:`.edmonds`."""
    f = problem.oriented
    sized = MAX_RANKS < problem.n <= (MOST_JOINED if len(f.vertices) == f.n else MOST_RANKS)
    return sized and not problem.by_paths and f.flat


def plan(problem: Problem) -> Solution | str:
    """Trees that meet the bound, as many as there is time for, or why there are none."""
    f, collective, root, bound = problem.oriented, problem.collective, problem.root, problem.bound
    deadline = problem.deadline
    for rails in (False, True) if len(f.topology.nodes) > 1 else (False,):
        if deadline.late():
            return OUT_OF_TIME
        g = logical_graph(f, rails=rails)
        units = bound / g.mbps
        each = units / f.n if collective in PER_RANK else units
        cap = g.matrix() * each.denominator
        if int(cap.sum()) + units * each.denominator > cuts_by_flow.FLOW_LIMIT:
            continue
        both = collective == "allreduce"
        if both:
            way = _directed(f, g, cap, each.numerator, deadline)
        else:
            way = cap if _rate(f, g, collective, root, deadline) == bound else None
        if way is None:
            continue
        roots = range(f.n) if collective in PER_RANK else [f.n - 1 if both else root]
        grown = pack_arborescences(
            g.as_fabric(f), way, [each.numerator if r in roots else 0 for r in range(f.n)], deadline
        )
        trees = [recentre(t) for t in grown] if both else _alike(grown, roots)
        placed = place(trees, g, Fraction(1, each.denominator), both_ways=both)
        rate = sum((t.weight for t in placed), Fraction(0))
        return Solution(placed, rate, cut=rate < bound) if rate else OUT_OF_TIME
    return "switches that are split in closed form do not carry the bound"


def _alike(trees: list[WeightedTree], roots: Sequence[int]) -> list[WeightedTree]:
    """The trees, with equal weight from each root, where growing them took too long."""
    least = min(sum(t.weight for t in trees if t.root == r) for r in roots)
    rest, kept = dict.fromkeys(roots, least), list[WeightedTree]()
    for tree in trees:
        weight = min(tree.weight, rest[tree.root])
        rest[tree.root] -= weight
        if weight:
            kept.append(tree._replace(weight=weight))
    return kept


def _directed(f: Fabric, g: LogicalGraph, cap: Ints, weight: int, deadline: Deadline) -> Ints | None:
    """The capacities for trees that are used both ways, of this total weight; None if they do not fit."""
    return directed(g.as_fabric(f), cap, weight, deadline) if np.array_equal(cap, cap.T) else None


def _rate(f: Fabric, g: LogicalGraph, collective: str, root: int, deadline: Deadline) -> Fraction:
    """The best rate of the logical arcs, in MB/s."""
    logical = g.as_fabric(f)
    arcs = logical.arcs
    if collective in PER_RANK:
        side = cuts_by_flow.ratio_side(logical, None, {0}, deadline, reverse=False)
        return Fraction(capacity_across(arcs, side) * f.n, len(side)) * g.mbps
    return capacity_across(arcs, cuts_by_flow.min_cut_side(logical, root, deadline, reverse=False)) * g.mbps


class ResidualNetwork:
    """What is left of the arcs between ranks and of the super-source's arcs to the roots.

    Attributes:
        left: the capacities of all arcs: between ranks, from the super-source, and to a sink, which have none.
    """

    def __init__(self, f: Fabric, cap: Ints, supply: Sequence[int]) -> None:
        self.n, self.net = f.n, CutNetwork(f)
        self.tails, self.heads = self.net.ends.T
        self.first_supply = len(self.tails)
        self.left = np.concatenate([cap[self.tails, self.heads], np.array([*supply, *[0] * self.n], np.int64)])
        self.number = np.full(cap.shape, -1)
        self.number[self.tails, self.heads] = np.arange(self.first_supply)
        self.all_tails = np.concatenate([self.tails, np.full(self.n, self.net.source)])
        self.all_heads = np.concatenate([self.heads, np.arange(self.n)])
        self.cuts: deque[Cut] = deque(maxlen=MOST_CUTS)

    def arc(self, number: int) -> Arc:
        """The ranks at its ends."""
        return int(self.tails[number]), int(self.heads[number])

    def test(self, left: Ints, need: int, u: int, v: int) -> Ints | None:
        """None if ``need`` flows to ``v`` from ``u`` and the super-source, else the sink's side of the cut."""
        amounts = np.minimum(left, need).astype(np.int32)
        amounts[self.first_supply + u] = need
        value, cut = self.net.flow(amounts, self.net.source, v)
        if value >= need:
            return None
        outside = np.ones(self.net.size, bool)
        outside[[*cut()]] = False
        return outside

    def surely(self, left: Ints, need: int, u: int, v: int) -> bool:
        """Whether paths of at most two arcs between ranks bring ``need`` to ``v``, as :meth:`test` would find.

        They share no arc: those from ``u``, and from any root that could supply all, by way of each rank to ``v``.
        """
        cap = np.zeros((self.n, self.n), np.int64)
        cap[self.tails, self.heads] = left[: self.first_supply]
        supply = left[self.first_supply : self.first_supply + self.n].copy()
        supply[u] = need
        at_ranks = supply + cap[supply >= need].sum(0)
        return int(supply[v] + np.minimum(cap[:, v], at_ranks).sum()) >= need

    def keep_cut(self, side: Ints) -> "Cut":
        """Keep the cut with these vertices on the sink's side."""
        self.cuts.append(Cut(side, side[self.all_heads] & ~side[self.all_tails]))
        return self.cuts[-1]

    def limit(self, cut: "Cut", own: Ints, need: int) -> int:
        """The largest weight that the cut leaves to a tree with the arcs ``own`` and one more across it."""
        crossing = int(cut.arcs[own].sum())
        return (int(self.left[: len(cut.arcs)][cut.arcs].sum()) - need) // crossing if crossing else need


class Cut(NamedTuple):
    """Vertices on the sink's side of a cut, and the arcs that enter it, supplies among them."""

    side: Ints
    arcs: Ints


def pack_arborescences(f: Fabric, cap: Ints, supply: Sequence[int], deadline: Deadline = NEVER) -> list[WeightedTree]:
    """Pack trees of total weight ``supply[v]`` rooted at each rank v; feasible as in :mod:`.arborescences`.

    Fewer of them if the time is over, or will be before all are packed and another method waits for it.

    Args:
        f: between ranks alone; ``cap`` has capacities for its arcs.
    """
    net, roots, need = ResidualNetwork(f, cap, supply), list(supply), sum(supply)
    whole, since = need, time.thread_time()
    trees: list[WeightedTree] = []
    while need and not deadline.hopeless(Fraction(whole - need, whole), since):
        tree = _grow_one(net, roots, need, deadline)
        if tree is None:
            break
        for u, v in tree.arcs:
            net.left[net.number[u, v]] -= tree.weight
        net.left[net.first_supply + tree.root] -= tree.weight
        roots[tree.root] -= tree.weight
        need -= tree.weight
        trees.append(tree)
    return trees


def _grow_one(net: ResidualNetwork, roots: list[int], need: int, deadline: Deadline) -> WeightedTree | None:
    """One tree, shallow arcs first; it loses weight where no arc keeps it. None if the time is over."""
    root = max(range(net.n), key=lambda v: (roots[v], -v))
    weight, arcs, used = roots[root], list[Arc](), [net.first_supply + root]
    level = np.full(net.n, -1)
    level[root] = 0
    while (level < 0).any():
        if deadline.late():
            return None
        own = np.array(used, np.int64)
        most, best = 0, -1
        for i, room in _options(net, level, weight, own, need):
            if room > most:
                limit = _limit(net, own, min(weight, room), need, net.arc(i), most)
                most, best = (limit, i) if limit > most else (most, best)
            if most == weight:
                break
        assert most > 0
        weight, (u, v) = most, net.arc(best)
        level[v] = level[u] + 1
        arcs.append((u, v))
        used.append(best)
    return WeightedTree(root, tuple(arcs), weight)


def _options(net: ResidualNetwork, level: Ints, weight: int, own: Ints, need: int) -> Iterator[tuple[int, int]]:
    """The arcs that may go on from a tree, and what capacity and known cuts leave to them, in the order to try.

    Those that keep the weight come first, shallow ones before deep ones; of the others, those that keep the most.
    """
    joined, left = level >= 0, net.left[: net.first_supply]
    found = np.flatnonzero(joined[net.tails] & ~joined[net.heads] & (left > 0))
    room = left[found].copy()
    for cut in net.cuts:
        limit = net.limit(cut, own, need)
        if limit < weight:
            across = cut.arcs[found]
            room[across] = np.minimum(room[across], limit)
    narrow = room < weight
    order = np.lexsort((found, room, np.where(narrow, -room, level[net.tails[found]]), narrow))
    return zip(found[order].tolist(), room[order].tolist(), strict=True)


def _limit(net: ResidualNetwork, own: Ints, weight: int, need: int, arc: Arc, enough: int) -> int:
    """The largest weight up to ``weight`` with which the tree may take ``arc``; 0 if not above ``enough``."""
    while weight > enough:
        left = net.left.copy()
        left[own] -= weight
        if net.surely(left, need, *arc):
            return weight
        side = net.test(left, need, *arc)
        if side is None:
            return weight
        weight = net.limit(net.keep_cut(side), own, need)
    return 0
