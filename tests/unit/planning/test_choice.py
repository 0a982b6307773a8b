"""Every collective goes from every root by the best packing of the plan; methods that find nothing are named."""

from pathlib import Path

import pytest

from blinkmpi.planning.explain import Explanation, explanation
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.selection import choose, make_plan, program_for
from blinkmpi.program.call import Call
from blinkmpi.topology import Topology
from blinkmpi.trees.tree import CARRIED, COLLECTIVES, ROOTED
from tests.unit.planning.rails import rails
from tests.unit.trees.packings import even_call

MACHINES = Path(__file__).parents[2] / "data" / "machines"


def calls(n: int) -> list[Call]:
    """A call of every collective from every root."""
    names = (*COLLECTIVES, *CARRIED)
    return [
        even_call(name, n, 1000, root=max(root, 0))
        for name in names
        for root in (range(n) if name in ROOTED else (-1,))
    ]


def the_best_is_taken(plan: Plan, topology: Topology) -> None:
    for call in calls(topology.n):
        rule = choose(plan, call)
        program_for(plan, call, rule)  # which is checked
        if call.collective in CARRIED:
            continue
        taken = plan.packing(call.collective, call.root, rule.scheme)
        there = [p.rate for p in plan.packings if p.collective == call.collective and p.root in (-1, call.root)]
        assert taken.rate == max(there), (call, rule)
        assert explanation(plan, topology, call).scheme == rule.scheme


@pytest.mark.parametrize("name", ["two-unequal-switches", "three-unlike-boxes"])
def test_roots_take_different_schemes(name: str) -> None:
    """One scheme for all roots runs at down to 44 % of what the plan has for some of them."""
    topology = Topology.from_json((MACHINES / f"{name}.json").read_text())
    plan = make_plan(topology)
    own = [rule for rule in plan.rules if rule.root >= 0]
    assert own
    assert {rule.root for rule in own} < set(range(topology.n))
    the_best_is_taken(Plan.from_json(plan.to_json()), topology)


@pytest.mark.parametrize(("boxes", "each", "slow"), [(4, 2, -1), (2, 2, 0), (3, 2, 0)])
def test_a_method_that_finds_nothing_is_passed_over(boxes: int, each: int, slow: int) -> None:
    topology = rails(boxes, each, slow=slow)
    plan = make_plan(topology)
    the_best_is_taken(plan, topology)
    assert {one.method for one in plan.passed_over} == {"cluster"}
    assert all("planes" in one.why for one in plan.passed_over)
    call = even_call("broadcast", topology.n, 1000, root=topology.n - 1)
    said = explanation(plan, topology, call)
    assert [one.root for one in said.passed_over] == [topology.n - 1]
    assert "no packing  cluster: what enters or leaves a box" in said.text()
    assert Explanation.from_json(said.to_json()) == said
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_that_passes_nothing_over_has_no_word_of_it() -> None:
    text = make_plan(rails(2, 2)).to_json()
    assert "passed_over" not in text
    assert '"root": -1' in text, "of packings"
