"""How the benchmark measures, as far as it is pure: where buffers lie, blocks of calls, other libraries."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blinkmpi.bench import environment as bench_meta
from blinkmpi.bench import peers as bench_peers
from blinkmpi.bench import time_gpu as bench_gpu
from blinkmpi.bench.layout import Buffers, Layout
from blinkmpi.bench.nccl_tests import TEST_NAMES
from blinkmpi.bench.timing import Timing
from blinkmpi.bench.verification import fill
from blinkmpi.errors import ArgumentError
from tests.unit.bench.calls import call_of_count

# ---------------------------------------------------------------- where buffers lie


@pytest.mark.parametrize("collective", TEST_NAMES)
@pytest.mark.parametrize("in_place", [False, True])
def test_buffers_are_those_of_mpi_and_of_nccl(collective: Any, in_place: bool) -> None:
    """What each library is told: by name of the buffer, the elements from where on, and how many."""
    root = 1 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    call = call_of_count(collective, 3, 8, "int32", "sum" if "reduce" in collective else "", root)
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
