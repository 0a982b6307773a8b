"""Clusters: whole boxes over their ports, up to a thousand ranks, equal or not, with slow cards and unequal boxes."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from blinkmpi.errors import NoPackingError, PlanError, TopologyError
from blinkmpi.planning.planner import make_plan
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, Switch, Topology
from blinkmpi.trees import Packing, pack, verify
from tests.effort import Effort
from tests.harness import NEVER_S
from tests.unit.trees.rails import rails

TREES = ("broadcast", "reduce", "allgather", "reduce_scatter", "allreduce")


def slow_card(t: Topology, rank: int, mbps: int) -> Topology:
    """The same cluster with one rank's network card at this rate."""
    links = tuple(replace(k, lane_mbps=mbps) if k.kind == "net" and rank in (k.src, k.dst) else k for k in t.links)
    return replace(t, links=links)


def units(packing: Packing) -> Fraction:
    return packing.rate / 1000


@pytest.mark.slow
@pytest.mark.parametrize("collective", TREES)
@pytest.mark.parametrize(
    "name", ["dgx-a100:3", "dgx-a100:4", "mi250:4", "dgx-1v:2", "dgx-1p:3", "dgx-2:3", "hgx-h200:8"]
)
def test_catalogue_clusters_meet_their_bound(name: str, collective: str) -> None:
    packing = pack(machine(name), collective, root=5 if collective in ("broadcast", "reduce") else 0)
    assert packing.optimal, packing.reason
    assert packing.scheme == "cluster"


@pytest.mark.parametrize(("name", "rate", "depth"), [
    ("dgx-a100:4", Fraction(800, 3), 2),
    ("dgx-a100:8", Fraction(1600, 7), 2),
    ("mi250:4", Fraction(1024, 3), 13),
])  # fmt: skip
def test_known_allgather_rates_in_gbps(name: str, rate: Fraction, depth: int) -> None:
    packing = pack(machine(name), "allgather")
    assert units(packing) == rate
    assert max(t.depth for t in packing.trees) <= depth
    assert len(packing.trees) <= 80


@pytest.mark.slow
@pytest.mark.parametrize(("boxes", "rate"), [(4, Fraction(740, 3)), (8, Fraction(1480, 7)), (16, Fraction(2960, 15))])
def test_one_slow_card(boxes: int, rate: Fraction) -> None:
    t = slow_card(machine(f"dgx-a100:{boxes}"), 3, 10_000)
    packing = pack(t, "allgather")
    assert packing.optimal
    assert units(packing) == rate
    allreduce = pack(t, "allreduce")
    assert allreduce.optimal
    assert allreduce.rate > packing.rate / 2  # unequal shares of the roots use the other boxes' cards
    assert pack(t, "broadcast").optimal


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize("boxes", [3, 4, 9, 10, 33])
def test_boxes_take_turns_at_fanning_out(boxes: int, collective: str) -> None:
    packing = pack(machine(f"dgx-a100:{boxes}"), collective, root=9)
    assert packing.optimal
    assert len(packing.trees) <= 16
    assert max(t.depth for t in packing.trees) <= 10


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["dgx-a100:128", "mi250:64"])
def test_a_thousand_ranks(name: str) -> None:
    t = machine(name)
    with Effort() as effort:
        packing = pack(t, "allgather", seconds=NEVER_S)
    assert packing.optimal
    assert len(packing.trees) == t.n == 1024
    assert effort.ours < 5000 * t.n
    for collective in ("allreduce", "broadcast"):
        assert pack(t, collective, seconds=NEVER_S).optimal


def test_large_packings_are_proved_like_small_ones() -> None:
    """Arrays find the fault, loops name it."""
    t = machine("dgx-a100:16")
    good = pack(t, "allgather")
    assert sum(len(tree.edges) for tree in good.trees) > 4096
    head, second, *rest = good.trees
    detour = replace(head.edges[0], path=(0, 1, head.edges[0].dst))
    wrong = {
        "carry": (replace(head, weight=head.weight * 2), second, *rest),
        "does not reach": (replace(head, edges=head.edges[:-1]), second, *rest),
        "parents before children": (replace(head, edges=head.edges[::-1]), second, *rest),
        "switches alone": (replace(head, edges=(detour, *head.edges[1:])), second, *rest),
        "trees rooted at": (head, *rest),
    }
    for words, trees in wrong.items():
        with pytest.raises(PlanError, match=words):
            verify(replace(good, trees=trees), t)
    with pytest.raises(PlanError, match=r"link \d+->\d+ carries"):
        verify(good, slow_card(t, 3, 20_000))


