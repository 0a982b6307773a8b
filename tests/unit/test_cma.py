"""Which channels are read from their writers' buffers, what the rows of runner.c are then, and the table without it."""

from __future__ import annotations

import pytest

from blinkmpi.plan import Plan
from blinkmpi.program import Call, Program
from blinkmpi.select import MPI_BELOW_BYTES_BY_SLOTS, by_slots, make_plan, program_for
from blinkmpi.topology import machine
from blinkmpi.transport.cma import lent_channels

MOVING = ("broadcast", "allgather", "gather", "scatter")


def plan_of(name: str, *, mpi: bool = False) -> Plan:
    return make_plan(machine(name), mpi=mpi)


def program_of(plan: Plan, collective: str, count: int = 1 << 16) -> Program:
    reduces = collective in ("allreduce", "reduce", "reduce_scatter")
    counts = (count,) * (plan.n if collective == "reduce_scatter" else 1)
    root = 1 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    call = Call(collective, plan.n, counts, "float32", "sum" if reduces else "", root)  # type: ignore[arg-type]
    return program_for(plan, call, plan.rule(collective, 1 << 40))


@pytest.mark.parametrize("name", ["cpu:4", "dgx-1v", "dgx-2"])
@pytest.mark.parametrize("collective", [*MOVING, "allreduce", "reduce", "reduce_scatter"])
def test_what_is_read_from_a_buffer_lies_there(name: str, collective: str) -> None:
    program = program_of(plan_of(name), collective)
    lent = lent_channels(program)
    if collective not in MOVING:
        assert lent == {}
        return
    if name == "cpu:4":
        assert len(lent) == len(program.channels) > 0  # everybody reads from where the bytes are
    for lane in program.lanes:
        for c in lane.outs:
            if c in lent:
                assert lent[c] == (("send", lane.local) if lane.local is not None else ("recv", lane.store))
                assert lane.fold in ((-1,), (0,))  # the value is one operand, unchanged
            else:
                assert lane.local is None
                assert lane.store is None  # it only passes through


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("mpi", [True, False])
def test_the_table_without_cma(n: int, mpi: bool) -> None:
    plan = plan_of(f"cpu:{n}", mpi=mpi)
    without = by_slots(plan)
    assert {r.road for r in without.rules} == {"slots"}
    for collective in MOVING:
        assert plan.rule(collective, (1 << 20) * (1 if n > 2 else 2)).road == "cma"
        floor = MPI_BELOW_BYTES_BY_SLOTS[collective][n > 2] if mpi else 0
        assert without.rule(collective, floor).scheme == "direct"
        if mpi:
            assert without.rule(collective, floor - 1).scheme == "mpi"
    for collective in ("allreduce", "reduce", "reduce_scatter"):
        kept = [[r for r in p.rules if r.collective == collective] for p in (plan, without)]
        assert kept[0] == kept[1]
    assert by_slots(without) == without
