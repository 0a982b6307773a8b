"""Method ``shallow``: trees of at most so many hops, the best of all where they can be listed."""

from fractions import Fraction

import pytest
from msgspec.structs import replace

from blinkmpi.errors import NoPackingError
from blinkmpi.planning.planner import make_plan
from blinkmpi.topology import machine, modify
from blinkmpi.trees import MethodOptions, pack, verify
from blinkmpi.trees.answer import is_shallow
from blinkmpi.trees.exact.enumeration import all_arborescences
from blinkmpi.trees.graph.fabric import fabric
from blinkmpi.trees.patterns.soonest import ARRIVES, BUSY, soonest
from blinkmpi.trees.tree import Collective, Tree
from tests.unit.trees.tiers import Network, leaf_spine

DGX = machine("dgx-1v")


@pytest.mark.parametrize(("depth", "units"), [(None, 2), (2, 2), (3, 5), (4, 6)])
def test_a_broadcast_on_eight_gpus_has_the_best_rate_of_each_depth(depth: int | None, units: int) -> None:
    found = pack(DGX, "broadcast", method="shallow", options=MethodOptions(max_depth=depth))
    assert found.rate == units * 25_000
    assert found.depth <= (depth or 2)
    assert found.scheme == f"depth-{depth or 2}"
    assert is_shallow(found)
    assert verify(found, DGX) == found


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "allreduce", "allgather", "reduce_scatter"])
@pytest.mark.parametrize("spec", ["dgx-1p", "mi250", "dgx-1v:2", "pcie-8"])
def test_every_machine_has_trees_of_least_depth(spec: str, collective: str) -> None:
    t = machine(spec)
    found = pack(t, collective, method="shallow")
    assert found.scheme == f"depth-{found.depth}"
    assert found.depth <= pack(t, collective).depth


def test_an_allreduce_gives_up_at_most_a_twentieth_for_fewer_trees() -> None:
    found = pack(DGX, "allreduce", method="shallow")
    best = Fraction(600_000, 7)
    assert found.depth == 2
    assert Fraction(19, 20) * best <= found.rate <= best
    assert len(found.trees) < 16


def test_limits_that_nothing_keeps_are_refused_with_the_reason() -> None:
    for t, depth, why in ((DGX, 1, "no trees of at most 1 hops"), (machine("mi250"), 6, "too many trees of at most 6")):
        with pytest.raises(NoPackingError, match=why):
            pack(t, "broadcast", method="shallow", options=MethodOptions(max_depth=depth))


def test_trees_of_one_hop_are_listed_at_once() -> None:
    """All subsets of the first level were tried, also where the last one must hold all that are left."""
    n = 40
    arcs = [(u, v) for u in range(n) for v in range(n) if u != v]
    assert len(list(all_arborescences(arcs, n, 0, 1))) == 1
    assert list(all_arborescences(arcs[1:], n, 0, 1)) == []


def test_links_of_one_direction_count_for_the_way_that_is_used() -> None:
    t = modify(DGX, gpus="0-3")
    down, up = (pack(t, collective, method="shallow") for collective in ("broadcast", "reduce"))
    assert (down.rate, down.depth) == (up.rate, up.depth)


def arrivals(tree: Tree) -> list[int]:
    """When each message arrives, of ranks of one node that send theirs one after another."""
    at, free = {tree.root: 0}, {tree.root: 0}
    for edge in tree.edges:
        at[edge.dst] = free[edge.dst] = free[edge.src] + ARRIVES[0]
        free[edge.src] += BUSY[0]
    return sorted(at.values())


@pytest.mark.parametrize("n", [2, 5, 65, 72])
def test_no_tree_of_ranks_on_a_switch_is_through_sooner(n: int) -> None:
    """As many have a vector at a time as had it before, and as were sent it long enough ago (the postal model)."""
    t = Network([n]).done()
    tree = soonest(fabric(t, t.kinds()), n // 2)
    holders = [1] * ARRIVES[0]
    while holders[-1] < n:
        holders.append(holders[-BUSY[0]] + holders[-ARRIVES[0]])
    assert len(arrivals(tree)) == n
    assert arrivals(tree)[-1] == len(holders) - 1


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "allreduce"])
def test_many_ranks_have_a_tree_that_enters_each_node_once(collective: Collective) -> None:
    t = leaf_spine([8] * 10, 5, 2, 400_000)[0].done()
    found = pack(t, collective, root=19, method="shallow", options=MethodOptions(quick=True))
    assert verify(found, t) == found
    (tree,) = found.trees
    between = [e for e in tree.edges if t.homes[e.src] != t.homes[e.dst]]
    assert len(between) == 9
    assert all(t.homes[v] >= 0 for e in tree.edges if e not in between for v in e.path), "within a node by its switch"
    assert found.depth <= 6
    with pytest.raises(NoPackingError, match="one such tree beyond 64 ranks, and none beyond 512"):
        pack(t, collective, method="shallow", options=MethodOptions(quick=True, max_depth=7))


def test_ranks_that_nothing_in_their_node_reaches_are_sent_to_from_others() -> None:
    net = Network([1] * 80)
    switch = net.switch()
    for rank in range(80):
        net.join(rank, switch, 50_000)
    t = net.done()
    alone = replace(t, devices=tuple(replace(d, node=i // 4) for i, d in enumerate(t.devices)))
    tree = soonest(fabric(alone, alone.kinds()), 3)
    assert {e.dst for e in tree.edges} == set(range(80)) - {3}


def test_plans_of_many_ranks_take_it_for_short_vectors() -> None:
    t = leaf_spine([8] * 10, 5, 2, 400_000)[0].done()
    plan = make_plan(t, collectives=("broadcast", "allreduce"), roots=(0,))
    for collective in ("broadcast", "allreduce"):
        assert plan.rule(collective, 4096, root=0).scheme == "depth-5"
        assert plan.rule(collective, 64 << 20, root=0).scheme == "tiers"
