"""Three phases on several boxes: splits of all kinds, their rates and bounds, and a proof that sees every fault."""

from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import pytest

from blinkmpi.errors import ArgumentError, FormatError, PlanError, TopologyError
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, Switch, Topology
from blinkmpi.trees import pack
from blinkmpi.trees.bounds.certify import certify
from blinkmpi.trees.cluster.hierarchy import Hierarchy, Share, hierarchy, verify_hierarchy
from blinkmpi.trees.graph.fabric import fabric

COLLECTIVES = ("allreduce", "broadcast", "reduce")
SPLITS = [(3, 5), (4, 4), (8, 8), (1, 7), (1, 1), (2, 3, 3), (1, 2, 5), (8, 2, 4, 1)]


def cluster(name: str, split: tuple[int, ...]) -> Topology:
    """The first ranks of each of several boxes."""
    t = machine(f"{name}:{len(split)}")
    size = t.n // len(split)
    return t.subset([b * size + i for b, count in enumerate(split) for i in range(count)])


def cpus(split: tuple[int, ...], net: tuple[int, ...], copy: int = 8000) -> Topology:
    """CPU ranks around one memory a node, the nodes around one network."""
    homes = [b for b, count in enumerate(split) for _ in range(count)]
    n = len(homes)
    pairs = [(r, n + b, "memory", copy) for r, b in enumerate(homes)]
    pairs += [(n + b, n + len(split), "net", mbps) for b, mbps in enumerate(net)]
    links = [Link(u, v, kind, 1, c) for a, b, kind, c in pairs for u, v in ((a, b), (b, a))]  # type: ignore[arg-type]
    switches = (*(Switch("memory", b) for b in range(len(split))), Switch("net", -1))
    devices = tuple(Device("cpu", b, i) for i, b in enumerate(homes))
    return Topology("cpus", devices, switches, tuple(links)).check()


def counted(h: Hierarchy) -> dict[tuple[int, int], Fraction]:
    """What all phases together put on every link, from the trees that an executor would run."""
    loads: dict[tuple[int, int], Fraction] = {}
    trees = [*h.exchange(), *(t for at in range(len(h.boxes)) for share in h.served(at) for t in share)]
    for tree in trees:
        for e in tree.edges:
            hops = [] if h.collective == "reduce" else list(pairwise(e.path))
            hops += [] if h.collective == "broadcast" else list(pairwise(e.path[::-1]))
            for hop in hops:
                loads[hop] = loads.get(hop, Fraction(0)) + tree.weight
    return loads


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["dgx-1v", "dgx-a100"])
def test_every_split_is_proved_and_counted_again(name: str, split: tuple[int, ...], collective: str) -> None:
    t = cluster(name, split)
    h = hierarchy(t, collective=collective, root=t.n - 1)

    room = fabric(t, t.kinds()).arcs
    assert all(load <= room[arc] for arc, load in counted(h).items())
    assert sum(s.fraction for s in h.shares) == 1
    for at, box in enumerate(h.boxes):
        for share, trees in zip(h.shares, h.served(at), strict=True):
            assert sum(tree.weight for tree in trees) == share.fraction * h.rate
            for tree in trees:
                assert {tree.root, *(e.dst for e in tree.edges)} == set(box.ranks)
    assert Hierarchy.from_json(h.to_json()) == h
    assert h.gap == 1 - h.rate / h.bound
    if collective == "allreduce":
        assert h.optimal


@pytest.mark.parametrize("split", [(3, 5), (2, 3, 3), (4, 4), (1, 7)])
@pytest.mark.parametrize("name", ["dgx-1v", "dgx-a100"])
def test_no_faster_than_the_whole_machine_allows(name: str, split: tuple[int, ...]) -> None:
    t = cluster(name, split)
    whole = fabric(t, t.kinds())
    for collective in COLLECTIVES:
        c = certify(whole, collective, 0)
        assert hierarchy(t, collective=collective).rate <= c.capacity_mbps / c.divisor


def test_as_fast_as_flat_trees_of_two_boxes() -> None:
    t = machine("dgx-1v:2")
    assert hierarchy(t).rate == pack(t, "allreduce").rate == 50_000
    assert hierarchy(t, collective="broadcast").rate == pack(t, "broadcast").rate
    four = machine("dgx-a100:4")
    assert hierarchy(four).rate == pack(four, "allreduce").rate == Fraction(400_000, 3)


