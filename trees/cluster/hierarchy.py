"""Plan Blink's three phases (section 3.5): reduce in each box, exchange between boxes, broadcast in each box.

The vector is cut into shares. In every box a share has one root, to which the box's trees for it lead. The roots of a
share exchange over the network: one box is its hub, to which the others send their partial sums and which sends the
result back (broadcast: the hub forwards what the root's box sends; reduce: the same in reverse). Every box spreads its
roots over the paths to its network cards in proportion to their capacity, independently of the other boxes; shares are
the common refinement. All phases run at once on consecutive slabs, so their loads share the links.

The result with its bound and proof is in :mod:`.phases`.
"""

from bisect import bisect_left
from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate
from typing import get_args

import msgspec

from ...errors import ArgumentError, TopologyError
from ...topology.model import Topology
from ..pack import pack
from ..tree import Edge, Packing, Tree
from .inside_boxes import rerooted
from .network_paths import (
    BoxView,
    ExchangeLimit,
    NetworkPath,
    box_views,
    exchange_limit,
    fixed_paths_limit,
    local_loads,
    network_paths,
)
from .phases import BoxPlan, Hierarchy, PhasedCollective, Share, bound_of, pairs, verify_hierarchy

__all__ = ["BoxPlan", "Hierarchy", "Share", "hierarchy", "verify_hierarchy"]


def hierarchy(topology: Topology, *, collective: str = "allreduce", root: int = 0) -> Hierarchy:
    """Plan the three phases of ``collective`` (allreduce, broadcast or reduce) on the boxes of ``topology``.

    Raises:
        ArgumentError: for another collective or a root that is no rank.
        TopologyError: where the machine is not several boxes around one network.
    """
    names: tuple[PhasedCollective, ...] = get_args(PhasedCollective)
    name = next((c for c in names if c == collective), None)
    if name is None:
        raise ArgumentError(f"collective {collective!r} has no hierarchy; choose one of {', '.join(names)}")
    if not 0 <= root < topology.n:
        raise ArgumentError(f"root is {root}, expected a rank of 0..{topology.n - 1}; correct it")
    root = root if name != "allreduce" else -1
    plans = [_BoxPlanner(s, name, root) for s in box_views(topology)]
    rate, parts = _rate(plans, name)
    if not rate:
        raise TopologyError(f"{topology.name}: some node exchanges nothing both ways; give it links in both directions")
    fans = [plan.network_paths(rate) for plan in plans]
    at_root = next((i for i, plan in enumerate(plans) if root in plan.view.ranks), None)
    shares = [share for hub, part in enumerate(parts) if part for share in _shares(fans, plans, hub, at_root, part)]
    boxes = tuple(plan.local(i, shares) for i, plan in enumerate(plans))
    bound, limit = bound_of([plan.view for plan in plans], boxes, topology, name, root)
    plan = Hierarchy(name, root, topology.n, boxes, tuple(shares), rate, bound, limit)
    return verify_hierarchy(plan, topology)


