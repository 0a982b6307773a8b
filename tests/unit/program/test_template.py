"""A template filled in for a count is what is lowered for that count, besides stages without elements."""

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from blinkmpi.errors import PlanError
from blinkmpi.planning.plan import Plan
from blinkmpi.program.call import Call
from blinkmpi.program.ir import Program
from blinkmpi.program.lower import lower
from blinkmpi.program.template import COLLECTIVES, SHORT, Sizes, Template
from blinkmpi.trees.tree import Collective, Packing
from tests.unit.transport.table_emulator import MACHINES, plan_of
from tests.unit.trees.packings import even_call, random_packing

COUNTS = st.one_of(st.integers(1, 200), st.integers(1, 10**6))
KINDS: Any = st.sampled_from(COLLECTIVES)


def without_empty(program: Program) -> Program:
    """The program without stages that have no elements, and without their channels."""
    stages = [stage for stage in program.stages if stage.count]
    used = {c for stage in stages for c in (*stage.ins, *stage.outs)}
    name = {c: i for i, c in enumerate(sorted(used))}
    kept = tuple(replace(s, ins=tuple(name[c] for c in s.ins), outs=tuple(name[c] for c in s.outs)) for s in stages)
    return replace(program, channels=tuple(program.channels[c] for c in sorted(used)), stages=kept)


def compare(packing: Packing, call: Call, template: Template, chunk_bytes: int) -> None:
    lowered = lower(packing, call, chunk_bytes=chunk_bytes, depth=3)
    sized = template.at(call)
    assert without_empty(sized) == lowered
    spans = template.spans(call)
    for stage in lowered.stages:
        assert spans[stage.tree].length == stage.count
        assert spans[stage.tree].chunk == lowered.chunk_of(stage)
    assert all(span.chunk > 0 for span in spans.values()), "a CTA divides by it"
    sizes = Sizes.of(call)
    room = template.slots(sizes)
    assert all(spans[tree].chunk <= room[tree] <= template.program.chunk for tree in spans), (sizes, spans, room)


def call_with(collective: Collective, n: int, counts: list[int], dtype: str, root: int) -> Call:
    call = even_call(collective, n, counts[0], dtype=dtype, root=root)
    return replace(call, counts=tuple(counts[:n])) if collective == "reduce_scatter" else call


@pytest.mark.slow
@given(
    collective=KINDS, n=st.integers(1, 7), seed=st.integers(0, 2**32),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "complex128"]),
    chunk_bytes=st.sampled_from([1, 64, 4096, 1 << 20]),
    counts=st.lists(st.lists(st.one_of(st.just(0), COUNTS), min_size=7, max_size=7), min_size=1, max_size=5),
)  # fmt: skip
@example("reduce_scatter", 3, 0, "bfloat16", 64, [[0] * 7, [0, 1, 0, 0, 0, 0, 0]])  # the first without partial results
@example("reduce", 3, 42770, "bfloat16", 64, [[0] * 7, [2, 0, 0, 0, 0, 0, 0]])  # the first only in the other tree
@settings(max_examples=300, deadline=None)
def test_templates_of_random_trees(
    collective: Collective, n: int, seed: int, dtype: str, chunk_bytes: int, counts: list[list[int]]
) -> None:
    rng = random.Random(seed)
    root = rng.randrange(n)
    packing = random_packing(collective, n, rng, root=root)
    calls = [call_with(collective, n, [max(c[0], 1), *c[1:]], dtype, root) for c in counts]
    template = Template(packing, calls[0], chunk_bytes=chunk_bytes, depth=3)
    for call in calls:
        compare(packing, call, template, chunk_bytes)


def templates(plan: Plan, collective: Collective, dtype: str) -> list[tuple[Packing, Template]]:
    found = [p for p in plan.packings if p.collective == collective]
    by_scheme = {p.scheme: p for p in reversed(found)}
    calls = [(p, even_call(collective, plan.n, 1, dtype=dtype, root=max(p.root, 0))) for p in by_scheme.values()]
    return [(p, Template(p, call, chunk_bytes=8192, depth=3)) for p, call in calls]


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_templates_of_every_plan(collective: Collective, name: str) -> None:
    rng = random.Random(name)
    plan = plan_of(name)
    for packing, template in templates(plan, collective, rng.choice(["float32", "bfloat16"])):
        for _ in range(20):
            counts = [rng.choice([0, rng.randint(1, 99), rng.randint(1, 10**6)]) for _ in range(plan.n)]
            call = call_with(
                collective, plan.n, [max(counts[0], 1), *counts[1:]], template.call.dtype, max(packing.root, 0)
            )
            compare(packing, call, template, 8192)
            even = even_call(collective, plan.n, rng.randint(1, 10**6), dtype=call.dtype, root=max(packing.root, 0))
            compare(packing, even, template, 8192)


@given(counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=6).filter(any))
def test_calls_of_equal_sizes_are_about_as_long(counts: list[int]) -> None:
    call = Call("reduce_scatter", len(counts), tuple(counts), "float32", "sum")
    sizes = Sizes.of(call)
    assert sizes.most // 2 < max(counts) <= sizes.most
    for i, most in enumerate(sizes.largest(call).counts):
        long = SHORT * counts[i] > max(counts)
        assert long == bool(sizes.longs >> i & 1)
        assert counts[i] <= most
    assert Sizes.of(Call("broadcast", 2, (1 << 20,), "int8", "", 0)) == Sizes(1 << 20)


def test_what_has_no_template() -> None:
    call = even_call("broadcast", 3, 10)
    packing = random_packing("broadcast", 3, random.Random(1))
    with pytest.raises(PlanError, match="pack again"):
        Template(packing, replace(call, root=1), chunk_bytes=64, depth=2)
    with pytest.raises(PlanError, match="barrier has no template"):
        Template(packing, Call("barrier", 3, (0,), ""), chunk_bytes=64, depth=2)
    gather = random_packing("gather", 3, random.Random(1))
    lacking = replace(gather, trees=tuple(t for t in gather.trees if t.edges[-1].dst != 2))
    with pytest.raises(PlanError, match="no tree carries the block of rank 2"):
        Template(lacking, even_call("gather", 3, 10), chunk_bytes=64, depth=2)
