"""How the benchmark measures, as far as it is pure: sizes, inputs, the check of results, buffers, blocks, libraries."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from blinkmpi.bench import environment as bench_meta
from blinkmpi.bench import peers as bench_peers
from blinkmpi.bench import time_gpu as bench_gpu
from blinkmpi.bench.layout import Buffers, Layout
from blinkmpi.bench.nccl_tests import OP_NAMES, TEST_NAMES, TYPE_NAMES, call_of_size, dtype_named
from blinkmpi.bench.timing import Timing
from blinkmpi.bench.verification import PERIOD, SHOWN, count_wrong, fill, find_wrong, pattern, pieces, poison
from blinkmpi.errors import ArgumentError, BufferTypeError
from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.reduction import accumulator_of, check_op, dtype_of, fold
from blinkmpi.util.together import allgather


def call_of_count(collective: Any, n: int, count: int, dtype: str, op: str = "", root: int = -1) -> Call:
    """A call by nccl-tests' count: the elements of the vector, or of every rank's block."""
    return Call(collective, n, (count,) * (n if collective == "reduce_scatter" else 1), dtype, op, root)


# ---------------------------------------------------------------- sizes and names


def test_unknown_types_name_the_known_ones() -> None:
    with pytest.raises(BufferTypeError, match="half, float"):
        dtype_named("float128")
    assert dtype_named("float32") == dtype_named("float") == "float32"


def test_bus_factors() -> None:
    factor = {c: call_of_count(c, 4, 8, "float32").bus_factor for c in TEST_NAMES}
    blocked, whole = (
        ("allgather", "reduce_scatter", "gather", "scatter", "alltoall"),
        ("broadcast", "reduce", "scan", "exscan"),
    )
    assert factor == {"allreduce": 1.5, **dict.fromkeys(whole, 1.0), **dict.fromkeys(blocked, 0.75)}


@pytest.mark.slow
@given(st.sampled_from(sorted(TEST_NAMES)), st.integers(1, 9), st.integers(0, 1 << 20))
def test_a_row_is_never_larger_than_asked(collective: Any, n: int, nbytes: int) -> None:
    call = call_of_size(collective, n, nbytes, "float32", "sum", 0)
    assert nbytes - 16 * n < call.nbytes <= nbytes
    assert max(call.send_count, call.recv_count(0)) == call.total
    if collective in ("allgather", "reduce_scatter"):
        assert call.counts[0] * 4 % 16 == 0


# ---------------------------------------------------------------- the check


def honest(call: Call, rank: int, *, sources: list[int] | None = None, shift: int = 0) -> Any:
    """The result of ``rank`` by the package's own arithmetic, or with wrong contributions or a shift."""
    result = np.empty(call.recv_count(rank), dtype_of(call.dtype))
    poison(result)
    for start, length, folded, offset in pieces(call, rank):
        ranks = sources if sources is not None and len(folded) > 1 else list(folded)
        inputs = [np.empty(length, dtype_of(call.dtype)) for _ in ranks]
        for values, r in zip(inputs, ranks, strict=True):
            fill(values, r, call.dtype, offset + shift)
        total = np.empty(length, accumulator_of(call.dtype))
        with np.errstate(all="ignore"):
            fold(call.op or "sum", inputs, total, final=True, n=call.n)
        result[start : start + length] = total.astype(result.dtype)
    return result


CASES = [
    (collective, dtype, op)
    for collective in TEST_NAMES
    for dtype in TYPE_NAMES.values()
    for op in (OP_NAMES if collective in REDUCTIONS else ("",))
    if not (op == "avg" and "scan" in collective)
]


@pytest.mark.parametrize(("collective", "dtype", "op"), CASES)
def test_right_results_pass_and_poison_does_not(collective: Any, dtype: str, op: str) -> None:
    call = call_of_count(
        collective, 5, 1003, dtype, op, 3 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    )
    if op:
        check_op(op, dtype)
    for rank in range(call.n):
        result = honest(call, rank)
        assert count_wrong(call, rank, result) == 0
        expected = sum(length for _, length, _, _ in pieces(call, rank))
        poison(result)
        assert count_wrong(call, rank, result) >= 0.95 * expected


@pytest.mark.parametrize("dtype", TYPE_NAMES.values())
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_a_missing_or_repeated_contribution_shows(dtype: str, op: str) -> None:
    call = call_of_count("allreduce", 4, 2000, dtype, op)
    for sources in ([0, 1, 2], [0, 1, 2, 3, 3], [0, 1, 2, 2]):
        assert count_wrong(call, 0, honest(call, 0, sources=sources)) > 0.9 * call.counts[0]


def test_the_order_of_the_fold_does_not_matter() -> None:
    call = call_of_count("allreduce", 8, 5000, "float32", "sum")
    assert count_wrong(call, 0, honest(call, 0, sources=[7, 3, 5, 1, 0, 2, 4, 6])) == 0


