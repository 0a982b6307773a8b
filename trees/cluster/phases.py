"""A collective in three phases on several boxes, as a value with bound and proof; :mod:`.hierarchy` plans it.

No schedule in three phases is faster than ``bound``. With k boxes that send out_b and receive in_b MB/s at most:

* AllReduce, in the box: phases one and three of box b together are an AllReduce on its own links, so its bound holds.
* Each box holds a contribution that the others need and needs theirs: rate <= out_b, rate <= in_b.
* AllReduce, all boxes: look at one element and the messages that cross between boxes, in order of arrival. When some
  box first knows the sum, the messages so far join all k boxes: at least k - 1. No other box knows it yet, so each of
  the k - 1 others must still receive one. So 2 (k - 1) rate <= sum of out_b, and likewise of in_b.
* Broadcast: each box but the root's receives each element: rate <= in_b, (k - 1) rate <= sum of out_b, and
  rate <= out_b of the root's box. Edmonds' cut of the whole machine holds too. Reduce is the same in reverse.

Shares x_b with hub b need rate + (k - 2) x_b <= min(out_b, in_b) each; for suitable x_b that is all of the above, so
hubs reach these bounds wherever links are equal both ways and local phases and exchange use different links.
"""

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar, Literal, NoReturn

from ...errors import PlanError
from ...topology.model import Topology
from ...util.codec import Document, Value
from ..bounds.certify import certify
from ..bounds.verify import verify
from ..graph.fabric import Arc, fabric
from ..graph.loads import link_loads
from ..tree import Edge, Packing, Tree
from .network_paths import BoxView, box_views, local_loads, reach

FORMAT_VERSION = 1
PhasedCollective = Literal["allreduce", "broadcast", "reduce"]


class Share(Value, frozen=True):
    """A part of the vector: its root in every box, and the tree of boxes over which these roots exchange.

    ``edges`` point away from the hub's root (broadcast, reduce: from the root of the box that holds the call's root);
    AllReduce uses them in reverse, then forwards.
    """

    fraction: Fraction
    hub: int
    roots: tuple[int, ...]
    edges: tuple[Edge, ...]


class BoxPlan(Value, frozen=True):
    """The plan of one box. Packings are for ``topology.subset(ranks)``, whose vertices are ``vertices`` of the machine.

    Each share takes the next trees, in order, of the packing that serves its root; AllReduce has one for all roots.
    """

    node: int
    ranks: tuple[int, ...]
    vertices: tuple[int, ...]
    packings: tuple[Packing, ...]


class Hierarchy(Document, frozen=True):
    """The three phases of a collective on several boxes; rates are MB/s of the vector, ``limit`` names the bound."""

    KIND: ClassVar = "hierarchy"
    VERSION: ClassVar = FORMAT_VERSION
    collective: PhasedCollective
    root: int
    n: int
    boxes: tuple[BoxPlan, ...]
    shares: tuple[Share, ...]
    rate: Fraction
    bound: Fraction
    limit: str

    @property
    def optimal(self) -> bool:
        """Whether rate and bound are equal as exact rationals."""
        return self.rate == self.bound

    @property
    def gap(self) -> Fraction:
        """The fraction of the bound that is not reached."""
        return 1 - self.rate / self.bound

    def served(self, at: int) -> tuple[tuple[Tree, ...], ...]:
        """For each share the trees of box number ``at``, as ranks of the machine, with their MB/s at ``rate``.

        Raises:
            PlanError: if the trees of the box do not follow the shares.
        """
        box = self.boxes[at]
        todo = {p.root: list(p.trees[::-1]) for p in box.packings}
        keys = [self._packing(at, share) for share in self.shares]
        part: dict[int, Fraction] = {}
        for key, share in zip(keys, self.shares, strict=True):
            part[key] = part.get(key, Fraction(0)) + share.fraction
        found: list[tuple[Tree, ...]] = []
        for i, (key, share) in enumerate(zip(keys, self.shares, strict=True)):
            if key not in todo:
                self._fail(f"box {box.node} has no packing for root {share.roots[at]} of share {i}")
            packing = next(p for p in box.packings if p.root == key)
            factor = self.rate * part[key] / packing.rate
            trees, left = [], share.fraction * self.rate
            while left > 0 and todo[key]:
                tree = todo[key].pop()
                left -= tree.weight * factor
                wanted = self.root if self.root in box.ranks else share.roots[at]
                if box.vertices[tree.root] != wanted:
                    self._fail(f"box {box.node} share {i}: tree root {box.vertices[tree.root]}, expected {wanted}")
                trees.append(_placed(tree, box.vertices, tree.weight * factor))
            if left:
                self._fail(f"box {box.node} share {i}: its trees carry {-left} MB/s too much (less: too little)")
            found.append(tuple(trees))
        if any(todo.values()):
            self._fail(f"box {box.node} has trees that no share uses")
        return tuple(found)

    def exchange(self) -> tuple[Tree, ...]:
        """The second phase: for each share a tree over its roots, with its MB/s at ``rate``."""
        return tuple(Tree(s.edges[0].src, s.edges, s.fraction * self.rate) for s in self.shares)

    def _packing(self, at: int, share: Share) -> int:
        """Which packing of the box serves the share, by its root."""
        box = self.boxes[at]
        if self.collective == "allreduce":
            return -1
        return box.ranks.index(self.root if self.root in box.ranks else share.roots[at])

    def _fail(self, what: str) -> NoReturn:
        raise PlanError(f"{self.collective} hierarchy: {what}; plan again with blinkmpi.trees.hierarchy")


