"""Trees, packings and certificates as values (Blink section 3, TreeGen).

A packing is a set of weighted trees. What a tree may be depends on the
collective; edges always point away from the tree's root:

=============== ================================== ===========================================
collective      trees                              load that a tree of weight w puts on links
=============== ================================== ===========================================
broadcast       spanning, all from one root        w along each edge
reduce          spanning, all from one root        w against each edge
allreduce       spanning, any roots                w along and w against each edge; or w along each edge
                                                   of a tree from the root and of another one to it
allgather       spanning, each rank roots rate/n   w along each edge
reduce_scatter  spanning, each rank roots rate/n   w against each edge
gather          path root -> one source            w against each edge
scatter         path root -> one destination       w along each edge
alltoall        path source -> one destination     w along each edge
barrier         spanning, one tree                 none
=============== ================================== ===========================================

``rate`` and ``bound`` are bytes of the user's vector per second in MB/s, where
the vector is the largest buffer of the call (n blocks for allgather,
reduce_scatter, gather, scatter and alltoall). Weights are MB/s too, as exact fractions:

* broadcast, reduce, allreduce: the weights sum to ``rate``;
* allgather, reduce_scatter: the weights of one root's trees sum to ``rate / n``;
* gather, scatter: the weights of the paths to one rank sum to ``rate / n``; the
  root's own block does not travel;
* alltoall: the weights of the paths from each rank to each other one sum to ``rate / n``.

Scan and exscan have no trees of their own and go along those of every root's scatter (:func:`carried`), from each rank
to the next one. So does an alltoall of so many ranks that it is not packed: it is a scatter from every rank at once.

Pure data; nothing here searches. :mod:`.pack` makes packings, :mod:`.bounds.verify` proves them.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Literal

from ..errors import PlanError
from ..util.codec import Value

Collective = Literal[
    "broadcast", "reduce", "allreduce", "allgather", "reduce_scatter", "gather", "scatter", "barrier",
    "alltoall", "scan", "exscan", "custom",
]  # fmt: skip  # custom: one that an algorithm of the user's defines
COLLECTIVES: tuple[Collective, ...] = (
    "broadcast", "reduce", "allreduce", "allgather", "reduce_scatter", "gather", "scatter", "barrier",
    "alltoall",
)  # fmt: skip  # those that are packed
CARRIED: tuple[Collective, ...] = ("scan", "exscan")  # along the scatters' trees
MAY_BE_CARRIED: tuple[Collective, ...] = ("alltoall", *CARRIED)
ROOTED: frozenset[str] = frozenset({"broadcast", "reduce", "gather", "scatter"})
ALONG: frozenset[str] = frozenset({"broadcast", "allreduce", "allgather", "scatter", "alltoall"})  # from the root on
AGAINST: frozenset[str] = frozenset({"reduce", "allreduce", "reduce_scatter", "gather"})  # to the root
PER_RANK: frozenset[str] = frozenset({"allgather", "reduce_scatter"})  # every rank roots rate / n


class Edge(Value, frozen=True, gc=False):
    """A hop between two ranks.

    Attributes:
        src: the rank that sends.
        dst: the rank that receives.
        path: the vertices that it crosses, both ends included.
    """

    src: int
    dst: int
    path: tuple[int, ...]


def depth_of(root: int, arcs: Iterable[tuple[int, int]]) -> int:
    """Hops from ``root`` to the farthest rank, along arcs that come parents before children."""
    level = {root: 0}
    for u, v in arcs:
        level[v] = level[u] + 1
    return max(level.values())


class Tree(Value, frozen=True, omit_defaults=True):
    """Edges away from ``root``, parents before children.

    Partial results come to the root against them; in an AllReduce they may take another tree, ``up``, whose edges point
    to the root, children before parents.

    Attributes:
        root: the rank at its root.
        edges: n - 1 of them.
        weight: what it carries, in MB/s of the vector, an exact fraction; weight / rate is its share of the vector.
        up: other edges for the way to the root; empty where ``edges`` are used both ways.
    """

    root: int
    edges: tuple[Edge, ...]
    weight: Fraction
    up: tuple[Edge, ...] = ()

    @property
    def upward(self) -> tuple[Edge, ...]:
        """The edges on which partial results come to the root, children before parents."""
        return self.up or tuple(Edge(e.dst, e.src, e.path[::-1]) for e in reversed(self.edges))

    def paths(self, src: int, dst: int, *, up: bool) -> list[tuple[int, ...]]:
        """The ways on which bytes go from one rank to another: on an edge to the root and on one from it.

        Args:
            up: whether that to the root comes first.
        """
        down = [e.path for e in self.edges if (e.src, e.dst) == (src, dst)]
        if self.up:
            rising = [e.path for e in self.up if (e.src, e.dst) == (src, dst)]
        else:
            rising = [e.path[::-1] for e in self.edges if (e.dst, e.src) == (src, dst)]
        return [*rising, *down] if up else [*down, *rising]

    @property
    def depth(self) -> int:
        """Hops between the root and the farthest rank."""
        down = depth_of(self.root, ((e.src, e.dst) for e in self.edges))
        return max(down, depth_of(self.root, ((e.dst, e.src) for e in reversed(self.up))))

    def children(self, rank: int) -> tuple[int, ...]:
        """Ascending children of ``rank``."""
        return tuple(sorted(e.dst for e in self.edges if e.src == rank))


class Certificate(Value, frozen=True):
    """Why no trees have a higher rate, if the links have the rates that the machine has.

    ``kind`` is ``cut`` (bytes must enter ``parts[0]``), ``ratio-cut`` (blocks of ``parts[0]`` must
    leave it), ``partition`` (Tutte, Nash-Williams), ``prices`` (``parts`` are links with their price:
    src, dst, price), ``copies`` (each rank's core must touch the vector) or ``trivial`` (one rank).
    ``capacity_mbps`` is what crosses; the bound is ``capacity_mbps / divisor``.
    """

    kind: Literal["cut", "ratio-cut", "partition", "prices", "copies", "trivial"]
    parts: tuple[tuple[int, ...], ...]
    capacity_mbps: Fraction
    divisor: Fraction
    text: str

    @property
    def bound(self) -> Fraction:
        """The MB/s that it allows."""
        return self.capacity_mbps / self.divisor


def trivial(text: str) -> Certificate:
    """The certificate where no byte travels; its bound of 1 MB/s stands for "no limit"."""
    return Certificate("trivial", (), Fraction(1), Fraction(1), text)


class Packing(Value, frozen=True):
    """Weighted trees for one collective, with rate, bound and certificate.

    Attributes:
        collective: what it is for.
        root: of the collective; -1 for one without a root.
        n: how many ranks.
        scheme: what made it, as ``explain`` and ``BLINKMPI_ALGO`` name it.
        links: the kinds of links that it uses.
        trees: with weights whose sum is the rate.
        rate: MB/s of the vector that the trees carry, an exact fraction.
        bound: MB/s that no trees on these links exceed, an exact fraction.
        certificate: why that is a bound.
        multicast: whether the ranks share one memory: the way down is one slot that all ranks read, so a tree's shape
            matters on its way up alone.
        reason: why it was made so, for people.
    """

    collective: Collective
    root: int
    n: int
    scheme: str
    links: str
    trees: tuple[Tree, ...]
    rate: Fraction
    bound: Fraction
    certificate: Certificate
    multicast: bool = False
    reason: str = ""

    @property
    def optimal(self) -> bool:
        """Whether rate and bound are equal as exact rationals."""
        return self.rate == self.bound

    @property
    def depth(self) -> int:
        """Hops of the deepest tree."""
        return max((tree.depth for tree in self.trees), default=0)

    def route(self, tree: int, src: int, dst: int, *, partial: bool) -> tuple[int, ...]:
        """The vertices from ``src`` to ``dst`` on an edge of a tree: of partial results, one to the root.

        Raises:
            PlanError: if the tree has no such edge.
        """
        paths = self.trees[tree].paths(src, dst, up=partial) if tree < len(self.trees) else []
        if not paths:
            raise PlanError(f"the program sends from rank {src} to {dst} on tree {tree}, which has no such edge; "
                            "lower the call from this packing")  # fmt: skip
        return paths[0]

    def crossed(self) -> frozenset[int]:
        """All vertices that the trees' edges cross."""
        return frozenset(v for tree in self.trees for e in tree.edges for v in e.path)


def packed_as(collective: str) -> str:
    """The collective along whose trees another one goes; mostly itself."""
    return "scatter" if collective in CARRIED else collective


def carried(collective: Collective, scatters: Sequence[Packing]) -> Packing:
    """The trees of one of :data:`MAY_BE_CARRIED`.

    Args:
        scatters: a scatter's packing for each root, by root.

    Returns:
        For an alltoall all paths of all roots; for a scan one walk, the best path from each rank to the next one. No
        rate or bound is worked out: both are 0.
    """
    first, n = scatters[0], scatters[0].n
    paths = [tree for packing in scatters for tree in packing.trees if tree.edges]
    if collective != "alltoall":
        ways = [[t for t in paths if (t.root, t.edges[-1].dst) == (r, r + 1)] for r in range(n - 1)]
        best = [max(way, key=lambda t: (t.weight, -len(t.edges))) for way in ways]
        weight = min((t.weight for t in best), default=Fraction(1))
        paths = [Tree(0, tuple(edge for t in best for edge in t.edges), weight)]
    trees = tuple(paths) or (Tree(0, (), Fraction(1)),)
    text = f"no rate is worked out for {collective}, which goes along the trees of the scatters"
    proof = Certificate("trivial", (), Fraction(0), Fraction(1), text)
    links = "+".join(dict.fromkeys(kind for p in scatters for kind in p.links.split("+") if kind))
    return Packing(collective, -1, n, first.scheme, links, trees, Fraction(0), Fraction(0), proof, first.multicast)
