"""Algorithms in plans: which calls take them, what a plan proves of them, and what is said of them."""

from typing import Any

import msgspec
import pytest

from blinkmpi import lang
from blinkmpi.errors import PlanError, SettingsError
from blinkmpi.lang import Algorithm, library
from blinkmpi.planning.algorithms import for_part, named_in, with_algorithms
from blinkmpi.planning.explain import explanation
from blinkmpi.planning.memory_rows import by_slots
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.planning.slots import GPU_SLOTS, NODE_CTAS, NODE_SLOTS
from blinkmpi.program.call import Call, call_of_bytes
from blinkmpi.runtime.bootstrap import Options, agree_on_plan
from blinkmpi.topology import machine
from blinkmpi.trees.tree import Collective
from blinkmpi.util.settings import Settings
from tests.unit.trees.packings import machine_of

CPUS = machine("cpu:4")
DGX = machine("dgx-1v")
HGX = machine("hgx-h200")


def sized(least: int, most: int, name: str = "sized") -> Algorithm:
    return msgspec.structs.replace(library.one_step(4), name=name, min_bytes=least, max_bytes=most)


def schemes(plan: Plan, *sizes: int, collective: str = "allreduce", root: int = -1) -> list[str]:
    return [plan.rule(collective, nbytes, root=root).scheme for nbytes in sizes]


@pytest.mark.parametrize("mpi", [False, True])
def test_a_range_of_sizes_is_cut_out_of_the_table(mpi: bool) -> None:
    plan = make_plan(CPUS, mpi=mpi, collectives=["allreduce", "broadcast"])
    mine = with_algorithms(plan, [sized(1 << 10, (1 << 20) - 1)], {}).check(CPUS)
    sizes = (0, 1, 1023, 1 << 20, 1 << 24, 1 << 30)
    assert schemes(mine, *sizes) == schemes(plan, *sizes)
    assert set(schemes(mine, 1 << 10, 1 << 19, (1 << 20) - 1)) == {"lang:sized"}
    assert [row for row in mine.rules if row.collective == "broadcast"] == [
        row for row in plan.rules if row.collective == "broadcast"
    ]
    assert Plan.from_json(mine.to_json()) == mine


def test_the_last_one_given_wins_and_what_is_asked_for_takes_all() -> None:
    plan = make_plan(CPUS, collectives=["allreduce"])
    mine = with_algorithms(plan, [sized(0, 4096, "short"), sized(1024, 0, "long")], {})
    assert schemes(mine, 0, 1023, 1024, 1 << 30) == ["lang:short", "lang:short", "lang:long", "lang:long"]
    asked = with_algorithms(plan, [sized(0, 4096, "short")], {"allreduce": library.ring(4)})
    assert set(schemes(asked, 0, 1 << 30)) == {"lang:ring"}
    assert [one.name for one in asked.algorithms] == ["short", "ring"]


def test_an_algorithm_with_a_root_takes_the_calls_of_that_root() -> None:
    @lang.algorithm("broadcast", chunks=1, inplace=True, root=2)
    def star(n: int) -> None:
        for r in range(n):
            lang.chunk(2, "input", 0).copy(r)

    plan = make_plan(CPUS, collectives=["broadcast"])
    mine = with_algorithms(plan, [star(4)], {}).check(CPUS)
    assert schemes(mine, 1 << 20, collective="broadcast", root=2) == ["lang:star"]
    assert schemes(mine, 1 << 20, collective="broadcast", root=1) == schemes(
        plan, 1 << 20, collective="broadcast", root=1
    )


