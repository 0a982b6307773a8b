"""Automorphisms of a machine: they move one rank onto another, so that what is planned for one root serves the others.

Boxes and the ranks inside them are counted on, around, and switches follow: a switch goes where its ranks and its
switches have gone. Every automorphism is checked on all links, so a packing that it moves is as good as the one made.
"""

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from ...topology.model import Topology
from ..tree import Edge, Packing, Tree
from .fabric import Fabric, Kept, fabric, shared_memory

ROUNDS = 8  # of switches whose neighbours are switches
MOST_TRIED = 4  # ranks that a rank is compared with
_BOXES: Kept[None, list[tuple[int, ...]]] = Kept()
_AROUND_SWITCHES: Kept[int, dict[int, tuple[int, int]]] = Kept()
_LIKE_ROOTS: Kept[int, tuple[int, tuple[int, ...]]] = Kept()
_ROOTS_SEEN: Kept[None, int] = Kept()  # how many ranks the table before has been asked about


def automorphism(f: Fabric, start: int, to: int) -> dict[int, int] | None:
    """Where every vertex goes so that rank ``start`` goes to ``to`` and all links fit; None if counting on does not."""
    if _rates(f, start) != _rates(f, to):
        return None
    boxes = _BOXES.once(f, None, lambda: [f.topology.ranks_of(node) for node in f.topology.nodes])
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
    near = _AROUND_SWITCHES.of(f)
    for s in switches if not near else ():
        near[s] = {v: (f.arcs.get((s, v), 0), f.arcs.get((v, s), 0)) for v in _around(f, s)}
    for _ in range(ROUNDS):
        left = [s for s in switches if s not in image]
        free = set(switches) - set(image.values())
        if not left:
            return True
        for s in left:
            known = {(image[v], rates) for v, rates in near[s].items() if v in image}
            if not known:
                continue
            beside = free & _around(f, min(known)[0])  # it goes beside where its neighbour has gone
            fitting = [t for t in beside if known <= near[t].items() and len(near[t]) == len(near[s])]
            if len(fitting) == 1:
                image[s] = fitting[0]
                free.discard(fitting[0])
    return all(s in image for s in switches)


def _around(f: Fabric, vertex: int) -> set[int]:
    return {*f.neighbours[vertex], *f.backwards.neighbours[vertex]}


def moved_by(trees: Sequence[Tree], image: dict[int, int]) -> tuple[Tree, ...]:
    """The same trees elsewhere."""

    def moved(edges: Sequence[Edge]) -> tuple[Edge, ...]:
        return tuple(Edge(image[e.src], image[e.dst], tuple(image[v] for v in e.path)) for e in edges)

    return tuple(replace(t, root=image[t.root], edges=moved(t.edges), up=moved(t.up)) for t in trees)


def like_roots(t: Topology, last: int | None = None) -> dict[int, tuple[int, tuple[int, ...]]]:
    """The ranks that a symmetry of all links makes of an earlier one: that rank, and where every vertex goes.

    None where ranks share memory, whose trees are found at once.

    Args:
        last: no rank behind this one is looked at, which takes a while on many; by default all are.
    """
    if shared_memory(t) is not None:
        return {}
    f = fabric(t, tuple(dict.fromkeys(k.kind for k in t.links)))
    found, looked_at = _LIKE_ROOTS.of(f), _ROOTS_SEEN.of(f)
    seen, end = looked_at.get(None, 0), t.n if last is None else min(last + 1, t.n)
    looked_at[None] = max(seen, end)
    for root in range(seen, end):
        for start in [r for r in range(root) if r not in found][:MOST_TRIED]:
            moved = automorphism(f, start, root)
            image = tuple(moved.get(v, v) for v in range(t.n + len(t.switches))) if moved else ()
            if moved and is_symmetry(t, image):
                found[root] = start, image
                break
    return found


def is_symmetry(t: Topology, image: Sequence[int]) -> bool:
    """Whether moving every vertex v to ``image[v]`` leaves all devices, switches and links as they are."""
    if sorted(image) != list(range(t.n + len(t.switches))) or sorted(image[: t.n]) != list(range(t.n)):
        return False
    kinds = [d.kind for d in t.devices] + [s.kind for s in t.switches]
    links = Counter((k.src, k.dst, k.kind, k.lanes, k.lane_mbps) for k in t.links)
    moved = Counter((image[k.src], image[k.dst], k.kind, k.lanes, k.lane_mbps) for k in t.links)
    return links == moved and all(kinds[image[v]] == kind for v, kind in enumerate(kinds))


def packing_moved_by(p: Packing, image: Sequence[int]) -> Packing:
    """The packing for the root that a symmetry makes of this one's."""
    proof = p.certificate
    parts = tuple(tuple(sorted(image[v] for v in part)) for part in proof.parts)
    if proof.kind == "prices":
        parts = tuple(sorted((image[part[0]], image[part[1]], part[2]) for part in proof.parts))
    proof = replace(proof, parts=parts, text=f"as from rank {p.root}, where it is {proof.text}")
    trees = moved_by(p.trees, dict(enumerate(image)))
    return replace(p, root=image[p.root], trees=trees, certificate=proof)
