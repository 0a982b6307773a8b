"""Networks without boxes, built for tests: dragonflies and tori."""

from itertools import combinations, product

from blinkmpi.topology.model import Device, Link, Topology

from .tiers import CARD, Network


def dragonfly(groups: int, routers: int, hosts: int) -> Topology:
    """Groups of routers that are all joined, every two groups by one link; ``hosts`` GPUs on each router."""
    net = Network([1] * (groups * routers * hosts))
    low = [[net.switch() for _ in range(routers)] for _ in range(groups)]
    for g, r, h in product(range(groups), range(routers), range(hosts)):
        net.join((g * routers + r) * hosts + h, low[g][r], CARD)
    for some in low:
        for u, v in combinations(some, 2):
            net.join(u, v, CARD)
    for a, b in combinations(range(groups), 2):
        net.join(low[a][(b - a - 1) % routers], low[b][(groups - b + a - 1) % routers], CARD)
    return net.done()


def torus(*sides: int) -> Topology:
    """GPUs on a torus without switches."""
    number = {place: i for i, place in enumerate(product(*map(range, sides)))}
    ends = set()
    for place, axis in product(number, range(len(sides))):
        there = (*place[:axis], (place[axis] + 1) % sides[axis], *place[axis + 1 :])
        ends |= {(number[place], number[there]), (number[there], number[place])}
    links = tuple(Link(u, v, "nvlink", 1, 25_000) for u, v in sorted(ends))
    devices = tuple(Device("gpu", 0, i) for i in range(len(number)))
    return Topology("torus " + "x".join(map(str, sides)), devices, (), links).check()
