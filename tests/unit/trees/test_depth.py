"""Depth and rate together: the cheapest trees and paths of so many hops, the front by depth, and its proofs."""

from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.optimize import linprog

from blinkmpi.errors import ArgumentError, NoPackingError, PlanError
from blinkmpi.planning.planner import make_plan
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees import MethodOptions, pack, pareto
from blinkmpi.trees.bounds.prices import FAR, CheapestPaths
from blinkmpi.trees.bounds.verify import verify_depth
from blinkmpi.trees.exact.enumeration import all_arborescences
from blinkmpi.trees.graph.fabric import FAST, fabric
from blinkmpi.trees.graph.shallow_arborescence import ShallowArborescences, can_search
from blinkmpi.trees.pareto_front import DepthPoint, by_depth
from tests.unit.trees.test_certify import machines

DGX = machine("dgx-1v")
ALL = ("broadcast", "reduce", "allgather", "reduce_scatter", "gather", "scatter", "allreduce", "alltoall")
BEST = Fraction(1_200_000, 7)  # MB/s: all links of a DGX-1V, 7 of 8 blocks


# ---------------------------------------------------------------- the cheapest trees and paths


def hops_to(parent: list[int], v: int) -> int:
    """Give the hops from the root to a vertex, many where no root is found."""
    count = 0
    while parent[v] != v and count < len(parent):
        v, count = parent[v], count + 1
    return count if parent[v] == v else FAR


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.booleans(), st.data())
def test_the_cheapest_tree_of_so_many_hops_is_that_of_brute_force(
    n: int, depth: int, floats: bool, data: st.DataObject
) -> None:
    prices = st.sampled_from([0, 1, 1, 2, 3, 5, 9, FAR])
    cost = np.array(data.draw(st.lists(st.lists(prices, min_size=n, max_size=n), min_size=n, max_size=n)))
    np.fill_diagonal(cost, FAR)
    root = data.draw(st.integers(0, n - 1))
    every = ([*some[:root], root, *some[root:]] for some in map(list, product(range(n), repeat=n - 1)))
    valid = [
        parent for parent in every
        if all(parent[v] != v or v == root for v in range(n)) and max(hops_to(parent, v) for v in range(n)) <= depth
    ]  # fmt: skip
    best = min(sum(int(cost[parent[v], v]) for v in range(n) if v != root) for parent in valid)
    found = ShallowArborescences(np.where(cost == FAR, np.inf, cost) if floats else cost, depth).tree(root)
    total = sum(int(cost[found[v], v]) for v in range(n) if v != root)
    assert found[root] == root
    assert max(hops_to(found, v) for v in range(n)) <= depth
    assert total == best or min(total, best) >= FAR


def test_sixteen_ranks_can_be_searched_in_two_hops_and_nine_in_any_number() -> None:
    assert can_search(16, 2)
    assert can_search(9, 8)
    assert not can_search(17, 2)
    assert not can_search(10, 3)