@pytest.mark.parametrize("collective", TEST_NAMES)
def test_a_displaced_chunk_shows(collective: Any) -> None:
    root = 1 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    call = call_of_count(collective, 3, 4096, "float32", "sum" if collective in REDUCTIONS else "", root)
    assert count_wrong(call, 1, honest(call, 1, shift=1024)) > 0.99 * call.recv_count(1)


def test_vectors_longer_than_the_period() -> None:
    call = call_of_count("reduce_scatter", 2, PERIOD + 10, "int32", "sum")
    result = honest(call, 1)
    assert count_wrong(call, 1, result) == 0
    result[PERIOD + 3] += 1
    assert count_wrong(call, 1, result) == 1


@pytest.mark.parametrize(("dtype", "found"), [("float32", "nan (0xffffffff)"), ("bfloat16", "nan (0xffff)")])
def test_wrong_elements_are_named_with_what_was_expected_and_found(dtype: str, found: str) -> None:
    call = call_of_count("reduce", 4, PERIOD + 10, dtype, "sum", 0)
    result = honest(call, 0)
    expected = str(result[PERIOD + 3])
    poison(result[PERIOD + 3 : PERIOD + 5])
    wrong = find_wrong(call, 0, result)
    assert wrong.count == 2
    assert str(wrong.first[0]) == f"rank 0, element {PERIOD + 3}: expected {expected}, found {found}"
    poison(result)
    assert len(find_wrong(call, 0, result).first) == SHOWN


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_libraries_that_round_at_every_hop_are_not_called_wrong(order: tuple[int, ...]) -> None:
    call = call_of_count("reduce", 4, PERIOD, "bfloat16", "sum", 0)
    kind = dtype_of("bfloat16")
    inputs = [np.asarray(pattern(rank, "bfloat16")) for rank in range(4)]
    total = inputs[order[0]].astype(np.float32)
    for rank in order[1:]:
        total = (total + inputs[rank].astype(np.float32)).astype(kind).astype(np.float32)
    result = total.astype(kind)
    assert find_wrong(call, 0, result).count > 0.1 * PERIOD
    assert find_wrong(call, 0, result, narrow=True).count == 0
    result[::1000] = (total[::1000] - inputs[2][::1000].astype(np.float32)).astype(kind)
    assert find_wrong(call, 0, result, narrow=True).count == -(-PERIOD // 1000), "a contribution is missing"


class Elsewhere:
    """NumPy under another name, as CuPy is: buffers are compared in pieces, references uploaded."""

    asarray = staticmethod(np.asarray)
    count_nonzero = staticmethod(np.count_nonzero)
    flatnonzero = staticmethod(np.flatnonzero)


@pytest.mark.parametrize(("collective", "dtype", "op"), CASES)
def test_results_outside_host_memory_are_checked_alike(collective: Any, dtype: str, op: str) -> None:
    root = 1 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    call = call_of_count(collective, 2, 2 * PERIOD + 7, dtype, op, root)
    result = honest(call, 1)
    assert count_wrong(call, 1, result, xp=Elsewhere) == 0
    for at in (0, PERIOD + 3, call.recv_count(1) - 1):
        poison(result[at : at + 1])
    assert count_wrong(call, 1, result, xp=Elsewhere) == 3


@given(st.integers(0, 3 * PERIOD), st.integers(0, 3 * PERIOD))
@settings(max_examples=20, deadline=None)
def test_inputs_repeat_with_their_period(size: int, start: int) -> None:
    out, more = np.empty(size, np.float32), np.empty(start + size, np.float32)
    fill(out, 2, "float32", start, xp=Elsewhere)
    fill(more, 2, "float32")
    assert np.array_equal(out, more[start:])


# ---------------------------------------------------------------- where buffers lie


@pytest.mark.parametrize("collective", TEST_NAMES)
@pytest.mark.parametrize("in_place", [False, True])
def test_buffers_are_those_of_mpi_and_of_nccl(collective: Any, in_place: bool) -> None:
    """What each library is told: by name of the buffer, the elements from where on, and how many."""
    root = 1 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    call = call_of_count(collective, 3, 8, "int32", "sum" if collective in REDUCTIONS else "", root)
    buffers = Buffers([call])
    send, recv = buffers.views(call)

    def where(part: Any) -> str:
        if part is None or isinstance(part, str):
            return str(part)
        name, whole = ("send", send) if np.shares_memory(part, send) else ("recv", recv)
        first = (part.ctypes.data - whole.ctypes.data) // 4
        return f"{name}[{first}:{first + part.size}]"

    for rank in (1, 2):
        ours = Layout(call, rank, buffers, in_place=in_place, marker="IN_PLACE")
        nccl = Layout(call, rank, buffers, in_place=in_place)
        told = tuple(where(part) for part in ours.arguments)
        assert (told, (where(nccl.source), where(nccl.target))) == LAYOUTS[collective, in_place][rank - 1]
        for layout in (ours, nccl):
            layout.prepare()
            for part in layout.inputs:
                wanted = np.empty_like(part)
                fill(wanted, rank, call.dtype)
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
    ("alltoall", False): [(("send[0:24]", ALL), ("send[0:24]", ALL))] * 2,
    ("alltoall", True): [((IN, ALL), (ALL, ALL))] * 2,
    **{(kind, False): [(("send[0:8]", "recv[0:8]"), ("send[0:8]", "recv[0:8]"))] * 2 for kind in ("scan", "exscan")},
    **{(kind, True): [((IN, "recv[0:8]"), ("recv[0:8]", "recv[0:8]"))] * 2 for kind in ("scan", "exscan")},
    ("scatter", True): [(("send[0:24]", IN), ("send[0:24]", "send[8:16]")),
                        (("None", "recv[0:8]"), ("None", "recv[0:8]"))],
}  # fmt: skip


