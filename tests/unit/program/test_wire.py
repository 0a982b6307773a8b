"""Partial results that are rounded on each hop: what travels, and how exact sums are."""

from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from blinkmpi.planning.plan import Plan, Rule
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.program.call import Call
from blinkmpi.program.interpreter import run
from blinkmpi.program.ir import Program, Wire
from blinkmpi.program.reduction import accumulator_of, dtype_of
from blinkmpi.topology import machine, modify

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e5m2": 2.0**-3}
COUNT = 5000


def programs(call: Call) -> dict[Wire, Program]:
    plan = make_plan(machine("dgx-1v"), collectives=(call.collective,))
    wires: tuple[Wire, ...] = ("accumulator", "operand")
    plans = {wire: Plan.from_json(replace(plan, wire=wire).to_json(), source="here") for wire in wires}
    return {wire: program_for(p, call, choose(p, call)) for wire, p in plans.items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
def test_nothing_wider_than_the_operands_travels_and_sums_are_as_exact_as_the_manual_says(
    collective: str, dtype: str
) -> None:
    counts = (COUNT,) * (8 if collective == "reduce_scatter" else 1)
    call = Call(collective, 8, counts, dtype, "sum", *([0] if collective == "reduce" else []))  # type: ignore[arg-type]
    made = programs(call)
    assert any(c.wide for c in made["accumulator"].channels)
    assert not any(c.wide for c in made["operand"].channels)
    rng = np.random.default_rng(3)
    sends = [rng.uniform(0.5, 1, call.send_length(r)).astype(dtype_of(dtype)) for r in range(8)]
    exact = np.sum([s.astype(np.float64) for s in sends], axis=0)
    found = {wire: run(program, sends) for wire, program in made.items()}
    for wire, roundings in (("accumulator", 1), ("operand", 8)):
        got = found[wire][0]  # type: ignore[index]
        assert got is not None
        error = np.abs(got.astype(np.float64) - exact[: got.size])
        assert (error <= roundings * ROUNDOFF[dtype] * 1.01 * exact[: got.size]).all()
    assert any((a != b).any() for a, b in zip(*found.values(), strict=True) if a is not None and b is not None)


def carried(program: Program) -> dict[int, set[int]]:
    """By channel: the ranks whose operands are in what it carries."""
    found: dict[int, set[int]] = {}
    while len(found) < len(program.channels):
        for stage in program.stages:
            if all(c in found for c in stage.ins):
                own = {stage.rank} if stage.local is not None else set()
                found |= {c: own.union(*(found[i] for i in stage.ins)) for c in stage.outs}
    return found


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
def test_only_sums_of_some_ranks_travel_wide(collective: str, n: int) -> None:
    """Bytes of each link by every scheme: four for an element that is a sum yet to be completed, two for all others."""
    counts = (COUNT,) * (n if collective == "reduce_scatter" else 1)
    call = Call(collective, n, counts, "bfloat16", "sum", *([0] if collective == "reduce" else []))  # type: ignore[arg-type]
    plan = make_plan(modify(machine("hgx-h200"), gpus=f"0-{n - 1}"), collectives=(call.collective,), gpus="onehop")
    for scheme in plan.schemes(call.collective, call.root):
        program = program_for(plan, call, Rule(call.collective, 0, scheme, 32 << 10, 4))
        elements = {c: stage.count for stage in program.stages for c in stage.outs}
        sums = carried(program)
        travel, ideal = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
        for c, channel in enumerate(program.channels):
            link = channel.writer, *channel.readers
            travel[link] += elements[c] * (4 if channel.wide else 2)
            ideal[link] += elements[c] * (4 if 1 < len(sums[c]) < n else 2)
        assert travel == ideal, scheme
        assert n > 2 or not any(channel.wide for channel in program.channels)


def test_other_types_are_summed_as_ever() -> None:
    call = Call("allreduce", 8, (COUNT,), "float32", "sum")
    made = programs(call)
    assert accumulator_of("float32") == np.float32
    sends = [np.random.default_rng(r).random(COUNT, np.float32) for r in range(8)]
    for one, other in zip(*(run(program, sends) for program in made.values()), strict=True):
        assert one is not None
        assert other is not None
        assert one.tobytes() == other.tobytes()


def test_a_plan_keeps_it() -> None:
    plan = make_plan(machine("dgx-1v"), collectives=("allreduce",))
    assert "wire" not in plan.to_json()
    again = Plan.from_json(replace(plan, wire="operand").to_json(), source="here")
    assert again.wire == "operand"