def pairs(k: int, hub: int, at_root: int | None) -> list[tuple[int, int]]:
    """The tree of boxes of a share, parents first."""
    first = [] if at_root is None or at_root == hub else [(at_root, hub)]
    return first + [(hub, b) for b in range(k) if b not in (hub, at_root)]


def bound_of(
    found: Iterable[BoxView], boxes: tuple[BoxPlan, ...], t: Topology, collective: PhasedCollective, root: int
) -> tuple[Fraction, str]:
    """The least of the bounds above, and its text."""
    found = list(found)
    k, both = len(found), collective == "allreduce"
    out = {s.node: reach(s, out=True) for s in found}
    into = {s.node: reach(s, out=False) for s in found}
    names: list[tuple[Fraction, str]] = []
    for s, box in zip(found, boxes, strict=True):
        sends = both or (root in s.ranks) == (collective == "broadcast")
        receives = both or not sends
        for mbps in ([out[s.node]] if sends else []) + ([into[s.node]] if receives else []):
            names.append((Fraction(mbps), f"node {s.node} reaches the network at {mbps / 1000:g} GB/s"))
        if both and len(s.ranks) > 1:
            names += [(p.bound, f"inside node {s.node}: {p.certificate.text}") for p in box.packings]
    for word, total in (("leave", sum(out.values())), ("enter", sum(into.values()))):
        crossings = (2 if both else 1) * (k - 1)
        text = f"{total / 1000:g} GB/s {word} all nodes, and each byte crosses between them {crossings} times"
        names.append((Fraction(total, crossings), text))
    if not both:
        c = certify(fabric(t, t.kinds()), collective, root)
        names.append((c.capacity_mbps / c.divisor, c.text))
    return min(names, key=lambda pair: pair[0])


