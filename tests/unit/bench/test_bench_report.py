"""What the benchmark reports: rows for people, its JSON file, and older files by today's names."""

import json
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.bench import document as bench_document
from blinkmpi.bench import environment as bench_meta
from blinkmpi.bench.document import with_current_names
from blinkmpi.bench.options import read
from blinkmpi.bench.report import Columns, Row, number, omb_header, omb_row
from blinkmpi.bench.timing import TimingResult
from tests.harness import ROOT
from tests.unit.bench.test_bench_measure import call_of_count
from tests.unit.bench.test_bench_options import flags


def example(*, wrong: int = 0, peers: bool = False) -> Row:
    ours = (TimingResult(42.17, (41.0, 42.17, 50.0), (40.0, 42.0), wrong), TimingResult(41.9, (41.9,), (41.9, 41.9), 0))
    theirs = (TimingResult(84.34, (84.34,), (84.0, 84.34), 0), TimingResult(20.95, (20.95,), (20.0, 20.95), 0))
    call = call_of_count("allreduce", 8, 262144, "float32", "sum")
    how = {"scheme": "direct", "executor": "c", "chunk_bytes": 131072, "reason": "measured"}
    return Row(call, ours, {"mpi": theirs} if peers else {}, how, (1e-5, None), (None, None), True)


def test_rows_are_those_of_nccl_tests() -> None:
    header = Columns().header()
    assert header[1] == "#" + " " * 62 + "out-of-place" + " " * 23 + "in-place" + " " * 10
    assert header[2] == (
        "#       size         count      type   redop    root"
        "     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong"
    )
    assert Columns().row(example()) == (
        "     1048576        262144     float     sum      -1"
        "    42.17   24.87   43.51       0    41.90   25.03   43.79       0"
    )


def test_our_columns_come_to_the_right() -> None:
    columns = Columns(peers=("mpi",), executor=True, predict=True, emulated=True)
    plain, header, row = Columns().row(example()), columns.header(), columns.row(example(peers=True))
    assert row.startswith(plain)
    assert row.removeprefix(plain).split() == [
        "84.34", "2.00", "20.95", "0.50", "10.00", "-76.3", "N/A", "N/A", "N/A", "c", "emulated",
    ]  # fmt: skip
    assert len(header[2]) == len(row)
    absent = Row(example().call, example().ours, {"mpi": None}, {}, (None, None), (None, None), False)
    assert Columns(peers=("mpi",)).row(absent).removeprefix(plain).split() == ["N/A"] * 4


def on_gpu() -> Row:
    """A row of a GPU run with two peers, one of which cannot run it."""
    call = call_of_count("allreduce", 8, 262144, "float32", "sum")
    ours = [TimingResult(t, (t - 1, t, t + 1), (t, t), 0, calls=20, host_us=7.5) for t in (20.0, 21.0)]
    theirs = [TimingResult(t, (t,) * 3, (t, t), 0, calls=20, host_us=5.0, note="one_shot") for t in (40.0, 42.0)]
    how = {"scheme": "onehop", "executor": "cuda", "chunk_bytes": 0, "reason": "x", "protocol": "packets", "ctas": 16}
    peers = {"nccl": (theirs[0], theirs[1]), "symm_mem": None}
    return Row(call, (ours[0], ours[1]), peers, how, (1e-5, 1e-5), (5e-6, 5e-6), False)


def test_rows_of_gpus_say_how_the_call_travelled() -> None:
    columns = Columns(peers=("nccl", "symm_mem"), predict=True, protocol=True)
    header, row = columns.header(), columns.row(on_gpu())
    assert len(header[2]) == len(header[3]) == len(row)
    assert header[2].split()[14:] == ["nccl", "ratio"] * 2 + ["symm_mem", "ratio"] * 2 + [
        "pred", "error", "pred", "error", "bound", "protocol", "ctas",
    ]  # fmt: skip
    assert " ".join(row.split()[13:]) == "40.00 2.00 42.00 2.00 N/A N/A N/A N/A 10.00 -50.0 10.00 -52.4 5.00 packets 16"


def document_of(args: Any, row: Row, processes: list[bench_meta.Process], setup: dict[str, Any]) -> dict[str, Any]:
    """The JSON document of a run that made one row."""
    return bench_document.document(
        args, read(args, 8), [(row, "all_reduce_float_sum")], devices=bench_meta.devices(processes), machine={},
        versions={}, verdict=(0, 1.0, None), started=datetime(2026, 1, 2).astimezone(), peak_resident_bytes=1,
        setup=setup,
    )  # fmt: skip


def test_the_file_of_a_gpu_run_says_what_was_compared() -> None:
    args = flags("all_reduce", "-b", "1M", "-e", "1M", "--compare", "nccl,symm_mem", "-G", "4")
    setup: dict[str, Any] = {"memory": "gpu", "local_register": 2, "refused": {"symm_mem": "why"}}
    setup["peers"] = {"nccl": {"version": "2.28.9", "nvls": "0"}}
    setup["gpu"] = {"name": "NVIDIA H200", "driver": "580.159.04"}
    made = document_of(args, on_gpu(), [bench_meta.Process(0, 11, "a", "NVIDIA H200", 3, "0000:1b:00.0")], setup)
    device = made["config"]["devices"][0]
    assert (device["device"], device["device_hex"], device["device_info"]) == (3, "0000:1b:00.0", "NVIDIA H200")
    assert (made["nccl_version"], made["config"]["graph"]) == ("2.28.9", 4)
    assert {key: made["blinkmpi"][key] for key in setup} == setup
    assert "repeats of many calls" in made["blinkmpi"]["statistic"]
    result = made["results"][0]
    assert result["actual_iterations"] == 60
    ours = result["blinkmpi"]
    assert (ours["protocol"], ours["ctas"]) == ("packets", 16)
    assert (ours["out_of_place"]["host_us"], ours["out_of_place"]["repeats"]) == (7.5, 3)
    compare = ours["in_place"]["compare"]
    assert compare["symm_mem"] is None
    assert {k: compare["nccl"][k] for k in ("time", "ratio", "nwrong", "host_us", "variant")} == {
        "time": 42.0, "ratio": 2.0, "nwrong": 0, "host_us": 5.0, "variant": "one_shot",
    }  # fmt: skip


