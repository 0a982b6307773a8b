"""Commodities between the boxes of a cluster: whole boxes as vertices around one network (Blink section 3, phase two).

A commodity is a part of the vector with a root rank. Its box tree is a star from the root's box, or from a hub to which
the root's box sends it. Stars alone are optimal where every box can send its share to all others; hubs forward what a
box cannot send more than once. Where all ports are alike, rooted collectives get one tree a port instead, in which the
boxes fan out in turn; where ports lead to networks of their own, a few trees each (:func:`on_rails`). All but these
meet every cut that separates whole boxes:

* rate * (1 - share) enters each box, rate * share leaves it at least once, rate * (boxes - 1) leaves all of them;
* AllReduce: half the ports of all boxes over (boxes - 1), and no box carries more than its ports.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from ..graph.boxes import Box

FAN = 2  # children of a box on one rail


# For each arc of the box tree the sizes, in their order, that take a port of either box.
Entries = tuple[tuple[tuple[int, int], tuple[tuple[Fraction, int, int], ...]], ...]


class Commodity(NamedTuple):
    """Bytes of rank ``root`` in box ``box``; ``rail`` is the port to prefer, ``hub`` the box that fans out."""

    box: int
    root: int
    rail: int
    size: Fraction
    hub: int
    tree: tuple[tuple[int, int], ...] = ()  # a box tree of its own instead of a star
    ports: Entries = ()  # the ports that it takes, instead of those of its rail

    def arcs(self, boxes: int) -> Sequence[tuple[int, int]]:
        """The box tree, parents before children."""
        return self.tree or star(self.box, self.hub, boxes)


def star(origin: int, hub: int, boxes: int) -> list[tuple[int, int]]:
    """From the box in which a commodity begins to its hub, and from there to all others."""
    first = [(origin, hub)] if hub != origin else []
    return first + [(hub, b) for b in range(boxes) if b not in (origin, hub)]


def shares(boxes: Sequence[Box], collective: str, root: int) -> list[Fraction]:
    """The part of the vector that has its root in each box, for collectives whose bytes go one way."""
    if collective in ("broadcast", "reduce"):
        return [Fraction(int(root in b.vertices[: b.m])) for b in boxes]
    n = sum(b.m for b in boxes)
    return [Fraction(b.m, n) for b in boxes]


def one_way_rate(boxes: Sequence[Box], part: Sequence[Fraction]) -> Fraction:
    """The best rate of the boxes' ports: the least of the cuts that separate whole boxes."""
    limits = [b.into / (1 - s) for b, s in zip(boxes, part, strict=True) if s < 1]
    limits += [b.out / s for b, s in zip(boxes, part, strict=True) if s]
    return min(*limits, sum((b.out for b in boxes), Fraction(0)) / (len(boxes) - 1))


def both_ways_rate(boxes: Sequence[Box]) -> Fraction:
    """The best AllReduce rate of the boxes' ports."""
    return min(*(_room(b) for b in boxes), sum(map(_room, boxes), Fraction(0)) / (2 * len(boxes) - 2))


def one_way(
    boxes: Sequence[Box], collective: str, root: int, part: Sequence[Fraction], rate: Fraction
) -> list[Commodity]:
    """Commodities of total size ``rate``; rooted collectives are divided among the ports of the root's box."""
    count = len(boxes)
    if collective in ("broadcast", "reduce") and count > 2 and _alike(boxes):
        return _disjoint(boxes, part.index(1), root, rate)
    need = [s * rate for s in part]
    direct = [
        need[b] if box.out >= need[b] * (count - 1) else (box.out - need[b]) / (count - 2)
        for b, box in enumerate(boxes)
    ]
    spare = [box.out - need[b] - direct[b] * (count - 2) for b, box in enumerate(boxes)]
    commodities: list[Commodity] = []
    for b, box in enumerate(boxes):
        if not need[b]:
            continue
        hubs = [(b, direct[b])] if direct[b] else []
        rest = need[b] - direct[b]
        for hub in [h for h in range(count) if h != b and spare[h] > 0] if rest else []:
            size = min(rest, spare[hub] / (count - 2))
            spare[hub] -= size * (count - 2)
            rest -= size
            hubs.append((hub, size))
            if not rest:
                break
        for hub, size in hubs:
            if collective in ("broadcast", "reduce"):
                commodities += [Commodity(b, root, i, size * p.out / box.out, hub) for i, p in enumerate(box.ports)]
            else:
                commodities += [Commodity(b, box.vertices[i], i, size / box.m, hub) for i in range(box.m)]
    return commodities


def _alike(boxes: Sequence[Box]) -> bool:
    """Whether all ports of all boxes are equally fast, and every box has the same number."""
    return len({(len(b.ports), p.out, p.into) for b in boxes for p in b.ports}) == 1


def _disjoint(boxes: Sequence[Box], source: int, root: int, rate: Fraction) -> list[Commodity]:
    """One tree a port: every box fans out with all of its ports, in one or two of the trees."""
    trees = _box_trees(len(boxes), source, len(boxes[source].ports))
    return [Commodity(source, root, rail, rate / len(trees), source, arcs) for rail, arcs in enumerate(trees)]


def on_rails(boxes: Sequence[Box], source: int, root: int) -> list[Commodity]:
    """Trees for a rooted collective on rails that no switch joins: a few for each port, which take it in every box."""
    trees = _box_trees(len(boxes), source, min(FAN, len(boxes) - 1))
    commodities: list[Commodity] = []
    for rail, own in enumerate(boxes[source].ports):
        others = (box.ports[rail] for b, box in enumerate(boxes) if b != source)
        size = min(own.out, *(min(p.out, p.into) for p in others))
        commodities += [Commodity(source, root, rail, size / len(trees), source, arcs) for arcs in trees]
    return commodities


def _box_trees(count: int, source: int, width: int) -> list[tuple[tuple[int, int], ...]]:
    """So many trees of boxes, in which each box has at most ``width`` children, together: it is a leaf in most.

    So their depth is logarithmic in the number of boxes.
    """
    others = [b for b in range(count) if b != source]
    slots = [b for b in others for _ in range(width)]
    each = len(others) - 1  # edges of a tree from boxes that do not leave the source
    trees = []
    for number in range(width):
        room: dict[int, int] = {}
        for b in slots[number * each : (number + 1) * each]:
            room[b] = room.get(b, 0) + 1
        inner = sorted(room, key=lambda b: (-room[b], b))
        waiting = [*inner, *(b for b in others if b not in room)]
        arcs = [(source, waiting.pop(0))]
        for _, parent in arcs:
            for child in waiting[: room.get(parent, 0)]:
                arcs.append((parent, child))
            del waiting[: room.get(parent, 0)]
        trees.append(tuple(arcs))
    return trees


def both_ways(boxes: Sequence[Box], rate: Fraction) -> list[Commodity]:
    """AllReduce: stars from every port, heavier where a box has more to spare."""
    count = len(boxes)
    weight = [_room(b) - rate if count > 2 else _room(b) for b in boxes]
    total = sum(weight)
    return [
        Commodity(b, p.rank, i, rate * weight[b] / total * min(p.out, p.into) / _room(box), b)
        for b, box in enumerate(boxes)
        for i, p in enumerate(box.ports)
        if weight[b]
    ]


def _room(box: Box) -> Fraction:
    """MB/s that the ports of a box carry both ways at once."""
    return sum((min(p.out, p.into) for p in box.ports), Fraction(0))