@settings(max_examples=40, deadline=None)
@given(machines(most=6, symmetric=False, switches=1), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_cheapest_paths_of_so_many_hops_are_that_short_and_that_cheap(t: Topology, depth: int, rng: object) -> None:
    f = fabric(t, FAST)
    prices = np.array([rng.randint(0, 9) for _ in f.arcs])  # type: ignore[attr-defined]
    price = dict(zip(f.arcs, prices.tolist(), strict=True))
    one = CheapestPaths(f, prices).cost.tolist()
    found = CheapestPaths(f, prices, relay=True, depth=depth)
    for source in range(t.n):
        least = [0 if v == source else FAR for v in range(t.n)]
        for _ in range(depth):  # Bellman and Ford
            least = [min([least[v], *(least[u] + one[u][v] for u in range(t.n) if u != v)]) for v in range(t.n)]
        for v in range(t.n):
            if v != source and least[v] < FAR:
                path = found.path(source, v)
                assert found.cost[source, v] == least[v]
                assert sum(price[arc] for arc in pairwise(path)) == least[v]
                assert sum(u < t.n for u in path[1:]) <= depth


# ---------------------------------------------------------------- the front


@settings(max_examples=30, deadline=None)
@given(machines(most=5, symmetric=True, switches=1), st.sampled_from(ALL), st.integers(0, 4))
def test_every_point_is_proved_and_the_rate_grows_with_the_depth(t: Topology, collective: str, root: int) -> None:
    points = by_depth(t, collective, root % t.n)
    assert all(point.proved for point in points)
    assert all(point.packing.depth <= point.depth for point in points)
    assert [point.depth for point in points] == sorted({point.depth for point in points})
    rates = [point.packing.rate for point in points]
    assert rates == sorted(set(rates))
    assert rates[-1] == pack(t, collective, root=root % t.n).rate


@settings(max_examples=25, deadline=None)
@given(machines(most=4, symmetric=False), st.sampled_from(["allgather", "broadcast"]), st.integers(1, 3))
def test_the_rate_of_a_depth_is_that_of_a_linear_program_over_all_trees(
    t: Topology, collective: str, depth: int
) -> None:
    arcs = {arc: mbps for arc, mbps in fabric(t, FAST).arcs.items() if max(arc) < t.n}
    number = {arc: i for i, arc in enumerate(arcs)}
    roots = range(t.n) if collective == "allgather" else (0,)
    trees = [tree for root in roots for tree in all_arborescences(list(arcs), t.n, root, depth)]
    if {tree.root for tree in trees} != set(roots):
        assert depth < by_depth(t, collective)[0].depth
        return
    uses, owners = np.zeros((len(arcs), len(trees) + 1)), np.zeros((len(roots), len(trees) + 1))
    for j, tree in enumerate(trees):
        uses[[number[arc] for arc in tree.arcs], j] = 1
        owners[tree.root, j] = -1
    owners[:, -1] = 1
    right = [*arcs.values(), *[0] * len(roots)]
    best = linprog([*[0] * len(trees), -1], A_ub=np.vstack([uses, owners]), b_ub=right, method="highs-ds")
    point = [point for point in by_depth(t, collective) if point.depth <= depth][-1]
    assert float(point.packing.rate) == pytest.approx(-best.fun * len(roots), rel=1e-9)


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_a_dgx_1v_gathers_in_two_hops_as_fast_as_in_any_number(collective: str) -> None:
    (point,) = by_depth(DGX, collective)
    assert (point.depth, point.packing.depth, point.packing.rate) == (2, 2, BEST)
    assert point.proved


def test_what_two_hops_carry_on_sixteen_ranks_is_proved_to_be_the_most() -> None:
    first, *_ = by_depth(machine("dgx-a100:2"), "allgather")
    assert first.depth == 1
    found = pack(machine("dgx-a100:2"), "allgather", method="shallow", options=MethodOptions(max_depth=2))
    assert found.optimal
    assert found.depth == 2


@pytest.mark.parametrize("collective", ALL)
def test_every_collective_has_a_front_and_no_point_of_it_beats_another(collective: str) -> None:
    points = [(len(p.trees), p.depth, -p.rate) for p in pareto(machine("dgx-1p"), collective, 3)]
    for i, a in enumerate(points):
        assert not any(all(x <= y for x, y in zip(b, a, strict=True)) for j, b in enumerate(points) if j != i)


@pytest.mark.parametrize(("collective", "rate"), [("alltoall", 75_000), ("scatter", BEST), ("gather", BEST)])
def test_paths_of_at_most_two_hops_are_packed_and_none_of_one_hop(collective: str, rate: Fraction) -> None:
    found = pack(DGX, collective, root=5, method="shallow", options=MethodOptions(max_depth=2))
    assert (found.depth, found.rate, found.optimal) == (2, rate, True)
    with pytest.raises(NoPackingError, match="no trees of at most 1 hops reach all ranks"):
        pack(DGX, collective, root=5, method="shallow", options=MethodOptions(max_depth=1))


def test_a_plan_gathers_short_vectors_in_two_hops() -> None:
    plan = make_plan(DGX, gpus="slots", collectives=("allgather",))
    assert [rule.scheme for rule in plan.rules if rule.collective == "allgather" and not rule.min_bytes] == ["depth-2"]


@pytest.mark.parametrize("function", [by_depth, pareto])
def test_what_has_no_front_is_refused_with_the_reason(function: Any) -> None:
    for t, collective, root, why in (
        (DGX, "scan", 0, "collective 'scan': expected one of broadcast"),
        (DGX, "broadcast", 8, r"root 8: dgx-1v has ranks 0\.\.7"),
        (DGX, "barrier", 0, "barrier on dgx-1v: depth and rate are compared where several ranks send bytes"),
        (DGX.subset([3]), "allgather", 0, "depth and rate are compared where several ranks send bytes over links"),
        (machine("cpu:4"), "allgather", 0, "not through one memory; take blinkmpi.trees.pack"),
    ):
        with pytest.raises(ArgumentError, match=why):
            function(t, collective, root)


# ---------------------------------------------------------------- proofs


def broadcast_in_two() -> DepthPoint:
    """Give a packing of two hops that is slower than deeper ones, with its proof."""
    first, *_ = by_depth(DGX, "broadcast")
    assert first.packing.rate == 50_000
    return first


def test_a_proof_is_checked_from_the_machine_alone() -> None:
    point = broadcast_in_two()
    assert point.proof is not None
    assert point.proof.bound == 50_000 < point.packing.bound
    verify_depth(point.packing, point.proof, 2, DGX)


def test_proofs_that_do_not_hold_are_refused_with_the_reason() -> None:
    point = broadcast_in_two()
    packing, proof = point.packing, point.proof
    assert proof is not None
    dearer = replace(proof, parts=tuple((u, v, 2 * price) for u, v, price in proof.parts[:1]) + proof.parts[1:])
    cut, many = pack(DGX, "broadcast"), pack(machine("mi250"), "broadcast")
    for some, certificate, depth, why in (
        (packing, proof, 1, "has trees of 2 hops, expected at most 1"),
        (packing, cut.certificate, 2, "certificate is a cut, expected prices"),
        (packing, proof, 3, "certificate has prices at which what the rate needs may cost nothing"),
        (packing, dearer, 2, "certificate states"),
        (replace(packing, rate=packing.rate + 1), proof, 2, "is above its bound"),
    ):
        with pytest.raises(PlanError, match=why):
            verify_depth(some, certificate, depth, DGX)
    with pytest.raises(PlanError, match="of 16 ranks, too many to look at"):
        verify_depth(many, proof, many.depth, machine("mi250"))
