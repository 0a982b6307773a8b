"""Tuning, but for the measuring: rows from winners, tables in files, the search for a chunk while a job runs."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from blinkmpi.errors import BlinkError, FormatError, PlanError, SettingsError
from blinkmpi.lang import library
from blinkmpi.measure.tune import candidates, rows
from blinkmpi.planning.algorithms import with_algorithms
from blinkmpi.planning.chunk_search import ChunkSearch
from blinkmpi.planning.plan import Rule
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.tuned_table import TunedTable, file_of, read, taken
from blinkmpi.program.call import Call
from blinkmpi.topology import machine, modify
from blinkmpi.trees.tree import Collective
from blinkmpi.util.cache_folder import keep
from tests.harness import ROOT

KIB, MIB = 1 << 10, 1 << 20
ONESHOT = Rule("allreduce", 0, "onehop", 64 * KIB, 4, protocol="ll16_one_shot")
SLOTS = Rule("allreduce", 0, "onehop", 64 * KIB, 4, ctas=64)
ALL = {"onehop", "trees", "chain"}


def test_a_row_begins_half_way_between_the_sizes() -> None:
    made = rows([(KIB, ONESHOT), (4 * KIB, ONESHOT), (16 * KIB, SLOTS), (64 * KIB, ONESHOT)], registered=True)
    wanted = [(0, "ll16_one_shot"), (8 * KIB, "slots"), (32 * KIB, "ll16_one_shot")]
    assert [(r.min_bytes, r.protocol) for r in made] == wanted
    assert all(r.registered and r.reason == "measured by blinkmpi tune" for r in made)
    assert made[1].ctas == 64


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "tables").glob("tuned-*.json")), ids=lambda path: path.name
)
def test_the_tables_that_are_kept_can_be_read(path: Path) -> None:
    kept = read(path)
    assert kept is not None
    assert kept.rules
    assert file_of(path.parent, kept.gpu, modify(machine("hgx-h200"), gpus=f"0-{kept.ranks - 1}")).name.startswith(
        path.name.rpartition("-")[0]
    ), "what a job looks for"
    assert {rule.reason for rule in kept.rules} == {"measured by blinkmpi tune"}


@given(st.lists(st.sampled_from([ONESHOT, SLOTS, replace(SLOTS, ctas=0)]), min_size=1, max_size=12))
def test_rows_give_each_measured_size_its_winner(winners: list[Rule]) -> None:
    sizes = [KIB << 2 * i for i in range(len(winners))]
    made = rows(list(zip(sizes, winners, strict=True)), registered=False)
    assert made[0].min_bytes == 0
    for nbytes, winner in zip(sizes, winners, strict=True):
        row = max((r for r in made if r.min_bytes <= nbytes), key=lambda r: r.min_bytes)
        assert (row.protocol, row.ctas) == (winner.protocol, winner.ctas)
    assert all(a.min_bytes < b.min_bytes for a, b in pairwise(made))
    assert all((a.protocol, a.ctas) != (b.protocol, b.ctas) for a, b in pairwise(made)), "no row for nothing"


def table(*rules: Rule) -> TunedTable:
    return TunedTable("GPU", 8, "hgx-h200", "2026-11-21", {"cupy": "14"}, rules)


def test_a_table_is_kept_and_joined(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.json"
    assert read(path) is None
    keep(path, table(ONESHOT).to_json())
    assert read(path) == table(ONESHOT)
    other = Rule("broadcast", 0, "onehop", 64 * KIB, 4)
    assert table(ONESHOT, other).joined([SLOTS]).rules == (other, SLOTS)
    path.write_text("{}")
    with pytest.raises(FormatError):
        read(path)
    with pytest.raises(SettingsError, match="cannot read"):
        read(tmp_path)
    with pytest.raises(SettingsError, match=r"cannot write .* set BLINKMPI_CACHE_DIR"):
        keep(path / "below" / "a" / "file", table().to_json())


def test_a_table_is_for_gpus_of_a_name_and_links() -> None:
    h200 = machine("hgx-h200")
    one, other = modify(h200, gpus="0,1,2,3"), modify(h200, gpus="4,5,6,7")
    folder = Path("cache")
    assert file_of(folder, "NVIDIA H200", one) == file_of(folder, "NVIDIA H200", other), "alike, whatever their indices"
    assert file_of(folder, "NVIDIA H100", one) != file_of(folder, "NVIDIA H200", one)
    assert file_of(folder, "NVIDIA H200", h200) != file_of(folder, "NVIDIA H200", one)
    assert file_of(folder, "NVIDIA H200", modify(h200, scale=["nvlink=1/2"])) != file_of(folder, "NVIDIA H200", h200)


def test_a_plan_takes_the_rows_that_it_has_packings_for() -> None:
    h200 = machine("hgx-h200")
    plan = make_plan(h200, gpus="onehop", collectives=("allreduce", "allgather"))
    got = taken(plan, table(SLOTS), h200)
    assert [r for r in got.rules if r.collective == "allreduce"] == [SLOTS]
    assert [r for r in got.rules if r.collective == "allgather"] == [
        r for r in plan.rules if r.collective == "allgather"
    ]
    with pytest.raises(PlanError, match="names scheme 'ring'"):
        taken(plan, table(replace(SLOTS, scheme="ring")), h200)
    assert issubclass(PlanError, BlinkError)


def test_beside_a_model_a_tables_rows_have_few_ctas() -> None:
    told = modify(machine("hgx-h200"), gpus="0,1,2,3")
    plan = make_plan(told, gpus="onehop", collectives=("allreduce", "allgather"))
    direct = Rule("allreduce", 0, "onehop", 32 * KIB, 4, protocol="direct", ctas=128, registered=True)
    chain = replace(direct, min_bytes=64 * MIB, scheme="chain", protocol="rs_ag", ctas=0)
    gathers = [replace(row, collective="allgather") for row in (direct, replace(chain, protocol="slots"))]
    again = replace(gathers[0], min_bytes=256 * MIB)
    tuned = table(SLOTS, direct, chain, *gathers, again)
    assert {*taken(plan, tuned, told).rules} == {*tuned.rules}
    few = taken(plan, tuned, told, max_ctas=32).rules
    assert {*few} == {SLOTS, *(replace(r, ctas=32) for r in (direct, gathers[0], again)), gathers[1]}
    assert {*taken(plan, tuned, told, max_ctas=64).rules} == {*tuned.rules}, "enough for slots"


@pytest.mark.parametrize(("collective", "schemes"), [("reduce", {"onehop", "chain"}), ("allreduce", ALL)])
def test_the_same_trees_are_measured_once(collective: Collective, schemes: set[str]) -> None:
    told = modify(machine("hgx-h200"), gpus="0,1,2,3")
    gpus = SimpleNamespace(plans=make_plan(told, gpus="onehop"), machine=told, emulated=False)
    call = Call(collective, 4, (1 << 24,), "bfloat16", "sum", 0 if collective == "reduce" else -1)
    found = list(candidates(gpus, call, registered=True))  # type: ignore[arg-type]
    assert {rule.scheme for rule in found} == schemes
    assert len(set(found)) == len(found)
    by_two = {rule.scheme for rule in found if rule.protocol == "rs_ag"}
    assert by_two == ({"onehop", "chain"} if collective == "allreduce" else set())


def test_algorithms_are_measured_beside_the_trees_and_a_table_keeps_those_that_it_chooses() -> None:
    told = modify(machine("hgx-h200"), gpus="0,1,2,3")
    plan = make_plan(told, gpus="onehop", collectives=("allreduce", "allgather"))
    ring, pairs, bruck = library.ring(4), library.all_pairs(4), library.bruck_allgather(4)
    plan = with_algorithms(plan, [ring, pairs, bruck], {})
    gpus = SimpleNamespace(plans=plan, machine=told, emulated=False)
    call = Call("allreduce", 4, (1 << 22,), "float32", "sum")
    found = [rule for rule in candidates(gpus, call, registered=False) if rule.scheme.startswith("lang:")]  # type: ignore[arg-type]
    assert {rule.scheme for rule in found} == {"lang:ring", "lang:all_pairs"}
    assert {rule.protocol for rule in found} == {"slots"}
    assert len({rule.chunk_bytes for rule in found}) > 1

    chosen = replace(found[0], scheme="lang:ring", reason="measured by blinkmpi tune")
    kept = table(Rule("allgather", 0, "onehop", 64 * KIB, 4)).joined([chosen], plan.algorithms)
    assert kept.algorithms == (ring,)
    assert TunedTable.from_json(kept.to_json(), source="kept") == kept
    later = taken(make_plan(told, gpus="onehop", collectives=("allreduce",)), kept, told)
    assert later.rule("allreduce", 1 << 20).scheme == "lang:ring"
    assert later.algorithm("allreduce", -1, "lang:ring") == ring
    assert taken(make_plan(told, gpus="onehop", collectives=("broadcast",)), kept, told).algorithms == ()
    assert kept.joined([SLOTS]).algorithms == (), "no row names it any more"


# ---------------------------------------------------------------- the chunk


def settled(times: dict[int, float], *, highest: int = MIB, step: int = 32 * KIB) -> tuple[int, int]:
    """(chunk, calls) that a search ends with, where a call takes ``times`` by chunk; between them, on a line."""

    def seconds(chunk: int) -> float:
        below = max(c for c in times if c <= chunk)
        above = min((c for c in times if c >= chunk), default=below)
        share = (chunk - below) / (above - below) if above > below else 0.0
        return times[below] + share * (times[above] - times[below])

    search = ChunkSearch(32 * KIB, highest, step)
    for calls in range(1, 1000):
        search.learn(seconds(search.chunk))
        assert 32 * KIB <= search.chunk <= highest
        if search.done:
            search.learn(0.0)
            return search.chunk, calls
    raise AssertionError("never settles")


def test_the_chunk_with_the_shortest_calls_is_found() -> None:
    valley = {32 * KIB: 8.0, 64 * KIB: 6.0, 128 * KIB: 5.0, 256 * KIB: 4.0, 512 * KIB: 6.0, MIB: 9.0}
    assert settled(valley)[0] == 256 * KIB
    assert settled({32 * KIB: 1.0, MIB: 5.0})[0] == 32 * KIB, "no larger chunk helps"
    falling = {32 * KIB: 32.0, 64 * KIB: 16.0, 128 * KIB: 8.0, 256 * KIB: 4.0, 512 * KIB: 2.0, MIB: 1.0}
    assert settled(falling)[0] == MIB
    assert settled(falling, highest=128 * KIB)[0] == 128 * KIB, "no more than there is room for"
    between = {32 * KIB: 8.0, 64 * KIB: 6.0, 128 * KIB: 4.0, 192 * KIB: 2.0, 224 * KIB: 2.5, 256 * KIB: 3.0, MIB: 9.0}
    assert settled(between)[0] == 192 * KIB, "found on the way down"
    little = {32 * KIB: 8.0, 64 * KIB: 6.0, 128 * KIB: 4.0, 160 * KIB: 2.96, 224 * KIB: 2.98, 256 * KIB: 3.0, MIB: 9.0}
    assert settled(little)[0] == 160 * KIB, "on the way down a little faster is faster"


@given(st.lists(st.floats(0.001, 10.0), min_size=6, max_size=6))
def test_a_search_ends_and_never_with_a_chunk_that_was_worse_than_the_first(times: list[float]) -> None:
    by_chunk = {32 * KIB << i: t for i, t in enumerate(times)}
    chunk, calls = settled(by_chunk)
    assert calls < 150
    if chunk in by_chunk:
        assert by_chunk[chunk] <= by_chunk[32 * KIB]


def test_one_slow_call_is_forgiven() -> None:
    search = ChunkSearch(32 * KIB, MIB, 32 * KIB)
    for seconds in (9.0, 1.0, 9.0):
        search.learn(seconds)
    for seconds in (9.0, 0.5, 9.0):  # the fastest of three counts
        search.learn(seconds)
    assert search.best == 64 * KIB
    assert ChunkSearch(32 * KIB, 32 * KIB, 32 * KIB).done, "nothing to look for"


def test_lines_are_tried_where_nvlink_alone_leads() -> None:
    told = modify(machine("hgx-h200"), gpus="0,1,2,3")
    by_pcie = replace(told, links=tuple(replace(link, kind="pcie") for link in told.links))
    call = Call("reduce", 4, (1 << 16,), "float32", "sum", 0)
    for topology, wanted in ((told, {"ll128_one_shot", "ll128_two_shot"}), (by_pcie, set())):
        protocol = SimpleNamespace(plans=make_plan(topology, gpus="onehop"), machine=topology, emulated=False)
        found = {rule.protocol for rule in candidates(protocol, call, registered=True)}  # type: ignore[arg-type]
        assert {name for name in found if name.startswith("ll128")} == wanted
        assert found >= {"direct", "slots"}
