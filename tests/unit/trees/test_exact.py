"""Exact methods: linear programs over trees, translations of symmetric machines, and trees grown by flows."""

import random
from fractions import Fraction
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.optimize import linprog

from blinkmpi.errors import PlanError
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, Switch, Topology
from blinkmpi.trees import pack, verify
from blinkmpi.trees.exact import arborescences, arborescences_by_flow
from blinkmpi.trees.exact.basis import exact_basis, exact_prices, lowered
from blinkmpi.trees.exact.rational import solve
from blinkmpi.trees.graph.arborescence import cheapest_arborescence
from blinkmpi.trees.graph.cuts import min_cut, ratio_cut
from blinkmpi.trees.graph.fabric import fabric
from blinkmpi.trees.graph.symmetry import translations
from tests.harness import NEVER_S
from tests.unit.trees.test_certify import machines

# ---------------------------------------------------------------- linear programs


def star(n: int, out: int, into: int) -> Topology:
    """GPUs on a switch that gives more than it takes, or less."""
    links = [k for i in range(n) for k in (Link(i, n, "nvlink", 1, out), Link(n, i, "nvlink", 1, into))]
    return Topology("star", tuple(Device("gpu", 0, i) for i in range(n)), (Switch("nvswitch", 0),), tuple(links))


@pytest.mark.parametrize("n", [3, 5])
def test_a_switch_that_gives_more_than_it_takes_cannot_copy(n: int) -> None:
    """The ratio cut says n times what the prices say; unicast counting is right."""
    packing = pack(star(n, 100, 100_000), "allgather")
    assert packing.optimal
    assert packing.rate == Fraction(100 * n, n - 1)
    assert packing.certificate.kind == "prices"
    wrong = msgspec.structs.replace(packing.certificate, parts=packing.certificate.parts[1:])
    with pytest.raises(PlanError, match="certificate states"):
        verify(msgspec.structs.replace(packing, certificate=wrong), star(n, 100, 100_000))


def float_allreduce(t: Topology) -> float:
    """The best rate of any trees, up and down apart: flows of every rank's share to and from everybody, no switches."""
    arcs = [(k.src, k.dst) for k in t.links]
    n, m = t.n, len(arcs)
    # Variables: x_v; a and b per arc; for each sink a flow within a and one, reversed, within b.
    x, a, b = 0, n, n + m
    flows = [n + 2 * m + i * m for i in range(2 * n)]
    count = n + 2 * m + 2 * n * m
    upper, equal = [], []
    for i in range(m):
        row = np.zeros(count)
        row[a + i] = row[b + i] = 1
        upper.append((row, t.links[i].mbps))
    for v, (way, first) in product(range(n), ((1, a), (-1, b))):
        f = flows[2 * v + (way < 0)]
        for i in range(m):
            row = np.zeros(count)
            row[f + i], row[first + i] = 1, -1
            upper.append((row, 0))
        for u in range(n):
            row = np.zeros(count)
            for i, (p, q) in enumerate(arcs):
                row[f + i] += way * ((p == u) - (q == u))
            row[x + u] -= 1
            if u == v:
                row[x : x + n] += 1
            equal.append(row)
    aim = np.zeros(count)
    aim[:n] = -1
    limits = np.array([c for _, c in upper], float)
    found = linprog(aim, np.array([r for r, _ in upper]), limits, np.array(equal), np.zeros(len(equal)))
    return -float(found.fun)


@settings(max_examples=25, deadline=None)
@given(machines(most=5, symmetric=False))
def test_allreduce_bound_is_the_linear_program_of_flows(t: Topology) -> None:
    packing = pack(t, "allreduce")
    best = float_allreduce(t)
    assert float(packing.bound) >= best * (1 - 1e-6)
    if not packing.optimal:  # trees that are used both ways may lose; the bound is then that of any trees
        assert float(packing.bound) == pytest.approx(best, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    machines(most=5, symmetric=False, switches=2),
    st.sampled_from(["broadcast", "reduce", "allgather", "reduce_scatter"]),
    st.integers(0, 99),
)
def test_one_way_collectives_are_optimal_on_any_graph(t: Topology, collective: str, pick: int) -> None:
    packing = pack(t, collective, root=pick % t.n)
    assert packing.optimal, packing.reason


def test_a_root_whose_trees_weigh_more_than_needed() -> None:
    """The program's solution had three trees of one root and two of the other; both must come to the same, exactly."""
    pairs = [(a, b) for u, v in ("01", "02", "03", "12", "23") for a, b in ((int(u), int(v)), (int(v), int(u)))]
    links = tuple(Link(a, b, "nvlink", 2 if (a, b) == (2, 1) else 1, 7) for a, b in pairs)
    t = Topology("unequal", (Device("gpu", 0, 0), Device("gpu", 0, 1)), (Switch("nvswitch", 0),) * 2, links)
    packing = pack(t, "allgather", method="columns")
    assert packing.optimal
    assert (packing.rate, {tree.weight for tree in packing.trees}) == (28, {7})


