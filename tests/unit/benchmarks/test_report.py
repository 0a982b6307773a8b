"""The performance page: every row of a result is shown, its means are right, and what is missing is said."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.benchmarks.scripts import script


def row(size: int, ours: float, peer: float | None, *, executor: str = "c", name: str = "all_reduce_float_sum") -> Any:
    compare = {"mpi": None if peer is None else {"time": peer, "ratio": peer / ours, "nwrong": 0}}
    result: dict[str, Any] = {"size": size, "type": "float", "redop": "sum", "root": -1, "experiment_name": name}
    result["blinkmpi"] = {"scheme": "direct", "executor": executor}
    for place in ("out_of_place", "in_place"):
        result[place] = {"time": ours, "nwrong": 0}
        result["blinkmpi"][place] = {"compare": compare}
    return result


def document(*rows: Any) -> dict[str, Any]:
    facts = {"ranks": 2, "collective": "allreduce", "compare": ["mpi"], "commit": "0123456789abcdef", "dirty": False}
    args = [".../blinkmpi", "bench", "all_reduce", "--algo", "allreduce:^mpi"]
    return {"args": args, "env": ["BLINKMPI_TIMEOUT=9", "OMPI_X=1"], "results": list(rows), "blinkmpi": facts}


def overview(made: ModuleType, results: Any) -> str:
    """All tables of docs/performance.md."""
    return "\n".join(made.ratio_tables(results).values())


def test_a_report_shows_every_row_and_the_mean_of_the_large_ones() -> None:
    made = script("report")
    page = made.render([
        ("a.json", document(row(1024, 10.0, 5.0), row(1 << 20, 100.0, 200.0), row(4 << 20, 1000.0, 8000.0)))
    ])  # fmt: skip
    assert "| 1 KiB | direct | c | 10.0 | 5.0 | 0.50 | 10.0 | 5.0 | 0.50 | 0 |" in page
    assert "| allreduce | 2 | c | 4.00 | 4.00 | 0 | [a.json](#ajson) |" in page, "geometric mean of 2 and 8"
    assert "`mpirun -np 2 blinkmpi bench all_reduce --algo 'allreduce:^mpi'`" in page
    assert "- settings: `BLINKMPI_TIMEOUT=9`\n" in page
    assert "- commit: `0123456789ab`\n" in page


def test_a_report_keeps_executors_apart_and_says_what_is_missing() -> None:
    made = script("report")
    rows = [row(1024, 10.0, 5.0, executor="mpi"), row(1 << 20, 100.0, 200.0)]
    rows += [row(1024, 10.0, 5.0, executor="mpi"), row(1 << 20, 100.0, None, executor="numpy")]
    rows[-1]["in_place"] = {"cpu_time": 7.0, "nwrong": None}
    blocks = list(made.blocks(document(*rows)))
    assert [(executor, len(found)) for executor, found in blocks] == [("c", 2), ("numpy", 2)]
    page = made.render([("a.json", document(*rows))])
    assert "| 1 MiB | direct | numpy | 100.0 | - | - | 7.0 | - | - | 0 |" in page
    assert "| allreduce | 2 | numpy | - | - | 0 |" in page
    assert "- hardware: unknown processor" in page


def test_a_report_has_gpus_in_a_section_of_their_own() -> None:
    made = script("report")
    rows = [row(1024, 10.0, None), row(1 << 20, 100.0, None)]
    for found in rows:
        found["blinkmpi"] |= {"protocol": "packets", "ctas": 16, "predicted_us": 9.0, "bound_us": None}
        for place in ("out_of_place", "in_place"):
            found[place]["bus_bw"] = 12.34
            time = 4 * found[place]["time"]
            found["blinkmpi"][place]["compare"] = {"nccl": {"time": time, "ratio": 4.0, "nwrong": 0}, "symm_mem": None}
    gpu = document(*rows)
    gpu["env"].append("NCCL_NVLS_ENABLE=0")
    gpu["config"] = {"graph": 4}
    gpu["blinkmpi"] |= {
        "memory": "gpu", "compare": ["nccl", "symm_mem"], "local_register": 2,
        "gpu": {"name": "NVIDIA H200", "driver": "580.1"}, "peers": {"nccl": {"version": "2.28.9"}},
        "refused": {"symm_mem": "it has no such call"},
    }  # fmt: skip
    page = made.render([("a.json", document(row(1 << 20, 100.0, 200.0))), ("g.json", gpu)])
    head, _, part = page.partition("## GPUs")
    assert "a.json" in head
    assert "g.json" not in head
    ratios = "4.00 | 4.00 | 4.00 | 4.00 | 0 | [g.json](#gjson) |"
    assert f"| allreduce | float | 2 | graph, launched 4 times | NCCL without NVLS | {ratios}" in part
    assert "| symm_mem | - | - | - | - | 0 |" in part
    one = "10.0 | 12.3 | 40.0 | 4.00 | N/A | N/A"
    assert f"| 1 KiB | float | sum | direct | packets | 16 | {one} | {one} | 9.0 | - | 0 |" in part
    for line in ("- GPUs: 2 x NVIDIA H200, driver 580.1", "- NCCL without NVLS: version 2.28.9", "`NCCL_NVLS_ENABLE=0`",
                 "- N/A: symm_mem, where it has no such call"):  # fmt: skip
        assert line in part
    assert "## Summary" not in made.render([("g.json", gpu)])
    short = overview(made, [("g.json", gpu)])
    assert "### 2 x NVIDIA H200, in a CUDA graph" in short
    assert (
        "| allreduce | float32 | registered | NCCL without NVLS | 4.00 | 4.00 | [all](measurements.md#gjson) |" in short
    )
    assert "| allreduce | float32 | registered | symm_mem | - | - | [all](measurements.md#gjson) |" in short
    assert made.ratio_tables([("g.json", gpu)])["cpu-ranks"] == "Not measured."
    gpu["env"].remove("NCCL_NVLS_ENABLE=0")
    assert "| allreduce | float32 | registered | NCCL | 4.00 | 4.00 |" in overview(made, [("g.json", gpu)])


def test_the_first_page_marks_what_is_slower() -> None:
    rows = [row(1 << 10, 100.0, 90.0), row(1 << 20, 100.0, 200.0)]
    short = overview(script("report"), [("a.json", document(*rows))])
    assert "| collective | ranks | place | 1 KiB | 1 MiB | file |" in short
    assert "| allreduce | 2 | out of place | *0.90* | 2.00 | [all](measurements.md#ajson) |" in short
    assert "NVIDIA" not in short


def test_a_report_of_nothing_says_so_and_of_something_else_fails(tmp_path: Path) -> None:
    made = script("report")
    (tmp_path / "campaign-cpu.json").write_text(json.dumps({"calls": 7}))  # which holds no times
    assert "No results yet" in made.render(made.read(tmp_path))
    (tmp_path / "x.json").write_text(json.dumps({"results": []}))
    with pytest.raises(made.ReportError, match=r"x\.json.*-J"):
        made.read(tmp_path)


def short(collective: str, size: int, ratio: float, protocol: str = "", place: str = "out_of_place") -> Any:
    side = {"us": 2.0, "wrong": 0}
    how = {"scheme": "direct", "protocol": protocol} if protocol else None
    return {"collective": collective, "size": size, "place": place, "ours": side, "mpi": side, "ratio": ratio} | (
        {"how": how} if how else {}
    )


def test_a_report_marks_short_calls_below_the_goal_and_says_why() -> None:
    made = script("report")
    about = {"goal": 0.97, "hosts": 1, "oversubscribed": False, "load": 0.5, "niceness": 0}
    rows = [short("broadcast", 64, 0.5, "one_shot"), short("broadcast", 65536, 0.9, "cma"), short("barrier", 0, 0.8),
            short("scan", 65536, 0.96, "slots", "in_place"), short("scan", 64, 1.5, "one_shot")]  # fmt: skip
    found = document(*rows) | {"small_calls": about}
    found["blinkmpi"] |= {"hardware": {"cpu": "a processor", "cores_available": 2}}
    assert "communicators made" not in made.render([("small-np2.json", found)])
    found["communicators"] = [short("split", 0, 0.7), short("split", 32, 0.1), short("dup", 0, 0.8)]
    page = made.render([("small-np2.json", found)])
    told = (
        "Split without a call 0.70 (2.0); Split with a call of 32 B on it 0.10 (2.0); Dup without a call 0.80 (2.0)\n"
    )
    assert f"- communicators made and freed, mpi4py's time / ours (ours): {told}" in page
    assert "| broadcast | out of place | **0.50** (2.0) | **0.90** (2.0) |" in page
    assert "| scan | out of place | 1.50 (2.0) | - |" in page
    assert "fewer or for none: broadcast 64 B\n" in page
    assert "what the ranks announced: barrier\n" in page
    assert "as mpi4py's call makes: broadcast 64 KiB\n" in page
    assert "through slots: scan in place 64 KiB\n" in page
    facts = json.loads(made.facts_of([("small-np2.json", found), ("a.json", document())]))
    assert facts["machines"] == {"2x1": "a processor, 2 cores"}
    assert facts["rows"] == {
        "2x1": {"barrier": [[0, 0.8]], "broadcast": [[64, 0.5], [65536, 0.9]], "scan": [[64, 1.5], [65536, 0.96]]}
    }


def on_gpus(kind: str, about: dict[str, Any], *rows: Any) -> dict[str, Any]:
    """A file of a program beside bench, on two GPUs."""
    found = document(*rows) | {kind: about}
    found["blinkmpi"] |= {"memory": "gpu", "gpu": {"name": "NVIDIA H200", "NCCL": "2.28.9"}}
    return found


def test_products_beside_calls_have_a_section_where_there_is_such_a_file() -> None:
    made = script("report")
    side = {"alone_us": 100.0, "beside_us": 150.0, "slowdown": 1.5, "product_beside_us": 1100.0, "wrong": 0,
            "product_slowdown": 1.1, "total_us": 20_000.0, "one_after_another_us": 30_000.0}  # fmt: skip
    row = {"edge": 8192, "dtype": "bfloat16", "bytes": 16 << 20, "max_ctas": 8, "product_us": 1000.0}
    both = {"ours": side, "nccl": {**side, "total_us": 25_000.0, "slowdown": 1.75}}
    spoiled = {"ours": side, "nccl": {"wrong": 3}}
    rows = [{**row, "libraries": both}, {**row, "max_ctas": None, "libraries": spoiled}]
    found = on_gpus("beside_compute", {"high_priority": True, "registered": True, "late_laps": 0}, *rows)
    page = made.render([("beside-compute-gpu-np2.json", found)])
    ours, nccl = "100.0 | 1.50 | 1.10 | 20.00 | 30.00", "100.0 | 1.75 | 1.10 | 25.00 | 30.00"
    assert f"| 8192^3 | bfloat16 | 16 MiB | 8 | 1000 | {ours} | {nccl} | 1.25 | 0 |" in page
    assert f"| 8192^3 | bfloat16 | 16 MiB | default | 1000 | {ours} | - | - | - | - | - | - | 3 |" in page
    assert "- GPUs: 2 x NVIDIA H200, NCCL 2.28.9" in page
    assert "on a stream of a high priority, on registered buffers" in page
    assert "## Matrix products beside AllReduces" not in made.render([("a.json", document())])
    summary = script("pages/summary").table([("beside-compute-gpu-np2", found)])
    assert "8192^3 bfloat16 16M: 8: 1.10 1.50; 1.10 1.75; 1.25 | all: 1.10 1.50; wrong |" in summary


def test_sharded_training_is_shown() -> None:
    made = script("report")
    one = {"step_ms": 80.0, "kernels_ms": {"products": 15.4, "communication": 40.0}, "losses_apart": 0.0,
           "ratio": {"median": 1.0, "low": 1.0, "high": 1.0}}  # fmt: skip
    gated = {**one, "step_ms": 75.5, "kernels_ms": {"products": 16.0, "gates": 30.25},
             "ratio": {"median": 1.06, "low": None, "high": None}, "losses_apart": 1e-3}  # fmt: skip
    row = {"how": "fully_shard", "reduce": "float32", "parameters": 939_500_000, "batch": 2, "length": 1023}
    libraries = {"nccl": one, "blink, gate from 1 MiB": gated}
    found = on_gpus("fsdp", {"repeats": 21}, {**row, "libraries": libraries}) | {"failed": ["blink: losses are apart"]}
    results = [("fsdp-gpu-np2.json", found)]
    page = made.render(results)
    model = "939.5 M parameters, 2 x 1023 tokens | fully_shard | float32"
    assert f"| {model} | nccl | 80.0 | 15.4 | 40.0 | - | 1.000 (1.000 to 1.000) | 0e+00 |" in page
    assert f"| {model} | blink, gate from 1 MiB | 75.5 | 16.0 | - | 30.2 | 1.060 | 1e-03 |" in page
    assert "- failed: blink: losses are apart" in page
    assert "## Sharded training" not in made.render([("a.json", document())])
    summary = script("pages/summary").table(results)
    assert "blink, gate from 1 MiB: 75.5, products 16.0, ratio 1.060" in summary


def test_groups_and_torch_on_gpus_are_shown() -> None:
    made = script("report")
    us = {"group": 10.0, "vector": 8.0, "each": 40.0, "nccl": 15.0}
    row = {"tensors": 10, "bytes": 1024, "us": us, "graph_us": {**us, "group": 5.0}, "wrong": dict.fromkeys(us, 0)}
    groups = on_gpus("groups", {"no_nccl": ""}, row)
    step = {"step_ms": 10.0, "exposed_ms": 1.0, "communication_ms": 2.0, "overlap": 0.5, "weights_differ_by": 0.0}
    libraries = {"blink": step, "nccl": {**step, "step_ms": 12.0}, "hook": {**step, "step_ms": 8.0}}
    trained = {"model": "resnet50", "dtype": "float32", "batch": "64 images", "parameters": 25_600_000,
               "compute_ms": 9.0, "libraries": libraries}  # fmt: skip
    training = on_gpus("training", {"repeats": 11}, trained)
    paced = on_gpus("training", {"emulated": "0,1"}, {**trained, "libraries": {"blink": step, "ring": step}})
    results = [("groups-gpu-np2.json", groups), ("training-resnet50-gpu-np2.json", training),
               ("training-emulated-0-1-gpu-np2.json", paced)]  # fmt: skip
    page = made.render(results)
    assert "| 10 | 1 KiB | directly | 10.0 | 8.0 | 0.80 | 40.0 | 4.00 | 15.0 | 1.50 | 0 |" in page
    assert "| 10 | 1 KiB | in a graph | 5.0 | 8.0 | 1.60 | 40.0 | 8.00 | 15.0 | 3.00 | 0 |" in page
    assert page.count("- GPUs: 2 x NVIDIA H200") == 3
    assert "| resnet50, on links of GPUs 0,1 of a DGX-1V | float32 | 64 images | 25.6 M | ring | 10.0 |" in page
    short = overview(made, results)
    assert "| resnet50 | float32 | 2 GPUs | backend `blink` | nccl | 1.200 | 1.00 |" in short
    assert "| resnet50 | float32 | 2 GPUs | `ddp_hook` | nccl | 1.500 | 1.00 |" in short, "both are ours"
    libraries["nccl_hook"] = {**step, "step_ms": 9.6}
    short = overview(made, results)
    assert "| `ddp_hook` | nccl_hook | 1.200 | 1.00 |" in short
    assert "| `ddp_hook` | nccl |" not in short, "hooks are compared with hooks"
    assert "| backend `blink` | nccl_hook |" not in short
    assert "| backend `blink` | nccl | 1.200 | 1.00 |" in short
    libraries["blink"], libraries["nccl"] = [
        {**step, "turns_ms": [base + turn for turn in range(11)]} for base in (100.0, 110.0)
    ]
    short = overview(made, results)
    assert "| backend `blink` | nccl | 1.095 (1.092 to 1.099) | 1.00 |" in short, "round by round"
    lines = script("pages/summary").table(results).splitlines()
    assert "10 x 1K us: group 10.0, vector 8.0, each 40.0, nccl 15.0; 0 wrong" in lines
    assert any(
        line.startswith("resnet50 float32: compute 9.0 ms; blink 10.0 (exposed 1.0, alone 2.0)") for line in lines
    )


def test_forced_schemes_and_rounding_on_each_hop_are_named() -> None:
    made = script("report")
    gpu = on_gpus("config", {"graph": 4}, row(1 << 20, 100.0, 200.0))
    gpu["args"] = ["blinkmpi", "bench", "all_reduce", "--algo", "allreduce:lang:ring", "-G", "4"]
    short = overview(made, [("lang-ring-gpu-graph-np2.json", gpu)])
    assert "| allreduce by lang:ring | float32 | not registered | MPI | 2.00 |" in short
    gpu["args"][3:5], gpu["results"][0]["blinkmpi"]["scheme"] = ["--algorithm", ".../mine.py"], "lang:ring"
    short = overview(made, [("lang-ring-gpu-graph-np2.json", gpu)])
    assert "| allreduce by lang:ring | float32 | not registered | MPI | 2.00 |" in short
    gpu["blinkmpi"]["wire"] = "operand"
    short = overview(made, [("lang-ring-gpu-graph-np2.json", gpu)])
    assert "| allreduce by lang:ring | float32, rounded on each hop | not registered | MPI | 2.00 |" in short
