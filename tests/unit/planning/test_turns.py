"""Roots that a symmetry of the machine makes of one another: planned once, and turned when they are asked for."""

import numpy as np
import pytest
from msgspec.structs import replace

from blinkmpi.errors import PlanError
from blinkmpi.planning.diff import plan_differences
from blinkmpi.planning.explain import explanation
from blinkmpi.planning.plan import Plan, Turn
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.program.interpreter import run
from blinkmpi.topology import machine, modify
from blinkmpi.topology.model import Topology
from blinkmpi.trees import pack, verify
from blinkmpi.trees.graph.automorphism import is_symmetry, like_roots
from tests.unit.trees.packings import even_call
from tests.unit.trees.rails import rails

MACHINES = {"2 boxes": machine("dgx-a100:2"), "rails": rails(3, 2), "one switch": machine("hgx-h100")}
APART = modify(machine("dgx-1v"), gpus="0-4")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


@pytest.fixture(scope="module", params=MACHINES)
def made(request: pytest.FixtureRequest) -> tuple[Topology, Plan]:
    topology = MACHINES[request.param]
    return topology, make_plan(topology, collectives=ROOTED)


@pytest.mark.slow
def test_one_root_is_planned_and_serves_all(made: tuple[Topology, Plan]) -> None:
    topology, plan = made
    assert {p.root for p in plan.packings} == {0}
    assert [(turn.root, turn.like) for turn in plan.turns] == [(root, 0) for root in range(1, topology.n)]
    for collective in ROOTED:
        for root in range(topology.n):
            op = "sum" if collective == "reduce" else ""
            long = even_call(collective, topology.n, 1 << 28, op=op, root=root)
            best = plan.packing(collective, root, choose(plan, long).scheme)
            assert (best.root, best.rate) == (root, pack(topology, collective, root=root).rate)
            call = even_call(collective, topology.n, 6400, op=op, root=root)
            found = plan.packing(collective, root, choose(plan, call).scheme)
            assert found.root == root
            assert verify(found, topology) == found
            assert plan.packing(collective, root, found.scheme) is found
            assert (root == 0) == ("as from rank 0" not in found.certificate.text)
            assert explanation(plan, topology, call).scheme == found.scheme


def test_programs_of_packing_moved_bys_are_right() -> None:
    topology = MACHINES["rails"]
    plan = make_plan(topology, collectives=("broadcast",))
    call = even_call("broadcast", topology.n, 600, root=4)
    sent = [np.full(call.counts[0], 5.0, np.float32) if rank == 4 else None for rank in range(topology.n)]
    got = run(program_for(plan, call, choose(plan, call)), sent)
    assert [rank for rank, vector in enumerate(got) if vector is not None and (vector == 5).all()] == [0, 1, 2, 3, 5]


def test_a_plan_keeps_its_turns_in_its_file(made: tuple[Topology, Plan]) -> None:
    topology, plan = made
    again = Plan.from_json(plan.to_json()).check(topology)
    assert again == plan
    root = topology.n - 1
    assert again.packing("broadcast", root, again.schemes("broadcast", root)[0]).root == root
    assert '"turns"' not in make_plan(APART, collectives=("broadcast",)).to_json()


def test_turns_that_are_no_symmetry_are_refused() -> None:
    topology = MACHINES["rails"]
    plan = make_plan(topology, collectives=("broadcast",))
    turn, size = plan.turns[0], len(plan.turns[0].image)
    swapped = list(turn.image)
    swapped[2], swapped[3] = swapped[3], swapped[2]
    with pytest.raises(PlanError, match="is no symmetry; plan again"):
        replace(plan, turns=(replace(turn, image=tuple(swapped)), *plan.turns[1:])).check(topology)
    for wrong in (
        Turn(turn.root, turn.like, tuple(range(size))),
        Turn(turn.root, turn.like, turn.image[:-1]),
        Turn(turn.root, turn.like, (turn.image[0],) * size),
        Turn(turn.root, plan.turns[1].root, turn.image),
        Turn(turn.root, topology.n, turn.image),
        Turn(turn.root, 0, ()),
    ):
        with pytest.raises(PlanError, match="does not become rank"):
            Plan.from_json(replace(plan, turns=(wrong, *plan.turns[1:])).to_json())


def test_ranks_that_differ_are_planned_each() -> None:
    assert like_roots(APART) == {}
    slow = rails(3, 2, slow=1)
    for root, (like, image) in like_roots(slow).items():
        assert like < root
        assert image[like] == root
        assert is_symmetry(slow, image)
    assert 1 not in like_roots(slow)
    plan = make_plan(slow, collectives=("broadcast",))
    assert 1 in {p.root for p in plan.packings}


def test_ranks_are_compared_as_far_as_they_are_asked_for() -> None:
    whole = like_roots(rails(3, 2, slow=1))
    part = replace(rails(3, 2, slow=1), name="another one")  # of which nothing is known yet
    assert like_roots(part, -1) == {}
    assert set(like_roots(part, 2)) == {root for root in whole if root <= 2}
    assert like_roots(part, 99) == whole


def test_symmetries_keep_kinds_of_links() -> None:
    topology = MACHINES["2 boxes"]
    (_, image), *_ = like_roots(topology).values()
    assert is_symmetry(topology, image)
    assert not is_symmetry(topology, image[:-1])
    assert not is_symmetry(topology, (*image[1:], image[0]))
    links = tuple(
        replace(k, kind="pcie") if (k.src, k.dst) == (0, topology.links[0].dst) else k for k in topology.links
    )
    assert not is_symmetry(replace(topology, links=links), image)


def test_a_difference_is_told_of_every_root() -> None:
    topology = MACHINES["rails"]
    slower = make_plan(topology.scale("net", 0.5), collectives=("broadcast",))
    rates = [d.collective for d in plan_differences(make_plan(topology, collectives=("broadcast",)), slower)
             if d.what == "cluster: rate"]  # fmt: skip
    assert rates == [f"broadcast from {root}" for root in range(topology.n)]