def verify_hierarchy(h: Hierarchy, topology: Topology) -> Hierarchy:
    """Return ``h`` if it is valid for ``topology``: it reaches every rank, overloads no link, and its bound holds.

    Raises:
        PlanError: naming the box, share or link, what is there and what was expected.
    """
    found = box_views(topology)
    _check_head(h, topology, found)
    load: dict[Arc, Fraction] = {}
    for tree in h.exchange():
        for arc, mbps in link_loads(h.collective, [tree]).items():
            load[arc] = load.get(arc, Fraction(0)) + mbps
    work: dict[int, Fraction] = {r: Fraction(0) for s in found for r in s.cores}
    for at, (s, box) in enumerate(zip(found, h.boxes, strict=True)):
        if len({p.root for p in box.packings}) < len(box.packings):
            h._fail(f"box {box.node} has two packings for one root")
        for p in box.packings:
            if p.collective != h.collective:
                h._fail(f"box {box.node} has a packing for {p.collective}")
            verify(p, s.local)
        h.served(at)
        parts = [(p, sum((x.fraction for x in h.shares if h._packing(at, x) == p.root), Fraction(0)))
                 for p in box.packings]  # fmt: skip
        links, cores = local_loads(s, parts)
        for arc, mbps in links.items():
            load[arc] = load.get(arc, Fraction(0)) + mbps * h.rate
        for r in s.cores:
            work[r] = cores.get(r, Fraction(0)) * h.rate
    arcs = fabric(topology, topology.kinds()).arcs
    for (u, v), mbps in sorted(load.items()):
        for r in {u, v} & set(work):  # a CPU rank's access to the memory costs time of its core
            work[r] += mbps
        if not {u, v} & set(work) and mbps > arcs[u, v]:
            h._fail(f"link {u}->{v} carries {mbps} MB/s, expected at most {arcs[u, v]}")
    for s in found:
        for r, most in s.cores.items():
            if work[r] > most:
                h._fail(f"the core of rank {r} copies {work[r]} MB/s, expected at most {most}")
    bound = bound_of(found, h.boxes, topology, h.collective, h.root)
    if (h.bound, h.limit) != bound or not 0 < h.rate <= h.bound:
        h._fail(f"rate {h.rate}, bound {h.bound} MB/s ({h.limit}), expected a bound of {bound[0]} ({bound[1]})")
    return h


def _check_head(h: Hierarchy, t: Topology, found: tuple[BoxView, ...]) -> None:
    if h.n != t.n or [(b.node, b.ranks, b.vertices) for b in h.boxes] != [(s.node, s.ranks, s.vertices) for s in found]:
        h._fail(f"its boxes are not those of {t.name}")
    if (h.root == -1) != (h.collective == "allreduce") or not -1 <= h.root < h.n:
        h._fail(f"root is {h.root}, expected a rank, or -1 for allreduce")
    if sum(x.fraction for x in h.shares) != 1 or any(x.fraction <= 0 for x in h.shares):
        h._fail(f"the shares sum to {sum(x.fraction for x in h.shares)}, expected parts above 0 that sum to 1")
    nodes = [s.node for s in found]
    at_root = next((i for i, s in enumerate(found) if h.root in s.ranks), None)
    arcs = fabric(t, t.kinds()).arcs
    for i, x in enumerate(h.shares):
        if len(x.roots) != len(found) or any(r not in s.ranks for r, s in zip(x.roots, found, strict=False)):
            h._fail(f"share {i} has roots {x.roots}, expected one rank of each box")
        if x.hub not in nodes:
            h._fail(f"share {i} has hub {x.hub}, expected one of nodes {nodes}")
        wanted = [(x.roots[a], x.roots[b]) for a, b in pairs(len(found), nodes.index(x.hub), at_root)]
        if [(e.src, e.dst) for e in x.edges] != wanted:
            h._fail(f"share {i} exchanges over {[(e.src, e.dst) for e in x.edges]}, expected {wanted}")
        for e in x.edges:
            way, inner = list(pairwise(e.path)), e.path[1:-1]
            ends = (e.path[0], e.path[-1]) == (e.src, e.dst)
            if not ends or len(set(e.path)) < len(e.path) or min(inner, default=t.n) < t.n:
                h._fail(f"share {i} path {e.path} must lead from {e.src} to {e.dst} through switches, each once")
            if any((u, v) not in arcs or (v, u) not in arcs for u, v in way):
                h._fail(f"share {i} path {e.path} uses a link that {t.name} does not have both ways")


def _placed(tree: Tree, at: tuple[int, ...], weight: Fraction) -> Tree:
    """The tree in the vertex numbers of the machine."""
    edges = tuple(Edge(at[e.src], at[e.dst], tuple(at[v] for v in e.path)) for e in tree.edges)
    return Tree(at[tree.root], edges, weight)
