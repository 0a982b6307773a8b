"""Method ``tiers``: networks of several tiers, whose plans are proved on every link of the machine itself."""

from fractions import Fraction
from math import log2

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees.bounds.certify import certify
from blinkmpi.trees.bounds.verify import verify
from blinkmpi.trees.cluster import hierarchy
from blinkmpi.trees.graph import edge_table
from blinkmpi.trees.graph.fabric import choose_links
from blinkmpi.trees.graph.tiers import families, tiers
from blinkmpi.trees.on_links import finished
from blinkmpi.trees.packing import pack
from blinkmpi.trees.problem import Problem, Solution
from blinkmpi.trees.tree import Packing
from tests.effort import Effort

from .tiers import CARD, Network, dragonfly, fat_tree, leaf_spine, rails

COLLECTIVES = ("broadcast", "reduce", "allreduce", "allgather", "reduce_scatter")
PLENTY = 16 * CARD


def planned(t: Topology, collective: str, root: int = 0) -> Packing:
    """The method's own packing, proved; also where machines are so small that others are taken."""
    problem = Problem(choose_links(t, collective, root), collective, root)
    found = hierarchy.plan(problem)
    assert isinstance(found, Solution)
    return verify(finished(problem, "tiers", found), t)


def racks(count: int, gpus: int) -> Topology:
    """Racks of GPUs on one switch each, and one network."""
    net = Network([gpus] * count, 900_000)
    top = net.switch()
    for r in range(len(net.devices)):
        net.join(r, top, CARD)
    return net.done()


def broken(t: Network) -> Topology:
    """Without one card, and with another at half its rate."""
    for r, mbps in ((3, 0), (17, CARD // 2)):
        net = next(v for u, v in t.links if u == r and t.links[u, v][0] == "net")
        t.join(r, net, mbps)
    return t.done()


MACHINES = {
    "leaves and a spine": leaf_spine([8] * 10, 5, 2, 8 * CARD)[0].done(),
    "two leaves": leaf_spine([8] * 16, 2, 1, 64 * CARD)[0].done(),
    "fat tree": fat_tree(3, 2, 2, 8).done(),
    "fat tree 4:1": fat_tree(3, 2, 2, 8, over=4).done(),
    "fat tree 16:1": fat_tree(3, 2, 2, 8, over=16).done(),
    "rails and spines": rails(16, 8, 2, 4).done(),
    "dragonfly": dragonfly(9, 4, 2),
    "racks": racks(2, 40),
    "unlike boxes": leaf_spine([8, 3, 5, 8, 8, 2, 8, 8, 8, 8, 7], 4, 3, PLENTY)[0].done(),
    "cards": broken(leaf_spine([8] * 10, 5, 2, 8 * CARD)[0]),
    "cards of rails": broken(rails(16, 8, 2, 4)),
}


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", MACHINES)
def test_networks_of_several_tiers_come_within_a_twentieth_of_the_bound(name: str, collective: str) -> None:
    t = MACHINES[name]
    packing = pack(t, collective, root=min(5, t.n - 1))
    assert packing.scheme == "tiers" or name == "racks"  # where templates are exact
    assert packing.rate >= Fraction(95, 100) * packing.bound
    assert packing.depth <= 2 * log2(t.n)


@pytest.mark.parametrize("name", ["leaves and a spine", "two leaves", "fat tree", "rails and spines"])
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter"])
def test_equal_boxes_meet_the_bound(name: str, collective: str) -> None:
    assert pack(MACHINES[name], collective).optimal


@settings(max_examples=25, deadline=None)
@given(
    boxes=st.lists(st.integers(1, 4), min_size=3, max_size=6),
    leaves=st.integers(2, 3),
    spines=st.integers(1, 3),
    up=st.sampled_from([CARD // 2, CARD, 4 * CARD, PLENTY]),
    slow=st.integers(0, 2),
    collective=st.sampled_from(COLLECTIVES),
)
def test_small_networks_against_exact_plans(
    boxes: list[int], leaves: int, spines: int, up: int, slow: int, collective: str
) -> None:
    assume(sum(boxes) > 2)
    net, low, high = leaf_spine(boxes, leaves, spines, up)
    net.join(0, low[0], CARD // 2)
    net.join(low[-1], high[0], up // (1 + slow))
    t = net.done()
    found, exact = planned(t, collective), pack(t, collective)
    assert found.rate <= exact.rate <= exact.bound <= found.bound
    assert found.rate >= exact.rate / 2


def test_groups_are_nested_tier_by_tier() -> None:
    t = fat_tree(3, 2, 2, 8).done()
    problem = Problem(choose_links(t, "allreduce", 0), "allreduce", 0)
    top = tiers(problem.oriented, problem.boxes)
    assert [len(pod.children) for pod in top.children] == [2, 2, 2]
    assert [leaf.boxes for leaf in top.children[1].children] == [(4, 5), (6, 7)]
    assert top.children[0].children[0].out == 16 * CARD
    assert top.children[0].out == 32 * CARD
    for family in families(top, problem.boxes):
        assert sorted(v for group in family for v in group if v < t.n) == list(range(t.n))


def test_the_links_of_a_pod_are_the_bound_where_they_are_the_least() -> None:
    t = fat_tree(2, 2, 3, 6, over=36).done()
    problem = Problem(choose_links(t, "broadcast", 0), "broadcast", 0)
    assert problem.likely == certify(problem.fabric, "broadcast", 0)
    assert problem.bound == CARD // 2  # a leaf's two links up


def test_without_a_way_between_two_leaves_there_is_no_plan() -> None:
    net, low, high = leaf_spine([8] * 10, 2, 1, PLENTY)
    net.join(low[1], high[0], 0)
    net.join(0, 40, 100, "nvlink")  # a link between two boxes joins them all the same
    assert pack(net.done(), "broadcast").scheme != "tiers"


def test_racks_are_left_and_come_back_to_by_one_tree_of_a_broadcast() -> None:
    packing = pack(racks(2, 40), "broadcast", root=7)
    assert packing.rate == Fraction(900_000 * 40, 39)
    (back,) = [tree for tree in packing.trees if tree.edges[0].dst >= 40]
    assert sum(e.src >= 40 > e.dst for e in back.edges) == 39


def test_large_packings_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_table, "BLOCK", 500)
    packing = pack(MACHINES["two leaves"], "allgather")
    assert packing.optimal
    table = edge_table.EdgeTable(128, packing.trees)
    assert [table.edges[i] for i in table.edge[127:254].tolist()] == list(packing.trees[1].edges)
    assert table.spanning()


def test_a_thousand_ranks_take_no_more_work_than_a_few_calls_for_each_box_of_each_tree() -> None:
    t = machine("hgx-h100:136")
    with Effort() as effort:
        packing = pack(t, "allgather")
    assert packing.scheme == "tiers"
    assert packing.optimal
    assert effort.ours < 8 * len(packing.trees) * 136


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["broadcast", "allreduce", "allgather"])
def test_four_thousand_ranks(collective: str) -> None:
    packing = pack(machine("hgx-h100:512"), collective)
    assert packing.rate >= Fraction(95, 100) * packing.bound
    assert packing.depth <= 24
