"""Method ``cluster``: commodities between boxes and trees inside boxes, assembled to spanning trees of all ranks.

A commodity prefers one rail: the port of that number in every box. What does not fit there moves to ports with capacity
left. Inside each box it takes the next trees rooted where it enters. A commodity is cut wherever one of these changes,
so that every piece is one spanning tree of the whole cluster. All sizes are integers in one unit.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, chain
from math import lcm
from typing import TypeVar

from ..exact.arborescences import MAX_RANKS
from ..graph.boxes import Box, tiered
from ..problem import Problem, Solution
from ..tree import AGAINST, ALONG, ROOTED, Edge, Tree
from . import between_boxes, rails
from .between_boxes import Commodity
from .inside_boxes import BoxTrees, box_trees

Item = TypeVar("Item")
Pieces = list[tuple[int, int]]  # sizes, with the port of each


class PortAssignment:
    """The ports that every commodity takes in every box."""

    def __init__(
        self, boxes: Sequence[Box], commodities: Sequence[Commodity], sizes: list[int], unit: int, both: bool
    ) -> None:
        self.boxes, self.commodities, self.sizes = boxes, commodities, sizes
        self.moved: dict[tuple[int, int, int], Pieces] = {}
        self._widths = [len(box.ports) for box in boxes]
        self.ok = True
        if any(s.ports for s in commodities):
            self.entering = self._take_ports(unit)
            return
        leaving, self.entering = self._loads()
        for b, box in enumerate(boxes):
            into, out = [int(p.into * unit) for p in box.ports], [int(p.out * unit) for p in box.ports]
            if both:
                loads = [x + y for x, y in zip(leaving[b], self.entering[b], strict=True)]
                self._fit(b, loads, list(map(min, into, out)), (True, False))
            else:
                self._fit(b, list(self.entering[b]), into, (True,))
                self._fit(b, leaving[b], out, (False,))

    def ports_of(self, commodity: int, at: int, target: int) -> Pieces:
        """The ports of box ``at`` by which a commodity leaves for box ``target``, or enters if ``target`` is ``at``."""
        found = self.moved.get((commodity, at, target))
        return found or [(self.sizes[commodity], self.commodities[commodity].rail % self._widths[at])]

    def _take_ports(self, unit: int) -> list[list[int]]:
        """Give every commodity the ports that it brings; returns what enters by each port."""
        entering = [[0] * width for width in self._widths]
        for i, s in enumerate(self.commodities):
            for (a, b), pieces in s.ports:
                self.moved[i, a, b] = [(int(size * unit), leave) for size, leave, _ in pieces]
                self.moved[i, b, b] = [(int(size * unit), enter) for size, _, enter in pieces]
                for size, enter in self.moved[i, b, b]:
                    entering[b][enter] += size
        return entering

    def _loads(self) -> tuple[list[list[int]], list[list[int]]]:
        """The load of every port of every box, out and in, if every commodity keeps to its rail."""
        count = len(self.boxes)
        out = [[0] * len(box.ports) for box in self.boxes]
        into = [[0] * len(box.ports) for box in self.boxes]
        rails: dict[int, int] = {}
        own: dict[tuple[int, int], int] = {}
        for s, size in zip(self.commodities, self.sizes, strict=True):
            rails[s.rail] = rails.get(s.rail, 0) + size
            own[s.box, s.rail] = own.get((s.box, s.rail), 0) + size
            star = ((s.box, count - 1),) if s.hub == s.box else ((s.box, 1), (s.hub, count - 2))
            for a, copies in Counter(a for a, _ in s.tree).items() if s.tree else star:
                out[a][s.rail % len(out[a])] += size * copies
        for b, ports in enumerate(into):
            for rail, size in rails.items():
                ports[rail % len(ports)] += size - own.get((b, rail), 0)
        return out, into

    def _fit(self, b: int, load: list[int], room: list[int], directions: tuple[bool, ...]) -> None:
        """Move the last commodities of overloaded ports of box ``b`` to ports with capacity left.

        Args:
            directions: True for bytes that enter the box, False for bytes that leave it.
        """
        if all(used <= most for used, most in zip(load, room, strict=True)):
            return
        if len({p.plane for p in self.boxes[b].ports}) > 1:
            self.ok = False
            return
        for i, target in self._users(b, directions):
            k = self.commodities[i].rail % len(load)
            moving = min(self.sizes[i], load[k] - room[k])
            if moving <= 0:
                continue
            pieces = [(self.sizes[i] - moving, k)] if moving < self.sizes[i] else []
            load[k] -= moving
            while moving:
                free = max(range(len(load)), key=lambda j: (room[j] - load[j], -j))
                part = min(moving, room[free] - load[free])
                if part <= 0:
                    self.ok = False
                    return
                load[free] += part
                moving -= part
                pieces.append((part, free))
            self.moved[i, b, target] = pieces
            if target == b:
                self.entering[b][k] -= self.sizes[i]
                for part, j in pieces:
                    self.entering[b][j] += part

    def _users(self, b: int, directions: tuple[bool, ...]) -> Iterator[tuple[int, int]]:
        """Commodities, the last first, that enter box ``b`` (the target is ``b``) or leave it for a target."""
        for i in range(len(self.commodities) - 1, -1, -1):
            s = self.commodities[i]
            if True in directions and s.box != b:
                yield i, b
            if False in directions:
                yield from ((i, target) for a, target in s.arcs(len(self.boxes)) if a == b)


def fits(problem: Problem) -> bool:
    """Collectives of spanning trees on several boxes around a network of one tier."""
    return bool(problem.boxes) and not problem.by_paths and not tiered(problem.oriented)


def plan(problem: Problem) -> Solution | str:
    """Trees for a cluster, or why its ports or boxes are of a kind that this method cannot plan."""
    boxes, collective, root = problem.boxes, problem.collective, problem.root
    both = collective in ALONG and collective in AGAINST
    if both:
        found = between_boxes.both_ways(boxes, between_boxes.both_ways_rate(boxes))
    else:
        part = between_boxes.shares(boxes, collective, root)
        found = between_boxes.one_way(boxes, collective, root, part, between_boxes.one_way_rate(boxes, part))
    assembled = assemble(boxes, found, both=both)
    apart = len({p.plane for b in boxes for p in b.ports}) > 1
    if isinstance(assembled, str) and apart and collective in ROOTED and len({len(b.ports) for b in boxes}) == 1:
        source = next(b for b, box in enumerate(boxes) if root in box.vertices[: box.m])
        assembled = assemble(boxes, between_boxes.on_rails(boxes, source, root), both=both)
    if apart and (isinstance(assembled, str) or not problem.met(assembled[1])):
        if both:
            found = rails.both_ways(boxes, problem.deadline)
        else:
            found = (
                rails.from_root(boxes, root, problem.deadline)
                if collective in ROOTED
                else rails.from_all(boxes, part, problem.deadline)
            )
        other = assemble(boxes, found, both=both) if found else "two boxes have no plane of the network in common"
        if isinstance(assembled, str) or (not isinstance(other, str) and other[1] > assembled[1]):
            assembled = other
    return assembled if isinstance(assembled, str) else Solution(*assembled)


def assemble(
    boxes: Sequence[Box], commodities: Sequence[Commodity], *, both: bool
) -> tuple[tuple[Tree, ...], Fraction] | str:
    """Spanning trees for the commodities and their total in MB/s, or why there are none.

    All commodities are slowed down by one factor where the links inside a box cannot carry them.
    """
    unlike = len({tuple(p.plane for p in b.ports) for b in boxes}) > 1
    if unlike and len({p.plane for b in boxes for p in b.ports}) > 1 and not any(s.ports for s in commodities):
        return "the ports of the boxes lie in different planes of the network"
    if any(b.m > MAX_RANKS for b in boxes):
        return f"a box has more than {MAX_RANKS} ranks"
    room = {c for b in boxes for p in b.ports for c in (p.out, p.into)}
    sizes = {s.size for s in commodities} | {piece[0] for s in commodities for _, pieces in s.ports for piece in pieces}
    unit = lcm(*{c.denominator for c in room | sizes})
    ports = PortAssignment(boxes, commodities, [int(s.size * unit) for s in commodities], unit, both)
    if not ports.ok:
        return "what enters or leaves a box does not fit its ports, as planes of the network separate them"
    spread = box_trees(boxes, _entering(boxes, commodities, ports, unit), both=both)
    return _trees(boxes, commodities, ports, unit, spread), sum(
        (s.size for s in commodities), Fraction(0)
    ) * spread.factor


def _entering(
    boxes: Sequence[Box], commodities: Sequence[Commodity], ports: PortAssignment, unit: int
) -> list[tuple[Fraction, ...]]:
    """The MB/s that each rank of each box must spread inside it: its own commodities, and what enters by its ports."""
    found = [[0] * box.m for box in boxes]
    for b, box in enumerate(boxes):
        for k, at in enumerate(_ranks(box)):
            found[b][at] += ports.entering[b][k]
    for s, size in zip(commodities, ports.sizes, strict=True):
        found[s.box][boxes[s.box].vertices.index(s.root)] += size
    return [tuple(Fraction(x, unit) for x in supply) for supply in found]


def _ranks(box: Box) -> list[int]:
    """The rank of each port, in the numbers of the box."""
    return [box.vertices.index(p.rank) for p in box.ports]


def _trees(
    boxes: Sequence[Box], commodities: Sequence[Commodity], ports: PortAssignment, unit: int, spread: BoxTrees
) -> tuple[Tree, ...]:
    """Cut every commodity into trees."""
    factor = spread.factor  # all commodities are slowed down by it
    finer = lcm(unit * factor.denominator, *(w.denominator for w in spread.weights())) // unit
    stretch = int(finer * factor)
    spread.begin(unit * finer)
    ranks = [_ranks(box) for box in boxes]
    hops: dict[tuple[int, int, int, int], Edge] = {}
    trees: list[Tree] = []

    def crossing(a: int, j: int, b: int, k: int) -> Edge:
        out, into = boxes[a].ports[j], boxes[b].ports[k]
        hops[a, j, b, k] = hop = Edge(out.rank, into.rank, out.up + into.down[1:])
        return hop

    for i, s in enumerate(commodities):
        size = ports.sizes[i] * stretch
        # The steps of the tree, parents first: for each step its alternatives, with their sizes.
        steps = [spread.take(s.box, boxes[s.box].vertices.index(s.root), size)]
        for a, b in s.arcs(len(boxes)):
            enter = ports.ports_of(i, b, b)
            steps.append(
                [(part * stretch, (hops.get((a, j, b, k)) or crossing(a, j, b, k),))
                 for part, j, k in _both(ports.ports_of(i, a, b), enter)]
            )  # fmt: skip
            steps.append([one for part, k in enter for one in spread.take(b, ranks[b][k], part * stretch)])
        for part, edges in _common(steps, size):
            trees.append(Tree(s.root, tuple(edges), Fraction(part, unit * finer)))
    return tuple(trees)


def _both(leave: Pieces, enter: Pieces) -> Iterator[tuple[int, int, int]]:
    """Sizes over which both ports stay the same, with these ports."""
    if len(leave) == len(enter) == 1:
        yield enter[0][0], leave[0][1], enter[0][1]
        return
    for part, (j, k) in _common([[(size, (j,)) for size, j in leave], [(size, (k,)) for size, k in enter]], None):
        yield part, j, k


def _common(steps: list[list[tuple[int, tuple[Item, ...]]]], size: int | None) -> Iterator[tuple[int, list[Item]]]:
    """Cut all steps where one of them changes; each piece with its items in order."""
    if size is not None and all(len(step) == 1 for step in steps):
        yield size, list(chain.from_iterable(step[0][1] for step in steps))
        return
    ends = [list(accumulate(part for part, _ in step)) for step in steps]
    start = 0
    for end in sorted({e for some in ends for e in some}):
        items = [step[bisect_left(some, end)][1] for step, some in zip(steps, ends, strict=True)]
        yield end - start, list(chain.from_iterable(items))
        start = end
