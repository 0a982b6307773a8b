"""Symmetries that move one rank of a cluster onto another, so that what is planned for one root serves the others.

Boxes and the ranks inside them are counted on, around, and switches follow: a switch goes where its ranks and its
switches have gone. Every turn is checked on all links, so a packing that is turned is as good as the one that was made.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from ..tree import Edge, Tree
from .fabric import Fabric

ROUNDS = 8  # of switches whose neighbours are switches


def turning(f: Fabric, start: int, to: int) -> dict[int, int] | None:
    """Where every vertex goes so that rank ``start`` goes to ``to`` and all links fit; None if counting on does not."""
    if _rates(f, start) != _rates(f, to):
        return None
    boxes = [f.topology.ranks_of(node) for node in f.topology.nodes]
    size = len(boxes[0])
    if any(len(box) != size for box in boxes):
        return None
    place = {rank: (b, i) for b, box in enumerate(boxes) for i, rank in enumerate(box)}
    boxes_on, ranks_on = (there - here for here, there in zip(place[start], place[to], strict=True))
    image = {
        rank: boxes[(b + boxes_on) % len(boxes)][(i + ranks_on) % size] for rank, (b, i) in place.items()
    }  # fmt: skip
    if not _follow(f, image) or any(f.arcs.get((image[u], image[v])) != c for (u, v), c in f.arcs.items()):
        return None
    return image


def _rates(f: Fabric, rank: int) -> list[tuple[int, int]]:
    """MB/s of a rank's links, out and in."""
    return sorted((f.arcs.get((rank, v), 0), f.arcs.get((v, rank), 0)) for v in _around(f, rank))


def _follow(f: Fabric, image: dict[int, int]) -> bool:
    """Add the switches, as far as their neighbours say where they go; whether they all have a place of their own."""
    switches = [v for v in f.vertices if v >= f.n]
    near = {s: {v: (f.arcs.get((s, v), 0), f.arcs.get((v, s), 0)) for v in _around(f, s)} for s in switches}
    for _ in range(ROUNDS):
        left = [s for s in switches if s not in image]
        free = set(switches) - set(image.values())
        if not left:
            return True
        for s in left:
            known = {(image[v], rates) for v, rates in near[s].items() if v in image}
            fitting = [t for t in free if known <= set(near[t].items()) and len(near[t]) == len(near[s])]
            if known and len(fitting) == 1:
                image[s] = fitting[0]
                free.discard(fitting[0])
    return all(s in image for s in switches)


def _around(f: Fabric, vertex: int) -> set[int]:
    return {*f.neighbours[vertex], *f.backwards.neighbours[vertex]}


def turned(trees: Sequence[Tree], image: dict[int, int]) -> tuple[Tree, ...]:
    """The same trees elsewhere."""

    def moved(edges: Sequence[Edge]) -> tuple[Edge, ...]:
        return tuple(Edge(image[e.src], image[e.dst], tuple(image[v] for v in e.path)) for e in edges)

    return tuple(replace(t, root=image[t.root], edges=moved(t.edges), up=moved(t.up)) for t in trees)
