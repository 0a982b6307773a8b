"""Explanations: what they say must be what the plan, the price and the table say."""

from fractions import Fraction

import msgspec
import pytest

from blinkmpi.errors import PlanError
from blinkmpi.planning.explain import FORMAT_VERSION, WIDTH, Explanation, explanation, plan_line, share_text, shares
from blinkmpi.planning.plan import Plan, Rule
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.program.cost_model import price
from blinkmpi.topology.importers import modify
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees import pack
from blinkmpi.trees.tree import CARRIED, COLLECTIVES
from blinkmpi.util.codec import loads
from blinkmpi.util.text import time_text
from tests.unit.trees.packings import even_call

MIB = 1 << 20


@pytest.mark.slow
def test_the_numbers_are_those_of_the_packing_and_the_price() -> None:
    topology = modify(machine("dgx-1v"), gpus="1,4,5,6")
    plan = make_plan(topology)
    asked = even_call("allreduce", 4, 16 * MIB)
    found = explanation(plan, topology, asked)
    rule = choose(plan, asked)
    packing = plan.packing("allreduce", -1, rule.scheme)
    cost = price(program_for(plan, asked, rule), packing, topology)
    assert found.chosen is not None
    assert found.scheme == found.chosen.scheme == rule.scheme
    assert (found.chosen.rate_gbps, found.chosen.bound_gbps, found.chosen.optimal) == (60.5, 60.5, True)
    assert (found.chosen.seconds, found.chosen.algbw) == (cost.seconds, cost.algbw)
    assert found.chosen.busbw == pytest.approx(1.5 * cost.algbw)
    assert found.chosen.certificate == packing.certificate.text
    text = found.text()
    for part in (packing.certificate.text[:20], "equal to the bound", "trees", "60.5 GB/s", rule.reason, "64 MiB"):
        assert part in text


def told_of_the_bound(topology: Topology) -> str:
    """The line of the rate, whatever its breaks."""
    found = explanation(make_plan(topology), topology, even_call("allreduce", topology.n, 64 * MIB))
    return " ".join(found.text().split()).partition(" rate ")[2].partition(" bound ")[2].partition(" bound ")[0]


def test_a_bound_is_said_to_be_one_of_trees_at_known_rates() -> None:
    """On CPU ranks the rate is measured, and a call may beat it; sums in the switch are beyond trees of copies."""
    cpus = machine("cpu:2")
    assert told_of_the_bound(cpus).startswith("of trees at the copy rate assumed, 8 GB/s")
    links = tuple(msgspec.structs.replace(link, lane_mbps=3100, origin="measured") for link in cpus.links)
    measured = msgspec.structs.replace(cpus, links=links)
    assert told_of_the_bound(measured).startswith("of trees at the copy rate measured at opening, 3.1 GB/s")
    assert told_of_the_bound(machine("dgx-a100")) == "of trees at the rates listed for these links"
    assert told_of_the_bound(machine("hgx-h100")) == "of trees of copies at the rates listed for these links"
    assert told_of_the_bound(modify(machine("dgx-1v"), gpus="0-3")) == "of trees at the rates listed for these links"


def test_where_switches_could_make_the_sums_the_bound_with_them_stands_beside() -> None:
    found = explanation(make_plan(t := machine("hgx-h100")), t, even_call("allreduce", 8, 64 * MIB))
    assert found.chosen is not None
    assert found.chosen.bound_gbps == pytest.approx(1800 / 7)
    assert found.in_switches.startswith("at most 450 GB/s with sums in the switches (SHARP), not executed here: GPU")
    assert "in switches at most 450 GB/s" in found.text()
    for name, collective in (("hgx-h100", "broadcast"), ("dgx-a100", "allreduce"), ("dgx-1v", "allreduce")):
        t = machine(name)
        other = explanation(make_plan(t), t, even_call(collective, t.n, MIB))
        assert other.in_switches == ""
        assert "in switches" not in other.text()


@pytest.mark.parametrize(("share", "text"), [
    ("1", "100%"), ("1/2", "50%"), ("1/3", "33.3%"), ("693423208338235022/3900534941026005171", "17.8%"),
    ("1/800", "0.125%"), ("1/10000000", "<0.01%"), ("9999/10000", "99.99%"), ("0", "0%"),
])  # fmt: skip
def test_a_share_is_a_percentage_for_people(share: str, text: str) -> None:
    assert share_text(Fraction(share)) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dgx-1v", "dgx-a100", "cpu:4", "pcie-8", "cpu:1"])
