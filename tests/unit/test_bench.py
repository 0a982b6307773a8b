"""The benchmark's pure parts: flags, inputs and their check, rows, JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi import bench_case as bc
from blinkmpi import bench_document, bench_gpu, bench_meta, bench_peers
from blinkmpi.bench import add_parser
from blinkmpi.bench_measure import Buffers, Layout, Measured, Timing
from blinkmpi.bench_options import PEER_MEMORY, PEERS, read, settle
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
        ("-G -1", "at least 0"),
        ("-G 2 -z 1", "leave one"),
        ("-y 1", "stream of their own"),
        ("-g 2", "one device"),
        ("-t 4", "one thread"),
        ("-R 1", "NCCL alone registers"),
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
        ("--compare gloo", "use mpi, nccl, symm_mem"),
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


@pytest.mark.parametrize(
    ("words", "gpu", "memory"),
    [
        ("", False, "host"),
        ("", True, "gpu"),
        ("--memory host --compare mpi", True, "host"),
        ("-R 0 -G 3 --persistent --compare nccl,symm_mem", True, "gpu"),
        ("-R 0", False, "host"),
    ],
)
def test_buffers_lie_on_gpus_where_the_ranks_have_some(words: str, gpu: bool, memory: str) -> None:
    args = flags("all_reduce", *words.split())
    assert settle(args, read(args, 2), gpu=gpu) == memory


@pytest.mark.parametrize(
    ("words", "gpu", "message"),
    [
        ("--memory gpu", False, "have no GPUs"),
        ("-G 1", False, "no CUDA graphs"),
        ("-G 1 --memory host", True, "no CUDA graphs"),
        ("-R 2", False, "no device memory"),
        ("--persistent", False, "GPU memory"),
        ("--compare nccl", False, "gpu memory only; leave it out"),
        ("--compare mpi,nccl", True, "--compare mpi: it is measured on host memory only; add --memory host"),
    ],
)
def test_what_ranks_without_gpus_cannot_do_is_refused(words: str, gpu: bool, message: str) -> None:
    args = flags("all_reduce", *words.split())
    with pytest.raises(ArgumentError, match=re.escape(message)):
        settle(args, read(args, 2), gpu=gpu)
    assert set(PEER_MEMORY) == set(PEERS)


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


class Elsewhere:
    """NumPy under another name, as CuPy is: buffers are compared in pieces, references uploaded."""

    asarray = staticmethod(np.asarray)
    count_nonzero = staticmethod(np.count_nonzero)


@pytest.mark.parametrize(("collective", "dtype", "op"), CASES)
def test_results_outside_host_memory_are_checked_alike(collective: Any, dtype: str, op: str) -> None:
    root = 1 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    case = bc.Case(collective, 2, 2 * bc.PERIOD + 7, dtype, op, root)
    result = honest(case, 1)
    assert bc.count_wrong(case, 1, result, xp=Elsewhere) == 0
    for at in (0, bc.PERIOD + 3, case.recv_count - 1):
        bc.poison(result[at : at + 1])
    assert bc.count_wrong(case, 1, result, xp=Elsewhere) == 3


@given(st.integers(0, 3 * bc.PERIOD), st.integers(0, 3 * bc.PERIOD))
@settings(max_examples=20, deadline=None)
def test_inputs_repeat_with_their_period(size: int, start: int) -> None:
    out, more = np.empty(size, np.float32), np.empty(start + size, np.float32)
    bc.fill(out, 2, "float32", start, xp=Elsewhere)
    bc.fill(more, 2, "float32")
    assert np.array_equal(out, more[start:])


# ---------------------------------------------------------------- where buffers lie


@pytest.mark.parametrize("collective", bc.TEST_NAMES)
@pytest.mark.parametrize("in_place", [False, True])
def test_buffers_are_those_of_mpi_and_of_nccl(collective: Any, in_place: bool) -> None:
    """What each library is told: by name of the buffer, the elements from where on, and how many."""
    root = 1 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    case = bc.Case(collective, 3, 8, "int32", "sum" if "reduce" in collective else "", root)
    buffers = Buffers([case])
    send, recv = buffers.views(case)

    def where(part: Any) -> str:
        if part is None or isinstance(part, str):
            return str(part)
        name, whole = ("send", send) if np.shares_memory(part, send) else ("recv", recv)
        first = (part.ctypes.data - whole.ctypes.data) // 4
        return f"{name}[{first}:{first + part.size}]"

    for rank in (1, 2):
        ours = Layout(case, rank, buffers, in_place=in_place, marker="IN_PLACE")
        nccl = Layout(case, rank, buffers, in_place=in_place)
        told = tuple(where(part) for part in ours.arguments)
        assert (told, (where(nccl.source), where(nccl.target))) == LAYOUTS[collective, in_place][rank - 1]
        for layout in (ours, nccl):
            layout.prepare()
            for part in layout.inputs:
                wanted = np.empty_like(part)
                bc.fill(wanted, rank, case.dtype)
                assert np.array_equal(part, wanted)
            if layout.result is not None and not layout.inputs:
                assert (layout.result == -1).all(), "poisoned"


IN, ALL, OWN2 = "IN_PLACE", "recv[0:24]", "recv[16:24]"
# (collective, in place): rank 1, which is the root, and rank 2; each (what MPI is told, what NCCL is told).
LAYOUTS: dict[tuple[str, bool], list[Any]] = {
    ("allreduce", False): [(("send[0:8]", "recv[0:8]"), ("send[0:8]", "recv[0:8]"))] * 2,
    ("allreduce", True): [((IN, "recv[0:8]"), ("recv[0:8]", "recv[0:8]"))] * 2,
    ("allgather", False): [(("send[0:8]", ALL), ("send[0:8]", ALL))] * 2,
    ("allgather", True): [((IN, ALL), ("recv[8:16]", ALL)), ((IN, ALL), (OWN2, ALL))],
    ("reduce_scatter", False): [(("send[0:24]", "recv[0:8]"), ("send[0:24]", "recv[0:8]"))] * 2,
    ("reduce_scatter", True): [((IN, ALL), (ALL, "recv[8:16]")), ((IN, ALL), (ALL, OWN2))],
    ("broadcast", False): [(("send[0:8]",), ("send[0:8]", "send[0:8]")), (("recv[0:8]",), ("recv[0:8]", "recv[0:8]"))],
    ("broadcast", True): [(("recv[0:8]",), ("recv[0:8]", "recv[0:8]"))] * 2,
    ("reduce", False): [(("send[0:8]", "recv[0:8]"), ("send[0:8]", "recv[0:8]")),
                        (("send[0:8]", "None"), ("send[0:8]", "None"))],
    ("reduce", True): [((IN, "recv[0:8]"), ("recv[0:8]", "recv[0:8]")), (("send[0:8]", "None"), ("send[0:8]", "None"))],
    ("gather", False): [(("send[0:8]", ALL), ("send[0:8]", ALL)), (("send[0:8]", "None"), ("send[0:8]", "None"))],
    ("gather", True): [((IN, ALL), ("recv[8:16]", ALL)), (("send[0:8]", "None"), ("send[0:8]", "None"))],
    ("scatter", False): [(("send[0:24]", "recv[0:8]"), ("send[0:24]", "recv[0:8]")),
                         (("None", "recv[0:8]"), ("None", "recv[0:8]"))],
    ("scatter", True): [(("send[0:24]", IN), ("send[0:24]", "send[8:16]")),
                        (("None", "recv[0:8]"), ("None", "recv[0:8]"))],
}  # fmt: skip


# ---------------------------------------------------------------- GPUs and peers, as far as they are pure


@pytest.mark.parametrize(
    ("seconds", "timing", "calls"),
    [
        (10e-6, Timing(), 200),
        (1e-3, Timing(), 30),
        (0.1, Timing(), 5),
        (0.0, Timing(), 200),
        (10e-6, Timing(replays=10), 50),
        (1e-3, Timing(replays=10), 3),
        (0.1, Timing(replays=10), 1),
        (0.1, Timing(replays=2), 3),
        (0.1, Timing(iterations=7, aggregate=2), 14),
        (1e-6, Timing(iterations=7, replays=4), 7),
    ],
)
def test_blocks_hold_as_many_calls_as_their_time_allows(seconds: float, timing: Timing, calls: int) -> None:
    assert bench_gpu.calls_in_block(seconds, timing) == calls


def test_a_sweep_with_two_peers_takes_about_a_minute() -> None:
    """From 1 KiB to 1 GiB in steps of 4, both places, three libraries at the speed of eight H200s."""
    sizes = [1024 * 4**i for i in range(11)]
    seconds = [max(50e-6, size / 195e9) for size in sizes]
    blocks = [bench_gpu.calls_in_block(t, Timing()) * t for t in seconds]
    assert 2 * 3 * bench_gpu.REPEATS * sum(blocks) < 30


def test_memory_that_does_not_fit_is_named() -> None:
    runtime = SimpleNamespace(memGetInfo=lambda: (10 << 20, 80 << 30))
    xp = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    assert bench_gpu.no_room(xp, 9 << 20) is None
    assert "16 MiB of buffers do not fit into the GPU's free 10 MiB" in str(bench_gpu.no_room(xp, 16 << 20))


def test_versions_from_numbers_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_peers.version_text(22809) == "2.28.9"
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.3\n"
    monkeypatch.setattr(bench_meta, "_read", lambda path: text)
    assert bench_meta.nvidia_driver() == "580.159.04"
    monkeypatch.setattr(bench_meta, "_read", lambda path: "")
    assert bench_meta.nvidia_driver() is None


def test_nccl_is_not_measured_with_unknown_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    with pytest.raises(ArgumentError, match=r"NCCL_NVLS_ENABLE is not set.*mpirun -x"):
        bench_peers._nccl(None)
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    with pytest.raises(ArgumentError, match="mpirun -x TORCH_SYMM_MEM_DISABLE_MULTICAST=1"):
        bench_peers._torch(1)
    with pytest.raises(ArgumentError, match="3 hosts"):
        bench_peers._torch(3)


def test_a_missing_peer_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ArgumentError, match="pip install torch"):
        bench_peers._torch(1)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", SimpleNamespace(available=False))
    xp = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(runtimeGetVersion=lambda: 13000)))
    with pytest.raises(ArgumentError, match="pip install nvidia-nccl-cu13"):
        bench_peers._nccl(xp)


def test_peers_say_what_they_cannot_run() -> None:
    mpi = bench_peers.MpiPeer(None, None)
    assert mpi.refusal(bc.Case("allreduce", 2, 8, "float32", "avg")) == "MPI has no average"
    assert "16-bit" in str(mpi.refusal(bc.Case("reduce", 2, 8, "bfloat16", "sum", 0)))
    assert mpi.refusal(bc.Case("broadcast", 2, 8, "bfloat16", "", 0)) is None
    torch = bench_peers.SymmMemPeer.__new__(bench_peers.SymmMemPeer)
    torch.n = 8
    assert torch.refusal(bc.Case("allreduce", 8, 8, "bfloat16", "sum")) is None
    assert "no other collective" in str(torch.refusal(bc.Case("allgather", 8, 8, "float32")))
    assert "float32 and bfloat16" in str(torch.refusal(bc.Case("allreduce", 8, 8, "float32", "max")))
    assert "16 bytes" in str(torch.refusal(bc.Case("allreduce", 8, 7, "float32", "sum")))
    torch.n = 3
    assert "2, 4 or 8" in str(torch.refusal(bc.Case("allreduce", 3, 8, "float32", "sum")))


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


def on_gpu() -> Row:
    """A row of a GPU run with two peers, one of which cannot run it."""
    case = bc.Case("allreduce", 8, 262144, "float32", "sum")
    ours = [Measured(t, (t - 1, t, t + 1), (t, t), 0, calls=20, host_us=7.5) for t in (20.0, 21.0)]
    theirs = [Measured(t, (t,) * 3, (t, t), 0, calls=20, host_us=5.0, note="one_shot") for t in (40.0, 42.0)]
    how = {"scheme": "onehop", "runner": "cuda", "chunk_bytes": 0, "reason": "x", "protocol": "packets", "ctas": 16}
    return Row(case, (ours[0], ours[1]), {"nccl": (theirs[0], theirs[1]), "symm_mem": None}, how, 1e-5, 5e-6, False)


def test_rows_of_gpus_say_how_the_call_travelled() -> None:
    columns = Columns(peers=("nccl", "symm_mem"), predict=True, protocol=True)
    header, row = columns.header(), columns.row(on_gpu())
    assert len(header[2]) == len(header[3]) == len(row)
    assert header[2].split()[14:] == ["nccl", "ratio"] * 2 + ["symm_mem", "ratio"] * 2 + [
        "pred", "bound", "protocol", "ctas",
    ]  # fmt: skip
    assert " ".join(row.split()[13:]) == "40.00 2.00 42.00 2.00 N/A N/A N/A N/A 10.00 5.00 packets 16"


def test_the_file_of_a_gpu_run_says_what_was_compared() -> None:
    args = flags("all_reduce", "-b", "1M", "-e", "1M", "--compare", "nccl,symm_mem", "-G", "4")
    stage = {
        "memory": "gpu",
        "peers": {"nccl": {"version": "2.28.9", "nvls": "0"}},
        "refused": {"symm_mem": "why"},
        "gpu": {"name": "NVIDIA H200", "driver": "580.159.04"},
        "local_register": 2,
    }
    made = bench_document.document(
        args,
        read(args, 8),
        [(on_gpu(), "all_reduce_float_sum")],
        devices=bench_meta.devices([bench_meta.Process(0, 11, "a", "NVIDIA H200", 3, "0000:1b:00.0")]),
        machine={},
        versions={},
        verdict=(0, 1.0, None),
        started=datetime(2026, 1, 2).astimezone(),
        peak_resident_bytes=1,
        stage=stage,
    )
    device = made["config"]["devices"][0]
    assert (device["device"], device["device_hex"], device["device_info"]) == (3, "0000:1b:00.0", "NVIDIA H200")
    assert (made["nccl_version"], made["config"]["graph"]) == ("2.28.9", 4)
    assert {key: made["blinkmpi"][key] for key in stage} == stage
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
        devices=bench_meta.devices([bench_meta.Process(i, 11 + i, host, "cpu") for i, host in enumerate("aba")]),
        machine={"name": "cpu"},
        versions={},
        verdict=(0, 43.65, None),
        started=datetime(2026, 1, 2, 3, 4, 5).astimezone(),
        peak_resident_bytes=1,
        stage={"memory": "host"},
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
