"""A plan that is made call by call is the plan of those calls, on every rank."""

import itertools
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.errors import RemoteError, TopologyError
from blinkmpi.planning.memory_rows import by_slots
from blinkmpi.planning.on_demand import PlanOnDemand
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.topology import Topology, machine
from blinkmpi.trees import verify
from blinkmpi.trees.tree import CARRIED, COLLECTIVES, ROOTED, Collective
from tests.unit.topology.test_gather import on_ranks
from tests.unit.trees.packings import even_call

MACHINES = Path(__file__).parents[2] / "data" / "machines"
SIZES = (1, 1 << 10, 1 << 16, 1 << 22)


class Alone:
    """A communicator of one rank."""

    rank, size = 0, 1

    def allgather_bytes(self, sendobj: Any, /) -> list[Any]:
        return [sendobj]

    def bcast_bytes(self, obj: Any, root: int, /) -> Any:
        return obj

    def Barrier(self) -> None:
        """Nobody is waited for."""


def on_demand(topology: Topology, comm: Any = None) -> PlanOnDemand:
    def part(collective: Collective, root: int) -> Plan:
        return make_plan(topology, collectives=(collective,), roots=(root,))

    return PlanOnDemand(comm or Alone(), topology, part)


def parts(n: int) -> list[tuple[Collective, int]]:
    return [(c, root) for c in (*COLLECTIVES, *CARRIED) for root in (range(n) if c in ROOTED else (-1,))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two-unequal-switches", "cpu:3", "dgx-a100:2"])
def test_parts_in_any_order_are_a_plan(name: str) -> None:
    """Every call takes the row and the packing that it has where it is planned for alone."""
    found = MACHINES / f"{name}.json"
    topology = Topology.from_json(found.read_text()) if found.exists() else machine(name)
    wanted = parts(topology.n)
    random.Random(1).shuffle(wanted)
    plans = on_demand(topology)
    for part in wanted:
        assert plans.lacks(*part)
        plans.add(*part)
        assert not plans.lacks(*part)
    plan = Plan.from_json(plans.plan.to_json()).check(topology)
    for (collective, root), count in itertools.product(wanted, SIZES):
        call = even_call(collective, topology.n, count, root=max(root, 0))
        alone = make_plan(topology, collectives=(collective,), roots=(max(root, 0),))
        rule, own = choose(plan, call), choose(alone, call)
        assert (rule.scheme, rule.protocol, rule.chunk_bytes, rule.depth) == (
            own.scheme, own.protocol, own.chunk_bytes, own.depth,
        )  # fmt: skip
        program_for(plan, call, rule)  # which is checked


def test_rows_of_one_root_stay_its_own() -> None:
    topology = Topology.from_json((MACHINES / "two-unequal-switches.json").read_text())
    for first in range(topology.n):
        plans = on_demand(topology).with_parts(
            ("gather", root % topology.n) for root in range(first, first + topology.n)
        )
        own = {rule.root for rule in plans.plan.rules}
        assert -1 in own, "the first root's rows are those of most"
        assert len(own) > 1, "some root has others"


def test_a_root_like_one_that_is_there_costs_a_turn_alone() -> None:
    topology = machine("dgx-a100:2")
    plans = on_demand(topology).with_parts([("broadcast", 0)])
    before = len(plans.plan.to_json())
    plans.add("broadcast", 5)
    assert len(plans.plan.packings) == len({(p.scheme, p.root) for p in plans.plan.packings})
    assert {p.root for p in plans.plan.packings} == {0}
    assert len(plans.plan.to_json()) - before < 400
    for scheme in plans.plan.schemes("broadcast", 5):
        packing = plans.plan.packing("broadcast", 5, scheme)
        assert packing.root == 5
        verify(packing, topology)


def test_a_question_changes_nothing_and_hears_what_a_call_would_take() -> None:
    topology = machine("cpu:4")
    plans = on_demand(topology)
    plans.change(partial(by_slots, in_c=False))
    asked = plans.about("allreduce", -1)
    assert plans.lacks("allreduce", -1)
    assert not plans.plan.rules
    assert plans.about("allreduce", -1) is asked, "planned once"
    plans.add("allreduce", 0)
    assert plans.plan.rules == asked.rules
    assert {rule.protocol for rule in asked.rules} == {"slots"}, "the change is made to what comes later, too"
    assert plans.about("allreduce", 3) is plans.plan


def test_a_plan_that_was_given_lacks_nothing() -> None:
    topology = machine("cpu:4")
    plan = make_plan(topology, collectives=("broadcast",), roots=(0,))
    plans = PlanOnDemand(Alone(), topology, plan)
    assert not plans.lacks("allreduce", -1)
    assert plans.with_parts([("allreduce", 0)]).plan is plan


def test_ranks_take_what_rank_0_makes_and_fail_with_it() -> None:
    topology = machine("cpu:3")

    def work(comm: Any, _: Any) -> Plan:
        def part(collective: Collective, root: int) -> Plan:
            assert comm.rank == 0, "rank 0 alone plans"
            if collective == "reduce":
                raise TopologyError("no links")
            return make_plan(topology, collectives=(collective,), roots=(root,))

        plans = PlanOnDemand(comm, topology, part)
        with pytest.raises(TopologyError if comm.rank == 0 else RemoteError, match="no links"):
            plans.add("reduce", 1)
        assert plans.lacks("reduce", 1)
        plans.add("allgather", 0)
        return plans.plan

    first, *others = on_ranks([0, 0, 0], work)
    assert isinstance(first, Plan), first
    assert others == [first, first]
