"""Trees grown by flows agree with those grown by cut vectors, and serve what is larger."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees import pack
from blinkmpi.trees.exact import arborescences, arborescences_by_flow
from blinkmpi.trees.graph.cuts import min_cut, ratio_cut
from blinkmpi.trees.graph.fabric import fabric
from tests.unit.trees.test_certify import machines
from tests.unit.trees.test_symmetric import torus


@settings(max_examples=30, deadline=None)
@given(machines(most=6, symmetric=False), st.booleans())
def test_same_total_weight_as_by_cut_vectors(t: Topology, rooted: bool) -> None:
    cap = fabric(t, ["nvlink"]).matrix()
    if rooted:
        supply = [min_cut(cap, t.n, 0)[1], *[0] * (t.n - 1)]
    else:
        mask, units = ratio_cut(cap, t.n, None)
        cap, supply = cap * mask.bit_count(), [units] * t.n
    for trees in (
        arborescences_by_flow.pack_arborescences(cap, supply),
        arborescences.pack_arborescences(cap, supply, arborescences.ORDERS[0]),
    ):
        left = cap.copy()
        rooted_at = [0] * t.n
        for tree in trees:
            rooted_at[tree.root] += tree.weight
            assert {v for _, v in tree.arcs} | {tree.root} == set(range(t.n))
            for arc in tree.arcs:
                left[arc] -= tree.weight
        assert left.min() >= 0
        assert rooted_at == supply


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "allgather"])
def test_irregular_torus(collective: str) -> None:
    packing = pack(torus(4, 5).drop_link(0, 1), collective)
    assert packing.scheme == "trees"
    assert packing.optimal
    assert "a maximum flow for each edge" in packing.reason


@pytest.mark.slow
def test_two_boxes_of_dies_split_rail_by_rail() -> None:
    packing = pack(machine("mi250:2"), "allgather")
    assert packing.optimal
    assert len(packing.trees) <= 90