class _BoxPlanner:
    """Plans one box: its packings with the parts that they serve, and its network paths if these are fixed."""

    def __init__(self, view: BoxView, collective: PhasedCollective, root: int) -> None:
        self.view, self.collective = view, collective
        self.fixed: tuple[NetworkPath, ...] | None = None
        if collective == "allreduce" or root in view.ranks:
            p = pack(view.local, collective, root=max(0, view.ranks.index(root)) if root in view.ranks else 0)
            if p.multicast and collective == "allreduce":  # cannot be rerooted: the trees' roots are the shares'
                memory = view.vertices[len(view.ranks)]
                self.fixed = tuple(
                    NetworkPath((view.ranks[r], memory, view.net), part / p.rate)
                    for r, part in sorted(_roots(p).items())
                )
            self.parts = [(p, Fraction(1))]
        else:
            self.fixed = network_paths(view, {}, Fraction(0))
            roots: dict[int, Fraction] = {}
            for path, part in self.fixed:
                roots[path[0]] = roots.get(path[0], Fraction(0)) + part
            self.parts = [(pack(view.local, collective, root=view.ranks.index(r)), f) for r, f in roots.items()]
        self.loads, self.cores = local_loads(view, self.parts)

    def most(self) -> list[Fraction]:
        """The rates at which a link or core of the box is full with the local phases alone."""
        rates = [self.view.arcs[arc] / load for arc, load in self.loads.items()]
        return rates + [self.view.cores[r] / load for r, load in self.cores.items()]

    def exchange_limit(self, rate: Fraction) -> ExchangeLimit:
        """The limit of the box's exchange near ``rate``."""
        if self.fixed is None and not self.view.cores:
            return exchange_limit(self.view, self.loads, rate)
        return fixed_paths_limit(self.view, self.network_paths(rate), self.loads, self.cores, rate)

    def network_paths(self, rate: Fraction) -> tuple[NetworkPath, ...]:
        """The paths to the network and their parts of the exchange."""
        return self.fixed or network_paths(self.view, self.loads, rate)

    def local(self, at: int, shares: list[Share]) -> BoxPlan:
        """The packings with their trees cut and rerooted to follow the shares."""
        view, packings = self.view, []
        for p, part in self.parts:
            todo = list(p.trees[::-1])
            mine = [s for s in shares if p.root < 0 or len(self.parts) == 1 or view.ranks[p.root] == s.roots[at]]
            trees: list[Tree] = []
            for share in mine:
                root, left = view.ranks.index(share.roots[at]), share.fraction / part * p.rate
                while left:
                    i = max(i for i, t in enumerate(todo) if not p.multicast or p.root >= 0 or t.root == root)
                    tree = todo.pop(i)
                    size = min(left, tree.weight)
                    left -= size
                    if size < tree.weight:
                        todo.insert(i, msgspec.structs.replace(tree, weight=tree.weight - size))
                    turn = p.root < 0 and tree.root != root
                    trees.append(Tree(root if turn else tree.root, rerooted(tree, root) if turn else tree.edges, size))
            packings.append(msgspec.structs.replace(p, trees=tuple(trees)))
        return BoxPlan(view.node, view.ranks, view.vertices, tuple(packings))


def _roots(p: Packing) -> dict[int, Fraction]:
    roots: dict[int, Fraction] = {}
    for tree in p.trees:
        roots[tree.root] = roots.get(tree.root, Fraction(0)) + tree.weight
    return roots


def _rate(plans: list[_BoxPlanner], collective: PhasedCollective) -> tuple[Fraction, list[Fraction]]:
    """The best rate of all phases together, by Newton steps on the limits of the boxes; and the part of each hub."""
    k = len(plans)
    crossings = (k - 1) * (2 if collective == "allreduce" else 1)
    full = [rate for plan in plans for rate in plan.most()]
    rate = min(full) if full else None
    while True:
        lines = [plan.exchange_limit(rate or Fraction(0)) for plan in plans]
        limits = [x.room / (1 + x.slope) for x in lines]
        limits.append(sum((x.room for x in lines), Fraction(0)) / (crossings + sum(x.slope for x in lines)))
        if rate is not None and min(limits) >= rate:
            break
        rate = min(limits)
    if k == 2:
        return rate, [Fraction(1, 2)] * 2 if collective == "allreduce" else _only(plans, 0)
    # The capacity of a hub besides its own copy; in a broadcast, only the box of the root also sends that copy.
    at_root = [plan.fixed is None or collective == "allreduce" for plan in plans]
    spare = [x.at(rate) - (rate if own else 0) for x, own in zip(lines, at_root, strict=True)]
    if collective != "allreduce":
        own = at_root.index(True)
        if spare[own] >= (k - 2) * rate:
            return rate, _only(plans, own)
    return rate, [x / sum(spare) for x in spare]


def _only(plans: list[_BoxPlanner], hub: int) -> list[Fraction]:
    return [Fraction(int(i == hub)) for i in range(len(plans))]


def _shares(
    fans: list[tuple[NetworkPath, ...]], plans: list[_BoxPlanner], hub: int, at_root: int | None, part: Fraction
) -> Iterable[Share]:
    """The shares of one hub, cut wherever some box goes on to its next path."""
    ends = [list(accumulate(way.part for way in fan)) for fan in fans]
    start = Fraction(0)
    for end in sorted({e for some in ends for e in some}):
        paths = [fan[bisect_left(some, end)].path for fan, some in zip(fans, ends, strict=True)]
        tree = pairs(len(plans), hub, at_root)
        edges = tuple(Edge(paths[a][0], paths[b][0], paths[a] + paths[b][-2::-1]) for a, b in tree)
        yield Share(part * (end - start), plans[hub].view.node, tuple(path[0] for path in paths), edges)
        start = end
