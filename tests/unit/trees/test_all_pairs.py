"""An alltoall: its rate against a linear program of another form, its proof, its program, and what it saves."""

from fractions import Fraction
from math import inf
from unittest import mock

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.optimize import linprog
from scipy.sparse import lil_array

from blinkmpi.cli.main import main
from blinkmpi.errors import NoPackingError, PlanError
from blinkmpi.planning.explain import explanation
from blinkmpi.planning.plan import Plan, Rule, chunk_for
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.program.check import check
from blinkmpi.program.cost_model import price
from blinkmpi.program.interpreter import run
from blinkmpi.program.lower import lower
from blinkmpi.topology.importers import modify
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, Topology
from blinkmpi.trees import Packing, methods, pack, verify
from blinkmpi.trees.deadline import NEVER, Deadline
from blinkmpi.trees.graph.fabric import Fabric, choose_links, fabric
from blinkmpi.trees.graph.loads import link_loads
from blinkmpi.trees.graph.symmetry import symmetry
from blinkmpi.trees.problem import MethodOptions
from blinkmpi.trees.tree import carried
from tests.effort import Effort
from tests.harness import NEVER_S
from tests.unit.trees.packings import call_of, reference, sends_of
from tests.unit.trees.test_certify import machines
from tests.unit.trees.test_deadline import NO_TIME, torus

LANE = 25_000
MIB = 1 << 20
DGX = machine("dgx-1v")


def greatest(f: Fabric) -> float:
    """The best rate by flows on arcs, a commodity for each pair of ranks: as the definition has it."""
    arcs, n = list(f.arcs), f.n
    at = {v: i for i, v in enumerate(f.vertices)}
    pairs = [(s, t) for s in range(n) for t in range(n) if s != t]
    size = len(pairs) * len(arcs)
    kept, loads = lil_array((len(pairs) * len(at), size + 1)), lil_array((len(arcs), size + 1))
    for k, (s, t) in enumerate(pairs):
        for j, (u, v) in enumerate(arcs):
            column = k * len(arcs) + j
            kept[k * len(at) + at[u], column] = 1
            kept[k * len(at) + at[v], column] = -1
            loads[j, column] = 1
        kept[k * len(at) + at[s], size] = -1
        kept[k * len(at) + at[t], size] = 1
    aim = np.zeros(size + 1)
    aim[-1] = -1
    found = linprog(
        aim, A_ub=loads.tocsr(), b_ub=list(f.arcs.values()), A_eq=kept.tocsr(), b_eq=np.zeros(kept.shape[0])
    )
    return float(found.x[-1]) * n


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(machines(most=6, symmetric=False, switches=3))
def test_the_rate_is_that_of_a_flow_for_every_pair(t: Topology) -> None:
    found = pack(t, "alltoall")
    assert found.optimal, found.reason
    assert float(found.rate) == pytest.approx(greatest(fabric(t, found.links.split("+"))), rel=1e-6)


@pytest.mark.parametrize("n", [3, 5, 12])
def test_a_ring_of_one_way(n: int) -> None:
    """Every link carries the blocks of 1 + 2 + ... + (n - 1) pairs."""
    links = tuple(Link(i, (i + 1) % n, "nvlink", 1, LANE) for i in range(n))
    found = pack(Topology("ring", tuple(Device("gpu", 0, i) for i in range(n)), (), links), "alltoall")
    assert found.rate == found.bound == Fraction(2 * LANE, n - 1)
    assert len(found.trees) == n * (n - 1)


@pytest.mark.parametrize(("name", "gpus", "lanes"), [
    ("dgx-1v", "0-7", Fraction(3)),
    ("dgx-1v", "0-6", Fraction(35, 12)),
    ("dgx-1v", "1,4,5,6", Fraction(8, 3)),
    ("dgx-1v", "0-3", Fraction(5)),
])  # fmt: skip
def test_known_rates_in_nvlink_lanes(name: str, gpus: str, lanes: Fraction) -> None:
    found = pack(modify(machine(name), gpus=gpus), "alltoall")
    assert (found.rate, found.bound) == (lanes * LANE, lanes * LANE)


@pytest.mark.parametrize(("name", "images", "classes"), [
    ("dgx-1v", 2, 16), ("dgx-2", 16, 2), ("dgx-a100:2", 16, 4), ("dgx-1v:4", 8, 33),
])  # fmt: skip
def test_ranks_that_a_symmetry_moves_share_their_paths(name: str, images: int, classes: int) -> None:
    f = choose_links(machine(name), "alltoall", 0)
    found = symmetry(f)
    assert (len(found.images), len(found.times)) == (images, classes)
    assert len(found.sources) * images == f.n
    for image in found.images:
        assert all(f.arcs[image[u], image[v]] == c for (u, v), c in f.arcs.items())


