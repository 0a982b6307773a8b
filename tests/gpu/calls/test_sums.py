"""Sums on a GPU: all pairs of 16-bit floats added two at a time, every float32 made a bfloat16, subnormal numbers.

The kernels add two operands by an instruction for pairs. Here it meets, for each pair of bit patterns, what the general
way does: widen both, add in float32, round.
"""

import ctypes

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.transport.cuda.device import Gpu
from blinkmpi.transport.cuda.kernels.compiler import kernel_source
from tests.gpu.helpers import Pools, at_least, fetch, sizes
from tests.harness import mpi

PATTERNS = 1 << 16
THREADS = 256
KERNELS = r"""
__device__ bool is_nan(u16 x, u16 infinity) { return (x & 0x7fff) > infinity; }

// One thread for each pattern of the first operand; the second is every pattern, two a turn.
extern "C" __global__ void all_pairs(u64* wrong, u32 infinity) {
  const u16 first = (u16)(blockIdx.x * blockDim.x + threadIdx.x);
  u64 mine = 0;
  for (u32 second = 0; second < 65536; second += 2) {
    const u32 sum = pair_sum<T>((u32)first << 16 | first, (second + 1) << 16 | second);
    for (int i = 0; i < 2; i++) {
      T expected;
      narrow(expected, widen(T{first}) JOINED_BY widen(T{(u16)(second + i)}));
      const u16 got = (u16)(sum >> 16 * i);
      const bool both = is_nan(got, infinity) && is_nan(expected.bits, infinity);
      mine += !both && got != expected.bits;
    }
  }
  if (mine) atomicAdd(wrong, mine);
}

// One thread for each upper half of a float32; rounded here in whole numbers.
extern "C" __global__ void all_floats(u64* wrong, u32) {
  const u32 upper = blockIdx.x * blockDim.x + threadIdx.x;
  u64 mine = 0;
  for (u32 lower = 0; lower < 65536; lower++) {
    const u32 bits = upper << 16 | lower;
    bf16 got;
    narrow(got, __uint_as_float(bits));
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    const u16 expected = (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    mine += nan ? !is_nan(got.bits, 0x7f80) : got.bits != expected;
  }
  if (mine) atomicAdd(wrong, mine);
}
"""
pytestmark = [pytest.mark.gpu, at_least(1)]


def wrong(kernel: str, element: str, infinity: int, joined_by: str = "+") -> int:
    """How many results of a kernel above are wrong."""
    import cupy

    macros = f"#define N 2\n#define ELEMENT {element}\n#define OPERATION SUM\n#define JOINED_BY {joined_by}\n"
    compiled = Gpu(0).compile(macros + kernel_source("types.cuh") + KERNELS, kernel)
    found = cupy.zeros(1, dtype=cupy.uint64)
    words = (ctypes.c_uint64 * 2)(found.data.ptr, infinity)
    params = (ctypes.c_void_p * 2)(*(ctypes.addressof(words) + 8 * i for i in range(2)))
    compiled.launcher(PATTERNS // THREADS, THREADS, 0, params, kernel)()
    return int(found[0])


@pytest.mark.parametrize(("element", "infinity"), [("f16", 0x7C00), ("bf16", 0x7F80)])
def test_pairs_have_the_bits_of_the_general_way(element: str, infinity: int) -> None:
    assert wrong("all_pairs", element, infinity) == 0


def test_the_judge_can_fail() -> None:
    assert wrong("all_pairs", "bf16", 0x7F80, "-") > PATTERNS


def test_every_float_is_rounded_as_in_whole_numbers() -> None:
    assert wrong("all_floats", "bf16", 0) == 0


@pytest.mark.parametrize("protocol", ["ll16_one_shot", "ll128_two_shot", "slots", "direct"])
@mpi(ranks=sizes(2), timeout=60)
def test_small_numbers_do_not_become_zero(comm: MPI.Intracomm, protocol: str) -> None:
    """Subnormal ones, which CuPy's compiler options would lose."""
    with blinkmpi.Communicator(comm, algo=f"allreduce:onehop/{protocol}") as ours:
        pools = Pools(ours, registered=protocol == "direct")
        for dtype in ("float32", "float64"):
            least = np.finfo(dtype).smallest_subnormal
            x = (np.arange(5000) % 7 * least).astype(dtype)
            recv = pools.take(1, x, 0)
            ours.Allreduce(pools.take(0, x, 0), recv)
            assert fetch(recv, dtype).tobytes() == (comm.size * x).tobytes()