@st.composite
def clusters(draw: st.DrawFn) -> Topology:
    """Boxes of unequal size on one network, NVSwitch or mesh inside, cards of any rate."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    n = sum(sizes)
    links: list[Link] = []
    devices: list[Device] = []
    switches = [Switch("nvswitch", b) for b in range(len(sizes))] + [Switch("net", -1)]
    net = n + len(sizes)
    even = draw(st.booleans())
    for b, size in enumerate(sizes):
        first = len(devices)
        ranks = range(first, first + size)
        devices += [Device("gpu", b, i) for i in range(size)]
        mesh = draw(st.booleans())
        pairs = [(u, v) for u in ranks for v in ranks if u < v] if mesh else [(r, n + b) for r in ranks if size > 1]
        for u, v in pairs:
            lanes = draw(st.integers(2, 6))
            links += [Link(u, v, "nvlink", lanes, 10), Link(v, u, "nvlink", lanes, 10)]
        for r in ranks:
            if r == first or draw(st.booleans()):
                rate = draw(st.integers(1, 20))
                back = rate if even else draw(st.integers(1, 20))
                links += [Link(r, net, "net", 1, rate), Link(net, r, "net", 1, back)]
    return Topology("cluster", tuple(devices), tuple(switches), tuple(links))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(clusters(), st.sampled_from(TREES), st.integers(0, 99))
def test_any_cluster_is_proved(t: Topology, collective: str, pick: int) -> None:
    packing = pack(t, collective, root=pick % t.n)
    assert packing.optimal or collective == "allreduce", packing.reason
    forced = pack(t, collective, root=pick % t.n, method="cluster")
    assert verify(forced, t) is forced
    assert forced.rate <= packing.bound


@pytest.mark.parametrize("some", [(0, 1, 2, 8, 9, 10, 11, 12), (0, 1, 2, 3, 8, 9, 10, 11), (0, *range(8, 15))])
def test_jobs_that_have_unequal_parts_of_two_boxes(some: tuple[int, ...]) -> None:
    t = machine("dgx-1v:2").subset(some)
    for collective in TREES:
        assert pack(t, collective).optimal


def test_whole_nodes_go_by_number() -> None:
    text = pack(slow_card(machine("dgx-a100:4"), 3, 10_000), "allgather").certificate.text
    assert text.startswith("nodes 1-3 | node 0: 8 net lanes, 185 GB/s")


@pytest.mark.parametrize(("links", "words"), [
    ((Link(0, 1, "nvlink", 0, 5), Link(1, 0, "nvlink", 1, 5)), "capacity 0 x 5"),
    ((Link(0, 1, "nvlink", 1, 5), Link(0, 1, "nvlink", 1, 5), Link(1, 0, "nvlink", 1, 5)), "second nvlink link"),
    ((Link(0, 2, "nvlink", 1, 5),), "vertices are 0..1"),
    ((Link(0, 0, "nvlink", 1, 5),), "two different vertices"),
    ((), "0 | GPU 1"),
])  # fmt: skip
@pytest.mark.parametrize("collective", ["broadcast", "allreduce", "gather"])
def test_malformed_machines(links: tuple[Link, ...], words: str, collective: str) -> None:
    t = Topology("bad", tuple(Device("gpu", 0, i) for i in range(2)), (), links)
    with Effort() as effort, pytest.raises(TopologyError, match=words.replace("|", r"\|")):
        pack(t, collective)
    assert effort.ours < 200, "before anything is planned"


# ---------------------------------------------------------------- rails that no switch joins


@pytest.mark.parametrize(
    ("boxes", "each", "slow"), [(2, 2, -1), (2, 4, 1), (3, 2, 3), (4, 8, -1), (5, 3, -1), (8, 8, 9), (16, 8, -1)]
)
def test_a_rooted_collective_on_rails_takes_a_few_trees_of_each(boxes: int, each: int, slow: int) -> None:
    """At the bound, with little work, and not deep; the rails of a box are joined inside it alone."""
    topology = rails(boxes, each, slow=slow)
    for collective, root in (("broadcast", 0), ("reduce", topology.n - 1)):
        with Effort() as effort:
            packing = pack(topology, collective, root=root, method="cluster")
        assert packing.optimal
        assert packing.depth <= 2 * boxes.bit_length()
        for tree in packing.trees:
            across = [e for e in tree.edges if e.src // each != e.dst // each]
            assert len(across) == boxes - 1
            assert len({e.src % each for e in across} | {e.dst % each for e in across}) == 1
        assert effort.of("linprog") == 0
        assert effort.ours < 1500 * topology.n


@pytest.mark.slow
@pytest.mark.parametrize(("boxes", "each", "slow"), [(2, 4, 0), (3, 3, 4), (8, 8, 5), (16, 8, 1), (4, 4, -1)])
def test_a_slow_card_leaves_the_other_rails_their_rate(boxes: int, each: int, slow: int) -> None:
    topology = rails(boxes, each, slow=slow)
    efforts = []
    for collective in ("allgather", "reduce_scatter", "allreduce"):
        with Effort() as effort:
            packing = pack(topology, collective, method="cluster", seconds=NEVER_S)
        efforts.append(effort)
        assert packing.optimal
        for tree in packing.trees:
            assert all(e.src // each == e.dst // each or e.src % each == e.dst % each for e in tree.edges)
    assert sum(effort.of("linprog") for effort in efforts) <= 2
    assert max(effort.ours for effort in efforts) < 5000 * topology.n


def test_a_missing_card_is_gone_around() -> None:
    whole = rails(4, 4)
    for gone in (0, 6):
        links = tuple(k for k in whole.links if k.kind != "net" or gone not in (k.src, k.dst))
        topology = replace(whole, links=links)
        for collective, root in product(("broadcast", "reduce", "allgather", "allreduce"), (0, 5)):
            packing = pack(topology, collective, root=root, method="cluster")
            assert packing.rate >= Fraction(9, 10) * packing.bound, (collective, root)


def test_streams_that_no_exact_corner_gives_are_a_little_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = rails(3, 3, slow=4)
    monkeypatch.setattr("blinkmpi.trees.cluster.rails.exact_basis", lambda *_, **__: None)
    for collective in ("allgather", "allreduce"):
        packing = pack(topology, collective, method="cluster")
        assert verify(packing, topology) == packing
        assert packing.rate >= Fraction(94, 100) * packing.bound


def on_planes(*planes: Sequence[int]) -> Topology:
    """Boxes of two GPUs around an NVSwitch; each box has a card on each of its planes."""
    boxes, n, links = len(planes), 2 * len(planes), list[Link]()
    for box, own in enumerate(planes):
        ends = [(2 * box + i, n + box, "nvlink", 6) for i in range(2)]
        ends += [(2 * box + i % 2, n + boxes + plane, "net", 1) for i, plane in enumerate(own)]
        for u, v, kind, lanes in ends:
            links += [Link(u, v, kind, lanes, 25_000), Link(v, u, kind, lanes, 25_000)]  # type: ignore[arg-type]
    switches = [Switch("nvswitch", box) for box in range(boxes)] + [Switch("net", -1)] * (1 + max(map(max, planes)))
    devices = tuple(Device("gpu", box, i) for box, i in product(range(boxes), range(2)))
    return Topology(f"planes {planes}", devices, tuple(switches), tuple(links))


@pytest.mark.parametrize(
    "planes", [([0], [0, 1], [1]), ([0], [1], [0, 1]), ([0], [0], [0, 1], [1]), ([0, 1], [0, 1], [1, 2], [2, 0])]
)
def test_boxes_that_share_no_plane_are_joined_through_others(planes: tuple[Sequence[int], ...]) -> None:
    topology = on_planes(*planes)
    for collective, root in product(("broadcast", "reduce", "allgather", "reduce_scatter", "allreduce"), (0, 5)):
        assert pack(topology, collective, root=root).optimal
    if planes == ([0], [0, 1], [1]):
        with pytest.raises(NoPackingError, match="no plane of the network in common"):
            pack(topology, "allgather", method="cluster")
    make_plan(topology)
