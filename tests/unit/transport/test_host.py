"""The host transport without ranks: which channels are read from their writers' buffers."""

import pytest

from blinkmpi.planning.default_tables import default_table, rows_of
from blinkmpi.planning.memory_rows import by_slots
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import program_for
from blinkmpi.program.check import check
from blinkmpi.program.ir import Program
from blinkmpi.topology import machine
from blinkmpi.transport.host.single_copy import LONG_BYTES, exported_channels, in_long_chunks
from tests.unit.trees.packings import even_call

MOVING = ("broadcast", "allgather", "gather", "scatter")
REDUCING = ("allreduce", "reduce", "reduce_scatter")


def plan_of(name: str, *, mpi: bool = False, algo: str = "") -> Plan:
    return make_plan(machine(name), mpi=mpi, algo=algo)


def program_of(plan: Plan, collective: str, count: int = 1 << 16) -> Program:
    call = even_call(collective, plan.n, count, root=1)
    return program_for(plan, call, plan.rule(collective, 1 << 40))


@pytest.mark.slow
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


@pytest.mark.parametrize("collective", ["scan", "exscan"])
def test_a_sum_that_goes_on_unrounded_is_not_read_where_it_is_kept_rounded(collective: str) -> None:
    plan = plan_of("cpu:4", algo=f"{collective}:direct")
    found = {}
    for dtype in ("float32", "float16"):
        call = even_call(collective, 4, 1000, dtype=dtype)
        program = program_for(plan, call, plan.rule(collective, call.nbytes))
        lent = exported_channels(program)
        found[dtype] = [c in lent for s in program.stages if s.ins for c in s.outs if program.channels[c].partial]
    assert set(found["float16"]) == {False}
    assert (True in found["float32"]) == (collective == "scan"), "an exscan's rank keeps less than it sends on"


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
def test_the_table_with_and_without_cma(n: int, mpi: bool) -> None:
    plan = plan_of(f"cpu:{n}", mpi=mpi)
    for row in default_table("memory", n).rules:
        rule = plan.rule(row.collective, row.min_bytes or 1)
        assert (rule.scheme, rule.protocol, rule.chunk_bytes) == ("direct", row.protocol, row.chunk_bytes)
    for in_c in (True, False):
        without = by_slots(plan, in_c=in_c)
        shots = {"one_shot"} if in_c else set()
        assert {r.protocol for r in without.rules} == {"slots", *shots}
        for collective in (*MOVING, *REDUCING):
            end = rows_of("memory", n, collective)[1].min_bytes
            floor = rows_of("no_cma", n, collective)[-1].min_bytes if mpi else 0
            assert without.rule(collective, max(floor, end)).protocol == "slots"
            assert without.rule(collective, max(floor, end)).scheme == "direct"
            assert without.rule(collective, 1).protocol == ("one_shot" if in_c else "slots")
            if mpi and floor > end:
                assert without.rule(collective, floor - 1).scheme == "mpi"
                assert without.rule(collective, end).scheme == "mpi"
            if mpi:
                assert (without.rule(collective, 1).scheme == "mpi") is not in_c
        assert by_slots(without, in_c=in_c) == without


def test_a_scheme_that_is_asked_for_takes_no_shot() -> None:
    for algo, scheme in (("allreduce:chain", "chain"), ("allreduce:direct", "direct")):
        plan = plan_of("cpu:4", mpi=True, algo=algo)
        rules = [plan.rule("allreduce", nbytes) for nbytes in (1, 64 << 10, 1 << 20)]
        assert {(rule.scheme, rule.protocol) for rule in rules} == {(scheme, "slots")}
    plan = plan_of("cpu:4", mpi=True, algo="allreduce:^mpi")
    assert plan.rule("allreduce", 0).protocol == "one_shot"