def test_flat_trees_may_leave_a_box_and_come_back() -> None:
    """What the bound of three phases does not allow: two boxes of A100 lend each other their networks."""
    t = machine("dgx-a100:2")
    h = hierarchy(t)
    assert h.rate == h.bound == pack(t.subset(range(8)), "allreduce").rate < pack(t, "allreduce").bound
    assert h.limit.startswith("inside node 0")


@pytest.mark.parametrize(("split", "cards"), [((8, 8), 4), ((3, 5), 4), ((4, 4), 4)])
def test_every_network_card_of_a_dgx_1_is_used(split: tuple[int, ...], cards: int) -> None:
    """Also those behind which no GPU of the job stands."""
    h = hierarchy(cluster("dgx-1v", split))
    net = max(v for s in h.shares for e in s.edges for v in e.path)
    hops = {hop for s in h.shares for e in s.edges for hop in pairwise(e.path) if net in hop}
    assert len(hops) == 2 * cards * len(split)


def test_roots_are_spread_in_proportion_to_their_links() -> None:
    """Eight cards against three: every rank is a root for what its card carries."""
    h = hierarchy(cluster("dgx-a100", (3, 5)))
    for at, count in ((0, 3), (1, 5)):
        parts: dict[int, Fraction] = {}
        for s in h.shares:
            parts[s.roots[at]] = parts.get(s.roots[at], Fraction(0)) + s.fraction
        assert parts == dict.fromkeys(h.boxes[at].ranks, Fraction(1, count))
    assert h.rate == 75_000
    slow = Fraction(1, 4)
    t = machine("dgx-a100:2")
    links = tuple(
        msgspec.structs.replace(k, lane_mbps=6_250) if k.kind == "net" and 0 in (k.src, k.dst) else k for k in t.links
    )
    limping = hierarchy(msgspec.structs.replace(t, links=links))
    assert sum(s.fraction for s in limping.shares if s.roots[0] == 0) == slow / (7 + slow)


def test_unequal_boxes_take_the_part_of_the_hub_that_they_can() -> None:
    """Three boxes with 1, 2 and 5 cards: the first one's card is the limit, and it is never a hub."""
    h = hierarchy(cluster("dgx-a100", (1, 2, 5)))
    assert h.rate == 25_000
    assert {s.hub for s in h.shares} == {1, 2}
    equal = hierarchy(machine("dgx-a100:3"))
    hubs = {node: sum(s.fraction for s in equal.shares if s.hub == node) for node in (0, 1, 2)}
    assert set(hubs.values()) == {Fraction(1, 3)}


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("split", [(4, 4), (3, 5), (1, 3), (2, 3, 3)])
def test_cpu_ranks_exchange_beside_their_memory(split: tuple[int, ...], collective: str) -> None:
    t = cpus(split, tuple(100 for _ in split))
    h = hierarchy(t, collective=collective)
    k = len(split)
    assert h.rate == (Fraction(100 * k, 2 * k - 2) if collective == "allreduce" else 100)
    assert h.optimal


def test_cores_that_copy_slowly_leave_less_for_the_network() -> None:
    t = cpus((4, 4), (1000, 1000), copy=1000)
    h = hierarchy(t)
    inside = pack(t.subset(range(4)), "allreduce").rate
    assert 0 < h.rate < inside
    assert h.gap > 0


def test_unequal_links_between_hosts() -> None:
    h = hierarchy(cpus((2, 2, 2), (100, 100, 25)))
    assert h.rate == 25
    assert "node 2" in h.limit


def test_pcie_carries_all_phases_at_once() -> None:
    """One tree of links for everything: the phases share it, and the gap says so."""
    t = machine("pcie-8:2")
    h = hierarchy(t)
    assert 0 < h.gap < Fraction(1, 10)
    room = fabric(t, t.kinds()).arcs
    assert max(load / room[arc] for arc, load in counted(h).items()) == 1


# ---------------------------------------------------------------- faults


def changed(h: Hierarchy, **fields: Any) -> Hierarchy:
    return msgspec.structs.replace(h, **fields)


def with_share(h: Hierarchy, at: int, **fields: Any) -> Hierarchy:
    some: list[Share] = list(h.shares)
    some[at] = msgspec.structs.replace(some[at], **fields)
    return changed(h, shares=tuple(some))


