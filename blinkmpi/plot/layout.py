"""Lay out pictures: positions of devices and switches, and the curves between them. Numbers alone, no drawing.

A DGX-1 is two quads, devices on one switch are a circle around it, a PCIe tree stands on its devices, boxes lie around
their network, a torus is a bent grid, and other graphs are laid out by their Laplacian. Several network switches stand
in tiers over the boxes, or, if each has boxes of its own, in a circle with these outside.
"""

from collections.abc import Iterator, Sequence
from math import atan2, ceil, copysign, cos, pi, prod, sin, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..topology.model import Topology
from ..trees.graph.fabric import Fabric

Points = NDArray[np.float64]
CUBE_MESH = ((-3.1, 1.75), (-1.25, 0.8), (-1.25, -0.8), (-3.1, -1.75))  # one quad of a DGX-1; the other is its mirror
CUBE_PAIRS = {(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 5), (2, 3), (2, 6), (3, 7)} | {
    (4, 5), (4, 6), (4, 7), (5, 6), (5, 7), (6, 7)
}  # fmt: skip
STEPS = 32
GRID, BOW = 2.0, 0.8  # between the vertices of a torus; how far the links around it keep from the others of their row
ASIDE = 0.55  # how far a grid is moved, so that links to the same place of the next one do not run along a row
FEW = 16  # devices, up to which switches are hardly larger than these
SWITCH, HUB = 1.25, 2.2  # the radius of a switch in that of a device, among few devices and among more
APART = 2.5  # from box to box in a row, in half the width of one
ROOM = 0.36  # the part of the way to the nearest neighbour that a radius may take at most


class Position(NamedTuple):
    """Centre and radius of a vertex; no centre for a switch that these links do not touch. ``scale`` is for texts."""

    at: Points | None
    size: float
    scale: float


def places(f: Fabric) -> list[Position]:
    """The position of every vertex of the topology."""
    t = f.topology
    at: dict[int, Points] = {}
    locals_ = {node: _box(f, node) for node in t.nodes}
    radius = max(float(np.abs(list(some.values())).max()) for some in locals_.values()) + 0.9
    rest = [v for v in f.vertices if all(v not in some for some in locals_.values())]
    centres, around = _network(f, rest, radius) if len(rest) > 1 else (_centres(len(t.nodes), radius), {})
    for node, centre in zip(t.nodes, centres, strict=True):
        at |= {v: spot + centre for v, spot in locals_[node].items()}
    at |= around or {v: _between(centres, radius) for v in rest}
    spots = np.array([at[v] for v in sorted(at)])
    span = float((spots.max(axis=0) - spots.min(axis=0)).max()) or 1.0
    room = dict(zip(sorted(at), ROOM * _gaps(spots), strict=True))
    size = min(0.3 * _nearest(np.array([at[r] for r in range(t.n)])), 0.042 * span + 0.02)
    scale = min(1.0, max(0.25, size / span / 0.034))
    most = size * (HUB if t.n > FEW else SWITCH)
    radii = {"device": size} | {s.kind: most for s in t.switches}
    for j, s in enumerate(t.switches):
        radii[s.kind] = min(radii[s.kind], room.get(t.n + j, most))
    kinds = ["device"] * t.n + [s.kind for s in t.switches]
    return [Position(at.get(v), radii[kind], scale) for v, kind in enumerate(kinds)]


def extent(spots: Sequence[Position]) -> tuple[Points, Points]:
    """The corners of the picture."""
    at = np.array([place.at for place in spots if place.at is not None])
    margin = max(2.2 * spots[0].size, 1.1 * max(place.size for place in spots if place.at is not None))
    return at.min(axis=0) - margin, at.max(axis=0) + margin


def framed(t: Topology, spots: Sequence[Position]) -> list[tuple[tuple[tuple[float, float], tuple[float, float]], str]]:
    """Boxes to put behind groups: corner, width and height, name. The quads of a DGX-1, or the boxes of a cluster."""
    groups: dict[str, list[int]] = {}
    if alone(t):
        return []
    if len(t.nodes) > 1:
        for v, node in enumerate(t.homes):
            if node >= 0 and spots[v].at is not None:
                groups.setdefault(f"node {node}", []).append(v)
    elif _is_cube_mesh(t, 0, _direct(t)):
        for r, d in enumerate(t.devices):
            groups.setdefault(f"quad {d.index // 4}", []).append(r)
    found = []
    for name, members in groups.items():
        at = np.array([spots[v].at for v in members if spots[v].at is not None])
        pad = 2.0 * spots[0].size
        low, high = at.min(axis=0) - pad, at.max(axis=0) + pad
        corner = float(low[0]), float(low[1])
        found.append(((corner, (float(high[0] - low[0]), float(high[1] - low[1]))), name))
    return found


