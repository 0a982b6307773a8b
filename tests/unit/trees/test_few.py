"""Few and shallow trees: limits kept, rates as good as brute force, minimal counts proved on all DGX-1 subsets."""

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from networkx.algorithms.isomorphism import numerical_edge_match

from blinkmpi.errors import ArgumentError, NoPackingError
from blinkmpi.program.estimate import Estimate
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees import pack
from blinkmpi.trees.baselines import few
from blinkmpi.trees.exact.enumeration import all_spanning_trees
from blinkmpi.trees.exact.weights import best_weights
from blinkmpi.trees.graph.fabric import FAST, fabric
from blinkmpi.trees.graph.logical import capacities_of, split_switches
from blinkmpi.trees.pareto_front import fewest, front, pareto
from blinkmpi.trees.problem import MethodOptions
from blinkmpi.trees.tree import Packing
from tests.unit.trees.test_certify import machines

LANE = {"dgx-1v": 25_000, "dgx-1p": 20_000}


@lru_cache
def unique_subsets(name: str) -> tuple[Topology, ...]:
    """The connected subsets of a DGX-1 up to isomorphism, by size."""
    return tuple(_unique(machine(name)))


def _unique(t: Topology) -> Iterator[Topology]:
    match = numerical_edge_match("mbps", 0)
    for size in range(2, t.n + 1):
        seen: list[nx.Graph[int]] = []
        for some in combinations(range(t.n), size):
            part = t.subset(some)
            graph: nx.Graph[int] = nx.Graph()
            graph.add_nodes_from(range(size))
            for k in part.links:
                if k.kind == "nvlink":
                    graph.add_edge(k.src, k.dst, mbps=k.mbps)
            if nx.is_connected(graph) and not any(nx.is_isomorphic(graph, g, edge_match=match) for g in seen):
                seen.append(graph)
                yield part


def test_there_are_as_many_unique_subsets_as_the_paper_counts() -> None:
    assert [sum(t.n >= 3 for t in unique_subsets(name)) for name in LANE] == [46, 14]


@settings(max_examples=40, deadline=None)
@given(machines(most=6, symmetric=False), st.integers(0, 99))
def test_all_arborescences_by_the_matrix_tree_theorem(t: Topology, pick: int) -> None:
    """Tutte 1948: as many arborescences as the determinant of the in-degree Laplacian without the root."""
    root = pick % t.n
    o = split_switches(fabric(t, FAST))
    joined = (o.matrix() > 0).astype(float)
    laplacian = np.diag(joined.sum(axis=0)) - joined
    keep = [v for v in range(t.n) if v != root]
    every = all_spanning_trees(capacities_of(o, root))
    assert every is not None
    assert len(set(every)) == len(every) == round(float(np.linalg.det(laplacian[np.ix_(keep, keep)])))
    for depth in range(1, t.n):
        assert all_spanning_trees(capacities_of(o, root), max_depth=depth) == [s for s in every if s.depth <= depth]


@pytest.mark.parametrize("name", sorted(LANE))
def test_fewest_broadcast_trees_are_proved_on_every_subset(name: str) -> None:
    for t in unique_subsets(name):
        packing, result = fewest(t, "broadcast")
        assert packing.optimal
        assert result.minimal, (t.name, packing.reason)
        assert result.proof in ("cut", "integer program")
        assert "the fewest" in packing.reason
        assert len(packing.trees) <= len(pack(t, "broadcast").trees)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rates"), [("dgx-1v", {2: 2, 3: 5, 4: 6, 5: 6, 7: 6}), ("dgx-1p", {2: 1, 3: 4, 4: 4, 7: 4})]
)
def test_broadcast_under_a_limit_on_depth(name: str, rates: dict[int, int]) -> None:
    for depth, units in rates.items():
        packing = pack(machine(name), "broadcast", method="few", options=MethodOptions(max_depth=depth))
        assert packing.rate == units * LANE[name]
        assert packing.depth <= depth
        assert "of all" in packing.reason
    with pytest.raises(ArgumentError, match="allow more hops"):
        pack(machine(name), "broadcast", method="few", options=MethodOptions(max_depth=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LANE))