def test_every_collective_is_explained_within_the_width_and_survives_json(name: str) -> None:
    topology = machine(name)
    plan = make_plan(topology)
    for collective in (*COLLECTIVES, *CARRIED):
        for count in (0, 1000, 4 * MIB):
            found = explanation(plan, topology, even_call(collective, topology.n, count), live=["C executor"])
            assert all(len(line) <= WIDTH for line in found.text().splitlines()), found.text()
            assert "C executor" in found.text()
            assert loads(found.to_json(), Explanation, kind="explanation", version=FORMAT_VERSION) == found


def test_rejected_schemes_come_with_their_prediction() -> None:
    topology = machine("cpu:4")
    plan = make_plan(topology)
    found = explanation(plan, topology, even_call("allreduce", 4, MIB))
    assert found.chosen is not None
    assert {found.scheme, *(o.scheme for o in found.others)} == set(plan.schemes("allreduce"))
    assert [o.seconds for o in found.others] == sorted(o.seconds for o in found.others)
    text = found.text()
    for other in found.others:
        ratio = other.seconds / found.chosen.seconds
        word = "slower" if ratio >= 1.005 else "faster" if ratio <= 0.995 else "the same"
        line = next(line for line in text.splitlines() if f"{other.scheme}: " in line and "predicted" in line)
        assert word in line
        assert time_text(other.seconds) in line


def with_mpi(plan: Plan) -> Plan:
    rules = (Rule("allreduce", 0, "mpi", reason="faster below 32 KiB"), Rule("allreduce", 32768, "direct", 65536, 4))
    return msgspec.structs.replace(plan, rules=(*(r for r in plan.rules if r.collective != "allreduce"), *rules))


def test_a_call_that_goes_to_mpi_says_so_and_why() -> None:
    topology = machine("cpu:4")
    plan = with_mpi(make_plan(topology))
    small, large = (explanation(plan, topology, even_call("allreduce", 4, count)) for count in (100, MIB))
    assert (small.scheme, small.chosen) == ("mpi", None)
    assert "MPI's own collective" in small.text()
    assert "faster below 32 KiB" in small.text()
    assert "direct: " in small.text()
    assert large.scheme == "direct"
    assert "MPI's own" not in large.text()


def test_a_table_that_names_a_missing_scheme_is_an_error() -> None:
    topology = machine("cpu:4")
    plan = make_plan(topology)
    broken = msgspec.structs.replace(plan, rules=(Rule("allreduce", 0, "ring", 65536, 4),))
    with pytest.raises(PlanError, match=r"chooses 'ring' for allreduce but has no packing"):
        explanation(broken, topology, even_call("allreduce", 4, 100))


def test_on_gpus_the_protocol_is_named_and_slots_only_where_there_are_some() -> None:
    topology = modify(machine("hgx-h200"), gpus="0-3")
    plan = make_plan(topology, gpus="onehop", collectives=["allreduce", "reduce_scatter"])
    for nbytes, registered, protocol, through_slots in (
        (1 << 10, True, "ll16_one_shot", False), (1 << 20, False, "ll128_two_shot", False),
        (16 << 20, True, "direct", False), (16 << 20, False, "", True), (256 << 20, True, "rs_ag", True),
    ):  # fmt: skip
        call = even_call("allreduce", 4, nbytes // 4)
        text = explanation(plan, topology, call, rule=choose(plan, call, registered=registered)).text()
        assert ("protocol    " in text) == bool(protocol)
        assert f"protocol    {protocol}" in text or not protocol
        assert ("slots a channel" in text) == through_slots
        assert all(len(line) <= WIDTH for line in text.splitlines())


def test_one_line_about_a_plan() -> None:
    line = plan_line(pack(machine("dgx-1v"), "broadcast", root=0))
    assert line.startswith("broadcast: 4 trees, depth ")
    assert "over nvlink, rate 150 GB/s = bound (" in line
    gap = plan_line(pack(machine("cpu:4"), "allreduce", method="direct"))
    assert "77.8% of the bound 4.571" in gap
    assert "one rank" in plan_line(pack(machine("cpu:1"), "allreduce"))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_shares_add_up_to_one_for_every_block(collective: str) -> None:
    topology = machine("dgx-1v")
    found = pack(topology, collective, root=0)
    blocks = {"allgather": 8, "reduce_scatter": 8, "gather": 7, "scatter": 7, "alltoall": 56}.get(collective, 1)
    parts = shares(found)
    assert sum(parts, Fraction(0)) == blocks
    assert len(parts) == len(found.trees)
    if blocks == 1 and collective != "barrier":
        assert parts == tuple(tree.weight / found.rate for tree in found.trees)
