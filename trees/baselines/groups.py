"""Method ``groups``: the paper's early protocol, which divides the ranks into fully connected groups.

Broadcast: the root sends the vector to its group, directly or in shares that the others forward. Each rank forwards
what it got over its own links to the next group, where the receiver sends it to its group. AllReduce: reduce to one
rank of each group, then across to a common group, and back the same way. Only the protocol's trees are used, with the
best weights that fit; so this is the protocol at its best.
"""

from collections.abc import Iterator
from itertools import product

from ...errors import PlanError
from ..exact.enumeration import MAX_TREES, all_arborescences, centred
from ..exact.weights import best_weights, placed
from ..graph.fabric import Arc, name_of
from ..graph.logical import Capacities, SpanningTree, arcs_from, neighbours_of
from ..problem import Problem, Solution
from . import mwu

MAX_RANKS = 12
Group = tuple[int, ...]


def fits(problem: Problem) -> bool:
    """Collectives of spanning trees on graphs small enough to search for groups."""
    return mwu.fits(problem) and problem.n <= MAX_RANKS


def plan(problem: Problem) -> Solution:
    """The protocol's trees with the best weights.

    Raises:
        PlanError: if the protocol leaves too many trees to choose from.
    """
    caps = problem.capacities
    groups = divide(problem.n, set(caps.number))
    shapes: dict[SpanningTree, None] = {}
    for shape in protocol(caps, groups):
        shapes[shape] = None
        if len(shapes) > MAX_TREES:
            raise PlanError(f"groups: more than {MAX_TREES} ways between {len(groups)} groups; take method 'exact'")
    trees = list(shapes)
    weights = best_weights(caps, trees)
    names = " | ".join(name_of(problem.fabric.topology, g) for g in groups)
    return Solution(*placed(caps, trees, weights), f"fully connected groups {names}, of whose {len(trees)} trees "
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


def protocol(caps: Capacities, groups: list[Group]) -> Iterator[SpanningTree]:
    """Every tree of the protocol; AllReduce's are rooted at their centres."""
    home = {v: i for i, group in enumerate(groups) for v in group}
    cross: dict[Arc, list[Arc]] = {}
    for u, v in sorted(caps.number):
        if home[u] != home[v]:
            cross.setdefault((home[u], home[v]), []).append((u, v))
    first = home[max(caps.root, 0)]
    for way in all_arborescences(list(cross), len(groups), first, len(groups)):
        for bridges in product(*(cross[arc] for arc in way.arcs)):
            yield from _inside(caps, groups, first, bridges)


def _inside(caps: Capacities, groups: list[Group], first: int, bridges: tuple[Arc, ...]) -> Iterator[SpanningTree]:
    """The trees over these links between groups, one for each choice of a sender in each group."""
    if caps.root < 0:
        for centres in product(*groups):
            inner = [(c, v) for c, group in zip(centres, groups, strict=True) for v in group if v != c]
            yield centred(SpanningTree(0, arcs_from(0, neighbours_of([*inner, *bridges]))))
        return
    entered = [(v, u) for _, v in bridges for group in groups if v in group for u in group if u != v]
    for hub in groups[first]:
        own = [(hub, v) for v in groups[first] if v not in (hub, caps.root)]
        own += [(caps.root, hub)] if hub != caps.root else []
        yield SpanningTree(caps.root, arcs_from(caps.root, neighbours_of([*own, *bridges, *entered])))
