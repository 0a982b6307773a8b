"""Planning that has no time left: valid packings with their gap, by little work, and nothing of it is kept."""

import time
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from msgspec.structs import replace

from blinkmpi.errors import SettingsError
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.topology import machine, modify
from blinkmpi.topology.model import Device, Link, Switch, Topology
from blinkmpi.trees import pack, verify
from blinkmpi.trees.deadline import NEVER, SECONDS
from blinkmpi.trees.graph.fabric import choose_links
from blinkmpi.trees.graph.loads import link_loads, scaled
from blinkmpi.trees.on_links import METHODS
from blinkmpi.trees.patterns import chains
from blinkmpi.trees.problem import Problem, Solution
from blinkmpi.trees.tree import COLLECTIVES
from blinkmpi.util.settings import read
from tests.effort import Effort
from tests.harness import NEVER_S
from tests.unit.trees.packings import even_call
from tests.unit.trees.rails import rails

NO_TIME = 1e-9


def torus(side: int, *, dead: bool) -> Topology:
    at = list(product(range(side), repeat=2))
    pairs = {tuple(sorted((at.index((x, y)), at.index(to)))) for x, y in at
             for to in (((x + 1) % side, y), (x, (y + 1) % side))}  # fmt: skip
    ends = sorted(pairs)[int(dead) :]
    links = tuple(Link(a, b, "nvlink", 1, 25_000) for u, v in ends for a, b in ((u, v), (v, u)))
    return Topology(f"torus {side}x{side}", tuple(Device("gpu", 0, r) for r in range(side * side)), (), links)


def two_switches(n: int) -> Topology:
    """Ranks on two unequal switches that are joined: no method but ``columns`` splits them."""
    links = [Link(r, n + (r % 3 > 0), "nvlink", 1 + r % 2, 10_000) for r in range(n)]
    links += [Link(n, n + 1, "nvlink", 5, 10_000)]
    both = tuple(k for link in links for k in (link, replace(link, src=link.dst, dst=link.src)))
    return Topology("two switches", tuple(Device("gpu", 0, r) for r in range(n)), (Switch("nvswitch", 0),) * 2, both)


MACHINES = {
    "torus 5x5 less a link": torus(5, dead=True),
    "two switches": two_switches(18),
    "rails, one slow card": rails(4, 5, slow=3),
    "two boxes": machine("mi250:2"),
    "part of a box": modify(machine("dgx-1v"), gpus="0,1,4,5,6"),
}


def test_the_setting() -> None:
    assert (read({"X": "y"}).plan_s, read({"BLINKMPI_PLAN_SECONDS": "0.25"}).plan_s) == (SECONDS, 0.25)
    for text in ("0", "-1", "soon"):
        with pytest.raises(SettingsError, match="BLINKMPI_PLAN_SECONDS"):
            read({"BLINKMPI_PLAN_SECONDS": text})


def test_within_nests() -> None:
    assert not NEVER.late()
    short, long = NEVER.within(NO_TIME), NEVER.within(NEVER_S)
    assert short.late()
    assert short.within(NEVER_S).late(), "the outer one is over"
    assert not long.late()
    assert long.within(NO_TIME).late()
    assert not long.late()
    assert not NEVER.late()


class Clocks:
    """CPU time and time, as a loaded machine gives them: a thread gets a tenth."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu, self.clock = 7.0, 70.0
        monkeypatch.setattr("blinkmpi.trees.deadline.time.thread_time", lambda: self.cpu)
        monkeypatch.setattr("blinkmpi.trees.deadline.time.monotonic", lambda: self.clock)

    def work(self, seconds: float) -> None:
        self.cpu += seconds
        self.clock += 10 * seconds


def test_what_counts_is_the_work_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine 11 of 720 plans fell short of the bound, by the clock."""
    clocks = Clocks(monkeypatch)
    deadline = NEVER.within(2)
    clocks.work(1)
    assert not deadline.late(), "10 s have passed"
    assert deadline.left() == 1
    assert deadline.left_on_the_clock() == 10, "which another second of work takes"
    clocks.work(1)
    assert deadline.late()


def test_a_thread_that_waits_is_not_late() -> None:
    deadline = NEVER.within(0.5)
    time.sleep(0.6)
    assert not deadline.late()


