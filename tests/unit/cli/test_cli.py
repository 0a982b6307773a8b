"""The commands: what they print, what they write, how they fail."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from blinkmpi import lang
from blinkmpi.cli import main as cli
from blinkmpi.cli import simulate
from blinkmpi.errors import PlanError
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.planner import make_plan
from blinkmpi.program.interpreter import run
from blinkmpi.topology.importers import modify
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from tests import harness


def report(blink: Any, text: str) -> dict[str, Any]:
    code, out, err = blink(f"plan {text} --json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("command", ["plan {} --collective broadcast --root 3", "explain {} --bytes 1M"])
def test_ranks_of_a_part_are_named_as_the_machines_gpus(blink: Any, command: str) -> None:
    code, out, err = blink(command.format("dgx-1v --gpus 0,1,2,4,5,6"))
    assert (code, err) == (0, "")
    assert "ranks       0 to 5 are GPU 0, GPU 1, GPU 2, GPU 4, GPU 5, GPU 6" in " ".join(out.splitlines())
    if command.startswith("plan"):
        assert "broadcast from GPU 4" in out
        trees = re.findall(r"^ +\d+ +\S+ +\S+ +\d+ +(\d) +(\S.*)$", out, re.MULTILINE)
        assert trees, out
        assert {root for root, _ in trees} == {"4"}
        assert set(re.findall(r"\d", " ".join(edges for _, edges in trees))) == set("012456")


def test_ranks_of_a_whole_machine_need_no_other_names(blink: Any) -> None:
    _, out, _ = blink("plan dgx-1v --collective broadcast --root 3")
    assert "broadcast from rank 3" in out
    assert "are GPU" not in out


@pytest.mark.parametrize(("flags", "rate", "most"), [
    ("dgx-1v --collective broadcast --root 0", 150.0, 6),
    ("dgx-1v --gpus 0,1,2,3,4,5,6 --collective allreduce", 75.0, 99),
    ("dgx-1v --gpus 1,4,5,6 --collective all_reduce", 50.0, 99),
    ("dgx-1p --collective Bcast", 80.0, 6),
])  # fmt: skip
def test_plan_reports_rate_bound_and_trees(blink: Any, flags: str, rate: float, most: int) -> None:
    found = report(blink, flags)
    assert found["rate_gbps"] == found["bound_gbps"] == rate
    assert found["optimal"] is True
    assert len(found["trees"]) <= most
    assert sum(tree["weight_gbps"] for tree in found["trees"]) == pytest.approx(rate)
    assert sum(Fraction(tree["share"]) for tree in found["trees"]) == 1
    for tree in found["trees"]:
        reached = [tree["root"], *(dst for _, dst in tree["edges"])]
        assert sorted(reached) == list(range(found["ranks"])), "edges point away from the root, to everybody once"
        assert all(src in reached[: i + 1] for i, (src, _) in enumerate(tree["edges"]))
    assert found["certificate"]["text"]
    assert found["seconds"] > 0


@pytest.mark.parametrize("text", ["dgx-a100:2 --collective allgather", "pcie-8 --collective allreduce"])
def test_loads_can_be_worked_out_from_the_report(blink: Any, text: str) -> None:
    found = report(blink, text)
    topology = machine(text.split()[0])
    room = {(k.src, k.dst): k.mbps / 1000 for k in topology.links}
    loads: Counter[tuple[int, int]] = Counter()
    for tree in found["trees"]:
        assert [[path[0], path[-1]] for path in tree["paths"]] == tree["edges"]
        up = tree.get("up_paths") or [path[::-1] for path in tree["paths"]]
        for path in (*tree["paths"], *(up if found["collective"] == "allreduce" else ())):
            for hop in pairwise(path):
                loads[hop] += tree["weight_gbps"]
    assert max(load / room[hop] for hop, load in loads.items()) == pytest.approx(1)


def test_the_report_has_its_format_and_rootless_collectives_have_root_minus_one(blink: Any) -> None:
    found = report(blink, "dgx-a100 --collective allgather")
    assert (found["format"], found["version"], found["root"], found["ranks"]) == ("blinkmpi.plan-report", 1, -1, 8)
    assert {tree["root"] for tree in found["trees"]} == set(range(8))
    for root in range(8):
        assert sum(Fraction(t["share"]) for t in found["trees"] if t["root"] == root) == 1


def test_plan_without_a_collective_is_a_table_of_all(blink: Any) -> None:
    code, out, _ = blink("plan dgx-1v --gpus 1,4,5,6")
    assert code == 0
    for word in ("broadcast from 0", "allreduce", "scatter from 0", "50", "yes", "nvlink"):
        assert word in out
    assert all(len(line) <= 100 for line in out.splitlines())
    plans = report(blink, "cpu:3")["plans"]
    assert [p["collective"] for p in plans][:3] == ["broadcast", "reduce", "allreduce"]


def test_methods_are_taken_or_refused(blink: Any) -> None:
    assert report(blink, "cpu:4 --collective allreduce --method chain")["scheme"] == "chain"
    code, out, err = blink("plan cpu:4 --collective allreduce --method magic")
    assert (code, out) == (2, "")
    assert err.startswith("blinkmpi: error: method 'magic' cannot plan allreduce on cpu:4")


@pytest.mark.parametrize(("flags", "method", "trees", "depth", "rate"), [
    ("--max-trees 2", "few", 2, 7, 100),
    ("--max-depth 3", "few", 5, 3, 125),
    ("--max-trees 3 --max-depth 3", "few", 3, 3, 75),
    ("--method rings", "rings", 6, 7, 150),
    ("--method hybrid --bytes 64M --switch-seconds 0.0001", "hybrid", 8, 7, 160),
    ("--epsilon 1/10", "mwu", 200, 7, 135),
    ("--method mwu+ilp --epsilon 0.1 --loss 0.1", "mwu+ilp", 12, 7, 120),
    ("--loss 1/10", "mwu+ilp", 12, 7, 125),
])  # fmt: skip
def test_limits_and_other_methods(blink: Any, flags: str, method: str, trees: int, depth: int, rate: float) -> None:
    found = report(blink, f"dgx-1v --collective broadcast {flags}")
    assert found["method"] == method
    assert found["reason"].startswith(f"{method}: ")
    assert len(found["trees"]) <= trees
    assert found["depth"] == max(tree["depth"] for tree in found["trees"]) <= depth
    assert rate <= found["rate_gbps"] <= found["bound_gbps"]
    assert Fraction(found["of_bound"]) == pytest.approx(found["rate_gbps"] / found["bound_gbps"])


def test_a_method_plans_what_it_can_of_all_collectives(blink: Any) -> None:
    found = report(blink, "dgx-1v --method mwu")
    assert [p["collective"] for p in found["plans"]] == ["broadcast", "reduce", "allreduce"]
    assert set(found["left_out"]) == {"allgather", "reduce_scatter", "gather", "scatter", "alltoall"}
    assert "not by this method: allgather" in blink("plan dgx-1v --method mwu")[1]
    assert blink("plan dgx-1v --method magic")[0] == 2


def test_a_plan_as_a_program_runs(blink: Any, tmp_path: Path) -> None:
    code, out, _ = blink("plan dgx-1v --collective allreduce --lang")
    assert code == 0
    (tmp_path / "mine.py").write_text(out)
    made = lang.load(f"{tmp_path}/mine.py:trees", 8)
    assert made.simulate(machine("dgx-1v"), 1 << 28).algbw > 60


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["broadcast", "allreduce", "allgather", "alltoall"])
def test_the_front_is_one(blink: Any, collective: str) -> None:
    found = report(blink, f"dgx-1p --collective {collective} --pareto")
    points = [(len(p["trees"]), p["depth"], -Fraction(p["of_bound"])) for p in found["pareto"]]
    assert points == sorted(points)
    for i, p in enumerate(points):
        assert not any(all(x <= y for x, y in zip(q, p, strict=True)) for j, q in enumerate(points) if j != i)
    assert found["rate_gbps"] == max(p["rate_gbps"] for p in found["pareto"])
    code, out, _ = blink(f"plan dgx-1p --collective {collective} --pareto")
    assert code == 0
    assert "few, shallow, fast" in out


def test_a_limit_of_hops_is_kept_by_every_collective(blink: Any) -> None:
    found = report(blink, "dgx-1v --gpus 0-3 --max-depth 2")
    assert found["left_out"] == {}
    assert {p["method"] for p in found["plans"]} == {"few", "shallow"}
    assert all(p["depth"] <= 2 for p in found["plans"])


def test_plan_writes_a_whole_plan_that_fits_its_machine_and_no_other(blink: Any, tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    assert [blink(f"plan dgx-1v --gpus 1,4,5,6 -o {f}")[0] for f in (a, b)] == [0, 0]
    assert a.read_bytes() == b.read_bytes()
    plan = Plan.from_json(a.read_text())
    plan.check(modify(machine("dgx-1v"), gpus="1,4,5,6"))
    with pytest.raises(PlanError, match="does not fit"):
        plan.check(machine("dgx-1v"))


@pytest.mark.parametrize("flags", ["--collective broadcast --root 3", "--collective allreduce"])
def test_what_is_shown_is_the_first_packing_of_the_plan(blink: Any, tmp_path: Path, flags: str) -> None:
    """Of a job's plan for one collective and root, and with -o of the plan in the file."""
    file = tmp_path / "plan.json"
    name, root = flags.split()[1], 3 if "root" in flags else -1
    for plan, found in (
        (make_plan(machine("dgx-1v"), collectives=[name], roots=[max(root, 0)]), report(blink, f"dgx-1v {flags}")),
        (None, report(blink, f"dgx-1v {flags} -o {file}")),
    ):
        plan = plan or Plan.from_json(file.read_text())
        packing = plan.packing(name, root, plan.schemes(name, root)[0])
        assert (found["scheme"], found["root"]) == (packing.scheme, root)
        assert [tree["edges"] for tree in found["trees"]] == [[[e.src, e.dst] for e in t.edges] for t in packing.trees]


