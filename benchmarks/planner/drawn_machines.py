"""Machines drawn at random, of 14 families: what a planner may meet, from two ranks to 256."""

import random
from collections.abc import Callable
from itertools import combinations, product

from blinkmpi.topology.model import Device, Link, LinkKind, Switch, SwitchKind, Topology

Draw = random.Random
Ends = list[tuple[int, int]]
RATES = {"nvlink": (25_000, 50_000), "pcie": (15_750, 31_500), "net": (12_500, 25_000, 50_000)}
LARGE = 0.05  # of the machines that have more than 64 ranks


class Drawing:
    """A machine under construction: ranks first, then switches."""

    def __init__(self, rng: Draw, boxes: list[int]) -> None:
        self.rng, self.boxes = rng, boxes
        self.n = sum(boxes)
        self.home = [box for box, ranks in enumerate(boxes) for _ in range(ranks)]
        self.switches: list[Switch] = []
        self.lanes: dict[tuple[int, int, LinkKind], int] = {}
        self.rate = {kind: rng.choice(rates) for kind, rates in RATES.items()}

    def switch(self, kind: SwitchKind, box: int = 0) -> int:
        """Add a switch; gives its vertex."""
        self.switches.append(Switch(kind, box))
        return self.n + len(self.switches) - 1

    def link(self, u: int, v: int, kind: LinkKind = "nvlink", lanes: int = 1, back: int | None = None) -> None:
        """Join two vertices: ``lanes`` from u to v, ``back`` from v to u (as many, if it is not given)."""
        for src, dst, many in ((u, v, lanes), (v, u, lanes if back is None else back)):
            if many:
                self.lanes[src, dst, kind] = self.lanes.get((src, dst, kind), 0) + many

    def done(self, name: str) -> Topology:
        """The machine."""
        devices, number = [], dict.fromkeys(range(len(self.boxes)), 0)
        for box in self.home:
            devices.append(Device("gpu", box, number[box]))
            number[box] += 1
        links = (Link(u, v, kind, lanes, self.rate[kind]) for (u, v, kind), lanes in self.lanes.items())
        return Topology(name, tuple(devices), tuple(self.switches), tuple(links)).check()


def ranks(rng: Draw, most: int = 256) -> int:
    """A number of ranks, small ones more often."""
    top = most if rng.random() < LARGE else min(most, 64)
    return max(2, min(most, round(2 ** rng.uniform(1, top.bit_length() - 1))))


def irregular(rng: Draw) -> Topology:
    """A connected graph of bundles of 1 to 4 links."""
    d = Drawing(rng, [ranks(rng)])
    chords = {(rng.randrange(v), v) for v in range(1, d.n)}
    chords |= {(u, v) for u, v in combinations(range(d.n), 2) if rng.random() < 2 / d.n}
    for u, v in sorted(chords):
        d.link(u, v, lanes=rng.randint(1, 4))
    return d.done("irregular")


def asymmetric(rng: Draw) -> Topology:
    """The same, with other rates there than back, or none."""
    d = Drawing(rng, [ranks(rng)])
    chords = {(rng.randrange(v), v) for v in range(1, d.n)}
    chords |= {(u, v) for u, v in combinations(range(d.n), 2) if rng.random() < 3 / d.n}
    for u, v in sorted(chords):
        d.link(u, v, lanes=rng.randint(1, 4), back=rng.randint(0, 4))
    return d.done("asymmetric")


