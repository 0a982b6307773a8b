"""The unique connected subsets of the DGX-1 machines: as many as the paper counts, rates and speed-ups as known."""

from fractions import Fraction
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.errors import ArgumentError
from blinkmpi.planning.subsets import ColouredGraph, by_size, coloured, isomorphic, subset, summary, survey
from blinkmpi.planning.subsets import connected as connected_subsets
from blinkmpi.topology.machines import machine
from blinkmpi.trees.graph.fabric import FAST, fabric
from tests.unit.trees.packings import machine_of

# Size: unique, allocations, without a ring; min, mean, max of broadcast and of allreduce; most trees.
TABLE: dict[str, dict[int, tuple[Any, ...]]] = {
    "dgx-1v": {
        2: (2, 16, 0, (1, 1, 1), (1, 1, 1), 1),
        3: (5, 32, 3, (1, 2.16, 5), (1.33, 2.78, 6.67), 2),
        4: (14, 56, 10, (1, 2.30, 5), (1.13, 3.25, 7.5), 3),
        5: (14, 56, 8, (1, 1.97, 5), (1.60, 3.06, 8), 3),
        6: (10, 28, 0, (1, 1.18, 1.5), (1.08, 1.67, 2.08), 4),
        7: (2, 8, 0, (1, 1, 1), (1.29, 1.29, 1.29), 4),
        8: (1, 1, 0, (1, 1, 1), (1, 1, 1), 4),
    },
    "dgx-1p": {
        2: (1, 16, 0, (1, 1, 1), (1, 1, 1), 1),
        3: (2, 32, 1, (1, 1.41, 2), (1, 1.63, 2.67), 2),
        4: (4, 56, 2, (1, 1.57, 2), (1, 1.92, 3), 3),
        5: (3, 56, 2, (1, 1.59, 2), (1.2, 2.31, 3.2), 2),
        6: (3, 28, 0, (1, 1.14, 1.5), (1.25, 1.36, 1.5), 3),
        7: (1, 8, 0, (1.5, 1.5, 1.5), (1.71, 1.71, 1.71), 3),
        8: (1, 1, 0, (1, 1, 1), (1, 1, 1), 4),
    },
}
FROM_3 = {"dgx-1v": (46, 1.78, 5.0, 2.54, 8.0), "dgx-1p": (14, 1.40, 2.0, 1.71, 3.2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_table_of_a_dgx_1(name: str) -> None:
    found = survey(machine(name))
    assert all(s.fewest for s in found)
    sizes = by_size(found)
    assert list(sizes) == list(TABLE[name])
    for size, some in sizes.items():
        unique, allocations, alone, broadcast, allreduce, trees = TABLE[name][size]
        got = summary(some)
        assert (got.unique, got.allocations, got.without_ring, got.most_trees) == (unique, allocations, alone, trees)
        assert got.speedups[0] == pytest.approx(broadcast, abs=0.0051)
        assert got.speedups[1] == pytest.approx(allreduce, abs=0.0051)
    larger = summary([s for s in found if len(s.gpus) > 2])
    (_, mean, most), (_, mean_all, most_all) = larger.speedups[:2]
    assert (larger.unique, *np.round([mean, most, mean_all, most_all], 2)) == FROM_3[name]


def test_the_whole_machine_and_the_stated_rate_of_pcie() -> None:
    whole, found = connected_subsets(machine("dgx-1v"))
    eight = subset(whole, found[-1])
    assert eight.rates == (150_000, Fraction(600_000, 7), Fraction(1_200_000, 7))
    assert eight.baseline == eight.rates
    assert (eight.rings, eight.trees) == (6, 4)
    chain = next(some for some in found if some.ranks == (0, 1, 4))
    slow, fast = (subset(whole, chain, pcie) for pcie in (5_000, 10_000))
    assert slow.rings == 0
    assert [a / b for a, b in zip(slow.speedups, fast.speedups, strict=True)] == [2, 2, 2]
    assert fast.baseline == (10_000, 7_500, 15_000)


def test_gpus_on_one_switch_are_all_alike() -> None:
    found = survey(machine("dgx-a100"))
    assert [len(s.gpus) for s in found] == [2, 3, 4, 5, 6, 7, 8]
    assert [s.allocations for s in found] == [28, 56, 70, 56, 28, 8, 1]
    assert all(s.rings == 12 and s.speedups[0] == 1 for s in found)


def test_subsets_keep_the_numbers_of_the_machine() -> None:
    part = machine("dgx-1v").subset([4, 5, 6])
    assert [s.gpus for s in survey(part)] == [(4, 5), (5, 6), (4, 5, 6)]
    with pytest.raises(ArgumentError, match="pcie_mbps is 0"):
        survey(part, pcie_mbps=0)
    with pytest.raises(ArgumentError, match="has 1 rank;"):
        survey(machine("dgx-1v").subset([4]))


EDGES = [(a, b) for a in range(5) for b in range(a)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=10, max_size=10), st.permutations(range(5)), st.integers(0, 9))
def test_isomorphism_equals_brute_force(stages: list[int], order: list[int], spot: int) -> None:
    renamed = [stages[EDGES.index((max(order[a], order[b]), min(order[a], order[b])))] for a, b in EDGES]
    changed = [*renamed]
    changed[spot] = (changed[spot] + 1) % 3
    first, same, other = (graph(some) for some in (stages, renamed, changed))
    if first and same:
        assert isomorphic(first, same)
    if first and other:
        assert isomorphic(first, other) == any(
            np.array_equal(first.capacities[np.ix_(p, p)], other.capacities) for p in permutations(range(5))
        )


def graph(stages: list[int]) -> ColouredGraph | None:
    edges = " ".join(f"{a}-{b}" for (a, b), k in zip(EDGES, stages, strict=True) for _ in range(k))
    return coloured(fabric(machine_of(5, edges), FAST)) if edges else None
