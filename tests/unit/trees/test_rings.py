"""Rings: as many as an exact count allows on every DGX-1 subset, rates as NCCL's, PCIe where there is none."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings

from blinkmpi.errors import TopologyError
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, Topology
from blinkmpi.trees import pack
from blinkmpi.trees.baselines.rings import all_rings, lanes_of, largest_set
from blinkmpi.trees.graph.fabric import FAST, fabric
from tests.unit.trees.packings import machine_of
from tests.unit.trees.test_certify import machines
from tests.unit.trees.test_few import LANE, unique_subsets

# By size: how many unique subsets have how many rings; 0 means PCIe.
COUNTS = {
    "dgx-1v": {
        2: {1: 1, 2: 1}, 3: {0: 3, 2: 2}, 4: {0: 10, 2: 3, 4: 1}, 5: {0: 8, 2: 6}, 6: {2: 8, 4: 2}, 7: {4: 2},
        8: {6: 1},
    },
    "dgx-1p": {2: {1: 1}, 3: {0: 1, 2: 1}, 4: {0: 2, 2: 2}, 5: {0: 2, 2: 1}, 6: {2: 3}, 7: {2: 1}, 8: {4: 1}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LANE))
def test_counts_by_size(name: str) -> None:
    found: dict[int, Counter[int]] = {}
    for t in unique_subsets(name):
        rings = pack(t, "broadcast", method="rings")
        on_pcie = rings.links == "host+pcie"
        count = 0 if on_pcie else int(rings.rate / LANE[name])
        found.setdefault(t.n, Counter())[count] += 1
        assert ("no ring of nvlink" in rings.reason) == on_pcie
        around = pack(t, "allreduce", method="rings")
        assert around.links == rings.links
        if not on_pcie:
            assert around.rate == rings.rate * Fraction(t.n, 2 * (t.n - 1))
            gathered = pack(t, "allgather", method="rings")
            assert gathered.rate == rings.rate * Fraction(t.n, t.n - 1)
            assert around.rate <= pack(t, "allreduce").rate
    assert {size: dict(counter) for size, counter in found.items()} == COUNTS[name]


def test_a_ring_takes_n_minus_one_hops() -> None:
    for collective in ("broadcast", "reduce", "allreduce", "allgather", "reduce_scatter"):
        packing = pack(machine("dgx-1v"), collective, method="rings", root=0)
        assert {tree.depth for tree in packing.trees} == {7}
        assert all(len(tree.children(r)) <= 1 for tree in packing.trees for r in range(8))


@settings(max_examples=30, deadline=None)
@given(machines(most=5, symmetric=False))
def test_largest_set_equals_brute_force(t: Topology) -> None:
    room = {arc: mbps // 7 for arc, mbps in fabric(t, FAST).arcs.items()}
    every = [(0, *p) for p in permutations(range(1, t.n))]
    every = [ring for ring in every if all(arc in room for arc in lanes_of(ring))]
    rings, complete = all_rings(t.n, room, both_ways=False)
    assert complete
    assert sorted(rings) == every
    found, exact = largest_set(t.n, room, both_ways=False)
    assert exact
    assert sum(found.values()) == most(every, room)


def most(rings: list[tuple[int, ...]], room: dict[tuple[int, int], int]) -> int:
    """Try every number of times to take the first ring, then the others."""
    if not rings:
        return 0
    arcs = lanes_of(rings[0])
    best = 0
    for k in range(min(room[a] for a in arcs) + 1):
        left = {a: lanes - k * (a in arcs) for a, lanes in room.items()}
        best = max(best, k + most(rings[1:], left))
    return best


def test_rings_that_need_not_come_in_pairs_are_mentioned() -> None:
    """Three GPUs all joined to three others have 3 rings one way and 1 both ways; five all joined have 4 and 2."""
    five = machine_of(5, " ".join(f"{a}-{b}" for a, b in combinations(range(5), 2)))
    assert "one way" not in pack(five, "allreduce", method="rings").reason
    six = machine_of(6, " ".join(f"{a}-{b}" for a in range(3) for b in range(3, 6)))
    packing = pack(six, "allreduce", method="rings")
    assert packing.rate == 10_000 * Fraction(6, 5)
    assert "one way 3 would fit" in packing.reason


def test_rings_through_switches_and_where_there_is_none() -> None:
    assert pack(machine("dgx-2"), "broadcast", method="rings").optimal
    assert pack(machine("pcie-8"), "allreduce", method="rings").links == "host+pcie"
    path = machine_of(3, "0-1 1-2")
    with pytest.raises(TopologyError, match="no ring joins its 3 ranks"):
        pack(path, "broadcast", method="rings")


@pytest.mark.parametrize(("name", "mbps"), [("dgx-a100:2", 200_000), ("dgx-1v:2", 50_000)])
def test_rings_from_box_to_box_use_every_card(name: str, mbps: int) -> None:
    """A broadcast enters the other box over 8 cards of 25 GB/s, or 4 of 12.5."""
    packing = pack(machine(name), "broadcast", method="rings")
    assert packing.rate == mbps
    assert len(packing.trees) >= 4
    for collective in ("allreduce", "allgather"):
        around = pack(machine(name), collective, method="rings")
        assert 0 < around.rate <= around.bound


def test_lanes_of_unequal_rates() -> None:
    """One ring is as wide as the common divisor of the lanes."""
    links = [Link(a, b, "nvlink", 1, 30 if {a, b} == {0, 1} else 20) for a in range(3) for b in range(3) if a != b]
    t = Topology("uneven", tuple(Device("gpu", 0, i) for i in range(3)), (), tuple(links)).check()
    assert pack(t, "broadcast", method="rings").rate == 40