@settings(max_examples=30, deadline=None)
@given(machines(most=6, symmetric=True, switches=2))
def test_allreduce_with_switches(t: Topology) -> None:
    packing = pack(t, "allreduce")
    assert packing.optimal, packing.reason


@pytest.mark.parametrize("collective", ["broadcast", "allreduce", "allgather"])
def test_agrees_with_growth(collective: str) -> None:
    for name in ("dgx-1v", "mi250"):
        t = machine(name)
        assert pack(t, collective, method="columns").rate == pack(t, collective).rate


def test_pcie_switches_wired_to_switches() -> None:
    for collective in ("broadcast", "allreduce", "allgather"):
        assert pack(machine("pcie-8:2"), collective).optimal


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.data())
def test_cheapest_arborescence_against_all(n: int, data: st.DataObject) -> None:
    cost = np.array(data.draw(st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n)))
    np.fill_diagonal(cost, 1 << 58)
    best = None
    for parents in product(range(n), repeat=n - 1):
        parent = [0, *parents]
        if all(_leads_to_root(parent, v) for v in range(n)):
            total = sum(int(cost[parent[v], v]) for v in range(1, n))
            best = total if best is None else min(best, total)
    found = cheapest_arborescence(cost, 0)
    assert all(_leads_to_root(found, v) for v in range(n))
    assert sum(int(cost[found[v], v]) for v in range(1, n)) == best


def _leads_to_root(parent: list[int], v: int) -> bool:
    for _ in parent:
        v = parent[v]
    return v == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.data())
def test_exact_solutions(n: int, data: st.DataObject) -> None:
    matrix = np.array(data.draw(st.lists(st.lists(st.integers(-3, 3), min_size=n, max_size=n), min_size=1, max_size=6)))
    wanted = [
        Fraction(p, q)
        for p, q in data.draw(st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 9)), min_size=n, max_size=n))
    ]
    right = [sum((int(a) * x for a, x in zip(row, wanted, strict=True)), Fraction(0)) for row in matrix]
    scale = int(np.lcm.reduce([r.denominator for r in right]))
    found = solve(matrix * scale, [int(r * scale * scale) for r in right])
    assert found is not None
    got = [sum((int(a) * x for a, x in zip(row, found, strict=True)), Fraction(0)) for row in matrix]
    assert got == [r * scale for r in right]


def test_contradiction_has_no_solution() -> None:
    assert solve(np.array([[1, 1], [2, 2]]), [1, 3]) is None


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_corner_of_a_linear_program_is_found_again_in_fractions(n: int, m: int, rng: random.Random) -> None:
    rows = np.array([[rng.randint(0, 4) for _ in range(n)] for _ in range(m)] + [[1] * n])
    right = np.array([rng.randint(1, 9) for _ in range(m)] + [rng.randint(1, 30)])
    gain = [rng.randint(1, 9) for _ in range(n)]
    best = linprog([-g for g in gain], A_ub=rows, b_ub=right, method="highs-ds")
    exact = exact_basis(rows, right, best.x)
    assert exact is not None
    assert min(exact) >= 0
    assert all(np.array([int(a) for a in row]) @ exact <= b for row, b in zip(rows, right.tolist(), strict=True))
    assert float(sum(g * x for g, x in zip(gain, exact, strict=True))) == pytest.approx(-best.fun, rel=1e-9)


def test_the_last_rows_hold_with_equality_and_what_is_no_corner_is_refused() -> None:
    rows, right = np.array([[1, 0], [0, 1], [1, -2]]), np.array([5, 5, 0])
    assert exact_basis(rows, right, np.array([5.0, 2.5]), equal=1) == [5, Fraction(5, 2)]
    assert exact_basis(rows, right, np.array([5.0, 5.0]), equal=1) is None, "three equations for two unknowns"
    assert exact_basis(rows, right, np.array([5.0, 2.5]), equal=1, most=1) is None


def test_full_rows_without_a_price_do_not_count_where_they_contradict_the_others() -> None:
    rows, right = np.array([[10**9, 10**9], [10**9, 0], [0, 10**9]]), np.array([2 * 10**9 + 1, 10**9, 10**9])
    x = np.array([1.0, 1.0])
    assert exact_basis(rows, right, x) is None
    assert exact_basis(rows, right, x, prices=np.array([0.0, 1.0, 1.0])) == [1, 1]
    right[0] -= 2
    assert exact_basis(rows, right, x, prices=np.array([0.0, 1.0, 1.0])) is None, "they must hold nevertheless"