def test_parts_of_a_plan_keep_the_algorithms_of_the_whole() -> None:
    empty = Plan(CPUS.name, CPUS.fingerprint, 4, (), ())
    start = with_algorithms(empty, [library.ring(4)], {})
    assert (start.rules, start.algorithms) == ((), (library.ring(4),))
    part = with_algorithms(make_plan(CPUS, collectives=["allreduce"]), [library.ring(4)], {})
    assert schemes(start.joined(part, "allreduce", -1), 1 << 20) == ["lang:ring"]
    assert schemes(by_slots(part, in_c=True), 0, 1 << 20) == ["lang:ring"] * 2, "no cma is needed"


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "alltoall"])
def test_a_program_of_the_plan_is_the_algorithms(collective: Collective) -> None:
    made = {"allreduce": library.ring, "allgather": library.bruck_allgather, "alltoall": library.bruck_alltoall}
    mine = with_algorithms(make_plan(CPUS, collectives=[collective]), [made[collective](4)], {})
    call = call_of_bytes(collective, 4, 1 << 20)
    program = program_for(mine, call, choose(mine, call), budget_bytes=1 << 18, multicast=True)
    assert program.scheme == f"lang:{made[collective].name}"
    slots = [sum(c.writer == r for c in program.channels) for r in range(4)]
    assert max(slots) * program.depth * program.chunk * 4 <= 1 << 18


@pytest.mark.slow
def test_explain_names_it_and_prices_it_beside_the_trees() -> None:
    plan = with_algorithms(make_plan(DGX, collectives=["allreduce"]), [library.ring(8)], {})
    call = call_of_bytes("allreduce", 8, 64 << 20)
    said = explanation(plan, DGX, call)
    assert said.scheme == "lang:ring"
    assert said.chosen is not None
    assert (
        said.chosen.seconds
        == library.ring(8).simulate(DGX, 64 << 20, chunk_bytes=said.chosen.chunk_bytes, depth=said.chosen.slots).seconds
    )
    assert {"trees", "ring"} & {other.scheme for other in said.others}
    text = said.text()
    assert "runs as     lang:ring: an algorithm of 112 messages of a chunk, 14 after one another" in text
    assert "none is worked out for what users write" in text
    others = explanation(make_plan(DGX, collectives=["allreduce"]), DGX, call)
    assert "lang" not in others.text()


def test_a_plan_with_a_wrong_algorithm_is_refused() -> None:
    mine = with_algorithms(make_plan(CPUS, collectives=["allreduce"]), [library.ring(4)], {})
    renamed = msgspec.structs.replace(mine, algorithms=(library.all_pairs(4),))
    with pytest.raises(PlanError, match="no 'lang:ring' for allreduce, root -1; it has lang:all_pairs: choose one"):
        renamed.check(CPUS)
    by_cma = msgspec.structs.replace(mine, rules=tuple(msgspec.structs.replace(r, protocol="cma") for r in mine.rules))
    with pytest.raises(PlanError, match="lang:ring by cma; algorithms go by slots"):
        by_cma.check(CPUS)
    with pytest.raises(PlanError, match=r"algorithms\[0\], ring: 3 ranks, in a plan of 4 ranks"):
        Plan.from_json(msgspec.structs.replace(mine, algorithms=(library.ring(3),)).to_json())
    outputs = library.ring(4).outputs[::-1]
    turned = msgspec.structs.replace(library.ring(4), outputs=outputs)
    wrong = msgspec.structs.replace(mine, algorithms=(turned,))
    assert Plan.from_json(wrong.to_json()) == wrong, "outputs may lie on other ranks: they are sent there"
    lacking = msgspec.structs.replace(turned, outputs=((None,) * 4, *outputs[1:]))
    with pytest.raises(PlanError, match="ring: rank 0: nothing writes chunk 0 of its output"):
        Plan.from_json(msgspec.structs.replace(mine, algorithms=(lacking,)).to_json())


class Alone:
    """The one rank of a job."""

    rank, size = 0, 1

    def allgather_bytes(self, sendobj: Any, /) -> list[Any]:
        return [sendobj]

    def bcast_bytes(self, obj: Any, root: int = 0, /) -> Any:
        return obj


