"""The tiers of a network: boxes on leaf switches, these on spines, and so on, as groups of groups (a fat tree's pods).

A switch's tier is its distance from the boxes (Leiserson 1985: fat trees). Without the switches of the highest tier the
network falls into groups, and each of these again, down to single boxes. Every group is a cut of the machine; between
the groups of one network the switches above are taken to join every two. That is exact where these switches carry
whatever the groups' links do (equal links to every spine, say: a hose, Duffield 1999), and tried elsewhere: plans count
what each link of the machine carries.
"""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import NamedTuple

from .boxes import Box, outside
from .fabric import Fabric

MOST_CHILDREN = 24  # of a group; more of them are grouped anew


class Group(NamedTuple):
    """Boxes and the switches below a tier.

    Attributes:
        boxes: their numbers, ascending.
        children: the groups of which it consists; none where it is one box.
        switches: those of the network that are in it.
        near: by child the children to which a link leads, with its MB/s; empty where switches above join every two.
        out, into: MB/s that leave it and enter it.
    """

    boxes: tuple[int, ...]
    children: tuple["Group", ...] = ()
    switches: tuple[int, ...] = ()
    near: tuple[Mapping[int, int], ...] = ()
    out: int = 0
    into: int = 0

    @property
    def direct(self) -> bool:
        """Whether links join some of its groups, and not switches above them."""
        return bool(self.near) or any(child.direct for child in self.children)


def tiers(f: Fabric, boxes: Sequence[Box]) -> Group:
    """The whole machine as a group of groups.

    Args:
        f: links in the direction of the trees.
        boxes: of the machine, as :func:`.boxes.boxes_of` finds them.
    """
    near: dict[int, dict[int, int]] = {}
    for (u, v), mbps in f.arcs.items():
        if outside(f, u) and outside(f, v):
            near.setdefault(u, {})[v] = mbps
    leaves = {b: sorted({p.plane for p in box.ports}) for b, box in enumerate(boxes)}
    tier = _distances(near, sorted({leaf for some in leaves.values() for leaf in some}))
    room = _Room(f, boxes)
    return _divided(tuple(range(len(boxes))), tuple(sorted(tier)), _Network(near, leaves, tier, room))


class _Room:
    """The MB/s that leave and enter sets of boxes and switches; switch v is -v here."""

    def __init__(self, f: Fabric, boxes: Sequence[Box]) -> None:
        home = {v: b for b, box in enumerate(boxes) for v in members(box)}
        self.out: dict[int, list[tuple[int, int]]] = {}
        self.into: dict[int, list[tuple[int, int]]] = {}
        for (u, v), mbps in f.arcs.items():
            a, b = home.get(u, -u), home.get(v, -v)
            if a != b:
                self.out.setdefault(a, []).append((b, mbps))
                self.into.setdefault(b, []).append((a, mbps))

    def around(self, boxes: Sequence[int], switches: Sequence[int]) -> tuple[int, int]:
        """What leaves these boxes and switches, and what enters them."""
        inside = {*boxes, *(-s for s in switches)}
        return _beyond(self.out, inside), _beyond(self.into, inside)


def _beyond(links: Mapping[int, list[tuple[int, int]]], inside: set[int]) -> int:
    return sum(mbps for v in inside for other, mbps in links.get(v, ()) if other not in inside)


def members(box: Box) -> tuple[int, ...]:
    """The vertices of a box, with the switches that lead to its ports."""
    return tuple(dict.fromkeys((*box.vertices, *(v for p in box.ports for v in (*p.up[:-1], *p.down[1:])))))