def combined(t: Topology) -> tuple[Packing, Fraction]:
    """The scatters of all roots at once, and the rate that the links carry of them."""
    scatters = carried("alltoall", [pack(t, "scatter", root=r) for r in range(t.n)])
    sums: dict[tuple[int, int], Fraction] = {}
    for tree in scatters.trees:
        pair = tree.root, tree.edges[-1].dst
        sums[pair] = sums.get(pair, Fraction(0)) + tree.weight
    even = [replace(x, weight=x.weight / sums[x.root, x.edges[-1].dst] / t.n) for x in scatters.trees]
    arcs = fabric(t, scatters.links.split("+")).arcs
    return scatters, min(arcs[arc] / load for arc, load in link_loads("alltoall", even).items())


def seconds_of(found: Packing, t: Topology, nbytes: int) -> float:
    call = call_of("alltoall", t.n, nbytes // 4 // t.n)
    chunk = chunk_for(found, call, Rule("alltoall", 0, found.scheme, 128 << 10, 8))
    program = check(lower(found, call, chunk_bytes=chunk, depth=8))
    return price(program, found, t).seconds


@pytest.mark.slow
@pytest.mark.parametrize(("t", "gain"), [
    (DGX, 1.4), (modify(DGX, gpus="0-6"), 1.5), (modify(DGX, gpus="1,4,5,6"), 1.05), (torus(4, dead=False), 1.45),
    (torus(4, dead=True), 1.4), (machine("mi250"), 1.3), (machine("pcie-8:2"), 1.25),
], ids=["8", "7", "4", "torus", "less a link", "mi250", "pcie"])  # fmt: skip
def test_it_is_faster_than_the_scatters_of_all_roots_at_once(t: Topology, gain: float) -> None:
    found = pack(t, "alltoall")
    before, rate = combined(t)
    assert found.optimal
    assert found.rate > rate
    nbytes = 64 * MIB
    seconds = seconds_of(found, t, nbytes)
    assert seconds >= nbytes / (float(found.bound) * 1e6) * (1 - 1e-4)
    assert seconds_of(before, t, nbytes) > gain * seconds


@pytest.mark.parametrize("name", ["dgx-2", "dgx-a100:2", "dgx-a100:8"])
def test_where_one_switch_joins_all_every_path_is_one_hop(name: str) -> None:
    t = machine(name)
    found = pack(t, "alltoall")
    assert (found.scheme, found.optimal, found.depth) == ("onehop", True, 1)
    assert len(found.trees) == t.n * (t.n - 1)


@pytest.mark.parametrize("t", [modify(DGX, gpus="1,4,5,6"), machine("pcie-8"), machine("cpu:3"), machine("cpu:1")],
                         ids=["dgx-1v", "pcie", "cpu", "one"])  # fmt: skip
def test_a_plan_runs_it_and_explains_it(t: Topology) -> None:
    plan = make_plan(t, collectives=("alltoall",))
    assert {p.collective for p in plan.packings} == {"alltoall"}
    assert Plan.from_json(plan.to_json()).check(t) == plan
    for uneven in (False, True):
        call = call_of("alltoall", t.n, 1003, uneven=uneven)
        rule = choose(plan, call)
        packing = plan.packing("alltoall", -1, rule.scheme)
        name, _, depth = rule.scheme.partition("-")
        options = MethodOptions(max_depth=int(depth)) if depth else None
        method = "auto" if t.n == 1 else "shallow" if depth else name
        assert packing == pack(t, "alltoall", method=method, options=options)
        sends = sends_of(call, np.random.default_rng(5))
        for got, want in zip(run(program_for(plan, call, rule), sends), reference(call, sends), strict=True):
            assert np.array_equal(got, want)  # type: ignore[arg-type]
        told = explanation(plan, t, call)
        assert told.chosen is not None
        assert told.chosen.rate_gbps == float(packing.rate / 1000)
        trees = rule.protocol != "one_shot"  # which is by no trees
        assert (
            t.n == 1 or not packing.optimal or ("equal to the bound of trees" in " ".join(told.text().split())) == trees
        )


@pytest.mark.slow
def test_many_ranks_go_along_the_scatters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(pack.__globals__, "MOST_ALL_TO_ALL", 7)
    assert methods(DGX, "alltoall") == ()
    with pytest.raises(NoPackingError, match="scatters"):
        pack(DGX, "alltoall")
    assert main(["plan", "dgx-1v"]) == 0
    assert "alltoall, which goes along the trees of the scatters" in capsys.readouterr().out
    assert main(["plan", "dgx-1v", "--method", "exact"]) == 0
    assert "not by this method: alltoall" in capsys.readouterr().out
    for plan in (make_plan(DGX), make_plan(DGX, collectives=("alltoall",))):
        call = call_of("alltoall", 8, 1000)
        rule = choose(plan, call)
        program_for(plan, call, rule)  # which is checked
        scatters = [plan.packing("scatter", r, rule.scheme) for r in range(8)]
        assert plan.packing("alltoall", -1, rule.scheme) == carried("alltoall", scatters)
        assert not any(p.collective == "alltoall" for p in plan.packings)


@pytest.mark.slow
@pytest.mark.long
def test_64_ranks_are_planned_by_one_linear_program_and_their_plan_is_small() -> None:
    at = [(x, y, z) for x in range(4) for y in range(4) for z in range(4)]
    ways = [
        [(p[0] + a) % 4, (p[1] + b) % 4, (p[2] + c) % 4] for p in at for a, b, c in ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    ends = [(i // 3, at.index((x, y, z))) for i, (x, y, z) in enumerate(ways)][1:]
    links = tuple(Link(a, b, "nvlink", 1, LANE) for u, v in ends for a, b in ((u, v), (v, u)))
    t = Topology("torus 4x4x4 less a link", tuple(Device("gpu", 0, r) for r in range(64)), (), links)
    for seconds, programs, least in ((NO_TIME, 0, Fraction(1, 8)), (NEVER_S, 1, Fraction(1))):
        solves = mock.patch.object(scipy.optimize, "linprog", wraps=scipy.optimize.linprog)
        asks = mock.patch.object(Deadline, "left_on_the_clock", autospec=True, side_effect=Deadline.left_on_the_clock)
        with Effort() as effort, solves as linprog, asks as asked:
            plan = make_plan(t, collectives=("alltoall",), seconds=seconds)
        assert effort.ours < 1_500_000
        limits = [call.kwargs["options"]["time_limit"] for call in linprog.call_args_list]
        assert len(limits) == programs
        assert all(limit > 0 for limit in limits)
        assert asked.call_count == programs, "it has what time is left"
        assert all(call.args[0].end < inf for call in asked.call_args_list)
        found = plan.packings[0]
        assert found.rate >= found.bound * least
        assert len(plan.to_json()) < 5_000_000


@pytest.mark.parametrize("t", [modify(DGX, gpus="1-7"), torus(5, dead=True)], ids=["dgx-1v", "torus"])
def test_without_time_the_first_paths_are_taken(t: Topology) -> None:
    found = pack(t, "alltoall", deadline=NEVER.within(NO_TIME))
    assert verify(found, t) == found
    assert 0 < found.rate < found.bound
    assert "BLINKMPI_PLAN_SECONDS" in found.reason
    assert pack(t, "alltoall").optimal


def test_wrong_packings_are_refused() -> None:
    good = pack(DGX, "alltoall")
    first, *rest = good.trees
    others = [i for i, tree in enumerate(rest) if tree.root != first.root]
    moved = replace(rest[others[0]], weight=rest[others[0]].weight + first.weight / 2)
    wrong = {
        "paths from rank 0 to rank . carry": (
            replace(first, weight=first.weight / 2), *rest[: others[0]], moved, *rest[others[0] + 1 :]),
        "paths from rank 0": tuple(tree for tree in good.trees if tree.root),
        "got no edge": (*good.trees, replace(first, edges=())),
        "carries": tuple(replace(tree, weight=tree.weight * 2) for tree in good.trees),
    }  # fmt: skip
    for words, trees in wrong.items():
        rate = good.rate * 2 if words == "carries" else good.rate
        with pytest.raises(PlanError, match=words):
            verify(replace(good, trees=trees, rate=rate, bound=max(rate, good.bound)), DGX)


def test_wrong_certificates_are_refused() -> None:
    good = pack(DGX, "alltoall")
    proof = good.certificate
    assert proof.kind == "prices"
    with pytest.raises(PlanError, match="certificate states"):
        verify(replace(good, certificate=replace(proof, parts=((*proof.parts[0][:2], 99), *proof.parts[1:]))), DGX)
    with pytest.raises(PlanError, match="cost nothing"):
        verify(replace(good, certificate=replace(proof, parts=proof.parts[:1])), DGX)
    cut = pack(modify(DGX, gpus="1,4,5,6"), "alltoall")
    assert (cut.certificate.kind, cut.certificate.divisor) == ("ratio-cut", Fraction(1 * 3, 4))
    fewer = replace(cut.certificate, divisor=Fraction(1, 4))
    with pytest.raises(PlanError, match="certificate states"):
        verify(replace(cut, certificate=fewer), modify(DGX, gpus="1,4,5,6"))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(machines(most=5, symmetric=False, switches=2), st.integers(0, 99))
def test_every_method_gives_a_proved_packing(t: Topology, pick: int) -> None:
    for method in methods(t, "alltoall"):
        found = pack(t, "alltoall", root=pick % t.n, method=method)
        assert found.root == -1
        assert verify(found, t) is found
