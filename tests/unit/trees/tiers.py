"""Machines of several tiers, built for tests: boxes on leaves, leaves on spines, pods."""

from itertools import product

from blinkmpi.topology.model import Device, Link, LinkKind, Switch, Topology

NVLINK, CARD = 450_000, 50_000  # MB/s


class Network:
    """A machine under construction: boxes first, then switches and links, equally fast both ways."""

    def __init__(self, boxes: list[int], nvlink: int = NVLINK) -> None:
        self.devices = [Device("gpu", b, i) for b, size in enumerate(boxes) for i in range(size)]
        self.switches: list[Switch] = []
        self.links: dict[tuple[int, int], tuple[LinkKind, int]] = {}
        self.ranks = [[r for r, d in enumerate(self.devices) if d.node == b] for b in range(len(boxes))]
        for b, ranks in enumerate(self.ranks):
            if len(ranks) > 1:
                inner = self.switch("nvswitch", b)
                for r in ranks:
                    self.join(r, inner, nvlink, "nvlink")

    def switch(self, kind: str = "net", node: int = -1) -> int:
        """Add a switch; gives its vertex."""
        self.switches.append(Switch(kind, node))  # type: ignore[arg-type]
        return len(self.devices) + len(self.switches) - 1

    def join(self, u: int, v: int, mbps: int, kind: LinkKind = "net") -> None:
        """Join two vertices, or change what joins them; 0: not at all."""
        for ends in ((u, v), (v, u)):
            self.links.pop(ends, None)
            if mbps:
                self.links[ends] = kind, mbps

    def done(self) -> Topology:
        """The machine."""
        links = (Link(u, v, kind, 1, mbps) for (u, v), (kind, mbps) in self.links.items())
        return Topology("tiers", tuple(self.devices), tuple(self.switches), tuple(links)).check()


def leaf_spine(
    boxes: list[int], leaves: int, spines: int, up: int, nvlink: int = NVLINK
) -> tuple[Network, list[int], list[int]]:
    """Boxes on leaves in turn of their numbers, with ``up`` MB/s from each leaf to each spine; and these switches."""
    net = Network(boxes, nvlink)
    low, high = [net.switch() for _ in range(leaves)], [net.switch() for _ in range(spines)]
    for b, ranks in enumerate(net.ranks):
        for r in ranks:
            net.join(r, low[b * leaves // len(boxes)], CARD)
    for u, v in product(low, high):
        net.join(u, v, up)
    return net, low, high


def fat_tree(pods: int, leaves: int, boxes: int, gpus: int, *, over: int = 1) -> Network:
    """Pods of leaves with two switches above them, which two cores each join; leaves have 1/over of their links up."""
    net = Network([gpus] * (pods * leaves * boxes))
    cores = [[net.switch() for _ in range(2)] for _ in range(2)]
    up = boxes * gpus * CARD // over // 2
    for pod in range(pods):
        low, high = [net.switch() for _ in range(leaves)], [net.switch() for _ in range(2)]
        for b in range(leaves * boxes):
            for r in net.ranks[pod * leaves * boxes + b]:
                net.join(r, low[b // boxes], CARD)
        for u, v in product(low, high):
            net.join(u, v, up)
        for u, some in zip(high, cores, strict=True):
            for v in some:
                net.join(u, v, up * leaves // 2)
    return net


def dragonfly(groups: int, routers: int, hosts: int) -> Topology:
    """Groups of routers that are all joined, and every two groups by one link."""
    net = Network([1] * (groups * routers * hosts))
    low = [[net.switch() for _ in range(routers)] for _ in range(groups)]
    for r in range(len(net.devices)):
        net.join(r, low[r // hosts // routers][r // hosts % routers], CARD)
    for some in low:
        for i, j in product(range(routers), repeat=2):
            if i < j:
                net.join(some[i], some[j], CARD)
    for a, b in product(range(groups), repeat=2):
        if a < b:
            net.join(low[a][(b - a - 1) % routers], low[b][(a - b - 1) % routers], CARD)
    return net.done()


def rails(boxes: int, gpus: int, pods: int, spines: int) -> Network:
    """In each pod a switch for each rail; spines join them, at half of what the cards carry."""
    net = Network([gpus] * boxes)
    high = [net.switch() for _ in range(spines)]
    for pod in range(pods):
        low = [net.switch() for _ in range(gpus)]
        some = net.ranks[pod * boxes // pods : (pod + 1) * boxes // pods]
        for ranks in some:
            for r, leaf in zip(ranks, low, strict=True):
                net.join(r, leaf, CARD)
        for u, v in product(low, high):
            net.join(u, v, len(some) * CARD // 2 // spines)
    return net
