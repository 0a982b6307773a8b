"""How a warp moves 32 packs that are not aligned to 16 bytes: the kernels' own code, executed by 32 host threads.

A C++ compiler takes the part of ``types.cuh`` that says how, with loads and stores that note which bytes they touch,
and with shuffles by a barrier.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from blinkmpi.transport.cuda.kernels.compiler import KERNELS

CXX = shutil.which("c++") or shutil.which("g++")
BLOCK = 512
ROOM = 64  # bytes around a block
BEGINS, ENDS = "// ---- blocks:", "__device__ __forceinline__ Partial load_partial("
HOST = r"""
#include <atomic>
#include <barrier>
#include <cstring>
#include <stdint.h>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(16) Pack { u32 w[4]; };
static thread_local struct { unsigned x; } threadIdx;
static std::barrier warp(32);
static u32 exchanged[32];
static u32 __shfl_sync(u32, u32 value, int from) {
  exchanged[threadIdx.x] = value;
  warp.arrive_and_wait();
  const u32 got = exchanged[from & 31];
  warp.arrive_and_wait();
  return got;
}
static u32 __shfl_xor_sync(u32 mask, u32 value, int bits) { return __shfl_sync(mask, value, threadIdx.x ^ bits); }
static u32 __funnelshift_r(u32 low, u32 high, u32 bits) { return (u32)(((u64)high << 32 | low) >> (bits & 31)); }
static const char *loads_from, *stores_to;
static std::atomic<int> *loaded, *stored, crooked;
static void note(std::atomic<int>* which, const char* at, int bytes) {
  if ((u64)at % bytes) crooked++;
  for (int i = 0; i < bytes; i++) which[i]++;
}
static Pack load_pack(const char* p) { Pack x; note(loaded + (p - loads_from), p, 16); memcpy(&x, p, 16); return x; }
static u32 load_byte(const char* p) { note(loaded + (p - loads_from), p, 1); return (unsigned char)*p; }
static void store_pack(char* p, const Pack& x) { note(stored + (p - stores_to), p, 16); memcpy(p, &x, 16); }
static void store_byte(char* p, u32 x) { note(stored + (p - stores_to), p, 1); *p = (char)x; }
"""
RUN = r"""
extern "C" int run(const char* source, char* target, int from, int to, int* loads, int* stores, int bytes) {
  std::vector<std::atomic<int>> in(bytes), out(bytes);
  loads_from = source, stores_to = target, loaded = in.data(), stored = out.data(), crooked = 0;
  std::vector<std::thread> lanes;
  for (int i = 0; i < 32; i++)
    lanes.emplace_back([=] {
      threadIdx.x = i;
      const Piece piece = load_piece(source + from + 16 * i);
      store_block(target + to + 16 * i, realigned(source + from + 16 * i, piece));
    });
  for (auto& lane : lanes) lane.join();
  for (int i = 0; i < bytes; i++) loads[i] = in[i], stores[i] = out[i];
  return crooked;
}
"""


@pytest.fixture(scope="module")
def warp(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The code of the kernels as a library."""
    if CXX is None:
        pytest.skip("no C++ compiler: install g++")
    text = (KERNELS / "types.cuh").read_text(encoding="utf-8")
    code = text[text.index(BEGINS) : text.index(ENDS)]
    folder: Path = tmp_path_factory.mktemp("blocks")
    (folder / "blocks.cpp").write_text(HOST + code + RUN, encoding="utf-8")
    argv = [CXX, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "blocks.cpp", "-o", "blocks.so"]
    made = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return ctypes.CDLL(str(folder / "blocks.so"))


@pytest.mark.slow
@pytest.mark.parametrize("to", range(16))
def test_a_block_moves_from_anywhere_to_anywhere(warp: ctypes.CDLL, to: int, rng: np.random.Generator) -> None:
    """Every byte of the block is loaded and stored once, and none beside it."""
    size = BLOCK + 2 * ROOM
    for skew in range(16):
        memory = [np.zeros(size + 16, np.uint8) for _ in range(2)]
        source, target = (m[-m.ctypes.data % 16 :][:size] for m in memory)
        source[:] = rng.integers(256, size=size)
        before = target.copy()
        loads, stores = (np.zeros(size, np.int32) for _ in range(2))
        at = [ctypes.c_void_p(x.ctypes.data) for x in (source, target, loads, stores)]
        assert warp.run(*at[:2], ROOM + skew, ROOM + to, *at[2:], size) == 0, "an access is not aligned"
        before[ROOM + to :][:BLOCK] = source[ROOM + skew :][:BLOCK]
        assert (target == before).all(), (skew, to)
        for touched, begin in ((loads, ROOM + skew), (stores, ROOM + to)):
            inside = np.zeros(size, np.int32)
            inside[begin : begin + BLOCK] = 1
            assert (touched == inside).all(), (skew, to)
