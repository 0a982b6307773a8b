"""A gate and the entry of the kernel behind it: the kernels' own code, executed by 32 host threads for each rank.

A C++ compiler takes ``layout.cuh``, ``sync.cuh`` and ``gate.cu``, with the flags' loads and stores as atomics of the
host, and votes and barriers of a warp by a barrier of threads. Each rank has a copy of the library, whose static
memory is its shared memory. The arguments are what the host fills in for a GPU.
"""

import ctypes
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blinkmpi.transport.cuda import kernel_layout
from blinkmpi.transport.cuda.failure_report import ABORTED, ANNOUNCEMENT, MISMATCH, OVERLAP, TIMEOUT
from blinkmpi.transport.cuda.kernels.compiler import INCLUDE, KERNELS
from blinkmpi.transport.cuda.memory_layout import ANNOUNCED, ANNOUNCED_AT, HEAD_BYTES, LINE
from tests.harness import NEVER_S, PATIENCE_S
from tests.harness.patience import wait_until

CXX = shutil.which("c++") or shutil.which("g++")
N = 3
CALL, OTHER_CALL = 0x1234, 0x5678  # fingerprints
SEQ_AT, RUNNING_AT, ABORT_AT = 0, 3, 16  # words of a header
SEND_REF, RECV_REF = 5 << 40 | 128, 6 << 40 | 256
HOST = r"""
#include <barrier>
#include <chrono>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __noinline__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads, ctas)
#define __shared__ static
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct Index { unsigned x; };
static thread_local Index threadIdx;
static const Index blockIdx = {0}, blockDim = {32}, gridDim = {1};
static std::barrier warp(32);
static int votes[32];
static int vote(bool all, int mine) {
  votes[threadIdx.x] = mine != 0;
  warp.arrive_and_wait();
  int ayes = 0;
  for (int v : votes) ayes += v;
  warp.arrive_and_wait();
  return all ? ayes == 32 : ayes > 0;
}
static int __any_sync(u32, int mine) { return vote(false, mine); }
static int __syncthreads_and(int mine) { return vote(true, mine); }
static void __syncthreads() { warp.arrive_and_wait(); }
static void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class W> static W atomicAdd(W* p, W v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
static u64 atomicExch(u64* p, u64 v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
static u64 atomicCAS(u64* p, u64 was, u64 v) {
  __atomic_compare_exchange_n(p, &was, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return was;
}
static u64 load_relaxed(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static u64 load_acquire(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void store_relaxed(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static void fence_system() { __threadfence(); }
static u64 now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}
"""
RUN = r"""
template <class Body> static void by_all(Body body) {
  std::vector<std::thread> lanes;
  for (unsigned i = 0; i < 32; i++) lanes.emplace_back([=] { threadIdx.x = i; body(); });
  for (auto& lane : lanes) lane.join();
}
extern "C" void run_gate(const CommonArguments* c) { by_all([=] { gate(*c); }); }
extern "C" void run_kernel(const CommonArguments* c, int waits) {
  by_all([=] {
    const u64 seq = announce<true>(*c);
    if (waits) await_announcements(*c, ((1ull << N) - 1) & ~(1ull << c->rank), seq);
    leave(*c);
  });
}
"""
BEGINS, ENDS = "// ---- flags:", "// ---- aborts and deadlines"  # what HOST has instead


