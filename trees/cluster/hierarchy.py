"""Method ``tiers``: spanning trees of clusters on networks of several tiers, and of clusters of very many boxes.

``tiers`` finds the groups of boxes, ``fan_out`` the trees of boxes over these, ``routes`` the ports and links of every
copy. Here these become trees of ranks: a tree of boxes serves one tree for each port, and inside a box a star hands on
what has entered. All trees of a problem have the same weight, which is what the fullest link of the machine allows.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain, count, pairwise
from operator import itemgetter

import msgspec

from ..graph.boxes import Box, tiered
from ..graph.fabric import Arc, Path
from ..graph.tiers import Group, tiers
from ..problem import MANY_RANKS, Problem, Solution
from ..tree import AGAINST, ALONG, PER_RANK, ROOTED, Edge, Tree
from .fan_out import BoxTree, FanOut
from .routes import NoRouteError, Routes

FLAT_RANKS = 1024  # beyond, on a network of one tier too
MOST_EDGES, LEAST_TREES = 3 << 19, 512  # of all trees, where their number is free; no fewer trees for all that
MOST_ARCS = 1 << 18  # of all trees of boxes, where each rank has its own; twice as many elsewhere
# How often every box is a centre, whether in turn, and of how many levels of direct links the emptiest sends first.
# What is best where boxes are alike comes first, then what is shallow.
ATTEMPTS = ((1, True, 0), (4, True, 0), (1, False, 2), (2, False, 5), (4, False, 8))
WELL, ENOUGH = Fraction(96, 100), Fraction(98, 100)  # of the bound, where no better trees are looked for
Rooted = tuple[int, tuple[Edge, ...]]  # a tree's root and edges


def fits(problem: Problem) -> bool:
    """Collectives of spanning trees on boxes in which every rank reaches every other one in one hop."""
    if problem.by_paths or problem.collective == "alltoall" or problem.n <= MANY_RANKS or not problem.boxes:
        return False
    return all(len(box.inner.hops) == box.m * (box.m - 1) for box in problem.boxes)


def fits_tiers(problem: Problem) -> bool:
    """The same where switches of the network are wired to switches."""
    return fits(problem) and tiered(problem.oriented)


def fits_many(problem: Problem) -> bool:
    """The same on a network of one tier where exact methods are too slow: so many ranks, with a tree from each."""
    many = problem.n > FLAT_RANKS and problem.collective not in ROOTED
    return many and fits(problem) and not tiered(problem.oriented)


def plan(problem: Problem) -> Solution | str:
    """Trees of equal weight."""
    best: Solution | None = None
    likely = problem.likely.bound
    top = tiers(problem.oriented, problem.boxes)
    for rounds, turns, levels in ATTEMPTS:
        hierarchy = _Hierarchy(problem, top, likely, turns=turns, levels=levels)
        if turns and (top.direct or not hierarchy.whole(rounds)):
            continue
        try:
            rated = hierarchy.trees(rounds)
        except NoRouteError:
            return "the network does not join all boxes"
        if best is None or rated[1] > best.rate:
            best = Solution(*rated)
        many = problem.collective in PER_RANK and not turns and 2 * rounds * problem.n**2 > MOST_EDGES
        last = problem.deadline.late() or many
        if last or best.rate >= (WELL if turns or problem.n > FLAT_RANKS else ENOUGH) * likely:
            break
    assert best is not None
    return best


class _Part(msgspec.Struct, gc=False):
    """Edges that trees have in common, how many of them do, and the edges that are counted here: others have a part."""

    edges: tuple[Edge, ...]
    own: tuple[Edge, ...]
    star: "_Part | None" = None
    uses: int = 0


class _Hierarchy:
    """The trees of one problem.

    Args:
        bound: MB/s that no trees exceed.
        turns: whether boxes are centres in turn; else every tree has a tree of boxes of its own.
        levels: as for :class:`.fan_out.FanOut`.
    """

    def __init__(self, problem: Problem, top: Group, bound: Fraction, *, turns: bool, levels: int) -> None:
        self.problem, self.boxes, self.turns = problem, problem.boxes, turns
        self.both = problem.collective in ALONG and problem.collective in AGAINST
        self.source: int | None = None
        if problem.collective in ROOTED:
            self.source = next(b for b, box in enumerate(self.boxes) if problem.root in box.vertices[: box.m])
        self.fan = FanOut(top, self.boxes, both=self.both, source=self.source, turns=turns, levels=levels)
        self.many = problem.collective in PER_RANK and problem.n * len(self.boxes) > MOST_ARCS
        self.routes = Routes(
            problem.oriented, self.boxes, self._entered, both=self.both, turns=turns, many=self.many
        )  # fmt: skip
        self.bound = bound
        self._parts: dict[tuple[int, ...], _Part] = {}
        self._ways: list[_Part] = []
        self._hubs = count()

    def trees(self, rounds: int) -> tuple[tuple[Tree, ...], Fraction]:
        """All trees, and their rate in MB/s: what the fullest link of the machine allows.

        Args:
            rounds: how often every box shall be a centre, where the number of trees is free.
        """
        if self.problem.collective in PER_RANK:
            made = sorted(self._from_all(1 if self.many else rounds), key=itemgetter(0))
        else:
            made = list(self._from_any(rounds))
        arcs, load = self.problem.oriented.arcs, dict[Arc, int]()
        for part in self._ways:
            if part.star:
                part.star.uses += part.uses
        for part in (*self._ways, *self._parts.values()):
            for edge in part.own if part.uses else ():
                for u, v in pairwise(edge.path):
                    load[u, v] = load.get((u, v), 0) + part.uses
                    if self.both:
                        load[v, u] = load.get((v, u), 0) + part.uses
        weight = min(Fraction(arcs[arc], copies) for arc, copies in load.items())
        return tuple(Tree(root, edges, weight) for root, edges in made), weight * len(made)

    def _from_all(self, each: int) -> Iterator[Rooted]:
        """So many trees from every rank."""
        alike = self.turns or self.many
        for b, box in ((b, box) for _ in range(each) for b, box in enumerate(self.boxes)):
            shape = self.fan.tree(b, b)
            for i in range(box.m):
                shape = shape if alike or not i else self.fan.tree(b, b)
                yield box.vertices[i], self._joined(self._star(b, i), shape, i)

    def _from_any(self, rounds: int) -> Iterator[Rooted]:
        """Trees from a root, or from wherever least was sent."""
        ports = self._ports_of_source()
        total = self._number(rounds) // len(ports) * len(ports)
        self.fan.reserve(total // len(ports) if self.turns else total)
        for number in range(0, total, len(ports) if self.turns else 1):
            shape = self.fan.tree(number // len(ports) if self.turns else number, self.source)
            for i in ports if self.turns else [ports[number % len(ports)]]:
                yield self._from_one(shape, i)
            if self.turns and self._comes_back(ports):
                yield self._there_and_back(shape)

    def _number(self, rounds: int) -> int:
        """How many trees there may be."""
        most = max(LEAST_TREES, min(MOST_EDGES // self.problem.n, 2 * MOST_ARCS // len(self.boxes)))
        return min(rounds * len(self.fan.others) * len(self._ports_of_source()), most)

    def whole(self, rounds: int) -> bool:
        """Whether every box is as often a centre as it shall be."""
        if self.problem.collective in PER_RANK:
            return rounds == 1 or rounds * self.problem.n**2 <= MOST_EDGES
        return self._number(rounds) == rounds * len(self.fan.others) * len(self._ports_of_source())

    def _ports_of_source(self) -> list[int]:
        """The numbers of the ports by which trees begin: not the root's own one, where the limit is inside its box.

        What the root hands to its own port would not cross the links to the others.
        """
        if self.source is None:
            return list(range(max(len(box.ports) for box in self.boxes)))
        box = self.boxes[self.source]
        others = [k for k, port in enumerate(box.ports) if port.rank != self.problem.root]
        enough = sum(box.ports[k].out for k in others) >= self.bound
        inside = max(box.inner.arcs.values(), default=0)
        return others if enough and inside <= self.bound else list(range(len(box.ports)))

    def _from_one(self, shape: BoxTree, number: int) -> Rooted:
        """A tree for the port of a number."""
        box, root = self.boxes[shape.root], self.problem.root
        if self.source is None:
            at = box.vertices.index(box.ports[self.routes.ports.first(shape.root, number)].rank)
            return box.vertices[at], self._joined(self._star(shape.root, at), shape, number)
        if box.m == 1:
            return root, self._joined(None, shape, number)
        at = box.vertices.index(root)
        hub = next(self._hubs) % (box.m - 1)
        return root, self._joined(self._through(shape.root, at, hub + (hub >= at)), shape, number)

    def _comes_back(self, ports: Sequence[int]) -> bool:
        """Whether trees begin at all ports but the root's own one, and each rank has one."""
        if self.source is None or not self.routes.ports.even:
            return False
        return len(ports) + 1 == len(self.boxes[self.source].ports) == self.boxes[self.source].m > 1

    def _there_and_back(self, shape: BoxTree) -> Rooted:
        """The tree by the root's own port, which comes back to each rank of its box over the network alone."""
        source, centre = shape.arcs[0]
        ports, root = self.boxes[source].ports, self.problem.root
        own = next(k for k, port in enumerate(ports) if port.rank == root)
        out, *others = self.routes.crossings(shape.arcs, own)
        back = [self.routes.crossings([(centre, source)], k)[0].own for k in range(len(ports)) if k != own]
        self._ways += (came := [_Part(edges, edges) for edges in back])
        for part in (out, *came, *others):
            part.uses += 1
        return root, tuple(chain.from_iterable(part.edges for part in (out, *came, *others)))

    def _joined(self, inside: _Part | None, shape: BoxTree, number: int) -> tuple[Edge, ...]:
        """The edges inside the first box, and those of all others."""
        if len(shape.arcs) < len(self.boxes) - 1:
            raise NoRouteError
        parts = self.routes.crossings(shape.arcs, number)
        parts = parts if inside is None else [inside, *parts]
        for part in parts:
            part.uses += 1
        return tuple(chain.from_iterable([part.edges for part in parts]))

    def _entered(self, edge: Edge, b: int) -> _Part:
        """An edge between two boxes, and the star by which the second one is filled."""
        star = self._star(b, self.boxes[b].vertices.index(edge.dst))
        self._ways.append(part := _Part((edge, *star.edges), (edge,), star))
        return part

    def _star(self, b: int, centre: int) -> _Part:
        """From one rank of a box to the others."""
        found = self._parts.get((b, centre))
        if found is None:
            box = self.boxes[b]
            ends = [(centre, v) for v in range(box.m) if v != centre]
            edges = tuple(_edge(box, box.inner.hops[end]) for end in ends)
            self._parts[b, centre] = found = _Part(edges, edges)
        return found

    def _through(self, b: int, root: int, hub: int) -> _Part:
        """From a rank of a box to another one, and from there to the others."""
        found = self._parts.get((b, root, hub))
        if found is None:
            box = self.boxes[b]
            star = (edge for edge in self._star(b, hub).edges if edge.dst != box.vertices[root])
            edges = (_edge(box, box.inner.hops[root, hub]), *star)
            self._parts[b, root, hub] = found = _Part(edges, edges)
        return found


def _edge(box: Box, path: Path) -> Edge:
    """An edge inside a box, in the numbers of the machine."""
    whole = tuple(box.vertices[v] for v in path)
    return Edge(whole[0], whole[-1], whole)
