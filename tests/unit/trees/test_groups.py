"""The early protocol: fewest fully connected groups, trees of the protocol alone, never above the bound."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees import pack
from blinkmpi.trees.blink.groups import divide
from blinkmpi.trees.graph.fabric import FAST, fabric
from tests.unit.trees.test_certify import machines, partitions
from tests.unit.trees.test_few import unique_subsets


@settings(max_examples=40, deadline=None)
@given(machines(most=6, symmetric=True))
def test_groups_are_fully_connected_and_the_fewest(t: Topology) -> None:
    arcs = set(fabric(t, FAST).arcs)

    def full(group: list[int]) -> bool:
        return all((u, v) in arcs for u, v in combinations(group, 2))

    found = divide(t.n, arcs)
    assert sorted(v for group in found for v in group) == list(range(t.n))
    assert all(full(list(group)) for group in found)
    assert len(found) == min(len(p) for p in partitions(list(range(t.n))) if all(map(full, p)))


def test_dgx1_falls_into_two_quads() -> None:
    for name, rates in (("dgx-1v", (75_000, 50_000)), ("dgx-1p", (60_000, 40_000))):
        t = machine(name)
        for collective, rate in zip(("broadcast", "allreduce"), rates, strict=True):
            packing = pack(t, collective, method="groups")
            assert packing.rate == rate
            assert "GPUs 0,1,2,3 | GPUs 4,5,6,7" in packing.reason
            assert not packing.optimal
    for tree in pack(machine("dgx-1v"), "broadcast", method="groups").trees:
        assert sum((e.src < 4) != (e.dst < 4) for e in tree.edges) == 1  # one link between the quads


@settings(max_examples=25, deadline=None)
@given(machines(most=6, symmetric=True), st.sampled_from(["broadcast", "reduce", "allreduce"]), st.integers(0, 99))
def test_the_protocol_is_feasible_and_no_better_than_trees(t: Topology, collective: str, pick: int) -> None:
    packing = pack(t, collective, root=pick % t.n, method="groups")
    assert 0 < packing.rate <= packing.bound


@pytest.mark.parametrize("collective", ["broadcast", "allreduce"])
def test_every_subset_of_a_dgx1v(collective: str) -> None:
    for t in unique_subsets("dgx-1v"):
        packing = pack(t, collective, method="groups")
        assert 0 < packing.rate <= packing.bound, t.name