def source() -> str:
    """The kernels' text for a host; every 16th poll looks at clock and abort words, for threads poll slowly."""
    layout, sync, gate = (
        (KERNELS / name).read_text(encoding="utf-8") for name in ("layout.cuh", "sync.cuh", "gate.cu")
    )
    sync = sync[: sync.index(BEGINS)] + sync[sync.index(ENDS) :]
    text, changed = re.subn(r"& 1023\b", "& 15", INCLUDE.sub("", layout + sync + gate))
    assert changed == 2, "polls of deadlines, and of the grid barrier"
    return kernel_layout.macros(N) + HOST + text + RUN


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    """The code, once for each rank."""
    if CXX is None:
        pytest.skip("no C++ compiler: install g++")
    folder: Path = tmp_path_factory.mktemp("gate")
    (folder / "gate.cpp").write_text(source(), encoding="utf-8")
    argv = [CXX, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "gate.cpp", "-o", "0.so"]
    made = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    for rank in range(1, N):
        shutil.copy(folder / "0.so", folder / f"{rank}.so")
    return [ctypes.CDLL(str(folder / f"{rank}.so")) for rank in range(N)]


@dataclass
class Ranks:
    """The memory of all ranks, and what runs on them."""

    libraries: list[ctypes.CDLL]
    pool: ThreadPoolExecutor
    headers: list[Any] = field(default_factory=lambda: [np.zeros(HEAD_BYTES // 8, np.uint64) for _ in range(N)])
    reports: list[Any] = field(
        default_factory=lambda: [np.zeros(len(kernel_layout.REPORT), np.uint64) for _ in range(N)]
    )

    def arguments(self, rank: int, fingerprint: int = CALL, timeout_s: float = NEVER_S) -> Any:
        addresses = [header.ctypes.data for header in self.headers]
        words = kernel_layout.common_arguments(addresses, self.reports[rank].ctypes.data, fingerprint, rank, 0)
        args = (ctypes.c_uint64 * len(words))(*words)
        kernel_layout.fill_call(args, N, int(timeout_s * 1e9), (0, 0, SEND_REF, RECV_REF, 0, 0))
        return args

    def gate(self, rank: int, fingerprint: int = CALL, timeout_s: float = NEVER_S) -> "Future[None]":
        return self.pool.submit(self.libraries[rank].run_gate, self.arguments(rank, fingerprint, timeout_s))

    def kernel(self, rank: int, fingerprint: int = CALL, *, waits: bool = True) -> "Future[None]":
        return self.pool.submit(self.libraries[rank].run_kernel, self.arguments(rank, fingerprint), int(waits))

    def code(self, rank: int) -> int:
        return int(self.reports[rank][1])

    def report(self, rank: int) -> dict[str, int]:
        return dict(zip(kernel_layout.REPORT, map(int, self.reports[rank].astype(np.int64)), strict=True))

    def line(self, rank: int, peer: int) -> list[int]:
        """What a rank has of a peer's announcements."""
        first = (ANNOUNCED_AT + LINE * peer) // 8
        return [int(word) for word in self.headers[rank][first : first + LINE // 8]]


@pytest.fixture
def ranks(libraries: list[ctypes.CDLL]) -> Iterator[Ranks]:
    with ThreadPoolExecutor(N) as pool:
        found = Ranks(libraries, pool)
        yield found
        for report in found.reports:  # ends what still waits
            report[0] = 1


def all_done(futures: list["Future[None]"]) -> None:
    for future in futures:
        future.result(PATIENCE_S)


def quiet(ranks: Ranks) -> bool:
    """Whether nobody has aborted."""
    return not any(ranks.code(rank) or ranks.headers[rank][ABORT_AT] for rank in range(N))


def test_gate_and_kernel_are_one_call(ranks: Ranks) -> None:
    """More calls than a line has announcements of, every other one with a gate."""
    for seq in range(1, ANNOUNCED + 4):
        fingerprint = CALL + seq
        if seq % 2:
            all_done([ranks.gate(rank, fingerprint) for rank in range(N)])
            for rank in range(N):
                assert ranks.headers[rank][SEQ_AT] == seq - 1, "the gate does not count the call"
                assert ranks.headers[rank][RUNNING_AT] == seq << 32 | fingerprint
        all_done([ranks.kernel(rank, fingerprint) for rank in range(N)])
        for rank in range(N):
            assert ranks.headers[rank][SEQ_AT] == seq
            assert ranks.headers[rank][RUNNING_AT] == 0
            for peer in set(range(N)) - {rank}:
                line = ranks.line(rank, peer)
                assert line[0] == line[1 + seq % ANNOUNCED] == seq << 32 | fingerprint
    assert quiet(ranks)


def test_a_gate_tells_where_buffers_are(ranks: Ranks) -> None:
    all_done([ranks.gate(rank) for rank in range(N)])
    halves = [(1 << 32) | half for ref in (SEND_REF, RECV_REF) for half in (ref & 0xFFFFFFFF, ref >> 32)]
    assert ranks.line(0, 1)[1 + ANNOUNCED :][:4] == halves


@pytest.mark.parametrize("late", range(N))
def test_gates_wait_for_every_rank(ranks: Ranks, late: int) -> None:
    gates = [ranks.gate(rank) for rank in range(N) if rank != late]
    for rank in set(range(N)) - {late}:
        wait_until(lambda rank=rank: ranks.line(late, rank)[0], f"rank {rank} announces")  # type: ignore[misc]
    time.sleep(0.1)
    assert not any(gate.done() for gate in gates)
    all_done([*gates, ranks.gate(late)])
    all_done([ranks.kernel(rank) for rank in range(N)])
    assert quiet(ranks)


def test_who_is_late_is_reported(ranks: Ranks) -> None:
    """By all who wait, and the kernels behind do not wait once more."""
    began = time.monotonic()
    all_done([ranks.gate(rank, timeout_s=0.3) for rank in (0, 1)])
    assert time.monotonic() - began > 0.25
    codes = [ranks.code(rank) for rank in (0, 1)]
    assert TIMEOUT in codes
    for rank in (0, 1):
        found = ranks.report(rank)
        assert found["code"] in (TIMEOUT, ABORTED)
        assert (found["seq"], found["peer"], found["stage"], found["want"], found["seen"]) == (1, 2, ANNOUNCEMENT, 1, 0)
    assert all(header[ABORT_AT] for header in ranks.headers), "all ranks are told"
    all_done([ranks.kernel(rank) for rank in (0, 1)])
    all_done([ranks.gate(2)])
    assert not ranks.code(2), "they have announced the call"


def test_another_call_is_reported_while_a_third_rank_is_late(ranks: Ranks) -> None:
    all_done([ranks.gate(0, CALL), ranks.gate(1, OTHER_CALL)])
    found = [ranks.report(rank) for rank in (0, 1)]
    assert MISMATCH in [one["code"] for one in found]
    for rank, one in enumerate(found):
        if one["code"] == MISMATCH:
            assert (one["peer"], one["stage"]) == (1 - rank, ANNOUNCEMENT)
            assert {one["want"], one["seen"]} == {CALL, OTHER_CALL}
        else:
            assert one["code"] == ABORTED


@pytest.mark.parametrize("who", ["the host", "a peer"])
def test_an_abort_ends_a_gate(ranks: Ranks, who: str) -> None:
    gate = ranks.gate(0)
    wait_until(lambda: ranks.line(1, 0)[0], "rank 0 announces")
    assert not gate.done()
    if who == "the host":
        ranks.reports[0][0] = 1
    else:
        ranks.headers[0][ABORT_AT] = 2
    all_done([gate])
    assert ranks.code(0) == ABORTED


@pytest.mark.parametrize("first", ["gate", "kernel"])
def test_two_calls_at_once_are_an_overlap(ranks: Ranks, first: str) -> None:
    """A kernel of another call behind a gate; and a gate while a kernel runs."""
    if first == "gate":
        all_done([ranks.gate(rank) for rank in range(N)])
        all_done([ranks.kernel(0, OTHER_CALL, waits=False)])
    else:
        ranks.headers[0][RUNNING_AT] = 7
        all_done([ranks.gate(0)])
    assert ranks.report(0)["code"] == OVERLAP
    assert ranks.report(0)["peer"] == 0