def alone(t: Topology) -> bool:
    """Whether each device has a node for itself, whose number then names it."""
    return len(t.nodes) == t.n > 1


def number_of(t: Topology, rank: int) -> str:
    """What a picture writes into a device: its number on its node, or that of the node where it is alone there."""
    return str(t.devices[rank].node if alone(t) else t.devices[rank].index)


def curve(stops: Sequence[Position], lane: float, *, crowd: int) -> Points:
    """From the rim of the first stop to that of the last, bent towards the switches between.

    Args:
        lane: how many places aside of the straight line, of ``crowd`` that share it.
    """
    a, b = _at(stops[0]), _at(stops[-1])
    between = [_at(s) for s in stops[1:-1]]
    along = b - a
    normal = np.array([-along[1], along[0]]) / (float(np.hypot(*along)) or 1.0)
    gap = min(0.62 * stops[0].size, 1.7 * stops[0].size / max(1, crowd - 1))
    shift = normal * lane * gap
    if len(between) == 1:
        inner = [between[0] * 0.72 + (a + b) * 0.14 + shift * 2]
    else:
        inner = [spot + shift * 2 for spot in between] or [(a + b) / 2 + shift * 1.5]
    control = [a + shift * 0.75, *inner, b + shift * 0.75]

    bend = smooth(np.array(control))
    length = np.concatenate([[0.0], np.hypot(*np.diff(bend, axis=0).T).cumsum()])

    def at(steps: Points) -> Points:
        return np.stack([np.interp(steps * length[-1], length, bend[:, k]) for k in (0, 1)], axis=1)

    fine = np.linspace(0, 1, 400)
    line = at(fine)
    outside = (np.hypot(*(line - a).T) >= 1.04 * stops[0].size) & (np.hypot(*(line - b).T) >= 1.1 * stops[-1].size)
    kept = fine[outside]
    return at(np.linspace(kept[0], kept[-1], STEPS)) if len(kept) > 1 else line


def smooth(corners: Points) -> Points:
    """A curve from the first to the last corner that stays near all (Chaikin's corner cutting)."""
    for _ in range(5):
        early, late = corners[:-1], corners[1:]
        cut = np.stack([early * 0.75 + late * 0.25, early * 0.25 + late * 0.75], axis=1).reshape(-1, 2)
        corners = np.concatenate([corners[:1], cut, corners[-1:]])
    return corners


def arrow_head(line: Points, size: float) -> Points:
    """A triangle that ends where the line ends."""
    tip = line[-1]
    far = np.hypot(*(line - tip).T)
    back = tip - line[int(np.flatnonzero(far >= min(1.5 * size, far[0]))[-1])]
    along = back / (float(np.hypot(*back)) or 1.0)
    side = np.array([-along[1], along[0]])
    return np.array([tip, tip - along * size * 1.5 + side * size * 0.7, tip - along * size * 1.5 - side * size * 0.7])


def _at(place: Position) -> Points:
    assert place.at is not None  # trees use the links that were laid out
    return place.at


def _box(f: Fabric, node: int) -> dict[int, Points]:
    """The devices and switches of one box around the origin."""
    t = f.topology
    ranks = list(t.ranks_of(node))
    switches = [v for v in f.vertices if v >= t.n and t.switches[v - t.n].node == node]
    direct = _direct_of(f)
    if len(ranks) == 1 and not switches:
        return {ranks[0]: np.zeros(2)}
    if _is_cube_mesh(t, node, direct):
        quads = [np.array((x if d.index < 4 else -x, y)) for d in t.devices for x, y in (CUBE_MESH[d.index % 4],)]
        return _beside(f, {r: quads[r] for r in ranks}, switches)
    if any(t.switches[v - t.n].kind in ("pcie", "host") for v in switches):
        return _standing(f, ranks, switches)
    if len(switches) == 1 or not any(u in ranks and v in ranks for u, v in direct):
        at = dict(zip(ranks, _circle(len(ranks)), strict=True))
        inner = _circle(len(switches)) * 0.3 if len(switches) > 1 else np.zeros((1, 2))
        return at | dict(zip(switches, inner, strict=False))
    grid = _torus(f, ranks)
    spots = _spectral(f, ranks) if grid is None else grid
    return dict(zip(ranks, spots, strict=True)) | {v: np.zeros(2) for v in switches}


def _beside(f: Fabric, at: dict[int, Points], switches: list[int]) -> dict[int, Points]:
    """PCIe switches over and under the quads, sockets left and right of them."""
    t, spots = f.topology, dict(at)
    for v in sorted(switches, key=lambda v: t.switches[v - t.n].kind == "host"):
        outside = t.switches[v - t.n].kind == "host"
        near = [spots[u] for u in f.neighbours[v] if u in spots and (u < t.n or t.switches[u - t.n].kind != "host")]
        x, y = np.mean(near or [np.zeros(2)], axis=0)
        spots[v] = np.array([copysign(4.5, x), 0.0] if outside else [x * 1.5, copysign(3.1, y)])
    return spots