def one_way(rng: Draw) -> Topology:
    """A one-way ring with one-way chords."""
    d = Drawing(rng, [ranks(rng)])
    chords = {(i, (i + 1) % d.n) for i in range(d.n)} | {tuple(rng.sample(range(d.n), 2)) for _ in range(d.n // 2)}
    for u, v in sorted(chords):
        d.link(u, v, lanes=rng.randint(1, 3), back=0)
    return d.done("one-way links")


def meshed(rng: Draw) -> Topology:
    """Every pair of ranks joined, by unequal bundles."""
    d = Drawing(rng, [ranks(rng, 64)])
    for u, v in combinations(range(d.n), 2):
        d.link(u, v, lanes=rng.randint(1, 3))
    return d.done("fully joined")


def switched(rng: Draw) -> Topology:
    """Ranks on one to three switches, which may be joined."""
    d = Drawing(rng, [ranks(rng)])
    hubs = [d.switch("nvswitch") for _ in range(rng.randint(1, 3))]
    for r in range(d.n):
        for hub in rng.sample(hubs, rng.randint(1, len(hubs))):
            d.link(r, hub, lanes=rng.randint(1, 6))
    for u, v in combinations(hubs, 2):
        if rng.random() < 0.7:
            d.link(u, v, lanes=rng.randint(1, 2 * d.n))
    return d.done("switched")


def uneven_switch(rng: Draw) -> Topology:
    """One switch, with ports that are faster in than out, or the other way."""
    d = Drawing(rng, [ranks(rng)])
    hub = d.switch("nvswitch")
    for r in range(d.n):
        d.link(r, hub, lanes=rng.randint(1, 6), back=rng.randint(1, 6))
    return d.done("switch with uneven ports")


def rail_boxes(rng: Draw) -> Topology:
    """Boxes whose cards lead to a network for each rail; some cards are slow or missing."""
    boxes, each = rng.randint(2, 16), rng.randint(2, 8)
    d = Drawing(rng, [each] * boxes)
    inner = [d.switch("nvswitch", box) for box in range(boxes)]
    rails = [d.switch("net", -1) for _ in range(each)]
    broken = {(rng.randrange(boxes), rng.randrange(each)): rng.randint(0, 1) for _ in range(rng.randint(0, 2))}
    for box, i in product(range(boxes), range(each)):
        d.link(box * each + i, inner[box], lanes=12)
        d.link(box * each + i, rails[i], "net", broken.get((box, i), 2))
    return d.done("rails")


def leaf_spine(rng: Draw) -> Topology:
    """Boxes on leaf switches, which are joined by spines with less capacity."""
    boxes, each, spines = rng.randint(2, 8), rng.randint(1, 8), rng.randint(1, 3)
    d = Drawing(rng, [each] * boxes)
    leaves = [d.switch("net", -1) for _ in range(rng.randint(1, boxes))]
    tops = [d.switch("net", -1) for _ in range(spines)]
    for box in range(boxes):
        inner = d.switch("nvswitch", box)
        for i in range(each):
            d.link(box * each + i, inner, lanes=6)
            d.link(box * each + i, leaves[box % len(leaves)], "net", 1)
    for leaf, top in product(leaves, tops):
        d.link(leaf, top, "net", rng.randint(1, 2 * each))
    return d.done("leaf and spine")


def torus(rng: Draw) -> Topology:
    """A torus of two or three dimensions, some of whose links are dead."""
    sides = [rng.randint(2, 6) for _ in range(2)] if rng.random() < 0.6 else [rng.randint(2, 4) for _ in range(3)]
    at = {place: i for i, place in enumerate(product(*map(range, sides)))}
    pairs = set()
    for place, axis in product(at, range(len(sides))):
        there = (*place[:axis], (place[axis] + 1) % sides[axis], *place[axis + 1 :])
        if there != place:
            pairs.add((min(at[place], at[there]), max(at[place], at[there])))
    return _with_dead_links(rng, f"torus {'x'.join(map(str, sides))}", len(at), sorted(pairs))


def hypercube(rng: Draw) -> Topology:
    """A hypercube, some of whose links are dead."""
    bits = rng.randint(2, 6)
    pairs = [(u, u ^ 1 << bit) for u, bit in product(range(1 << bits), range(bits)) if u < u ^ 1 << bit]
    return _with_dead_links(rng, f"hypercube {1 << bits}", 1 << bits, pairs)


def circulant(rng: Draw) -> Topology:
    """A ring with chords of equal lengths, some of whose links are dead."""
    n = ranks(rng)
    steps = {1, *(rng.randint(1, n // 2) for _ in range(rng.randint(0, 2)))}
    pairs = sorted({(min(i, (i + step) % n), max(i, (i + step) % n)) for i in range(n) for step in steps})
    return _with_dead_links(rng, f"circulant {n}", n, [(u, v) for u, v in pairs if u != v])


def bridges(rng: Draw) -> Topology:
    """PCIe boxes of two sockets, with NVLink bridges between some pairs."""
    boxes = rng.randint(1, 4)
    d = Drawing(rng, [2 * rng.randint(1, 4) for _ in range(boxes)])
    net = d.switch("net", -1) if boxes > 1 else -1
    first = 0
    for box, count in enumerate(d.boxes):
        sockets = [d.switch("host", box) for _ in range(2)]
        d.link(*sockets, "pcie", rng.randint(1, 2))
        for i in range(count):
            d.link(first + i, sockets[2 * i // count], "pcie", 1)
        for i in range(0, count - 1, 2):
            if rng.random() < 0.7:
                d.link(first + i, first + i + 1, "nvlink", rng.randint(1, 4))
        if net >= 0:
            d.link(sockets[0], net, "net", 1)
        first += count
    return d.done("PCIe with bridges")


def unlike_boxes(rng: Draw) -> Topology:
    """Boxes of unequal sizes and insides on one network."""
    d = Drawing(rng, [rng.randint(1, 8) for _ in range(rng.randint(2, 6))])
    net, first = d.switch("net", -1), 0
    for box, count in enumerate(d.boxes):
        if count > 1 and rng.random() < 0.5:
            inner = d.switch("nvswitch", box)
            for i in range(count):
                d.link(first + i, inner, lanes=rng.randint(2, 12))
        else:
            for i in range(count - 1):
                d.link(first + i, first + i + 1, lanes=rng.randint(1, 4))
        for i in range(rng.randint(1, count)):
            d.link(first + i, net, "net", rng.randint(1, 2))
        first += count
    return d.done("unlike boxes")


def dragonfly(rng: Draw) -> Topology:
    """Groups whose ranks are all joined, with a link or two between each two groups."""
    groups, each = rng.randint(2, 9), rng.randint(2, 8)
    d = Drawing(rng, [groups * each])
    for group in range(groups):
        for u, v in combinations(range(group * each, (group + 1) * each), 2):
            d.link(u, v, lanes=2)
    for a, b in combinations(range(groups), 2):
        for _ in range(rng.randint(1, 2)):
            d.link(a * each + rng.randrange(each), b * each + rng.randrange(each), lanes=1)
    return d.done("dragonfly")


def _with_dead_links(rng: Draw, name: str, n: int, pairs: Ends) -> Topology:
    d = Drawing(rng, [n])
    dead = set(rng.sample(pairs, min(len(pairs) // 8, rng.randint(0, 2))))
    for u, v in pairs:
        if (u, v) not in dead:
            d.link(u, v)
    return d.done(f"{name}, {len(dead)} dead" if dead else name)


FAMILIES: dict[str, Callable[[Draw], Topology]] = {
    draw.__name__: draw
    for draw in (
        irregular, asymmetric, one_way, meshed, switched, uneven_switch, rail_boxes, leaf_spine, torus, hypercube,
        circulant, bridges, unlike_boxes, dragonfly,
    )
}  # fmt: skip


def drawn(family: str, seed: int) -> Topology:
    """A machine of a family; the same seed gives the same one."""
    return FAMILIES[family](random.Random(f"{family} {seed}"))