@pytest.mark.slow
def test_a_search_ends_though_the_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No method looks at another clock."""
    monkeypatch.setattr("blinkmpi.trees.deadline.time.monotonic", lambda: 0.0)
    found = pack(two_switches(18), "allreduce", seconds=NO_TIME)
    assert "BLINKMPI_PLAN_SECONDS" in found.reason


def test_who_waits_for_time_is_said_to_a_method_alone() -> None:
    clocks = NEVER.within(NEVER_S)
    problem = Problem(choose_links(torus(5, dead=True), "allgather", 0), "allgather", 0, deadline=clocks)
    bound = problem.oriented
    waited = problem.while_others_wait(True)
    assert waited.deadline.others_wait
    assert not problem.deadline.others_wait
    assert waited.oriented is bound, "what is worked out is kept"
    assert waited.while_others_wait(True) is waited
    assert waited.on(problem.fabric).deadline == waited.deadline


def test_a_plan_may_take_longer_than_one_search_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLINKMPI_PLAN_SECONDS above the default is what its searches have."""
    monkeypatch.setattr("blinkmpi.trees.deadline.SECONDS", NO_TIME)
    topology = torus(5, dead=True)
    assert "PLAN_SECONDS" in pack(topology, "allgather").reason
    plan = make_plan(topology, collectives=("allgather",), seconds=NEVER_S)
    assert max(p.rate / p.bound for p in plan.packings) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_without_time_packings_are_valid_and_state_their_gap(name: str) -> None:
    topology = MACHINES[name]
    for collective in COLLECTIVES:
        with Effort() as effort:
            found = pack(topology, collective, root=1, seconds=NO_TIME)
        assert verify(found, topology) == found
        assert 0 < found.rate <= found.bound
        if found.rate < found.bound:
            assert "% of the bound, when the time for planning (BLINKMPI_PLAN_SECONDS) was over" in found.reason
        assert effort.of("linprog") <= 1, collective
        assert effort.ours < 150_000, (collective, effort.ours)
        better = pack(topology, collective, root=1, seconds=NEVER_S)
        assert better.rate >= found.rate
        assert better.optimal, "what was found without time is not kept"
        assert "BLINKMPI_PLAN_SECONDS" not in better.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torus 5x5 less a link", "rails, one slow card"])
def test_without_time_a_whole_plan_serves_every_call(name: str) -> None:
    topology = MACHINES[name]
    plan = make_plan(topology, seconds=NO_TIME)
    for collective in ("broadcast", "allreduce", "gather", "alltoall"):
        op = "sum" if collective == "allreduce" else ""
        call = even_call(collective, topology.n, 4096, op=op, root=topology.n - 1)
        program_for(plan, call, choose(plan, call))  # which is checked


@pytest.mark.parametrize("side", [5, 6])
def test_an_allreduce_on_many_ranks_is_grown_like_other_trees(side: int) -> None:
    found = pack(torus(side, dead=True), "allreduce")
    assert found.optimal
    assert found.scheme == "trees"
    assert len(found.trees) < side * side


def test_allreduces_on_random_graphs_meet_the_bound() -> None:
    for step, n in product((2, 5), (17, 22)):
        pairs = [(u, v) for u, v in combinations(range(n), 2) if (u * u + v * step) % 7 < 2 or v == u + 1]
        links = tuple(Link(a, b, "nvlink", 1 + (u + v) % 3, 25_000) for u, v in pairs for a, b in ((u, v), (v, u)))
        topology = Topology("drawn", tuple(Device("gpu", 0, r) for r in range(n)), (), links)
        found = pack(topology, "allreduce")
        assert found.optimal
        assert found.scheme == "trees"


@pytest.mark.slow
def test_prices_of_many_roots_stay_finite() -> None:
    """The trees of 64 roots raised the price of a narrow link beyond what a double holds."""
    with np.errstate(over="raise", invalid="raise"):
        found = pack(machine("pcie-8:8"), "allgather", seconds=0.5)
    assert 0 < found.rate <= found.bound


def test_one_chain_is_tried_when_flows_have_used_up_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """70 ranks around two switches that share one of them: a chain meets the bound, and comes last."""
    switch_of = [(rank, 70 + (rank > 35)) for rank in range(70)] + [(35, 71)]
    links = [k for rank, s in switch_of for k in (Link(rank, s, "nvlink", 1, 100), Link(s, rank, "nvlink", 1, 100))]
    devices = tuple(Device("gpu", 0, i) for i in range(70))
    t = Topology("two switches", devices, (Switch("nvswitch", 0),) * 2, tuple(links)).check()

    def slow(problem: Problem) -> Solution:
        while not problem.deadline.late():
            pass
        tree = replace(chains.shallow(problem.oriented, 0), weight=Fraction(1))
        return Solution(*scaled([tree], link_loads("broadcast", [tree]), problem.fabric.arcs))

    monkeypatch.setitem(METHODS, "flows", METHODS["flows"]._replace(plan=slow))
    found = pack(t, "broadcast", seconds=0.5)
    assert found.optimal
    assert found.scheme == "chain"