def test_the_proof_sees_every_fault() -> None:
    t = cluster("dgx-1v", (3, 5))
    h = hierarchy(t)
    share, box = h.shares[0], h.boxes[0]
    edge = share.edges[0]
    packing = box.packings[0]
    faults: list[tuple[Hierarchy, str]] = [
        (changed(h, rate=h.rate * 2), "carries"),
        (changed(h, rate=h.rate + 1, bound=h.bound + 1), "carries"),
        (changed(h, bound=h.bound * 2), "expected a bound of"),
        (changed(h, limit="nothing"), "expected a bound of"),
        (changed(h, rate=Fraction(0)), "hierarchy"),
        (changed(h, shares=h.shares[1:]), "sum to"),
        (with_share(h, 0, fraction=Fraction(0)), "sum to"),
        (with_share(h, 0, hub=7), "hub 7"),
        (with_share(h, 0, roots=(3, 3)), "one rank of each box"),
        (with_share(h, 0, roots=(0,)), "one rank of each box"),
        (with_share(h, 0, edges=()), "exchanges over"),
        (with_share(h, 0, edges=(msgspec.structs.replace(edge, path=edge.path[1:]),)), "must lead from"),
        (with_share(h, 0, edges=(msgspec.structs.replace(edge, path=(edge.src, edge.dst)),)), "does not have"),
        (with_share(h, 0, edges=(msgspec.structs.replace(edge, path=(edge.src, t.n + 2, edge.dst)),)), "does not have"),
        (changed(h, boxes=h.boxes[::-1]), "boxes are not those"),
        (changed(h, n=9), "boxes are not those"),
        (changed(h, root=0), "root is 0"),
    ]
    for trees, text in ((packing.trees[:-1], "weights sum"), (packing.trees[::-1], "box 0 share")):
        bad = msgspec.structs.replace(box, packings=(msgspec.structs.replace(packing, trees=trees),))
        faults.append((changed(h, boxes=(bad, h.boxes[1])), text))
    for fault, text in faults:
        with pytest.raises(PlanError, match=text):
            verify_hierarchy(fault, t)
    assert verify_hierarchy(h, t) is h


def test_packings_of_another_collective_or_root_are_refused() -> None:
    t = cluster("dgx-a100", (3, 5))
    h = hierarchy(t, collective="broadcast")
    box = h.boxes[1]
    with pytest.raises(PlanError, match="no packing for root"):
        verify_hierarchy(changed(h, boxes=(h.boxes[0], msgspec.structs.replace(box, packings=box.packings[1:]))), t)
    with pytest.raises(PlanError, match="packing for broadcast"):
        verify_hierarchy(changed(h, collective="reduce"), t)
    twice = msgspec.structs.replace(box, packings=(*box.packings, pack(t.subset(box.ranks), "broadcast")))
    with pytest.raises(PlanError, match="two packings for one root"):
        verify_hierarchy(changed(h, boxes=(h.boxes[0], twice)), t)


def test_cores_are_counted() -> None:
    t = cpus((4, 4), (1000, 1000), copy=1000)
    h = hierarchy(t)
    with pytest.raises(PlanError, match="core of rank"):
        verify_hierarchy(changed(h, rate=h.rate * Fraction(101, 100)), t)


def test_calls_and_machines_that_cannot_be() -> None:
    t = cluster("dgx-a100", (2, 2))
    with pytest.raises(ArgumentError, match="choose one of allreduce"):
        hierarchy(t, collective="gather")
    with pytest.raises(ArgumentError, match=r"0\.\.3"):
        hierarchy(t, collective="broadcast", root=4)
    net = t.n + next(j for j, s in enumerate(t.switches) if s.kind == "net")
    one_way = tuple(k for k in t.links if (k.src, k.dst) not in ((2, net), (net, 3)))
    for wrong, words in (
        (machine("dgx-1v"), "several nodes"),
        (msgspec.structs.replace(t, links=(*t.links, Link(0, 2, "nvlink", 1, 1000))), "past the network"),
        (t.drop_link(2, net).drop_link(3, net), "node 1 has no link"),
        (msgspec.structs.replace(t, links=one_way), "both ways"),
    ):
        with pytest.raises(TopologyError, match=words):
            hierarchy(wrong)
    with pytest.raises(FormatError, match="hierarchy"):
        Hierarchy.from_json(t.to_json())


def test_shares_are_in_order_and_the_plan_is_always_the_same() -> None:
    t = cluster("dgx-1v", (2, 3, 3))
    h = hierarchy(t)
    assert h.to_json() == hierarchy(t).to_json()
    assert list(accumulate(s.fraction for s in h.shares))[-1] == 1
    assert [s.hub for s in h.shares] == sorted(s.hub for s in h.shares)