def _direct(t: Topology) -> set[tuple[int, int]]:
    return {(k.src, k.dst) for k in t.links if k.kind in ("nvlink", "xgmi") and max(k.src, k.dst) < t.n}


def _direct_of(f: Fabric) -> set[tuple[int, int]]:
    return {(u, v) for u, v in f.arcs if u < f.n and v < f.n}


def _is_cube_mesh(t: Topology, node: int, direct: set[tuple[int, int]]) -> bool:
    """The direct links of a box are some of a DGX-1's."""
    index = {r: t.devices[r].index for r in t.ranks_of(node)}
    pairs = {(index[u], index[v]) for u, v in direct if u in index and v in index and index[u] < index[v]}
    several = len(index) > 1 and len(set(index.values())) == len(index)
    return several and bool(pairs) and pairs <= CUBE_PAIRS


def _circle(count: int) -> Points:
    """Points on a circle from the top clockwise, as far apart as comfortable."""
    radius = max(1.6, 0.95 * count / (2 * pi) * 1.6)
    turns = [2 * pi * i / count for i in range(count)]
    return radius * np.array([(sin(a), cos(a)) for a in turns])


def _standing(f: Fabric, ranks: list[int], switches: list[int]) -> dict[int, Points]:
    """Devices in a row, PCIe switches over them, sockets on top, NVSwitches underneath."""
    t = f.topology
    at = {r: np.array([i - (len(ranks) - 1) / 2, 0.0]) * 1.15 for i, r in enumerate(ranks)}
    level = {"pcie": 1.7, "nvswitch": -1.7, "memory": 1.7, "host": 3.4, "net": 5.1}
    for v in sorted(switches, key=lambda v: level[t.switches[v - t.n].kind]):
        height = level[t.switches[v - t.n].kind]
        below = [at[u][0] for u in f.neighbours[v] if u in at and abs(at[u][1]) < abs(height)]
        at[v] = np.array([float(np.mean(below)) if below else 0.0, height])
    middle = np.array([0.0, 1.7])
    return {v: spot - middle for v, spot in at.items()}


def _spectral(f: Fabric, ranks: list[int]) -> Points:
    """Coordinates from the two smoothest vectors of the Laplacian; a circle where they put two ranks in one place."""
    size = len(ranks)
    number = {r: i for i, r in enumerate(ranks)}
    cap = np.zeros((size, size))
    for u, v in _direct_of(f):
        if u in number and v in number:
            cap[number[u], number[v]] = cap[number[v], number[u]] = 1.0
    if size > 2 and cap.sum() < 0.6 * size * (size - 1):
        degree = cap.sum(axis=1)
        _, vectors = np.linalg.eigh(np.diag(degree) - cap)
        spots: Points = vectors[:, 1:3]
        nearest, span = _nearest(spots), float((spots.max(axis=0) - spots.min(axis=0)).max())
        if nearest > 0.09 * span:
            return spots / nearest * 0.95
    return _circle(size)


def _torus(f: Fabric, ranks: list[int]) -> Points | None:
    """A torus of two or three dimensions whose ranks count along the last one first; None for other graphs.

    Rows and columns are bent, so that the link around each passes beside its vertices. The third dimension is a row of
    such grids.
    """
    number = {r: i for i, r in enumerate(ranks)}
    arcs = {(number[u], number[v]) for u, v in _direct_of(f) if u in number and v in number}
    for sides in _sides(len(ranks)):
        places = np.array(np.unravel_index(np.arange(len(ranks)), sides), np.int64).T
        away = np.array([(places[u] - places[v]) % sides for u, v in arcs])
        steps = np.minimum(away, np.array(sides) - away)
        if len(arcs) >= len(ranks) and (steps.sum(axis=1) == 1).all():
            return _bent(places, sides)
    return None


