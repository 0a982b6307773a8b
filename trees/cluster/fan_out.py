"""Trees of boxes over groups of groups: every tree enters each group once, and the groups take turns to send.

A tree that is connected in every group crosses no group's links more often than it must. What is left to choose is who
sends to the others of its group: a tree has a centre, which sends to a box of every other group around it, and these
are the centres of their own groups. Centres are taken where least is sent so far for what the links carry, group by
group from above (list scheduling, Graham 1966): in the limit all groups are filled alike, whatever their links.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ..graph.boxes import Box
from ..graph.tiers import Group

GRAIN = 10**9  # costs of a copy are integers: this over the MB/s of a link
BoxArc = tuple[int, int]


class BoxTree(NamedTuple):
    """The boxes that a tree joins, parents before children."""

    root: int
    arcs: tuple[BoxArc, ...]


class FanOut:
    """What every group has sent.

    Args:
        both: trees are used both ways, so that what is received counts as what is sent.
        source: the box in which all trees begin, or None; it sends each to a centre, and no more.
        turns: boxes are centres in turn, at the same place of every group, as is best where groups are alike.
        levels: of boxes on a network of direct links, among which the emptiest sends first; more of them fill links
            more evenly, by deeper trees.
    """

    def __init__(
        self, top: Group, boxes: Sequence[Box], *, both: bool, source: int | None, turns: bool, levels: int
    ) -> None:  # fmt: skip
        self.top, self.both, self.turns, self.source, self.levels = top, both, turns, source, levels
        self.number: dict[tuple[int, ...], int] = {}
        self.around: list[list[int]] = [[] for _ in boxes]  # the groups around a box, the outermost first, without all
        self.own = [0] * len(boxes)
        self.place: list[tuple[int, ...]] = [()] * len(boxes)  # the numbers of these groups in the next outer ones
        room: list[tuple[int, int]] = []
        self._count(top, boxes, (), room)
        self.across = [GRAIN // max(1, crossing) for crossing, _ in room]  # what a copy costs that leaves the group
        self.ports = [GRAIN // max(1, ports) for _, ports in room]  # what a copy costs that one of its boxes sends
        self.left, self.sent = [0] * len(room), [0] * len(room)
        self.crossed: dict[tuple[int, int, int], int] = {}  # links between two groups, where some are slower
        self.unlike = len(_widths(top)) > 1
        outer = None if source is None else self.place[source][0]
        self.others = [b for b in range(len(boxes)) if outer is None or self.place[b][0] != outer]

    def reserve(self, count: int) -> None:
        """So many trees will leave the source, and the groups around it."""
        if self.source is not None:
            self.sent[self.own[self.source]] += count
            for g in self.around[self.source]:
                self.sent[g] += count
                self.left[g] += count

    def tree(self, number: int, root: int | None) -> BoxTree:
        """The next tree, from a box or from wherever least was sent."""
        turn = self.others[number % len(self.others)]
        if self.turns:
            best = turn if root is None or root == self.source else root
        else:
            best = self._centre(self.top, self.place[turn], self.source)
        if root is None or best == root or (root != self.source and self._full(root) <= self._full(best)):
            centre = best if root is None else root
            return BoxTree(centre, tuple(self._from(centre)))
        if root != self.source:
            self._send(root, best)
        return BoxTree(root, ((root, best), *(arc for arc in self._from(best) if arc[1] != root)))

    def _count(self, group: Group, boxes: Sequence[Box], place: tuple[int, ...], room: list[tuple[int, int]]) -> int:
        """Number the groups, outer ones first; returns the MB/s that the ports of this one send."""
        number = self.number[group.boxes] = len(room)
        room.append((0, 0))
        for b in group.boxes:
            self.place[b] = place
            if not group.children:
                self.own[b] = number
            elif number:
                self.around[b].append(number)
        if group.children:
            ports = sum(self._count(child, boxes, (*place, i), room) for i, child in enumerate(group.children))
        else:
            box = boxes[group.boxes[0]]
            ports = int(min(box.out, box.into) if self.both else box.out)
        room[number] = (min(group.out, group.into) if self.both else group.out, ports)
        return ports

    def _fill(self, g: int, more: int) -> int:
        """How full a group's links are with so many more copies; what a box sends leaves it."""
        sent = (self.sent[g] + more) * self.ports[g]
        left = (self.left[g] + more) * self.across[g]
        return sent if sent > left else left

    def _full(self, box: int) -> int:
        """How full the fullest group around a box would be if it were a centre."""
        group, worst, more = self.top, 0, 0
        for g, i in zip((*self.around[box], self.own[box]), self.place[box], strict=True):
            more += len(group.near[i]) if group.near else len(group.children) - 1
            worst = max(worst, self._fill(g, more))
            group = group.children[i]
        return worst

    def _centre(self, group: Group, place: Sequence[int], without: int | None) -> int:
        """The box of a group that may send most; where several may, that at this place, or the next one."""
        for depth in count():
            if not group.children:
                return group.boxes[0]
            many = len(group.children)
            first = place[depth] if depth < len(place) else 0
            order = [group.children[(first + i) % many] for i in range(many)]
            some = [child for child in order if child.boxes != (without,)]
            if self.turns and self.source not in group.boxes:
                group = some[0]
            else:
                group = min(some, key=lambda c: self._fill(self.number[c.boxes], many - 1))
        raise AssertionError

    def _from(self, centre: int) -> list[BoxArc]:
        """Send from a centre to all boxes but the source."""
        arcs: list[BoxArc] = []
        self._spread(self.top, 0, centre, arcs)
        return arcs

    def _spread(self, group: Group, depth: int, centre: int, arcs: list[BoxArc]) -> None:
        """From a box to all of its group, level by level of groups."""
        while group.children:
            many = len(group.children)
            own = self.place[centre][depth]
            depth += 1
            entered = {own: centre}
            if group.near:
                self._along(group, depth, entered, arcs)
            for i in () if group.near else ((own + k) % many for k in range(1, many)):
                self._enter(group, depth, entered, own, i, arcs)
            group = group.children[own]

    def _along(self, group: Group, depth: int, entered: dict[int, int], arcs: list[BoxArc]) -> None:
        """From one of groups that links join to all others; of every few levels the emptiest come first."""
        level = dict.fromkeys(entered, 0)
        ready = [(0, 0, at) for at in entered]
        while ready:
            _, _, at = heappop(ready)
            left = [i for i in group.near[at] if i not in entered and group.children[i].boxes != (self.source,)]
            if not left:
                continue
            to = min(left, key=lambda i: self._link(group, at, i)) if self.unlike else left[0]
            self._enter(group, depth, entered, at, to, arcs)
            level[to] = level[at] + 1
            for ends in ((at, to), (to, at)) if self.both else ((at, to),):
                key = (self.number[group.boxes], *ends)
                self.crossed[key] = self.crossed.get(key, 0) + 1
            for i in (at, to):
                full = self._fill(self.own[entered[i]], 1)
                if self.unlike:
                    full = max(
                        full, min((self._link(group, i, j) for j in group.near[i] if j not in entered), default=0)
                    )
                heappush(ready, (level[i] // self.levels, full, i))

    def _link(self, group: Group, at: int, to: int) -> int:
        """How full the link from one group to another is with one more copy."""
        return (self.crossed.get((self.number[group.boxes], at, to), 0) + 1) * (GRAIN // group.near[at][to])

    def _enter(
        self, group: Group, depth: int, entered: dict[int, int], at: int, to: int, arcs: list[BoxArc]
    ) -> None:  # fmt: skip
        """Send from where one group was entered to another group, and on inside that."""
        child = group.children[to]
        if child.boxes == (self.source,):
            return
        entered[to] = box = self._centre(child, self.place[entered[at]][depth:], self.source)
        arcs.append((entered[at], box))
        self._send(entered[at], box)
        if child.children:
            self._spread(child, depth, box, arcs)

    def _send(self, a: int, b: int) -> None:
        """Count a copy from a box to another one, where that is asked for."""
        if self.turns and self.source is None:
            return
        for one, other in ((a, b), (b, a)) if self.both else ((a, b),):
            self.sent[self.own[one]] += 1
            there = self.around[other]
            for g in self.around[one]:
                self.sent[g] += 1
                if g not in there:
                    self.left[g] += 1


def _widths(group: Group) -> set[int]:
    """The MB/s of links that join groups."""
    found = {mbps for some in group.near for mbps in some.values()}
    return found.union(*(_widths(child) for child in group.children))