# ---------------------------------------------------------------- GPUs and peers, as far as they are pure


@pytest.mark.parametrize(("seconds", "timing", "calls"), [
    (10e-6, Timing(), 200), (1e-3, Timing(), 30), (0.1, Timing(), 5), (0.0, Timing(), 200),
    (10e-6, Timing(replays=10), 50), (1e-3, Timing(replays=10), 3), (0.1, Timing(replays=10), 1),
    (0.1, Timing(replays=2), 3), (0.1, Timing(iterations=7, aggregate=2), 14),
    (1e-6, Timing(iterations=7, replays=4), 7),
])  # fmt: skip
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
    assert allgather(MPI.COMM_SELF, bench_gpu.no_room(xp, 9 << 20), str) == [""], "as the ranks tell it each other"
    assert "16 MiB of buffers do not fit into the GPU's free 10 MiB" in bench_gpu.no_room(xp, 16 << 20)


def test_versions_from_numbers_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench_peers.version_text(22809) == "2.28.9"
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.3\n"
    monkeypatch.setattr(bench_meta, "_read", lambda path: text)
    assert bench_meta.nvidia_driver() == "580.159.04"
    monkeypatch.setattr(bench_meta, "_read", lambda path: "")
    assert bench_meta.nvidia_driver() is None


def ranks_with(*values: str | None) -> Any:
    """Ranks whose environments have these values."""
    bodies = [msgspec.msgpack.encode(value) for value in values]
    return SimpleNamespace(rank=0, size=len(values), allgather_bytes=lambda _: bodies)


def test_nccl_is_measured_without_nvls_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the result says so; a child sees what was set, as NCCL does."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert bench_peers.nvls_setting(ranks_with("1", "1")) == {"nvls": "1"}
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    with pytest.raises(ArgumentError, match=r"ranks have NCCL_NVLS_ENABLE unlike \(1, unset\).*mpirun -x"):
        bench_peers.nvls_setting(ranks_with("1", None))
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    found = bench_peers.nvls_setting(ranks_with(None, None))
    assert found["nvls"] == "0"
    assert "bench has set it to 0" in found["NCCL_NVLS_ENABLE"]
    assert subprocess.run(["printenv", "NCCL_NVLS_ENABLE"], capture_output=True, text=True, check=True).stdout == "0\n"


def test_symmetric_memory_is_not_measured_with_unknown_settings(monkeypatch: pytest.MonkeyPatch) -> None:
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
        bench_peers.nccl_module(xp)


def test_peers_say_what_they_cannot_run() -> None:
    mpi = bench_peers.MpiPeer(None, None)
    assert mpi.refusal(call_of_count("allreduce", 2, 8, "float32", "avg")) == "MPI has no average"
    assert "16-bit" in str(mpi.refusal(call_of_count("reduce", 2, 8, "bfloat16", "sum", 0)))
    assert mpi.refusal(call_of_count("broadcast", 2, 8, "bfloat16", "", 0)) is None
    torch = bench_peers.SymmMemPeer.__new__(bench_peers.SymmMemPeer)
    torch.n = 8
    assert torch.refusal(call_of_count("allreduce", 8, 8, "bfloat16", "sum")) is None
    assert "no other collective" in str(torch.refusal(call_of_count("allgather", 8, 8, "float32")))
    assert "float32 and bfloat16" in str(torch.refusal(call_of_count("allreduce", 8, 8, "float32", "max")))
    assert "16 bytes" in str(torch.refusal(call_of_count("allreduce", 8, 7, "float32", "sum")))
    torch.n = 3
    assert "2, 4 or 8" in str(torch.refusal(call_of_count("allreduce", 3, 8, "float32", "sum")))