@pytest.mark.parametrize(("value", "width", "text"), [
    (0.0, 7, "   0.00"), (42.17, 7, "  42.17"), (9999.5, 7, "9999.50"), (98765.4, 7, "98765.4"),
    (9876543.0, 7, "9876543"), (123456789.0, 7, "1.2e+08"), (43.52, 6, " 43.52"), (12345.6, 6, " 12346"),
])  # fmt: skip
def test_numbers_fit(value: float, width: int, text: str) -> None:
    assert number(value, width) == text


def test_omb_rows() -> None:
    assert omb_header("allreduce", ())[1] == (
        "# Size         Avg Latency(us)     Min Latency(us)     Max Latency(us)  Iterations          Validation"
    )
    assert omb_row(example(), ()) == (
        "1048576                  41.00               40.00               42.00           3                Pass"
    )
    assert "Fail" in omb_row(example(wrong=2), ())
    assert omb_row(example(peers=True), ("mpi",)).split()[-2:] == ["84.17", "2.00"]


def test_the_document_has_the_keys_of_nccl_tests_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINKMPI_DEBUG", "INFO")
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    monkeypatch.setenv("SLURM_JWT", "secret")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/somebody/topo.xml")
    args = flags("all_reduce", "-b", "1M", "-e", "1M", "-f", "2", "--compare", "mpi", "-I", "1")
    processes = [bench_meta.Process(i, 11 + i, host, "cpu") for i, host in enumerate("aba")]
    made = document_of(args, example(peers=True), processes, {"memory": "host"})
    text = json.dumps(made)
    assert "secret" not in text
    assert "somebody" not in text
    assert {"BLINKMPI_DEBUG=INFO", "NCCL_TOPO_FILE=.../topo.xml"} <= set(made["env"])
    assert [d["device"] for d in made["config"]["devices"]] == [0, 0, 1]
    assert set(made) == {
        "version", "start_time", "args", "env", "nccl_version", "config", "results", "out_of_bounds",
        "average_bus_bandwidth", "errors", "end_time", "blinkmpi",
    }  # fmt: skip
    assert made["out_of_bounds"] == {"count": 0, "okay": True}
    result = made["results"][0]
    assert {k: result[k] for k in ("size", "count", "type", "redop", "root", "actual_iterations")} == {
        "size": 1048576, "count": 262144, "type": "float", "redop": "sum", "root": -1, "actual_iterations": 3,
    }  # fmt: skip
    assert set(result["out_of_place"]) == {"time", "alg_bw", "bus_bw", "nwrong"}
    ours = result["blinkmpi"]
    assert ours["out_of_place"]["compare"]["mpi"]["ratio"] == pytest.approx(2)
    assert ours["in_place"]["compare"]["mpi"]["time"] == 20.95
    assert ours["out_of_place"]["times_us"] == {"min": 41.0, "median": 42.17, "max": 50.0}
    assert ours["out_of_place"]["iteration_times_us"] == [41.0, 42.17, 50.0]
    assert (ours["scheme"], ours["executor"], ours["chunk_bytes"]) == ("direct", "c", 131072)
    assert ours["predicted_us"] == pytest.approx(10)
    assert ours["bound_us"] is None


def test_files_are_never_overwritten(tmp_path: Path) -> None:
    path = str(tmp_path / "x.json")
    assert [bench_document.write_new(path, str(i)) for i in range(3)] == [path, path + ".0", path + ".1"]
    assert Path(path).read_text() == "0\n"


def test_the_commit_is_that_of_this_checkout() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not in a checkout")
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert bench_meta.commit()["commit"] == head.stdout.strip()


# ---------------------------------------------------------------- results of older versions


def test_keys_executors_protocols_and_flags_are_mapped_and_nothing_else() -> None:
    old = {
        "args": ["blinkmpi", "bench", "--runner", "c"],
        "env": ["BLINKMPI_RUNNER=c"],
        "results": [{"size": 1024, "blinkmpi": {"runner": "c", "protocol": "oneshot128", "scheme": "onehop"}}],
        "blinkmpi": {"runners": ["c"], "versions": {"runner": "C runner, compiled by cc 12"}},
    }
    assert with_current_names(old) == {
        "args": ["blinkmpi", "bench", "--executor", "c"],
        "env": ["BLINKMPI_RUNNER=c"],
        "results": [{"size": 1024, "blinkmpi": {"executor": "c", "protocol": "ll128_one_shot", "scheme": "onehop"}}],
        "blinkmpi": {"executors": ["c"], "versions": {"executor": "C executor, compiled by cc 12"}},
    }
    assert "runner" in old["results"][0]["blinkmpi"], "the document itself stays as it is"  # type: ignore[index]


def test_names_of_today_stay() -> None:
    new = {"protocol": "direct", "executor": "numpy", "counts": [1, 2.5, None, True]}
    assert with_current_names(new) == new
