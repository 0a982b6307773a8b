"""The performance page: every row of a result is shown, its means are right, and what is missing is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.benchmarks.scripts import needs, script

pytestmark = needs("report")


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
    assert f"| allreduce | float | 2 | graph, launched 4 times | NCCL | {ratios}" in part
    assert "| symm_mem | - | - | - | - | 0 |" in part
    one = "10.0 | 12.3 | 40.0 | 4.00 | N/A | N/A"
    assert f"| 1 KiB | float | sum | direct | packets | 16 | {one} | {one} | 9.0 | - | 0 |" in part
    for line in ("- GPUs: 2 x NVIDIA H200, driver 580.1", "- NCCL: version 2.28.9", "`NCCL_NVLS_ENABLE=0`",
                 "- N/A: symm_mem, where it has no such call"):  # fmt: skip
        assert line in part
    assert "## Summary" not in made.render([("g.json", gpu)])


def test_a_report_of_nothing_says_so_and_of_something_else_fails(tmp_path: Path) -> None:
    made = script("report")
    (tmp_path / "campaign-cpu.json").write_text(json.dumps({"calls": 7}))  # which holds no times
    assert "No results yet" in made.render(made.read(tmp_path))
    (tmp_path / "x.json").write_text(json.dumps({"results": []}))
    with pytest.raises(made.ReportError, match=r"x\.json.*-J"):
        made.read(tmp_path)