def test_jobs_on_gpus_take_algorithms() -> None:
    """Given, asked for, and in a plan; for any buffers and for registered ones."""
    settings, four, ring = Settings(), HGX.subset([0, 1, 2, 3]), library.ring(4)
    given, asked = Options(algorithms=(sized(1 << 20, 1 << 24),)), Options(algo="allreduce:lang:ring")
    plan = agree_on_plan(Alone(), four, given, settings, "onehop").with_parts([("allreduce", -1)]).plan
    usual = make_plan(four, collectives=["allreduce", "reduce_scatter"], gpus="onehop")
    assert {r.registered for r in usual.rules} == {False, True}
    for registered in (False, True):
        own = [plan.rule("allreduce", nbytes, registered=registered) for nbytes in (1 << 20, 1 << 24)]
        assert {(r.scheme, r.protocol, r.chunk_bytes, r.depth) for r in own} == {("lang:sized", "slots", *GPU_SLOTS)}
        for nbytes in (0, (1 << 20) - 1, (1 << 24) + 1, 1 << 30):
            row, before = (p.rule("allreduce", nbytes, registered=registered) for p in (plan, usual))
            assert (row.scheme, row.protocol) == (before.scheme, before.protocol)
    plan = agree_on_plan(Alone(), four, asked, settings, "onehop").with_parts([("allreduce", -1)]).plan
    assert {r.scheme for r in plan.rules if r.collective == "allreduce"} == {"lang:ring"}
    made = with_algorithms(make_plan(four, collectives=["allreduce"], gpus="nodes"), [ring], {}, "nodes").check(four)
    assert {(r.chunk_bytes, r.depth, r.ctas) for r in made.rules} == {(*NODE_SLOTS, NODE_CTAS)}
    assert agree_on_plan(Alone(), four, Options(plan=made), settings, "nodes").plan == made


def test_a_call_that_packets_do_not_fit_takes_no_algorithm_for_other_sizes() -> None:
    four = HGX.subset([0, 1, 2, 3])
    large = msgspec.structs.replace(library.bruck_allgather(4), min_bytes=1 << 20)
    plan = with_algorithms(make_plan(four, collectives=["allgather"], gpus="onehop"), [large], {}, "onehop")
    uneven = Call("allgather", 4, (1, 2, 3, 4), "float32")
    rule = choose(plan, uneven, fits=lambda call, protocol: False)
    assert (rule.scheme, rule.protocol) == ("onehop", "slots")
    assert choose(plan, call_of_bytes("allgather", 4, 1 << 21)).scheme == "lang:bruck_allgather"


def test_ways_that_a_machine_of_gpus_lacks_are_an_error_as_the_communicator_is_made() -> None:
    """On the host all ranks share a memory."""
    line, settings = machine_of(3, "0-1 1-2"), Settings()
    given = Options(algorithms=(library.all_pairs(3),))
    with pytest.raises(PlanError, match=r"all_pairs: .* has no way from rank 0 to 2 but over other ranks; copy the"):
        agree_on_plan(Alone(), line, given, settings, "slots")
    assert agree_on_plan(Alone(), machine("cpu:3"), given, settings).plan.algorithms == given.algorithms
    ring = Options(algo="allreduce:lang:ring")
    assert agree_on_plan(Alone(), machine_of(3, "0-1 1-2 2-0"), ring, settings, "slots").plan.algorithms


def test_names_are_read_out_of_an_algo_text() -> None:
    mine = sized(0, 0, "mine")
    rest, asked = named_in("all_reduce:lang:mine; broadcast:^mpi;allgather:lang:bruck_allgather", [mine], 4)
    assert rest == "broadcast:^mpi"
    assert {kind: made.name for kind, made in asked.items()} == {"allreduce": "mine", "allgather": "bruck_allgather"}
    with pytest.raises(SettingsError, match=r"halving_doubling.*expected a number of ranks"):
        named_in("allreduce:lang:halving_doubling", [], 3)
    assert for_part("allreduce:lang:mine;broadcast:^mpi", [mine], 3) == ("broadcast:^mpi", ())
    assert for_part("allreduce:lang:mine", [mine], 4) == ("allreduce:lang:mine", (mine,))
    assert for_part("allreduce:lang:halving_doubling;allgather:lang:bruck_allgather", [], 3) == (
        "allgather:lang:bruck_allgather", ()
    )  # fmt: skip
