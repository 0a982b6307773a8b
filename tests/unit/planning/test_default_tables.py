"""The default rows that come from trials lie in files of the format of ``blinkmpi tune``, and are taken as they are."""

from importlib.resources import files
from itertools import groupby, pairwise

import pytest
from msgspec.structs import replace

from benchmarks.default_tables import default_of, differences
from blinkmpi.errors import FormatError
from blinkmpi.planning.default_tables import default_table
from blinkmpi.planning.memory_rows import without_shots
from blinkmpi.planning.plan import PACKETS, Rule
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.tuned_table import TunedTable, taken
from blinkmpi.topology import machine, modify
from blinkmpi.topology.live import ProcessInfo, cpu_topology
from tests.harness import ROOT

FILES = sorted(file.name for file in files("blinkmpi.planning").joinpath("tables").iterdir())
FOUR = modify(machine("hgx-h200"), gpus="0-3")


def text_of(name: str) -> str:
    return files("blinkmpi.planning").joinpath("tables", name).read_text("utf-8")


@pytest.mark.parametrize("name", FILES)
def test_a_table_is_as_tune_would_write_it(name: str) -> None:
    table = TunedTable.from_json(text_of(name), source=name)
    assert table.to_json() == text_of(name)
    assert name.endswith(f"-x{table.ranks}.json")
    kinds = [kind for kind, _ in groupby(table.rules, key=lambda r: (r.collective, r.registered, r.widened))]
    assert len(kinds) == len(set(kinds)), "the rows of a kind stand together"
    for _, some in groupby(table.rules, key=lambda r: (r.collective, r.registered, r.widened)):
        rows = [*some]
        assert rows[0].min_bytes == 0
        assert all(a.min_bytes < b.min_bytes for a, b in pairwise(rows)), "ascending, each once"
        packets = [row.protocol in PACKETS for row in rows]
        assert packets == sorted(packets, reverse=True), "packets carry what is short"


def test_a_row_is_a_line() -> None:
    table = default_table("nvlink", 4)
    rows = [line for line in table.to_json().splitlines() if line.startswith("  {")]
    assert len(rows) == len(table.rules)
    assert TunedTable.from_json(replace(table, rules=()).to_json()) == replace(table, rules=())


@pytest.mark.parametrize(("n", "ranks"), [(2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (72, 8)])
def test_the_table_is_that_for_the_fewest_ranks_that_are_enough(n: int, ranks: int) -> None:
    assert default_table("nvlink", n).ranks == default_table("other", n).ranks == ranks


def test_a_plan_has_the_rows_of_its_table() -> None:
    rules = make_plan(FOUR, gpus="onehop").rules
    assert {*default_table("nvlink", 4).rules} <= {*rules}
    assert {row.collective for row in rules} - {row.collective for row in default_table("nvlink", 4).rules} == {
        "barrier", "scan", "exscan",
    }  # fmt: skip


def test_more_gpus_than_were_tried_take_packets_as_long_as_kernels_make_them_the_fastest() -> None:
    plan = make_plan(machine("hgx-h200"), gpus="onehop", collectives=["allreduce"])
    shipped = default_table("nvlink", 8).rules
    assert not [row for row in shipped if row.protocol in PACKETS]
    rows = plan.rows("allreduce")[True]
    packets = [row for row in rows if row.protocol in PACKETS]
    assert packets
    assert {row.reason for row in packets} == {"default: by what kernels cost, on fewer GPUs"}
    assert rows[: -len(packets)][0] in shipped
    assert "expected" in rows[: -len(packets)][-1].reason


def test_rows_whose_scheme_a_plan_lacks_go_by_one_hop() -> None:
    """Of 9 GPUs on NVSwitches no trees but stars are packed for an allgather; the table names them for long ones."""
    nine = modify(machine("dgx-2"), gpus="0-8")
    plan = make_plan(nine, gpus="onehop", collectives=["allgather"])
    assert "trees" in {row.scheme for row in default_table("nvlink", 9).rules if row.collective == "allgather"}
    assert "trees" not in plan.schemes("allgather")
    rows = plan.rows("allgather")[False]
    assert {row.scheme for row in rows} == {"onehop"}
    assert [row.protocol for row in rows] == ["slots", "ll128_one_shot", "ll16_one_shot"]


@pytest.mark.parametrize("nbytes", [1 << 20, 100 << 20])
def test_a_last_row_without_a_scheme_leaves_longer_vectors_to_the_plan(nbytes: int) -> None:
    plan = make_plan(FOUR, gpus="onehop", collectives=["reduce"])
    short = Rule("reduce", 0, "onehop", 1 << 14, 4, "measured")
    table = TunedTable("GPU", 4, FOUR.name, "2026-11-29", {}, (short, Rule("reduce", nbytes, "")))
    got = TunedTable.from_json(table.to_json())
    made = taken(plan, got, FOUR)
    assert made.rule("reduce", nbytes - 1) == short
    for size in (nbytes, 2 * nbytes, 1 << 30):
        rule, own = made.rule("reduce", size), plan.rule("reduce", size)
        assert replace(rule, min_bytes=0) == replace(own, min_bytes=0)
        assert rule.min_bytes == max(own.min_bytes, nbytes)
    with pytest.raises(FormatError, match=r"here: rules\[0\], reduce: only the last row may have no scheme"):
        TunedTable.from_json(replace(table, rules=table.rules[::-1]).to_json(), source="here")


def test_what_ranks_leave_to_mpi_is_a_row_and_then_the_plans_own() -> None:
    for kind, n in (("no_cma", 2), ("no_cma", 8), ("nodes", 4)):
        rules = default_table(kind, n).rules  # type: ignore[arg-type]
        assert rules
        assert {(row.scheme, row.min_bytes > 0) for row in rules} == {("mpi", False), ("", True)}
        for short, rest in zip(rules[::2], rules[1::2], strict=True):
            assert short.collective == rest.collective
            assert f"below {rest.min_bytes} bytes" in short.reason
    nodes = [ProcessInfo(f"h{r // 2}", r, f"{r // 2}", (0,), 10_000, r // 2 * 2, 1_000) for r in range(4)]
    plan = make_plan(cpu_topology(nodes), mpi=True)
    for row in default_table("nodes", 4).rules:
        if not row.scheme and row.min_bytes > 2 << 20:  # longer than one shot is
            before, there = (without_shots(plan).rule(row.collective, row.min_bytes - less, root=0) for less in (1, 0))
            assert (before.scheme, there.scheme == "mpi") == ("mpi", False)


def test_a_measured_table_makes_defaults_that_a_plan_can_take() -> None:
    text = (ROOT / "benchmarks/tables/tuned-NVIDIA-H200-x4-4b050a2b8e1b.json").read_text("utf-8")
    tuned = TunedTable.from_json(text)
    made = default_of(tuned)
    assert any(row.scheme == "hybrid" for row in tuned.rules)
    assert not any(row.scheme == "hybrid" for row in made.rules)
    plan = taken(make_plan(FOUR, gpus="onehop"), made, FOUR)
    assert {*made.rules} <= {*plan.rules}
    assert [*differences(made, made)] == []
    assert any(line.startswith("allreduce") for line in differences(default_table("nvlink", 4), made))