def families(top: Group, boxes: Sequence[Box]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The vertices of the groups below each tier, the largest groups first; boxes alone are left out."""
    found, some = list[tuple[tuple[int, ...], ...]](), [top]
    while any(group.children for group in some):
        some = [child for group in some for child in group.children or (group,)]
        if any(group.children for group in some):
            found.append(tuple(_vertices(group, boxes) for group in some))
    return tuple(found)


def _vertices(group: Group, boxes: Sequence[Box]) -> tuple[int, ...]:
    return tuple(sorted({*(v for b in group.boxes for v in members(boxes[b])), *group.switches}))


class _Network(NamedTuple):
    """By switch those to which it leads, with MB/s; the switches of each box, tiers, and the room around sets."""

    near: Mapping[int, Mapping[int, int]]
    leaves: Mapping[int, Sequence[int]]
    tier: Mapping[int, int]
    room: _Room


def _distances(near: Mapping[int, Mapping[int, int]], start: Sequence[int]) -> dict[int, int]:
    tier = dict.fromkeys(start, 1)
    queue = list(start)
    for u in queue:
        for v in sorted(near.get(u, {})):
            if v not in tier:
                tier[v] = tier[u] + 1
                queue.append(v)
    return tier


def _divided(boxes: tuple[int, ...], switches: tuple[int, ...], network: _Network) -> Group:
    """These boxes, on these switches, as groups without the highest tier."""
    out, into = network.room.around(boxes, switches)
    if len(boxes) == 1:  # a leaf of its own limits nothing but the box
        return Group(boxes, (), switches, (), out, into)
    whole = switches
    top = max(network.tier[s] for s in switches)
    while top > 1:
        left = tuple(s for s in switches if network.tier[s] < top)
        parts = _parts(boxes, left, network)
        if len(parts) > 1:
            return _grouped(boxes, [_divided(*part, network) for part in parts], whole, network)
        switches, top = left, top - 1
    left_over = set(switches)
    own = {b: [s for s in network.leaves[b] if s in left_over] for b in boxes}
    if len(switches) > 1 and all(len(some) == 1 for some in own.values()):  # switches joined to one another
        return _joined(boxes, whole, own, network)
    singles = [Group((b,), (), (), (), *network.room.around((b,), ())) for b in boxes]
    return _grouped(boxes, singles, whole, network)


def _joined(
    boxes: tuple[int, ...], switches: tuple[int, ...], own: Mapping[int, Sequence[int]], network: _Network
) -> Group:
    """Groups of one switch each, joined by links between these switches."""
    used = [s for s in switches if any(own[b] == [s] for b in boxes)]
    children = [_divided(tuple(b for b in boxes if own[b] == [s]), (s,), network) for s in used]
    at = {s: i for i, s in enumerate(used)}
    ways = (network.near.get(s, {}) for s in used)
    near = tuple({at[other]: mbps for other, mbps in sorted(some.items()) if other in at} for some in ways)
    return Group(boxes, tuple(children), switches, near, *network.room.around(boxes, switches))


def _grouped(boxes: tuple[int, ...], parts: Sequence[Group], switches: tuple[int, ...], network: _Network) -> Group:
    """A group of these parts, grouped anew where they are many, so that no box has to send to all others."""
    if len(parts) > MOST_CHILDREN:
        root = isqrt(len(parts) - 1) + 1
        size = next((d for d in range(root, 2 * root) if len(parts) % d == 0), root)  # groups alike, if they can be
        parts = [_united(parts[i : i + size]) for i in range(0, len(parts), size)]
    return Group(boxes, tuple(parts), switches, (), *network.room.around(boxes, switches))


def _united(parts: Sequence[Group]) -> Group:
    boxes = tuple(sorted(b for part in parts for b in part.boxes))
    out, into = sum(part.out for part in parts), sum(part.into for part in parts)
    switches = tuple(s for part in parts for s in part.switches)
    return Group(boxes, tuple(parts), switches, (), out, into) if len(parts) > 1 else parts[0]


def _parts(
    boxes: Sequence[int], switches: Sequence[int], network: _Network
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes and switches in parts that are joined, by their first box; switches without boxes are left out."""
    left = set(switches)
    near = {s: sorted(left.intersection(network.near.get(s, {}))) for s in switches}
    on: dict[int, list[int]] = {s: [] for s in switches}
    for b in boxes:
        for s in left.intersection(network.leaves[b]):
            on[s].append(b)
    seen: set[int] = set()
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for first in boxes:
        if first in seen:
            continue
        seen.add(first)
        some, reached = [first], set[int]()
        for b in some:
            todo = [s for s in network.leaves[b] if s in left and s not in reached]
            reached.update(todo)
            for s in todo:
                fresh = [t for t in near[s] if t not in reached]
                reached.update(fresh)
                todo += fresh
                more = [c for c in on[s] if c not in seen]
                seen.update(more)
                some += more
        found.append((tuple(sorted(some)), tuple(sorted(reached))))
    return found
