"""The host transport without ranks: which channels are read from their writers' buffers."""

import pytest

from blinkmpi.planning.defaults import CMA_BYTES, MPI_BELOW_BYTES, SMALLEST, by_slots
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.selection import make_plan, program_for
from blinkmpi.program.check import check
from blinkmpi.program.ir import Program
from blinkmpi.topology import machine
from blinkmpi.transport.host.single_copy import LONG_BYTES, exported_channels, in_long_chunks
from tests.unit.trees.packings import even_call

MOVING = ("broadcast", "allgather", "gather", "scatter")
REDUCING = ("allreduce", "reduce", "reduce_scatter")


def plan_of(name: str, *, mpi: bool = False) -> Plan:
    return make_plan(machine(name), mpi=mpi)


def program_of(plan: Plan, collective: str, count: int = 1 << 16) -> Program:
    call = even_call(collective, plan.n, count, root=1)
    return program_for(plan, call, plan.rule(collective, 1 << 40))


@pytest.mark.parametrize("name", ["cpu:4", "dgx-1v", "dgx-2"])
@pytest.mark.parametrize("collective", [*MOVING, *REDUCING])
def test_what_is_read_from_a_buffer_lies_there(name: str, collective: str) -> None:
    """A value that its writer sends unchanged, or one that is final and kept; the rest passes through slots."""
    program = program_of(plan_of(name), collective)
    lent = exported_channels(program)
    if name == "cpu:4" and collective != "reduce":
        assert len(lent) == len(program.channels) > 0  # everybody reads from where the bytes are
    for stage in program.stages:
        for c in stage.outs:
            if c not in lent:
                assert stage.store is None  # it only passes through
                assert stage.ins
            elif lent[c].buffer == "send":
                assert lent[c].offset == stage.local
                assert stage.fold == (-1,)
            else:
                assert lent[c].offset == stage.store
                assert stage.fold == (0,) or stage.final
                assert not program.channels[c].partial


@pytest.mark.parametrize("collective", [*MOVING, *REDUCING])
def test_chunks_are_long_where_nobody_waits_for_a_part(collective: str) -> None:
    program = program_of(plan_of("cpu:2"), collective)
    lent = exported_channels(program)
    long = in_long_chunks(program, lent, 4)
    if collective == "allreduce":  # the way down begins with the first chunk that is complete
        assert long == program
    else:
        assert long.chunk * 4 == LONG_BYTES
        assert check(long) == long
    assert in_long_chunks(program, {}, 4) == program


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("mpi", [True, False])
def test_the_table_without_cma(n: int, mpi: bool) -> None:
    plan = plan_of(f"cpu:{n}", mpi=mpi)
    without = by_slots(plan)
    assert {r.protocol for r in without.rules} == {"slots"}
    for collective, sizes in CMA_BYTES.items():
        first, end = sizes[n > 2]
        assert plan.rule(collective, first).protocol == "cma"
        assert plan.rule(collective, first - 1).protocol == "slots"
        before, after = (plan.rule(collective, (end or first) - d).protocol for d in (1, 0))
        assert end is None or (before, after) == ("cma", "slots")
    for collective in (*MOVING, *REDUCING):
        floor = MPI_BELOW_BYTES[collective][n > 2] if mpi else 0
        assert without.rule(collective, floor).scheme == "direct"
        if mpi:
            assert without.rule(collective, floor - 1).scheme == plan.rule(collective, SMALLEST - 1).scheme == "mpi"
            assert plan.rule(collective, SMALLEST).scheme == "direct"
    assert by_slots(without) == without
