"""A program as a function of its count gives the programs of all counts."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import program_for
from blinkmpi.program.by_count import Border, ByCount, by_count, read, symbol
from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.ir import chunk_of
from blinkmpi.program.lower import cuts
from blinkmpi.program.spans import align_of, border
from blinkmpi.topology import machine, modify
from blinkmpi.trees.tree import COLLECTIVES, ROOTED

MACHINES = {"one hop": modify(machine("dgx-a100"), gpus="0-3"), "part": modify(machine("dgx-1v"), gpus="1,4,5,6")}


@given(st.integers(-(1 << 47), 1 << 47), st.dictionaries(st.integers(0, 9), st.integers(-(1 << 40), 1 << 40)))
def test_sums_of_symbols_are_read(rest: int, times: dict[int, int]) -> None:
    value = rest + sum(n * symbol(number) for number, n in times.items())
    assert read(value) == (rest, {number: n for number, n in times.items() if n})


def value_of(word: int, form: ByCount, count: int) -> int:
    """A sum of symbols for a count, worked out as C does."""
    align = align_of(form.call)
    values = [count, 0, *(border(b.part, b.trees, count, align) for b in form.borders)]
    spans = [values[span.end] - (values[span.first] if span.first >= 0 else 0) for span in form.lengths]
    steps = -(-max(spans, default=1) // form.chunk)
    values += [chunk_of(span, steps, form.chunk) for span in spans]
    rest, times = read(word)
    return rest + sum(values[number] * n for number, n in times.items())


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "barrier"])
def test_stages_of_other_counts_follow(collective: str, name: str) -> None:
    topology = MACHINES[name]
    plan = make_plan(topology, collectives=(collective,), mpi=False)
    root = 0 if collective in ROOTED else -1

    def call(count: int) -> Call:
        counts = (count,) * (topology.n if collective == "reduce_scatter" else 1)
        return Call(collective, topology.n, counts, "float32", "sum" if collective in REDUCTIONS else "", root)

    for rule in plan.rules:
        if rule.scheme == "mpi" or rule.protocol == "one_shot" or rule.root not in (-1, root):
            continue
        packing = plan.packing(collective, root, rule.scheme)

        first = 100_003
        program = program_for(plan, call(first), rule)
        form = by_count(program, cuts(packing, call(first)), partial(at, call(first), first))
        assert form is not None, rule
        for count in (70_001, 100_003, 100_004, 131_072):
            wanted = program_for(plan, call(count), rule)
            if wanted.chunk != form.chunk:  # then it is another function
                continue
            for stage, symbols in zip(wanted.stages, form.stages, strict=True):
                numbers = (symbols.count, symbols.local, symbols.store, form.chunk_of(symbols))
                found = [None if n is None else value_of(n, form, count) for n in numbers]
                assert found == [stage.count, stage.local, stage.store, wanted.chunk_of(stage)], (rule, count)


def at(call: Call, count: int, of: Border) -> int:
    return border(of.part, of.trees, count, align_of(call))


def test_stages_that_are_not_as_the_cuts_say_are_no_function_of_the_count() -> None:
    plan = make_plan(MACHINES["one hop"], collectives=("allreduce",), mpi=False)
    call = Call("allreduce", 4, (100_003,), "float32", "sum")
    rule = next(rule for rule in plan.rules if rule.protocol != "one_shot")
    program, parts = program_for(plan, call, rule), cuts(plan.packing("allreduce", -1, rule.scheme), call)
    assert len({cut.first for cut in parts.values()}) > 1, "the vector is not cut"
    assert by_count(program, parts, partial(at, call, 100_003)) is not None
    assert by_count(program, {}, partial(at, call, 100_003)) is None
    assert by_count(program, parts, lambda of: at(call, 100_003, of) + 1) is None
