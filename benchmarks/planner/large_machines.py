"""Machines of 65 to 4096 GPUs: what data centres are built of today, whole and with parts that are dead or slow."""

import random
from collections.abc import Callable
from itertools import combinations, product

from drawn_machines import Drawing

NVLINK, NIC = 450, 50  # GB/s of a GPU in a box of today, and of its network card


class Plan(Drawing):
    """A machine under construction, whose lanes are 1 GB/s each."""

    def __init__(self, boxes: list[int], seed: str = "") -> None:
        super().__init__(random.Random(seed), boxes)
        self.rate = dict.fromkeys(self.rate, 1000)
        self.first = [sum(boxes[:b]) for b in range(len(boxes))]

    def box(self, b: int, nvlink: int = NVLINK) -> None:
        """A switch inside a box."""
        if self.boxes[b] > 1:
            inner = self.switch("nvswitch", b)
            for i in range(self.boxes[b]):
                self.link(self.first[b] + i, inner, lanes=nvlink)

    def cards(self, b: int, nic: int, leaves: list[int], shared: int = 1) -> None:
        """A network card for each GPU of a box, or for each ``shared`` ones, on these switches in turn."""
        for i in range(0, self.boxes[b], shared):
            if shared == 1:
                self.link(self.first[b] + i, leaves[i % len(leaves)], "net", nic)
                continue
            bridge = self.switch("pcie", b)
            for k in range(i, min(i + shared, self.boxes[b])):
                self.link(self.first[b] + k, bridge, "pcie", 64)
            self.link(bridge, leaves[i % len(leaves)], "net", nic)

    def join(self, low: list[int], high: list[int], lanes: int) -> None:
        """Every switch of a tier with every one of the next."""
        for u, v in product(low, high):
            self.link(u, v, "net", lanes)

    def nets(self, count: int) -> list[int]:
        """So many switches of the network."""
        return [self.switch("net", -1) for _ in range(count)]

    def cables(self, *, cards: bool) -> list[tuple[int, int]]:
        """The network's links, once for both directions: those of cards, or those between its switches."""
        nets = {self.n + i for i, s in enumerate(self.switches) if s.kind == "net"}
        ends = ((u, v) for u, v, kind in self.lanes if kind == "net" and v in nets)
        return sorted((u, v) for u, v in ends if (u not in nets if cards else u in nets and u < v))

    def harm(self, pairs: list[tuple[int, int]], dead: int, slow: int) -> None:
        """Links that are dead, if others are left to both ends, and links at half of their rate."""
        for u, v in self.rng.sample(pairs, min(len(pairs) // 2, dead + slow)):
            left = [pair for pair in pairs if (*pair, "net") in self.lanes and pair != (u, v)]
            kill = dead > 0 and all(any(end in pair for pair in left) for end in (u, v) if end >= self.n)
            dead -= kill
            for ends in ((u, v, "net"), (v, u, "net")):
                lanes = self.lanes.pop(ends)
                if not kill:
                    self.lanes[ends] = max(1, lanes // 2)


def leaf_spine(
    boxes: int, gpus: int = 8, *, leaves: int = 0, spines: int = 4, over: int = 1, nic: int = NIC, nvlink: int = NVLINK,
    shared: int = 1,
) -> Plan:  # fmt: skip
    """Boxes on leaf switches, these on spines; a leaf's links up are ``1/over`` of those down."""
    leaves = leaves or max(2, boxes // 4)
    d = Plan([gpus] * boxes)
    low, high = d.nets(leaves), d.nets(spines)
    for b in range(boxes):
        d.box(b, nvlink)
        d.cards(b, nic, [low[b * leaves // boxes]], shared)
    each = -(-boxes // leaves) * -(-gpus // shared) * nic // over
    d.join(low, high, max(1, each // spines))
    return d


def fat_tree(pods: int, leaves: int, boxes: int, gpus: int = 8, *, over: int = 1, core_over: int = 1) -> Plan:
    """Three tiers: pods of leaves with ``boxes`` each; four switches join the leaves of a pod, four cores each pods."""
    d = Plan([gpus] * (pods * leaves * boxes))
    cores = [d.nets(4) for _ in range(4)]
    up = max(1, boxes * gpus * NIC // over // 4)
    for pod in range(pods):
        low, high = d.nets(leaves), d.nets(4)
        for b in range(leaves * boxes):
            box = pod * leaves * boxes + b
            d.box(box)
            d.cards(box, NIC, [low[b // boxes]])
        d.join(low, high, up)
        for agg, some in zip(high, cores, strict=True):
            d.join([agg], some, max(1, up * leaves // core_over // 4))
    return d


def rails(boxes: int, gpus: int = 8, *, pods: int = 2, spines: int = 4, over: int = 1) -> Plan:
    """In every pod a switch for each rail, which joins the cards of one number; spines join these."""
    d = Plan([gpus] * boxes)
    high = d.nets(spines)
    for pod in range(pods):
        low = d.nets(gpus)
        some = range(pod * boxes // pods, (pod + 1) * boxes // pods)
        for b in some:
            d.box(b)
            d.cards(b, NIC, low)
        d.join(low, high, max(1, len(some) * NIC // over // spines))
    return d


def racks(count: int, gpus: int = 72, *, nic: int = NIC, nvlink: int = 900, shared: int = 1) -> Plan:
    """Racks in which a switch joins all GPUs, on one network that does not block."""
    d = Plan([gpus] * count)
    (net,) = d.nets(1)
    for b in range(count):
        d.box(b, nvlink)
        d.cards(b, nic, [net], shared)
    return d


def dragonfly(groups: int, routers: int, hosts: int, links: int, *, nic: int = 25) -> Plan:
    """Groups of routers that are all joined, each with ``links`` to routers of other groups (Kim 2008)."""
    d = Plan([1] * (groups * routers * hosts))
    low = [d.nets(routers) for _ in range(groups)]
    for g, r, h in product(range(groups), range(routers), range(hosts)):
        d.cards((g * routers + r) * hosts + h, nic, [low[g][r]])
    for some in low:
        for u, v in combinations(some, 2):
            d.link(u, v, "net", nic)
    for a, b in combinations(range(groups), 2):
        there, back = (b - a - 1) // links % routers, (groups - (b - a) - 1) // links % routers
        d.link(low[a][there], low[b][back], "net", nic)
    return d


def torus(*sides: int, lanes: int = 25) -> Plan:
    """A torus without switches."""
    at = {place: i for i, place in enumerate(product(*map(range, sides)))}
    d = Plan([len(at)])
    for place, axis in product(at, range(len(sides))):
        there = (*place[:axis], (place[axis] + 1) % sides[axis], *place[axis + 1 :])
        if sides[axis] > 2 or place < there:
            d.link(at[place], at[there], lanes=lanes)
    return d


def unlike(seed: int, boxes: int, leaves: int, spines: int, over: int) -> Plan:
    """Boxes of 2 to 8 GPUs on leaves, drawn."""
    rng = random.Random(f"unlike {seed}")
    d = Plan([rng.randint(2, 8) for _ in range(boxes)], f"unlike {seed}")
    low, high = d.nets(leaves), d.nets(spines)
    for b in range(boxes):
        d.box(b)
        d.cards(b, NIC, [low[b * leaves // boxes]])
    d.join(low, high, max(1, d.n * NIC // leaves // over // spines))
    return d


def harmed(d: Plan, *, cards: bool, dead: int = 2, slow: int = 2) -> Plan:
    """With links that are dead, and links at half of their rate: of cards, or between switches."""
    d.harm(d.cables(cards=cards), dead, slow)
    return d


# The machines that data centres are built of, by what they are called in the table.
USUAL: dict[str, Callable[[], Plan]] = {
    "80 GPUs, leaf and spine": lambda: leaf_spine(10, leaves=5),
    "128 GPUs, 2 leaves and a spine": lambda: leaf_spine(16, leaves=2, spines=1),
    "1024 GPUs, fat tree 1:1": lambda: fat_tree(8, 4, 4),
    "1024 GPUs, fat tree 4:1": lambda: fat_tree(8, 4, 4, over=4),
    "128 GPUs, rails and spine": lambda: rails(16),
    "two NVL72": lambda: racks(2),
    "two NVL72 on leaves and spines": lambda: leaf_spine(2, 72, leaves=2, nvlink=900),
    "sixteen NVL72": lambda: racks(16),
    "torus 8x8x8": lambda: torus(8, 8, 8),
    "dragonfly of 1056": lambda: dragonfly(33, 8, 4, 4),
    "4096 GPUs on one network": lambda: racks(512, 8, nvlink=NVLINK),
    "4096 GPUs, fat tree 1:1": lambda: fat_tree(16, 8, 4),
}


def drawn(seed: int) -> tuple[str, Plan]:
    """A machine of a kind that goes with the seed, 65 to 512 GPUs; the same seed gives the same one."""
    rng = random.Random(f"large {seed}")
    over, gpus = rng.choice([1, 2, 4]), rng.choice([4, 8, 8, 8])
    boxes, pods = rng.randint(-(-66 // gpus), 256 // gpus), rng.choice([2, 3, 4])
    whole: Plan
    kind = ("leaves", "fat tree", "rails", "racks", "dragonfly", "shared cards", "unlike boxes", "torus")[seed % 8]
    if kind == "leaves":
        whole = leaf_spine(boxes, gpus, leaves=rng.randint(2, min(8, boxes)), spines=rng.randint(1, 6), over=over)
    elif kind == "fat tree":
        each = rng.randint(2, 4)
        whole = fat_tree(pods, each, -(-70 // (pods * each * gpus)), gpus, over=over, core_over=rng.choice([1, 2]))
    elif kind == "rails":
        whole = rails(-(-boxes // pods) * pods, gpus, pods=pods, spines=rng.randint(1, 4), over=over)
    elif kind == "racks":
        whole = racks(rng.randint(2, 6), rng.choice([36, 64, 72]), nic=rng.choice([50, 100]))
    elif kind == "dragonfly":
        routers, links = rng.randint(3, 6), rng.randint(1, 2)
        whole = dragonfly(rng.randint(7, routers * links + 1) if routers * links > 6 else 4, routers, 6, links)
    elif kind == "shared cards":
        whole = leaf_spine(boxes, gpus, leaves=2, spines=2, over=over, shared=2)
    elif kind == "unlike boxes":
        whole = unlike(seed, rng.randint(20, 40), rng.randint(2, 6), rng.randint(1, 4), over)
    else:
        whole = torus(rng.randint(4, 6), rng.randint(4, 6), rng.randint(5, 6))
    whole.rng = rng
    harm = rng.choice(["whole", "cards", "links"])
    cables = whole.cables(cards=harm == "cards")
    if harm == "whole" or not cables or (kind == "dragonfly" and harm == "cards"):
        return kind, whole
    return f"{kind}, {harm} dead and slow", harmed(whole, cards=harm == "cards")
