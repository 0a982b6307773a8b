"""Programs whose sums are made in switches: proved, right on every rank, priced by the links, and executed nowhere."""

import numpy as np
import pytest

from blinkmpi.errors import PlanError
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.planner import make_plan
from blinkmpi.program import interpreter
from blinkmpi.program.call import Call
from blinkmpi.program.check import check
from blinkmpi.program.cost_model import loads, price
from blinkmpi.program.ir import Program
from blinkmpi.program.lower import lower
from blinkmpi.topology.importers import modify
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees.bounds.verify import verify
from blinkmpi.trees.in_switch.packing import pack_in_switch

MACHINES = {
    "one box": machine("hgx-h100"),
    "three of its GPUs": machine("hgx-h100").subset([5, 0, 3]),
    "two boxes": machine("hgx-h100:2"),
    "two boxes and their network": modify(machine("hgx-h100:2"), sharp="nvswitch,net"),
    "four boxes on a network that adds up": modify(machine("dgx-1v:4"), sharp="net"),
}


def program_of(t: Topology, count: int, dtype: str = "float32", op: str = "sum") -> Program:
    return lower(pack_in_switch(t), Call("allreduce", t.n, (count,), dtype, op), chunk_bytes=1 << 18, depth=4)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("count", [1, 7, 5000])
def test_programs_are_proved_with_the_machines_switches_and_refused_without(name: str, count: int) -> None:
    t = MACHINES[name]
    program = program_of(t, count)
    assert check(program, switches=len(t.switches)) == program
    with pytest.raises(PlanError, match=f"stage .* of rank .*; expected one of {t.n} ranks"):
        check(program)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("dtype", "op"), [("int32", "sum"), ("float32", "max"), ("int64", "prod"), ("float16", "sum")])
def test_every_rank_gets_the_fold_of_all(name: str, dtype: str, op: str) -> None:
    """Small whole numbers, which every order of folding adds up to the same bits."""
    t = MACHINES[name]
    rng = np.random.default_rng(3)
    data = rng.integers(1, 3, (t.n, 1001)).astype(dtype)
    wanted = {"sum": np.add, "max": np.maximum, "prod": np.multiply}[op].reduce(data.astype(np.int64)).astype(dtype)
    for got in interpreter.run(program_of(t, 1001, dtype, op), list(data)):
        assert got is not None
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", MACHINES)
def test_a_switch_adds_up_what_crosses_its_links_once(name: str) -> None:
    """Each link works for its packing's loads, and the busiest one all the time at the packing's rate."""
    t = MACHINES[name]
    packing, program = pack_in_switch(t), program_of(t, 1 << 22)
    busiest = max(loads(program, packing, t).values())
    assert busiest == pytest.approx(program.call.nbytes / float(packing.rate * 10**6), rel=1e-3)


def test_a_long_vector_takes_what_the_rate_says_and_seven_fourths_of_that_by_copies() -> None:
    t = machine("hgx-h100")
    program = program_of(t, 1 << 28)
    found = price(program, pack_in_switch(t), t)
    assert 0.99 * 450 < found.algbw <= 450
    plan = make_plan(t)
    packing = plan.packing("allreduce", -1, plan.schemes("allreduce")[0])
    copies = price(lower(packing, program.call, chunk_bytes=1 << 18, depth=4), packing, t)
    assert copies.seconds / found.seconds == pytest.approx(7 / 4, rel=0.02)


def test_a_short_vector_waits_for_no_more_messages_than_one_to_the_root_and_one_from_it() -> None:
    t = machine("hgx-h100")
    assert price(program_of(t, 1), pack_in_switch(t), t).seconds == pytest.approx(2 * 2.6e-6, rel=0.01)


def test_plans_of_jobs_never_hold_one() -> None:
    t = machine("hgx-h100")
    plan, packing = make_plan(t), pack_in_switch(t)
    assert all(p.scheme != packing.scheme for p in plan.packings)
    other = Plan(**{**{f: getattr(plan, f) for f in plan.__struct_fields__}, "packings": (packing,)})
    with pytest.raises(PlanError, match="is no edge to a rank"):
        Plan.from_json(other.to_json())
    with pytest.raises(PlanError):
        verify(packing, t)
