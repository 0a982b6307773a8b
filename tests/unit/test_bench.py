"""The benchmark's pure parts: flags, inputs and their check, rows, JSON."""

from __future__ import annotations

import argparse
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkmpi import bench_case as bc
from blinkmpi import bench_document, bench_meta
from blinkmpi.bench import add_parser
from blinkmpi.bench_measure import Measured
from blinkmpi.bench_options import read
from blinkmpi.bench_report import Columns, Row, number, omb_header, omb_row
from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError, SettingsError
from blinkmpi.numerics import accumulator_of, check_op, dtype_of, fold


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["bench", *words])


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("text", "size"), [("64K", 65536), ("256M", 1 << 28), ("1.5m", 3 << 19), ("4G", 1 << 32), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert bc.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "64X", "1e400", "nan"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ArgumentError, match="such as 65536, 64K"):
        bc.parse_size(text)


def test_defaults_are_those_of_nccl_tests() -> None:
    options = read(flags("all_reduce"), 4)
    assert options.collective == "allreduce"
    assert options.sizes == (32 << 20,)
    assert options.series == (("float32", "sum", -1),)
    assert (options.timing.wanted, options.timing.warmup, options.timing.checks) == (20, 1, 1)
    assert options.peers == ()
    assert options.runners == ("auto",)


def test_steps() -> None:
    assert read(flags("all_reduce", "-b", "1K", "-e", "20K", "-f", "4"), 2).sizes == (1024, 4096, 16384)
    assert read(flags("all_reduce", "-b", "0", "-e", "2K", "-i", "1K"), 2).sizes == (0, 1024, 2048)


