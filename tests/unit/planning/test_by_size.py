"""The selection table has the fastest scheme for each size, by the cost model."""

import pytest
from msgspec.structs import replace

from blinkmpi.planning import by_size
from blinkmpi.planning.by_size import SIZES, contenders, fastest
from blinkmpi.planning.defaults import link_slots, rule_of
from blinkmpi.planning.memory_rows import by_slots
from blinkmpi.planning.plan import Plan, chunk_for
from blinkmpi.planning.planner import all_packings, make_plan
from blinkmpi.planning.selection import choose
from blinkmpi.planning.slots import LINK_SLOTS
from blinkmpi.program.call import Call
from blinkmpi.program.cost_model import price
from blinkmpi.program.lower import lower
from blinkmpi.topology import Topology, machine, modify
from blinkmpi.trees.deadline import NEVER
from blinkmpi.trees.tree import ROOTED, Collective
from tests.unit.trees.packings import even_call

DGX = machine("dgx-1v")
KIB, MIB = 1 << 10, 1 << 20


def call_for(collective: Collective, t: Topology, nbytes: int) -> Call:
    blocks = t.n if collective in ("allgather", "reduce_scatter", "gather", "scatter") else 1
    op = "sum" if collective in ("reduce", "allreduce", "reduce_scatter") else ""
    return even_call(collective, t.n, nbytes // 4 // blocks, op=op)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["broadcast", "allreduce", "allgather", "scatter"])
@pytest.mark.parametrize("gpus", ["0-7", "0-6", "1,4,5,6"])
def test_no_scheme_is_much_faster_than_the_choice(gpus: str, collective: Collective) -> None:
    t = modify(DGX, gpus=gpus)
    plan = make_plan(t, collectives=(collective,), roots=(0,))
    packings, _ = all_packings(t, collective, 0)
    for nbytes in SIZES[::3]:
        call = call_for(collective, t, nbytes)
        rule = choose(plan, call)
        seconds = {}
        for p in packings:
            own = rule if p.scheme == rule.scheme else rule_of(p, t, call)
            program = lower(p, call, chunk_bytes=chunk_for(p, call, own), depth=own.depth)
            seconds[p.scheme] = price(program, p, t).seconds
        assert seconds[rule.scheme] <= 1.05 * min(seconds.values()), (nbytes, rule.scheme, seconds)


def test_short_vectors_take_shallow_trees_and_long_ones_all_links() -> None:
    plan = make_plan(DGX, collectives=("broadcast", "allreduce"), roots=(0,))
    for collective in ("broadcast", "allreduce"):
        schemes = [choose(plan, call_for(collective, DGX, nbytes)).scheme for nbytes in SIZES]
        assert schemes[0] == "depth-2"
        assert schemes[-1] == "hybrid"
        rates = [plan.packing(collective, 0, scheme).rate for scheme in schemes]
        assert rates == sorted(rates)
    assert Plan.from_json(plan.to_json()) == plan


def test_only_packings_that_may_win_compete() -> None:
    packings, _ = all_packings(DGX, "broadcast", 0)
    able = contenders(packings)
    assert {"trees", "depth-2", "depth-3", "depth-4", "hybrid"} == {p.scheme for p in able}, "each has fewer trees"
    worse = replace(able[0], scheme="worse", rate=able[0].rate / 2)
    assert worse not in contenders([*able, worse])


def test_where_time_is_over_the_highest_rate_serves_all_sizes() -> None:
    packings, _ = all_packings(DGX, "broadcast", 0)
    (only,) = fastest(packings, DGX, link_slots, LINK_SLOTS, NEVER.within(0))
    assert (only.min_bytes, only.scheme, only.chunk_bytes, only.depth) == (0, "hybrid", *LINK_SLOTS)


def test_where_the_highest_rate_is_too_large_to_be_estimated_it_serves_all_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packings, _ = all_packings(DGX, "broadcast", 0)
    edges = {p.scheme: sum(len(tree.edges) for tree in p.trees) for p in packings}
    monkeypatch.setattr(by_size, "MOST_EDGES", edges["hybrid"] - 1)
    assert min(edges.values()) < edges["hybrid"], "a smaller one could be estimated"
    (only,) = fastest(packings, DGX, link_slots, LINK_SLOTS)
    assert (only.min_bytes, only.scheme, only.chunk_bytes, only.depth) == (0, "hybrid", *LINK_SLOTS)


def test_chunks_keep_to_the_least_and_the_largest_of_a_row() -> None:
    plan = make_plan(DGX, collectives=("broadcast",), roots=(0,))
    call = call_for("broadcast", DGX, 4 * KIB)
    rule = choose(plan, call)
    packing = plan.packing("broadcast", 0, rule.scheme)
    assert chunk_for(packing, call, rule) == rule.chunk_bytes == rule.least_chunk_bytes
    free = replace(rule, least_chunk_bytes=0)
    assert chunk_for(packing, call, free) == 4 * KIB
    assert chunk_for(packing, call_for("broadcast", DGX, 64 * MIB), free) == rule.chunk_bytes


def test_schemes_that_are_asked_for_are_taken_for_all_sizes() -> None:
    plan = make_plan(DGX, collectives=("broadcast",), roots=(0,), algo="broadcast:trees")
    assert {rule.scheme for rule in plan.rules} == {"trees"}
    assert {p.scheme for p in plan.packings} == {"trees", "hybrid"}, "shallow ones that nothing takes are left out"
    some = make_plan(DGX, collectives=("broadcast",), roots=(0,), algo="broadcast:^hybrid")
    assert "hybrid" not in {rule.scheme for rule in some.rules}
    assert len({rule.scheme for rule in some.rules}) > 1


def test_every_root_has_a_row_for_every_size() -> None:
    """Also where ranks cannot read one another's memory, and where some root has rows of its own."""
    t = modify(DGX, gpus="0,3,4")
    plan = make_plan(t, mpi=True)
    assert any(rule.root >= 0 for rule in plan.rules)
    for one in (plan, by_slots(plan, in_c=True)):
        for collective in ("broadcast", "reduce", "gather", "scatter", "allreduce"):
            for root in range(3) if collective in ROOTED else (-1,):
                for nbytes in (0, 3, 1 << 10, 1 << 20, 1 << 30):
                    assert one.rule(collective, nbytes, root=root).min_bytes <= nbytes
