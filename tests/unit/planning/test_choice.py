"""Every collective goes from every root by the fastest packing of the plan; methods that find nothing are named."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from blinkmpi.planning.defaults import MOST_LINK_SLOTS
from blinkmpi.planning.explain import Explanation, explanation
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.planning.slots import LINK_SLOTS
from blinkmpi.program.call import Call
from blinkmpi.program.cost_model import price
from blinkmpi.program.lower import lower
from blinkmpi.topology import Topology, machine, modify
from blinkmpi.trees import pack
from blinkmpi.trees.on_links import METHODS
from blinkmpi.trees.tree import CARRIED, COLLECTIVES, ROOTED
from tests.unit.trees.packings import even_call
from tests.unit.trees.rails import rails

MACHINES = Path(__file__).parents[2] / "data" / "machines"


def drawn(name: str) -> Topology:
    """One of the machines that were drawn at random."""
    return Topology.from_json((MACHINES / f"{name}.json").read_text())


def calls(n: int) -> list[Call]:
    """A call of every collective from every root."""
    names = (*COLLECTIVES, *CARRIED)
    return [
        even_call(name, n, count, root=max(root, 0))
        for name in names
        for count in (1000, 1 << 20)
        for root in (range(n) if name in ROOTED else (-1,))
    ]


def the_best_is_taken(plan: Plan, topology: Topology) -> None:
    for call in calls(topology.n):
        rule = choose(plan, call)
        program_for(plan, call, rule)  # which is checked
        said = explanation(plan, topology, call)
        assert said.scheme == rule.scheme
        if call.collective in CARRIED:
            continue
        assert said.chosen is not None
        for other in said.others:
            assert said.chosen.seconds <= 1.15 * other.seconds, (call, rule, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two-unequal-switches", "three-unlike-boxes"])
def test_roots_take_different_schemes(name: str) -> None:
    """One scheme for all roots runs at down to 44 % of what the plan has for some of them."""
    topology = drawn(name)
    plan = make_plan(topology)
    own = {(rule.collective, rule.root) for rule in plan.rules if rule.root >= 0}
    assert own
    assert len(own) < 4 * topology.n, "most have the same"
    the_best_is_taken(Plan.from_json(plan.to_json()), topology)


@pytest.mark.parametrize(("boxes", "each"), [(2, 2), (3, 2)])
def test_a_method_that_finds_nothing_is_passed_over(boxes: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "the boxes lie in different planes"
    monkeypatch.setitem(METHODS, "cluster", METHODS["cluster"]._replace(plan=lambda _: why))
    topology = rails(boxes, each, slow=0)
    plan = make_plan(topology)
    the_best_is_taken(plan, topology)
    assert {one.method for one in plan.passed_over} == {"cluster"}
    assert all("planes" in one.why for one in plan.passed_over)
    said = explanation(plan, topology, even_call("allgather", topology.n, 1000))
    assert [(one.collective, one.root) for one in said.passed_over] == [("allgather", -1)]
    assert "no packing  cluster: the boxes lie in different planes" in said.text()
    assert Explanation.from_json(said.to_json()) == said
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_that_passes_nothing_over_has_no_word_of_it() -> None:
    text = make_plan(rails(2, 2)).to_json()
    assert "passed_over" not in text
    assert '"root": -1' in text, "of packings"


# ---------------------------------------------------------------- several kinds of links


BRIDGES = modify(drawn("pcie-with-nvlink-bridges"), gpus="0-3")
ISLANDS = drawn("nvlink-islands-on-pcie")


@pytest.mark.parametrize(
    ("topology", "collective", "mbps", "on_pcie"),
    [
        (BRIDGES, "allreduce", 63_000, 21_000),
        (BRIDGES, "allgather", 126_000, 42_000),
        (modify(machine("dgx-1v"), gpus="0,1,2,7"), "allreduce", 15_750, 10_500),
        (ISLANDS, "allreduce", 15_750, 8_750),
        (ISLANDS, "scatter", 157_500, 17_500),
    ],
)
def test_nvlink_that_joins_some_ranks_is_used_beside_what_joins_all(
    topology: Topology, collective: str, mbps: int, on_pcie: int
) -> None:
    slow = replace(topology, links=tuple(k for k in topology.links if k.kind != "nvlink"))
    assert pack(slow, collective).rate == on_pcie
    packing = pack(topology, collective)
    assert (packing.rate, packing.bound) == (mbps, mbps)
    assert {"nvlink", "pcie"} <= set(packing.links.split("+"))


def test_packets_take_one_hop_over_pcie_and_long_vectors_all_links() -> None:
    plan = make_plan(BRIDGES, gpus="onehop")
    for collective in ("allreduce", "broadcast", "scatter"):
        rows = [rule for rule in plan.rules if rule.collective == collective]
        packets = [row for row in rows if row.protocol != "slots"]
        assert packets == rows[: len(packets)]
        assert {row.scheme for row in packets} == {"onehop"}
        assert plan.packing(collective, 0, "onehop").links == "pcie"
        assert not any(row.protocol.startswith("ll128") for row in rows), "a line stays whole on NVLink alone"
        long = plan.packing(collective, 0, max(rows, key=lambda row: row.min_bytes).scheme)
        assert long.optimal
        assert "nvlink" in long.links


# ---------------------------------------------------------------- slots


@pytest.mark.parametrize(("topology", "part"), [(rails(3, 2), 0.97), (machine("dgx-a100:4"), 0.9)])
def test_slots_hold_what_a_link_carries_until_they_are_free(topology: Topology, part: float) -> None:
    """Bandwidth times delay: with four slots of 128 KiB a broadcast over a network reaches two thirds of its rate."""
    plan = make_plan(topology, collectives=("broadcast", "allgather"), roots=(0,))
    call = even_call("broadcast", topology.n, 1 << 26)
    rule = choose(plan, call)
    assert rule.chunk_bytes * rule.depth > LINK_SLOTS[0] * LINK_SLOTS[1]
    assert rule.depth <= MOST_LINK_SLOTS
    packing = plan.packing("broadcast", 0, rule.scheme)

    def reached(chunk: int, depth: int) -> float:
        program = lower(packing, call, chunk_bytes=chunk, depth=depth)
        return price(program, packing, topology).algbw / float(packing.rate / 1000)

    assert reached(rule.chunk_bytes, rule.depth) > part
    assert reached(*LINK_SLOTS) < 0.7
    blocks = choose(plan, even_call("allgather", topology.n, 1 << 20))
    assert blocks.depth == LINK_SLOTS[1], "many trees share the links, and each needs less"