def test_all_types_and_operations_leave_out_what_is_not_defined() -> None:
    series = read(flags("reduce_perf", "-d", "all", "-o", "all", "-r", "-1"), 2).series
    assert ("int8", "avg", 0) not in series
    assert ("bfloat16", "avg", 1) in series
    assert len(series) == (10 * 4 + 4) * 2
    assert read(flags("Bcast", "-r", "1"), 2).series == (("float32", "", 1),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-G 1", "CUDA graphs"),
        ("-g 2", "one device"),
        ("-t 4", "one thread"),
        ("-R 1", "register"),
        ("-r 4", "0..3"),
        ("-o mulsum", "device API"),
        ("-o xor", "unknown"),
        ("-d f8e4m3", "8-bit"),
        ("-d quad", "unknown"),
        ("-o avg -d int32", "not defined for int32"),
        ("-b 2M -e 1M", "more than"),
        ("-b 0 -f 2", "never reach"),
        ("-i 0", "never reach"),
        ("-n 0", "at least 1"),
        ("-T 0", "more than 0"),
        ("--compare nccl", "use mpi"),
        ("--runner rust", "use auto, c, numpy"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_reason(words: str, message: str) -> None:
    with pytest.raises(BlinkError, match=re.escape(message)):
        read(flags("all_reduce" if "-r" not in words.split() else "reduce", *words.split()), 4)


def test_a_collective_without_data_or_name_is_refused() -> None:
    with pytest.raises(ArgumentError, match="cannot time barrier"):
        read(flags("barrier"), 2)
    with pytest.raises(SettingsError, match="unknown"):
        read(flags("all_to_some"), 2)


def test_minimum_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "2")
    assert read(flags("all_reduce"), 2).minimum_bandwidth == 2
    monkeypatch.setenv("BLINKMPI_TESTS_MIN_BW", "3.5")
    assert read(flags("all_reduce"), 2).minimum_bandwidth == 3.5
    monkeypatch.setenv("BLINKMPI_TESTS_MIN_BW", "fast")
    with pytest.raises(SettingsError, match="GB/s"):
        read(flags("all_reduce"), 2)


# ---------------------------------------------------------------- sizes and the check


@given(st.sampled_from(sorted(bc.TEST_NAMES)), st.integers(1, 9), st.integers(0, 1 << 20))
def test_a_row_is_never_larger_than_asked(collective: Any, n: int, nbytes: int) -> None:
    case = bc.case_of(collective, n, nbytes, "float32", "sum", 0)
    assert nbytes - 16 * n < case.size <= nbytes
    assert max(case.send_count, case.recv_count) == case.total
    if collective in ("allgather", "reduce_scatter"):
        assert case.count * 4 % 16 == 0


def honest(case: bc.Case, rank: int, *, sources: list[int] | None = None, shift: int = 0) -> Any:
    """The result of ``rank`` by the package's own arithmetic, or with wrong contributions or a shift."""
    result = np.empty(case.recv_count, dtype_of(case.dtype))
    bc.poison(result)
    for start, length, folded, offset in bc.pieces(case, rank):
        ranks = sources if sources is not None and len(folded) > 1 else list(folded)
        inputs = [np.empty(length, dtype_of(case.dtype)) for _ in ranks]
        for values, r in zip(inputs, ranks, strict=True):
            bc.fill(values, r, case.dtype, offset + shift)
        total = np.empty(length, accumulator_of(case.dtype))
        with np.errstate(all="ignore"):
            fold(case.op or "sum", inputs, total, final=True, n=case.n)
        result[start : start + length] = total.astype(result.dtype)
    return result


CASES = [
    (collective, dtype, op)
    for collective in bc.TEST_NAMES
    for dtype in bc.TYPE_NAMES.values()
    for op in (bc.OP_NAMES if collective in ("allreduce", "reduce", "reduce_scatter") else ("",))
    if not (op == "avg" and "int" in dtype)
]


@pytest.mark.parametrize(("collective", "dtype", "op"), CASES)
def test_right_results_pass_and_poison_does_not(collective: Any, dtype: str, op: str) -> None:
    case = bc.Case(
        collective, 5, 1003, dtype, op, 3 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    )
    if op:
        check_op(op, dtype)
    for rank in range(case.n):
        result = honest(case, rank)
        assert bc.count_wrong(case, rank, result) == 0
        expected = sum(length for _, length, _, _ in bc.pieces(case, rank))
        bc.poison(result)
        assert bc.count_wrong(case, rank, result) >= 0.95 * expected


@pytest.mark.parametrize("dtype", bc.TYPE_NAMES.values())
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_a_missing_or_repeated_contribution_shows(dtype: str, op: str) -> None:
    case = bc.Case("allreduce", 4, 2000, dtype, op)
    for sources in ([0, 1, 2], [0, 1, 2, 3, 3], [0, 1, 2, 2]):
        assert bc.count_wrong(case, 0, honest(case, 0, sources=sources)) > 0.9 * case.count


def test_the_order_of_the_fold_does_not_matter() -> None:
    case = bc.Case("allreduce", 8, 5000, "float32", "sum")
    assert bc.count_wrong(case, 0, honest(case, 0, sources=[7, 3, 5, 1, 0, 2, 4, 6])) == 0


@pytest.mark.parametrize("collective", bc.TEST_NAMES)
def test_a_displaced_chunk_shows(collective: Any) -> None:
    root = 1 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    case = bc.Case(collective, 3, 4096, "float32", "sum" if "reduce" in collective else "", root)
    assert bc.count_wrong(case, 1, honest(case, 1, shift=1024)) > 0.99 * case.recv_count


def test_vectors_longer_than_the_period() -> None:
    case = bc.Case("reduce_scatter", 2, bc.PERIOD + 10, "int32", "sum")
    result = honest(case, 1)
    assert bc.count_wrong(case, 1, result) == 0
    result[bc.PERIOD + 3] += 1
    assert bc.count_wrong(case, 1, result) == 1


def test_bus_factors() -> None:
    factor = {c: bc.Case(c, 4, 8, "float32").bus_factor for c in bc.TEST_NAMES}
    assert factor == {
        "allreduce": 1.5,
        "allgather": 0.75,
        "reduce_scatter": 0.75,
        "gather": 0.75,
        "scatter": 0.75,
        "broadcast": 1.0,
        "reduce": 1.0,
    }


# ---------------------------------------------------------------- rows and JSON


def example(*, wrong: int = 0, peers: bool = False) -> Row:
    ours = (Measured(42.17, (41.0, 42.17, 50.0), (40.0, 42.0), wrong), Measured(41.9, (41.9,), (41.9, 41.9), 0))
    theirs = (Measured(84.34, (84.34,), (84.0, 84.34), 0), Measured(20.95, (20.95,), (20.0, 20.95), 0))
    case = bc.Case("allreduce", 8, 262144, "float32", "sum")
    how = {"scheme": "direct", "runner": "c", "chunk_bytes": 131072, "reason": "measured"}
    return Row(case, ours, {"mpi": theirs} if peers else {}, how, 1e-5, None, True)


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
    columns = Columns(peers=("mpi",), runner=True, predict=True, emulated=True)
    plain, header, row = Columns().row(example()), columns.header(), columns.row(example(peers=True))
    assert row.startswith(plain)
    assert row.removeprefix(plain).split() == ["84.34", "2.00", "20.95", "0.50", "10.00", "N/A", "c", "emulated"]
    assert len(header[2]) == len(row)
    absent = Row(example().case, example().ours, {"mpi": None}, {}, None, None, False)
    assert Columns(peers=("mpi",)).row(absent).removeprefix(plain).split() == ["N/A"] * 4


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (0.0, 7, "   0.00"),
        (42.17, 7, "  42.17"),
        (9999.5, 7, "9999.50"),
        (98765.4, 7, "98765.4"),
        (9876543.0, 7, "9876543"),
        (123456789.0, 7, "1.2e+08"),
        (43.52, 6, " 43.52"),
        (12345.6, 6, " 12346"),
    ],
)
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
    made = bench_document.document(
        args,
        read(args, 8),
        [(example(peers=True), "all_reduce_float_sum")],
        devices=bench_meta.devices([(0, 11, "a", "cpu"), (1, 12, "b", "cpu"), (2, 13, "a", "cpu")]),
        machine={"name": "cpu"},
        versions={},
        verdict=(0, 43.65, None),
        started=datetime(2026, 1, 2, 3, 4, 5).astimezone(),
        peak_resident_bytes=1,
    )
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
    assert (ours["scheme"], ours["runner"], ours["chunk_bytes"]) == ("direct", "c", 131072)
    assert ours["predicted_us"] == pytest.approx(10)
    assert ours["bound_us"] is None


def test_files_are_never_overwritten(tmp_path: Path) -> None:
    path = str(tmp_path / "x.json")
    assert [bench_document.write_new(path, str(i)) for i in range(3)] == [path, path + ".0", path + ".1"]
    assert Path(path).read_text() == "0\n"


def test_unknown_types_name_the_known_ones() -> None:
    with pytest.raises(BufferTypeError, match="half, float"):
        bc.dtype_named("float128")
    assert bc.dtype_named("float32") == bc.dtype_named("float") == "float32"