@pytest.mark.slow
def test_an_alltoall_of_many_ranks_is_shown_along_the_scatters(blink: Any) -> None:
    """No trees of its own are packed for it; the plan of a job has those of the scatters."""
    found = report(blink, "cpu:130 --collective alltoall")
    assert (found["rate_gbps"], found["of_bound"], len(found["trees"])) == (0, "1", 130 * 129)
    assert "along the trees of the scatters" in found["certificate"]["text"]


def test_topo_prints_and_writes_and_reads_back(blink: Any, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    code, out, _ = blink(f"topo dgx-1v --gpus 0-3 --scale nvlink=0.5 -o {file}")
    assert (code, out) == (0, "")
    assert Topology.from_json(file.read_text()).n == 4
    code, out, _ = blink(f"topo {file} --json")
    assert Topology.from_json(out) == Topology.from_json(file.read_text())
    code, out, _ = blink(f"topo {file}")
    assert "GPU 3" in out
    assert report(blink, f"{file} --collective broadcast")["rate_gbps"] == 37.5 * 4 / 3


def test_dropped_links_change_the_plan(blink: Any) -> None:
    whole, less = (report(blink, f"dgx-1v --collective allreduce {f}") for f in ("", "--drop-link 0-3 --drop-link 0-4"))
    assert less["rate_gbps"] < whole["rate_gbps"]


def test_subsets_prints_and_writes(blink: Any, tmp_path: Path) -> None:
    file, picture = tmp_path / "s.json", tmp_path / "s.svg"
    code, out, _ = blink(f"subsets dgx-1v --gpus 0-4 --pcie 5 -o {file} --plot {picture}")
    assert (code, out) == (0, "")
    found = json.loads(file.read_text())
    assert (found["format"], found["version"], found["pcie_gbps"]) == ("blinkmpi.subsets", 1, 5.0)
    last = found["subsets"][-1]
    assert (last["gpus"], last["rings"], last["speedup"]["broadcast"]) == ([0, 1, 2, 3, 4], 0, 10.0)
    assert found["sizes"]["2"]["speedups"]["allreduce"] == {"least": 1.0, "mean": 1.0, "most": 1.0}
    assert picture.read_text().count("<svg") == 1
    code, out, _ = blink("subsets dgx-1v --gpus 0-4")
    assert code == 0
    for word in ("0,1,2,3,4", "PCIe", "no ring", "3-5"):
        assert word in out
    assert all(len(line) <= 100 for line in out.splitlines())
    assert json.loads(blink("subsets dgx-1v --gpus 0,1 --json")[1])["from_3"] is None


def test_explain_says_it_in_text_and_json(blink: Any) -> None:
    code, out, _ = blink("explain cpu:4 --collective reduce_scatter --bytes 1M --dtype half")
    assert code == 0
    assert out.startswith("reduce_scatter of 1 MiB, float16 sum, 4 ranks on cpu:4")
    code, out, _ = blink("explain dgx-a100 --collective broadcast --root 3 --bytes 64K --json")
    found = json.loads(out)
    assert (found["format"], found["root"], found["nbytes"]) == ("blinkmpi.explanation", 3, 65536)
    assert found["chosen"]["seconds"] > 0


@pytest.mark.parametrize(
    "collective", ["bcast", "reduce", "allreduce", "allgather", "reduce_scatter", "gather", "scatter"]
)
@pytest.mark.parametrize(("dtype", "op"), [("float", "sum"), ("bfloat16", "avg"), ("int32", "max")])
def test_simulate_runs_the_program_and_finds_every_element_right(
    blink: Any, collective: str, dtype: str, op: str
) -> None:
    code, out, _ = blink(
        f"simulate dgx-1v --gpus 0-3 --collective {collective} --bytes 100K --dtype {dtype} --op {op} --root 2 --json"
    )
    found = json.loads(out)
    assert (code, found["wrong"]) == (0, 0)
    assert found["seconds"] > 0
    assert max(row["seconds"] for row in found["busy"]) <= found["seconds"]


@pytest.mark.slow
def test_explain_and_simulate_obey_the_variables_that_jobs_obey(blink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = "dgx-1v --bytes 1M --dtype bfloat16"

    def simulated() -> dict[str, Any]:
        code, out, err = blink(f"simulate {call} --json")
        assert (code, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    usual = simulated()
    monkeypatch.setenv("BLINKMPI_WIRE", "operand")
    assert simulated()["seconds"] < usual["seconds"]
    assert "rounded to the call's type on each hop" in blink(f"explain {call}")[1]
    assert "on each hop" not in blink(f"explain {call.replace('bfloat16', 'float32')}")[1]
    monkeypatch.setenv("BLINKMPI_ALGO", "allreduce:trees;broadcast:lang:nope")
    assert "nope" in blink(f"explain {call}")[2]
    monkeypatch.setenv("BLINKMPI_ALGO", "allreduce:trees")
    assert simulated()["scheme"] == "trees" != usual["scheme"]
    assert re.search(r"runs as +trees.*why +BLINKMPI_ALGO", blink(f"explain {call}")[1], re.DOTALL)
    monkeypatch.setenv("BLINKMPI_ALGO", "allreduce:lang:ring")
    assert simulated()["scheme"] == "lang:ring"
    assert re.search(r"runs as +lang:ring.*why +BLINKMPI_ALGO", blink(f"explain {call}")[1], re.DOTALL)


def test_simulate_notices_a_wrong_program(blink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*args: Any) -> Any:
        found: Any = run(*args)
        found[1][7] += 1
        return found

    monkeypatch.setattr(simulate.interpreter, "run", spoiled)
    code, out, _ = blink("simulate cpu:3 --bytes 4K")
    assert code == 1
    assert "1 ELEMENTS WRONG" in out


def test_simulate_prints_bars_and_does_not_run_large_vectors(blink: Any) -> None:
    code, out, _ = blink("simulate pcie-8 --bytes 1G")
    assert code == 0
    for word in ("not run: more than 16 MiB", "predicted", "busbw", "PLX 0 (pcie)", "━━━"):
        assert word in out
    assert all(len(line) <= 100 for line in out.splitlines())
    assert blink("simulate cpu:2 --collective barrier")[0] == blink("simulate cpu:1 --bytes 1K")[0] == 0


@pytest.mark.parametrize(("text", "message"), [
    ("topo nowhere", "unknown machine 'nowhere'"),
    ("plan dgx-1v --collective frob", "collective 'frob' is unknown"),
    ("plan dgx-1v --root 8 --collective reduce", "root 8: dgx-1v has ranks 0..7"),
    ("explain dgx-1v --root -1 --collective bcast", "root -1: dgx-1v has ranks 0..7"),
    ("simulate dgx-1v --bytes 12X", "size '12X'"),
    ("simulate dgx-1v --dtype float8", "datatype 'float8'"),
    ("simulate dgx-1v --op median", "op 'median'"),
    ("plan dgx-1v --gpus 0,0", "dgx-1v: cannot take devices"),
    ("plan dgx-1v --drop-link 0-7", "dgx-1v: no link between 0 and 7"),
    ("plan dgx-1v --collective bcast --epsilon x", "--epsilon: 'x' is no number"),
    ("plan dgx-1v --collective bcast --epsilon 1/0", "--epsilon: '1/0' is no number"),
    ("plan dgx-1v --collective bcast --bytes x", "--bytes: size 'x'"),
    ("plan dgx-1v --trees", "--trees is for --diff A B"),
    ("plan dgx-1v --collective bcast --epsilon 2", "epsilon is 2, expected a part of the rate"),
    ("plan dgx-1v --collective bcast --max-trees two", "--max-trees: 'two' is no whole number"),
    ("plan dgx-1v --collective bcast --max-trees 0", "max_trees is 0, expected at least 1"),
    ("plan dgx-1v --collective bcast --max-trees 2 --method exact", "--max-trees is for method few, not for exact"),
    ("plan dgx-1v --collective bcast --max-trees 2 --loss 0.1", "--loss is for method mwu+ilp, not for those"),
    ("plan dgx-1v --pareto", "--pareto is for one collective"),
    ("plan dgx-1v --plot x.svg", "--plot is for one collective"),
    ("plan dgx-1v --lang", "--lang is for one collective"),
    ("plan dgx-1v --collective bcast --lang --json", "--lang prints one program; leave --pareto and --json out"),
    ("plan dgx-a100:8 --collective allgather --pareto", "--pareto: few and shallow trees for allgather"),
    ("plan cpu:4 --collective bcast --pareto", "--pareto: few and shallow trees for broadcast on cpu:4"),
    ("plan dgx-1v --collective bcast --plot x.doc", "cannot draw 'x.doc': expected a name that ends in .svg"),
    ("plan dgx-1v --collective bcast --plot /nowhere/x.svg", "cannot write '/nowhere/x.svg'"),
    ("subsets dgx-1v --plot x", "cannot draw 'x'"),
    ("subsets dgx-1v --pcie 0", "--pcie '0': expected GB/s above 0"),
    ("subsets dgx-1v --pcie x", "--pcie: 'x' is no number"),
    ("subsets dgx-1v --gpus 0", "dgx-1v[0] has 1 rank; subsets are listed for 2 to 10"),
    ("simulate dgx-1v --dtype all", "datatype 'all' is unknown; use one of int8, uint8, int32, uint32, int64, uint64, "
     "half, float, double, bfloat16\n"),
    ("subsets mi250", "mi250 has 16 ranks; subsets are listed for 2 to 10"),
    ("subsets cpu:4", "cpu:4: ranks joined by memory"),
    ("subsets pcie-8", "pcie-8: ranks joined by memory or by switches behind switches"),
    ("topo dgx-1v -o /nowhere/at/all", "cannot write '/nowhere/at/all'"),
])  # fmt: skip
def test_errors_are_one_line_and_code_2(blink: Any, text: str, message: str) -> None:
    code, out, err = blink(text)
    assert (code, out) == (2, "")
    assert err.startswith(f"blinkmpi: error: {message}")
    assert err.count("\n") == 1


def test_version_and_help(blink: Any) -> None:
    assert blink("--version")[:2] == (0, "blinkmpi 0.2.0\n")
    code, out, _ = blink("--help")
    assert code == 0
    assert all(name in out for name in ("topo", "plan", "explain", "simulate", "subsets", "bench"))
    assert blink("frob")[0] == 2


def test_under_a_launcher_rank_0_alone_answers(blink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    for text in ("topo cpu:2", "plan nowhere", "frob", "--help"):
        assert blink(text) == (0, "", "")


def test_a_machine_from_the_catalogue_needs_no_mpi() -> None:
    text = (
        "import sys; sys.modules['mpi4py'] = None; from blinkmpi.cli.main import main; "
        "code = main(['plan', 'dgx-1v', '--collective', 'broadcast', '--json']); "
        "sys.exit(code or 'rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rate_gbps"] == 150.0


def test_python_m_blinkmpi_is_the_command() -> None:
    words = [sys.executable, "-m", "blinkmpi", "topo", "cpu:2", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert Topology.from_json(done.stdout).n == 2


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_without_a_machine_the_ranks_are_the_machine(n: int) -> None:
    words = [sys.executable, "-m", "blinkmpi", "plan", "--collective", "allreduce", "--json"]
    outcome = harness.run_command(n, words, timeout=60, cwd=harness.ROOT)
    assert outcome.rc == 0, outcome
    found = json.loads(outcome.output)  # printed once
    assert found["ranks"] == n


def test_an_error_of_the_live_machine_is_printed_once_and_is_the_jobs_code() -> None:
    words = [sys.executable, "-m", "blinkmpi", "plan", "--gpus", "0,9"]
    outcome = harness.run_command(2, words, timeout=60, cwd=harness.ROOT)
    assert outcome.rc == 2, outcome
    assert (outcome.output).count("blinkmpi: error: cpu:2: cannot take devices [0, 9]") == 1


def test_shares_are_percentages_in_tables_and_fractions_in_json(blink: Any, tmp_path: Path) -> None:
    words = "plan dgx-1v --gpus 1-7 --collective allreduce"
    told = json.loads(blink(f"{words} --json")[1])
    assert all(Fraction(tree["share"]) and "/" in tree["share"] for tree in told["trees"])
    for more in ("", " --pareto"):
        out = blink(words + more)[1]
        assert "%" in out
        assert not re.search(r"\d/\d", out.partition("tree")[2]), out
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    blink(f"plan dgx-1v -o {files[0]}")
    blink(f"plan dgx-1v --drop-link 0-3 -o {files[1]}")
    rows = [line for line in blink(f"plan --diff {files[0]} {files[1]} --trees")[1].splitlines() if "tree" in line]
    assert any("33.3%" in row for row in rows)
    found = json.loads(blink(f"plan --diff {files[0]} {files[1]} --json")[1])
    assert "1/3" in json.dumps(found)


def test_a_rate_and_a_switch_are_flags_of_commands_that_take_a_machine(blink: Any, tmp_path: Path) -> None:
    file = tmp_path / "visible.txt"
    rows = "".join(f"GPU{i}\t" + "\t".join("X" if i == j else "NV6" for j in range(3)) + "\n" for i in range(3))
    file.write_text("\tGPU0\tGPU1\tGPU2\n" + rows)
    _, out, err = blink(f"plan {file} --collective broadcast --json")
    assert json.loads(out)["bound_gbps"] == 300
    assert "blinkmpi: visible.txt: NV6 between every two GPUs is read as direct links" in err
    _, out, err = blink(f"plan {file} --collective broadcast --json --switch --rate nvlink=20")
    assert json.loads(out)["bound_gbps"] == 120
    assert err == ""
    assert "2 x 21 = 42 GB/s" in blink("topo dgx-1v --rate nvlink=21 --gpus 0-1,3")[1]
    for command in ("explain", "simulate", "advise --take 2", "subsets"):
        assert "rate 'wire=1': expected KIND=GB/s" in blink(f"{command} dgx-1v --rate wire=1")[2]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_ends_with_examples_that_can_be_parsed(blink: Any, name: str) -> None:
    code, out, _ = blink(f"{name} -h")
    assert code == 0
    told = out.partition("\nexamples:\n")[2].partition("\n\n")[0].splitlines()
    examples = [shlex.split(line) for line in told if "$(" not in line]
    assert examples, "no example"
    for words in examples:
        mine = next(i for i, word in enumerate(words) if word == "blinkmpi") + 1
        assert cli.parsed(words[mine:]).command == name


def completions(line: str, tmp_path: Path) -> list[str]:
    """What the shell is told of a line at whose end a user types TAB."""
    found = tmp_path / "found"
    env = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n",
           "_ARGCOMPLETE_STDOUT_FILENAME": str(found)}  # fmt: skip
    argv = [sys.executable, "-m", "blinkmpi"]
    done = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [word.strip() for word in found.read_text().split("\n")]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "wanted"), [
    ("blinkmpi exp", ["explain"]),
    ("blinkmpi plan --coll", ["--collective"]),
    ("blinkmpi topo dgx-1", ["dgx-1p", "dgx-1v"]),
    ("blinkmpi launch --mpi s", ["srun"]),
])  # fmt: skip
def test_the_shell_completes_commands_flags_and_machines(line: str, wanted: list[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete", reason="argcomplete is an extra: pip install 'blinkmpi[completion]'")
    assert completions(line, tmp_path) == wanted


def test_without_argcomplete_a_shell_that_asks_gets_the_remedy_and_no_command_runs(
    blink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    code, out, err = blink("topo dgx-1v")
    assert (code, out) == (1, "")
    assert "pip install 'blinkmpi[completion]'" in err


@pytest.mark.parametrize("wrong", ["plan dgx-1v --root one", "topo --scale", "bench -z 7", "launch --mpi x"])
def test_a_wrong_flag_shows_the_usage_of_its_own_command(blink: Any, wrong: str) -> None:
    code, _, err = blink(wrong)
    name = wrong.split()[0]
    assert code == 2
    assert err.startswith(f"usage: blinkmpi {name} ")
    assert f"\nblinkmpi {name}: error: argument " in err