def test_allreduce_keeps_its_rate_at_radius_two(name: str) -> None:
    packing = pack(machine(name), "allreduce", method="few", options=MethodOptions(max_depth=2))
    assert packing.optimal
    assert packing.depth == 2


@pytest.mark.slow
def test_broadcast_under_a_limit_on_trees() -> None:
    for count, units in {1: 2, 2: 4, 3: 5, 4: 6, 9: 6}.items():
        packing = pack(machine("dgx-1v"), "broadcast", method="few", options=MethodOptions(max_trees=count))
        assert packing.rate == units * LANE["dgx-1v"]
        assert len(packing.trees) <= count
        assert count > 3 or "as many as" in packing.reason  # a cut proves it
    both = pack(machine("dgx-1v"), "broadcast", method="few", options=MethodOptions(max_trees=3, max_depth=3))
    assert both.rate == 3 * LANE["dgx-1v"]


@settings(max_examples=20, deadline=None)
@given(machines(most=4, symmetric=False), st.integers(1, 3), st.booleans())
def test_limits_on_trees_equal_brute_force(t: Topology, count: int, both: bool) -> None:
    collective = "allreduce" if both else "broadcast"
    f = fabric(t, FAST)
    caps = capacities_of(split_switches(f.two_way if both else f), -1 if both else 0)
    every = all_spanning_trees(caps)
    assert every
    choices = combinations(every, min(count, len(every)))
    best = max(few.rate_of(best_weights(caps, some)) for some in choices)
    packing = pack(t, collective, method="few", options=MethodOptions(max_trees=count))
    assert packing.rate == best * caps.logical.mbps
    assert len(packing.trees) <= count


def test_a_graph_with_too_many_trees_to_list_is_refused_and_its_front_is_by_depth() -> None:
    t = machine("dgx-a100")
    for options in (MethodOptions(), MethodOptions(max_trees=3), MethodOptions(max_depth=4)):
        with pytest.raises(NoPackingError, match="more than 20000 spanning trees"):
            pack(t, "broadcast", method="few", options=options)
    assert pack(t, "broadcast", method="few", options=MethodOptions(max_depth=1)).depth == 1
    assert min(p.depth for p in pareto(t, "broadcast")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["broadcast", "allreduce"])
def test_the_front_is_one(collective: str) -> None:
    found = pareto(machine("dgx-1v"), collective)
    points = [(len(p.trees), p.depth, -p.rate) for p in found]
    for a, b in combinations(points, 2):
        assert not (a[0] <= b[0] and a[1] <= b[1] and a[2] <= b[2])
        assert not (a[0] >= b[0] and a[1] >= b[1] and a[2] >= b[2])
    assert max(p.rate for p in found) == found[0].bound
    assert min(p.depth for p in found) == 2
    assert len(found[0].trees) == 1
    assert front(found) == found


@pytest.mark.slow
def test_the_cost_model_takes_shallow_trees_for_short_vectors_and_the_rate_for_long_ones() -> None:
    dgx = machine("dgx-1v")
    found = pareto(dgx, "broadcast")
    estimates = [Estimate(p, dgx) for p in found]

    def taken(nbytes: int) -> Packing:
        seconds = [estimate.seconds(nbytes, 64 << 10, 8) for estimate in estimates]
        return found[seconds.index(min(seconds))]

    small, large = taken(1_000), taken(10**9)
    assert small.depth == 2
    assert len(small.trees) <= 2
    assert large.rate == large.bound
    rates = [taken(10**k).rate for k in range(3, 10)]
    assert rates == sorted(rates)


def test_weights_are_exact() -> None:
    """A vertex of the linear program comes back as the fractions that it is."""
    caps = capacities_of(split_switches(fabric(machine("dgx-1v"), FAST).two_way), -1)
    shapes = all_spanning_trees(caps)
    assert shapes
    assert few.rate_of(best_weights(caps, shapes)) == Fraction(24, 7)
