"""The paper's early protocol: divide the ranks into fully connected groups, and go from group to group.

Broadcast: the root hands its group the vector, directly or in shares that the others pass on; each rank forwards what
it got over its own links to the next group, where the receiver hands it to its group. AllReduce: reduce to one rank of
each group, across to a common group, and back the same way. The trees are those of the protocol alone, their weights
the best that fit; so this is the protocol at its best.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...errors import PlanError
from ..exact.enumeration import MAX_TREES, Room, Shape, arborescences, best_weights, centred, placed
from ..graph.fabric import Arc, name_of
from ..task import Planned, Task
from . import mwu
from .mwu import ordered

MAX_RANKS = 12
Group = tuple[int, ...]


def fits(task: Task) -> int:
    """Collectives of spanning trees on small graphs whose groups can be searched for."""
    return int(mwu.fits(task) > 0 and task.n <= MAX_RANKS)


def plan(task: Task) -> Planned:
    """The protocol's trees with the best weights.

    Raises:
        PlanError: if the protocol leaves too many trees to choose from.
    """
    room = mwu.room_for(task)
    groups = divide(task.n, set(room.spot))
    shapes: dict[Shape, None] = {}
    for shape in protocol(room, groups):
        shapes[shape] = None
        if len(shapes) > MAX_TREES:
            raise PlanError(f"groups: more than {MAX_TREES} ways between {len(groups)} groups; take method 'exact'")
    trees = list(shapes)
    weights = best_weights(room, trees)
    names = " | ".join(name_of(task.fabric.topology, g) for g in groups)
    return Planned(*placed(room, trees, weights), f"fully connected groups {names}, of whose {len(trees)} trees "
                   f"{len(weights)} carry bytes")  # fmt: skip


def divide(n: int, arcs: set[Arc]) -> list[Group]:
    """The fewest groups in which every two ranks are joined both ways; the first such in order of ranks."""

    def joined(v: int, group: Group) -> bool:
        return all((u, v) in arcs and (v, u) in arcs for u in group)

    def place(v: int, groups: tuple[Group, ...], best: list[tuple[Group, ...]]) -> None:
        if best and len(groups) >= len(best[0]):
            return
        if v == n:
            best[:] = [groups]
            return
        for i, group in enumerate(groups):
            if joined(v, group):
                place(v + 1, (*groups[:i], (*group, v), *groups[i + 1 :]), best)
        place(v + 1, (*groups, (v,)), best)

    best: list[tuple[Group, ...]] = []
    place(0, (), best)
    return list(best[0])


def protocol(room: Room, groups: list[Group]) -> Iterator[Shape]:
    """Every tree of the protocol; AllReduce's are rooted at their centres."""
    home = {v: i for i, group in enumerate(groups) for v in group}
    cross: dict[Arc, list[Arc]] = {}
    for u, v in sorted(room.spot):
        if home[u] != home[v]:
            cross.setdefault((home[u], home[v]), []).append((u, v))
    first = home[max(room.root, 0)]
    for way in arborescences(list(cross), len(groups), first, len(groups)):
        for bridges in product(*(cross[arc] for arc in way.arcs)):
            yield from _inside(room, groups, first, bridges)


def _inside(room: Room, groups: list[Group], first: int, bridges: tuple[Arc, ...]) -> Iterator[Shape]:
    """The trees over these links between groups: who hands out in each group."""
    if room.root < 0:
        for centres in product(*groups):
            inner = [(c, v) for c, group in zip(centres, groups, strict=True) for v in group if v != c]
            yield centred(Shape(0, ordered(0, _parents(room.n, 0, [*inner, *bridges]))))
        return
    entered = [(v, u) for _, v in bridges for group in groups if v in group for u in group if u != v]
    for hub in groups[first]:
        own = [(hub, v) for v in groups[first] if v not in (hub, room.root)]
        own += [(room.root, hub)] if hub != room.root else []
        yield Shape(room.root, ordered(room.root, _parents(room.n, room.root, [*own, *bridges, *entered])))


def _parents(n: int, root: int, edges: list[Arc]) -> list[int]:
    """The parent of every rank in the tree of these edges, whatever their direction."""
    near: dict[int, list[int]] = {v: [] for v in range(n)}
    for u, v in edges:
        near[u].append(v)
        near[v].append(u)
    parent = [-1] * n
    parent[root] = root
    queue = [root]
    for u in queue:
        for v in sorted(near[u]):
            if parent[v] < 0:
                parent[v] = u
                queue.append(v)
    return parent