def test_exact_prices_come_first_and_rounded_ones_without_time() -> None:
    equations, norm = np.array([[2, -3, 0], [0, 1, -1]]), np.array([1, 1, 1])
    near = np.array([3.0, 2.0, 2.0]) / 7 + 1e-12
    first, *rest = exact_prices(equations, norm, near)
    assert first == [Fraction(3, 7), Fraction(2, 7), Fraction(2, 7)]
    assert list(exact_prices(equations, norm, near, late=True)) == rest
    assert rest[0] == [1, Fraction(2, 3), Fraction(2, 3)]


def test_lowered_floats_are_below_and_near() -> None:
    x = np.array([0.0, -1e-18, 1 / 3, 7.0])
    for value, exact in zip(x.tolist(), lowered(x, 10**6), strict=True):
        assert 0 <= exact <= max(value, 0)
        assert float(exact) == pytest.approx(value, abs=1e-5)


# ---------------------------------------------------------------- tori and their kin


LANE = 25_000


def torus(*sizes: int) -> Topology:
    """GPUs on a torus with these side lengths; a side of two has two lanes."""
    points = list(product(*map(range, sizes)))
    number = {p: i for i, p in enumerate(points)}
    lanes: dict[tuple[int, int], int] = {}
    for p in points:
        for axis, size in enumerate(sizes):
            for step in (1, -1):
                q = (*p[:axis], (p[axis] + step) % size, *p[axis + 1 :])
                arc = number[p], number[q]
                lanes[arc] = lanes.get(arc, 0) + 1
    links = tuple(Link(u, v, "nvlink", k, LANE) for (u, v), k in lanes.items())
    return Topology("torus", tuple(Device("gpu", 0, i) for i in range(len(points))), (), links)


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "allreduce"])
@pytest.mark.parametrize("sizes", [(9,), (20,), (4, 4), (3, 5), (8, 8), (4, 4, 4), (2, 2, 2, 2), (16, 16)])
def test_tori_at_full_speed_and_least_depth(sizes: tuple[int, ...], collective: str) -> None:
    t = torus(*sizes)
    packing = pack(t, collective)
    assert packing.scheme == "symmetric"
    assert packing.optimal
    assert packing.rate == Fraction(2 * len(sizes) * LANE * t.n, (t.n - 1) * (2 if collective == "allreduce" else 1))
    assert max(tree.depth for tree in packing.trees) == sum(size // 2 for size in sizes)


def test_translations_are_proved_on_every_link() -> None:
    t = torus(4, 4)
    assert translations(fabric(t, ["nvlink"])) is not None
    slower = replace(t, links=(replace(t.links[0], lane_mbps=LANE - 1), *t.links[1:]))
    assert translations(fabric(slower, ["nvlink"])) is None
    assert translations(fabric(t.drop_link(0, 1), ["nvlink"])) is None
    assert translations(fabric(machine("mi250"), ["xgmi"])) is None
    assert pack(slower, "allgather").optimal


# ---------------------------------------------------------------- trees grown by flows


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
        arborescences_by_flow.pack_arborescences(fabric(t, ["nvlink"]), cap, supply),
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
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_five_hundred_ranks_on_a_torus_are_sent_to_from_all_sides(collective: str) -> None:
    packing = pack(torus(8, 8, 8), collective, root=77, seconds=NEVER_S)
    assert packing.optimal
    assert len(packing.trees) == 6


@pytest.mark.slow
def test_two_boxes_of_dies_split_rail_by_rail() -> None:
    packing = pack(machine("mi250:2"), "allgather", seconds=NEVER_S)
    assert packing.optimal
    assert len(packing.trees) <= 90


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_every_rank_roots_trees_at_the_bound_on_irregular_graphs_beyond_64_ranks(collective: str) -> None:
    """Chains, which other methods leave there, reach half of it."""
    rng = random.Random(80)
    lanes: dict[tuple[int, int], int] = {}
    for u, v in [*((i, (i + 1) % 72) for i in range(72)), *(tuple(rng.sample(range(72), 2)) for _ in range(144))]:
        lanes[u, v] = lanes[v, u] = rng.randint(1, 4)
    links = tuple(Link(u, v, "nvlink", k, 25_000) for (u, v), k in lanes.items())
    t = Topology("irregular", tuple(Device("gpu", 0, i) for i in range(72)), (), links)
    packing = pack(t, collective, seconds=60)
    assert packing.optimal, packing.reason
    assert pack(t, collective, method="chain").rate < packing.rate / 1.5
    assert packing.depth < 10
