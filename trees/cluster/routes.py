"""The routes between boxes on the links of the machine: from port to port, over switches of the network.

Of the shortest paths between two switches a copy takes the one whose fullest link is the emptiest. So spines share what
their links carry, equal or not; where very many copies go, they take paths in turn.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, pairwise
from typing import Generic, TypeVar

from ..graph.boxes import Box, outside
from ..graph.fabric import Arc, Fabric, Path
from ..tree import Edge
from .ports import Ports

GRAIN = 10**9  # costs of a copy are integers: this over the MB/s of a link
MOST_PATHS = 64  # between two switches that are kept
TRIED = 16  # of them, each time
FEW = 4  # of them that copies between two ports take in turn

Made = TypeVar("Made")


class NoRouteError(Exception):
    """The network does not join two switches."""


class Routes(Generic[Made]):
    """The copies that ports and links have carried.

    Args:
        f: links in the direction of the trees.
        make: what to keep of an edge between two boxes, and the box that it enters.
        both: trees are used both ways.
        turns: trees take the ports of their number where all ports are alike.
        many: so many trees that they take paths in turn, too, as sums are even then.
    """

    def __init__(
        self, f: Fabric, boxes: Sequence[Box], make: Callable[[Edge, int], Made], *,
        both: bool, turns: bool, many: bool,
    ) -> None:  # fmt: skip
        self.f, self.boxes, self.both, self.many = f, boxes, both, many
        self.ports = Ports(boxes, both=both, turns=turns)
        self._load = dict.fromkeys(f.arcs, 0)
        self._links: dict[Path, tuple[Arc, ...]] = {}
        self._turns: dict[tuple[int, int, int], Iterator[Made]] = {}
        self._cost = {arc: GRAIN // mbps for arc, mbps in f.arcs.items()}
        self._before: dict[int, dict[int, list[int]]] = {}
        self._paths: dict[Arc, list[Path]] = {}
        self._turn: dict[Arc, int] = {}
        self._make, self._known = make, dict[tuple[int, int, int, int, Path], Made]()

    def crossings(self, arcs: Sequence[Arc], number: int) -> list[Made]:
        """What is made of the edges on which copy ``number`` goes from box to box."""
        if self.many and self.ports.even:
            return [next(self._turns.get((a, b, number)) or self._in_turn(a, b, number)) for a, b in arcs]
        made = []
        for a, b in arcs:
            j, k = self.ports.between(a, b, number)
            up, down = self.boxes[a].ports[j].up[-1], self.boxes[b].ports[k].up[-1]
            made.append(self._made(a, j, b, k, (up,) if up == down else self._least_filled(up, down)))
        return made

    def _in_turn(self, a: int, b: int, number: int) -> Iterator[Made]:
        """The edges between the ports of a number, on one path after the other, again and again."""
        j, k = self.ports.between(a, b, number)
        up, down = self.boxes[a].ports[j].plane, self.boxes[b].ports[k].plane
        paths = [(up,)] if up == down else self._between(up, down)
        first = FEW * len(self._turns)
        found = cycle(self._made(a, j, b, k, paths[i % len(paths)]) for i in range(first, first + min(FEW, len(paths))))
        self._turns[a, b, number] = found
        return found

    def _made(self, a: int, j: int, b: int, k: int, between: Path) -> Made:
        """What is made of the edge from a port of a box to a port of another one, over these switches."""
        found = self._known.get((a, j, b, k, between))
        if found is None:
            up, down = self.boxes[a].ports[j], self.boxes[b].ports[k]
            edge = Edge(up.rank, down.rank, (*up.up[:-1], *between, *down.down[1:]))
            self._known[a, j, b, k, between] = found = self._make(edge, b)
        return found

    def _least_filled(self, start: int, end: int) -> Path:
        """The path between two switches that is filled least."""
        paths = self._between(start, end)
        turn = self._turn[start, end] = self._turn.get((start, end), 0) + 1
        load, cost = self._load, self._cost
        best, at = -1, paths[0]
        for i in range(turn, turn + min(TRIED, len(paths))):
            path = paths[i % len(paths)]
            full = 0
            for arc in self._arcs(path):
                if (one := (load[arc] + 1) * cost[arc]) > full:
                    full = one
            if best < 0 or full < best:
                best, at = full, path
        for u, v in self._arcs(at):
            load[u, v] += 1
            if self.both:
                load[v, u] += 1
        return at

    def _arcs(self, path: Path) -> tuple[Arc, ...]:
        """The links of a path."""
        found = self._links.get(path)
        if found is None:
            self._links[path] = found = tuple(pairwise(path))
        return found

    def _between(self, start: int, end: int) -> list[Path]:
        """Shortest paths between two switches of the network.

        Raises:
            NoRouteError: if there is none.
        """
        if (start, end) not in self._paths:
            self._paths[start, end] = list(islice(self._shortest(start, end), MOST_PATHS))
        return self._paths[start, end]

    def _shortest(self, start: int, end: int) -> Iterator[Path]:
        if start not in self._before:
            self._before[start] = self._search(start)
        before = self._before[start]
        if end not in before:
            raise NoRouteError
        todo: list[Path] = [(end,)]
        while todo:
            path = todo.pop()
            if path[0] == start:
                yield path
            todo += [(v, *path) for v in reversed(before[path[0]])]

    def _search(self, start: int) -> dict[int, list[int]]:
        """For every switch of the network those before it on shortest paths."""
        level, before, queue = {start: 0}, {start: list[int]()}, [start]
        for u in queue:
            for v in self.f.neighbours[u]:
                if v not in level and outside(self.f, v):
                    level[v], before[v] = level[u] + 1, []
                    queue.append(v)
                if level.get(v) == level[u] + 1:
                    before[v].append(u)
        return before
