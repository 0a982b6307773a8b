"""Blink's own methods: its two stages, and two kinds of links at once."""

import random
from fractions import Fraction
from itertools import product
from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.errors import ArgumentError, PlanError
from blinkmpi.program.check import check
from blinkmpi.program.cost_model import price
from blinkmpi.program.interpreter import run
from blinkmpi.program.lower import lower
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees import COLLECTIVES, pack, verify
from blinkmpi.trees.exact.enumeration import all_spanning_trees
from blinkmpi.trees.graph.arborescence import cheapest_arborescence, minimum_spanning_tree
from blinkmpi.trees.graph.fabric import FAST, fabric
from blinkmpi.trees.graph.logical import SpanningTree, capacities_of, ordered, split_switches
from blinkmpi.trees.packing import extra_methods, methods
from blinkmpi.trees.patterns.hybrid import split
from blinkmpi.trees.problem import MethodOptions
from tests.unit.trees.packings import call_of, reference, sends_of
from tests.unit.trees.test_certify import machines

# ---------------------------------------------------------------- two stages


DGX = machine("dgx-1v")
SPANNING = ("broadcast", "reduce", "allreduce")


def length(matrix: list[list[float]], shape: SpanningTree) -> float:
    return sum(matrix[u][v] for u, v in shape.arcs)


@settings(max_examples=40, deadline=None)
@given(machines(most=6, symmetric=False), st.integers(0, 99))
def test_oracles_equal_brute_force(t: Topology, seed: int) -> None:
    rng = random.Random(seed)
    o = split_switches(fabric(t, FAST))
    matrix = [[rng.random() if (u, v) in o.routes else inf for v in range(t.n)] for u in range(t.n)]
    root = seed % t.n
    every = all_spanning_trees(capacities_of(o, root))
    assert every
    found = SpanningTree(root, ordered(root, cheapest_arborescence(np.array(matrix), root)))
    assert length(matrix, found) == pytest.approx(min(length(matrix, s) for s in every))
    even = [[min(matrix[u][v], matrix[v][u]) for v in range(t.n)] for u in range(t.n)]
    both = all_spanning_trees(capacities_of(split_switches(fabric(t, FAST).two_way), -1))
    assert both
    edges = minimum_spanning_tree(np.array(even))
    assert edges is not None
    tree = SpanningTree(0, tuple(edges))
    assert length(even, tree) == pytest.approx(min(length(even, s) for s in both))


def test_cycles_are_entered_where_that_adds_least() -> None:
    """On complete graphs, where the cheapest arcs into the ranks often form cycles."""
    n = 5

    def joined(parents: tuple[int, ...], v: int) -> bool:
        for _ in range(n):
            v = parents[v]
        return v == 0

    every = [(0, *some) for some in product(range(n), repeat=n - 1)]
    arborescences = [parents for parents in every if all(joined(parents, v) for v in range(n))]
    assert len(arborescences) == n ** (n - 2)
    for seed in range(50):
        rng = random.Random(seed)
        matrix = [[inf if u == v else rng.random() for v in range(n)] for u in range(n)]
        found, best = (
            min(sum(matrix[parents[v]][v] for v in range(1, n)) for parents in some)
            for some in ([cheapest_arborescence(np.array(matrix), 0)], arborescences)
        )
        assert found == pytest.approx(best), seed


@settings(max_examples=25, deadline=None)
@given(machines(most=6, symmetric=True), st.sampled_from(SPANNING), st.sampled_from(["1/4", "1/10", "1/20"]))
def test_rate_is_within_epsilon_of_the_bound(t: Topology, collective: str, epsilon: str) -> None:
    packing = pack(t, collective, root=t.n - 1, method="mwu", options=MethodOptions(epsilon=Fraction(epsilon)))
    assert packing.bound >= packing.rate >= (1 - Fraction(epsilon) - Fraction(1, 10**9)) * packing.bound


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(machines(most=6, symmetric=True), st.sampled_from(SPANNING), st.sampled_from(["0", "1/20", "1/4"]))
def test_ilp_has_no_more_trees_and_loses_no_more_than_stated(t: Topology, collective: str, loss: str) -> None:
    options = MethodOptions(loss=Fraction(loss))
    first = pack(t, collective, method="mwu", options=options)
    second = pack(t, collective, method="mwu+ilp", options=options)
    assert len(second.trees) <= len(first.trees)
    assert second.rate >= (1 - Fraction(loss)) * first.rate


def test_dgx1v_as_in_the_paper() -> None:
    """Dozens of trees become 6 of one NVLink each."""
    first = pack(DGX, "broadcast", method="mwu")
    second = pack(DGX, "broadcast", method="mwu+ilp")
    assert len(first.trees) > 20
    assert [tree.weight for tree in second.trees] == [25_000] * 6
    assert second.optimal
    assert "of one unit each" in second.reason
    relaxed = pack(machine("dgx-1p"), "allreduce", method="mwu+ilp")
    assert "of any weight" in relaxed.reason


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_extra_methods_are_asked_for_by_name_alone(collective: str) -> None:
    extra = extra_methods(DGX, collective)
    assert not set(extra) & set(methods(DGX, collective))
    assert extra_methods(machine("cpu:4"), collective) == ()
    assert extra_methods(DGX.subset([3]), collective) == ()
    for name in extra:
        packing = pack(DGX, collective, method=name, root=0)
        assert packing.scheme == (f"depth-{packing.depth}" if name == "shallow" else name)
        assert pack(DGX, collective, method=name, root=0) == packing
        assert ("meets the bound" in packing.reason) == packing.optimal