def _sides(count: int) -> Iterator[tuple[int, ...]]:
    """The sides of at least 3 that a torus of so many vertices may have, two of them before three."""
    divisors = [d for d in range(3, count) if count % d == 0]
    yield from sorted(((a, count // a) for a in divisors if count // a > 2), key=lambda s: (max(s), s))
    triples = ((a, b, count // a // b) for a in divisors for b in divisors if count % (a * b) == 0)
    yield from sorted((s for s in triples if min(s) > 2 and prod(s) == count), key=lambda s: (max(s), s))


def _bent(places: NDArray[np.int64], sides: tuple[int, ...]) -> Points:
    def bow(at: Points, side: int) -> Points:
        return BOW / (side - 2) * (at - (side - 1) / 2) ** 2

    def gap(side: int) -> float:
        return max(GRID, BOW / (side - 2) * ((side - 1) / 2) ** 2 + 1.2)

    down, right = places[:, -2].astype(float), places[:, -1].astype(float)
    x = right * gap(sides[-2]) + bow(down, sides[-2])
    y = bow(right, sides[-1]) - down * gap(sides[-1])
    if len(sides) == 3:
        columns = ceil(sqrt(sides[0]))
        row, column = places[:, 0] // columns, places[:, 0] % columns
        column = np.where(row % 2, columns - 1 - column, column)  # the next one is a neighbour
        wide, high = np.ptp(x) + 1.6 * GRID, np.ptp(y) + 1.6 * GRID
        x, y = x + column * wide + row * ASIDE, y - row * high - column * ASIDE
    spots = np.stack([x, y], axis=1)
    middle: Points = spots - (spots.max(axis=0) + spots.min(axis=0)) / 2
    return middle


def _network(f: Fabric, switches: list[int], radius: float) -> tuple[list[Points], dict[int, Points]]:
    """The centres of the boxes, and the places of several switches between them."""
    t = f.topology
    home = {v: t.nodes.index(node) for v, node in enumerate(t.homes) if node in t.nodes}
    boxes = {v: sorted({home[u] for u in f.neighbours[v] if u in home}) for v in switches}
    if all(boxes.values()) and len({box for some in boxes.values() for box in some}) == sum(map(len, boxes.values())):
        return _outside(switches, boxes, radius)
    return _in_tiers(f, switches, boxes, radius)


def _outside(switches: list[int], boxes: dict[int, list[int]], radius: float) -> tuple[list[Points], dict[int, Points]]:
    """Switches in a circle, each with its boxes behind it."""
    order = [box for v in switches for box in boxes[v]]
    slot = 2.3 * radius
    far = max(slot * len(order) / (2 * pi), 2.5 * radius)
    turn = {box: 2 * pi * i / len(order) for i, box in enumerate(order)}
    near = max(far - 2.6 * radius, 0.45 * far)
    middle = {v: atan2(sum(sin(turn[b]) for b in some), sum(cos(turn[b]) for b in some)) for v, some in boxes.items()}
    spots = {v: near * np.array([sin(a), cos(a)]) for v, a in middle.items()}
    return [far * np.array([sin(turn[b]), cos(turn[b])]) for b in range(len(order))], spots


def _in_tiers(
    f: Fabric, switches: list[int], boxes: dict[int, list[int]], radius: float
) -> tuple[list[Points], dict[int, Points]]:
    """Boxes in rows, over them the switches that join boxes, then those that join these, and so on."""
    count = len(f.topology.nodes)
    columns = count if count <= 8 else ceil(sqrt(2.5 * count))
    apart = APART * radius
    width, across = apart * columns, apart * (columns - 1) / 2
    centres = [apart * np.array([i % columns, -(i // columns)]) - np.array([across, 0.0]) for i in range(count)]
    tier, left, spots = [v for v in switches if boxes[v]], set(switches), dict[int, Points]()
    height = radius + 3.0
    while left:
        tier = tier or sorted(left)
        left -= set(tier)
        gap = width / max(len(tier), 1)
        for i, v in enumerate(tier):
            spots[v] = np.array([(i - (len(tier) - 1) / 2) * gap, height])
        height += max(3.0, 0.11 * width)
        tier = [v for v in sorted(left) if any(u in spots for u in f.neighbours[v])]
    return centres, spots


def _gaps(spots: Points) -> Points:
    """How far each point is from the nearest other one."""
    if len(spots) < 2:
        return np.ones(len(spots))
    gaps = np.hypot(*np.moveaxis(spots[:, None] - spots[None], -1, 0))
    np.fill_diagonal(gaps, np.inf)
    nearest: Points = gaps.min(axis=1)
    return nearest


def _nearest(spots: Points) -> float:
    """The least distance between two points."""
    return float(_gaps(spots).min())


def _between(centres: list[Points], radius: float) -> Points:
    """The middle of some boxes; where one lies there, the corner between it and its neighbours."""
    middle: Points = np.mean(centres, axis=0)
    taken = len(centres) > 1 and min(float(np.hypot(*(centre - middle))) for centre in centres) < radius
    return middle + taken * APART / 2 * radius


def _centres(count: int, radius: float) -> list[Points]:
    """Boxes on a circle around the network while they are few, in rows otherwise."""
    if count == 1:
        return [np.zeros(2)]
    if count <= 8:
        far = max(radius * 1.15 / sin(pi / count), radius + 1.2)
        start = pi / 2 if count == 2 else pi / count if count == 4 else 0.0
        turns = [2 * pi * i / count - start for i in range(count)]
        return [far * np.array([sin(a), cos(a)]) for a in turns]
    columns = ceil(sqrt(count))
    return [APART * radius * np.array([float(i % columns), -float(i // columns)]) for i in range(count)]
