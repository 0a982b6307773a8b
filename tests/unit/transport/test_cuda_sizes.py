"""Calls of many counts through one table: executed by the emulator; and what is made on a GPU for a new count."""

from typing import Any

import numpy as np
import pytest

from blinkmpi.planning.plan import Rule, chunk_for
from blinkmpi.planning.selection import program_for
from blinkmpi.program.call import Call
from blinkmpi.program.template import COLLECTIVES, Sizes, Template
from blinkmpi.trees.tree import Collective
from tests.unit.transport.table_emulator import (
    MACHINES,
    MadeTemplate,
    World,
    check_layout,
    compare,
    execute,
    made,
    plan_of,
)
from tests.unit.trees.packings import call_of, even_call, reference, sends_of

TYPES = ("float32", "bfloat16", "int8", "complex64")


def sized(collective: Collective, n: int, most: int, dtype: str, root: int, rng: np.random.Generator) -> Call:
    """A call of a count in the upper half up to ``most``, a reduce_scatter often with blocks of several lengths."""
    call = even_call(collective, n, int(rng.integers(most // 2 + 1, most + 1)), dtype=dtype, root=root)
    if collective != "reduce_scatter" or rng.random() < 0.3:
        return call
    counts = [int(rng.integers(0, most + 1)) if rng.random() < 0.7 else 0 for _ in range(n)]
    counts[int(rng.integers(n))] = call.counts[0]
    return Call(collective, n, tuple(counts), dtype, call.op)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", MACHINES)
def test_many_counts_through_one_table(name: str, depth: int, rng: np.random.Generator) -> None:
    """All collectives by all schemes over the same memory, among calls with tables of their own."""
    plan = plan_of(name)
    world = World(plan.n)
    order = [(p.collective, p.scheme, p) for p in plan.packings if p.collective in COLLECTIVES]
    found = {(collective, scheme): packing for collective, scheme, packing in order}
    calls, wants = [], []
    for collective, scheme in found:
        most = 1 << int(rng.integers(0, 11))
        dtype, packing = TYPES[int(rng.integers(len(TYPES)))], found[collective, scheme]
        root = max(packing.root, 0)
        kinds: dict[Sizes, MadeTemplate] = {}
        template = Template(packing, sized(collective, plan.n, most, dtype, root, rng), chunk_bytes=512, depth=depth)
        for _ in range(3):
            call = sized(collective, plan.n, most, dtype, root, rng)
            sizes = Sizes.of(call)
            if sizes not in kinds:
                kinds[sizes] = MadeTemplate.of(world, template, sizes, ctas=int(rng.integers(60, 133)))
            sends = sends_of(call, rng)
            calls.append(kinds[sizes].call(call, sends))
            wants.append(reference(call, sends))
            check_layout(world, calls[-1])
        exact = call_of(collective, plan.n, 100, dtype=dtype, root=root)
        sends = sends_of(exact, rng)
        program = program_for(plan, exact, Rule(collective, 0, scheme, 512, depth))
        calls.append(made(world, program, sends, ctas=64))
        wants.append(reference(exact, sends))
    shuffled = rng.permutation(len(calls)).tolist()
    execute(world, [calls[i] for i in shuffled], rng)
    for call_made, want in zip(calls, wants, strict=True):
        compare(call_made, want)


@pytest.mark.parametrize("name", ["hgx-h200 x 8", "dgx-1v x 8"])
def test_the_most_elements_take_the_groups_of_their_own_table(name: str) -> None:
    """A power of two is as fast as with a table of its own: as many CTAs, as long chunks, no larger slots."""
    plan = plan_of(name)
    world = World(plan.n, 48 << 20)
    for collective in COLLECTIVES:
        for scheme in plan.schemes(collective, 0):
            rule = Rule(collective, 0, scheme, 64 << 10, 4)
            call = even_call(collective, plan.n, 1 << 18)
            packing = plan.packing(collective, 0, scheme)
            template = Template(packing, call, chunk_bytes=chunk_for(packing, call, rule), depth=4)
            sends: list[Any] = [None] * plan.n
            own = made(world, program_for(plan, call, rule), sends, ctas=132)
            shared = MadeTemplate.of(world, template, Sizes.of(call), ctas=132).call(call, sends)
            assert [len(rows) for rows in shared.rows] == [len(rows) for rows in own.rows]
            words = slice(0, 10)  # up to EMULATED; slots may be a little larger
            for mine, theirs in zip(own.rows, shared.rows, strict=True):
                assert np.array_equal(mine[:, words], theirs[:, words]), (collective, scheme)