@pytest.mark.slow
@pytest.mark.parametrize("collective", [*SPANNING, "allgather", "reduce_scatter"])
def test_what_they_plan_runs_and_has_a_price(collective: str) -> None:
    dice = np.random.default_rng(7)
    for name in extra_methods(DGX, collective):
        packing = pack(DGX, collective, method=name)
        call = call_of(packing.collective, 8, 4096)  # root 0 where there is one
        program = check(lower(packing, call, chunk_bytes=4096, depth=2))
        sends = sends_of(call, dice)
        for got, wanted in zip(run(program, sends), reference(call, sends), strict=True):
            assert (got is None) == (wanted is None)
            assert got is None or (got == wanted).all(), name
        long = call_of(packing.collective, 8, 1 << 24)
        seconds = price(lower(packing, long, chunk_bytes=1 << 17, depth=4), packing, DGX).seconds
        assert seconds > 0


@pytest.mark.parametrize(("options", "words"), [
    (MethodOptions(epsilon=Fraction(0)), "epsilon"),
    (MethodOptions(loss=Fraction(1)), "loss"),
    (MethodOptions(max_trees=0), "max_trees"),
    (MethodOptions(max_depth=0), "max_depth"),
    (MethodOptions(nbytes=-1), "nbytes"),
])  # fmt: skip
def test_impossible_options(options: MethodOptions, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        pack(DGX, "broadcast", method="mwu", options=options)


@pytest.mark.slow
def test_solvers_do_not_print(capfd: pytest.CaptureFixture[str]) -> None:
    """The standard output belongs to whoever asked for the plan."""
    assert pack(machine("mi250"), "allreduce", method="mwu+ilp").rate > 0
    assert capfd.readouterr().out == ""


def test_too_many_ranks_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="mwu"):
        pack(machine("dgx-a100:4"), "broadcast", method="mwu")


# ---------------------------------------------------------------- two kinds of links at once


MOVING = tuple(c for c in COLLECTIVES if c != "barrier")
RATES = st.fractions(Fraction(1), Fraction(200_000))


@pytest.mark.parametrize("collective", MOVING)
@pytest.mark.parametrize("name", ["dgx-1v", "dgx-1p"])
def test_rates_add(name: str, collective: str) -> None:
    t = machine(name)
    slow = msgspec.structs.replace(t, links=tuple(k for k in t.links if k.kind != "nvlink"))
    both = pack(t, collective, method="hybrid")
    assert both.rate == pack(t, collective).rate + pack(slow, collective).rate
    assert both.links == "host+nvlink+pcie"
    assert both.bound >= both.rate
    assert "% of the vector on nvlink" in both.reason
    kinds = {kind for k in t.links for kind in [k.kind]}
    assert set(both.links.split("+")) == kinds


@given(RATES, RATES, st.integers(1, 10**10), st.fractions(Fraction(0), Fraction(1, 10)))
def test_both_end_together(fast: Fraction, slow: Fraction, nbytes: int, wait: Fraction) -> None:
    parts = split(fast, slow, nbytes=nbytes, switch_seconds=wait)
    size = Fraction(nbytes, 10**6)
    assert parts.fast + parts.slow == 1
    assert parts.fast * size / fast == parts.seconds
    if parts.slow:
        assert parts.slow * size / slow + wait == parts.seconds
    else:
        assert parts.seconds <= wait


def test_switching_cost_shifts_the_split() -> None:
    rates = []
    for wait in ("0", "1/10000", "1/1000", "1"):
        options = MethodOptions(nbytes=100_000_000, switch_seconds=Fraction(wait))
        packing = pack(DGX, "broadcast", method="hybrid", options=options)
        rates.append(packing.rate)
        assert ("before the slow links start" in packing.reason) == (wait != "0")
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == Fraction(165_750)
    assert rates[-1] == pack(DGX, "broadcast").rate


def test_every_shared_link_is_counted_once() -> None:
    """PCIe at half its rate no longer carries what the plan for the whole machine puts on it."""
    both = pack(DGX, "allreduce", method="hybrid")
    with pytest.raises(PlanError, match="carries"):
        verify(both, DGX.scale("pcie", "1/2"))


def test_where_one_kind_is_missing() -> None:
    for t in (machine("pcie-8"), machine("dgx-a100"), DGX.subset([0, 5])):
        assert "hybrid" not in extra_methods(t, "broadcast")
        with pytest.raises(ArgumentError, match="hybrid"):
            pack(t, "broadcast", method="hybrid")
    assert fabric(DGX, ["nvlink"]).serves("allreduce", 0)
