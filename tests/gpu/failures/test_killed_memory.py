"""Memory of a process that is killed while a kernel of another one stores into it and reads it: nothing breaks.

``shrink`` relies on it. This file is also the program of the victim: ``python tests/gpu/failures/test_killed_memory.py
DEVICE`` prints the handle of its memory.
"""

import ctypes
import os
import subprocess
import sys
import time

import pytest

from blinkmpi.transport.cuda.device import Gpu, cupy
from tests.gpu.helpers import DEVICES, at_least
from tests.harness import ROOT

NBYTES, TIMES, BLOCKS, THREADS = 4 << 20, 6, 16, 256
SPIN = r"""
extern "C" __global__ void spin(volatile unsigned* memory, volatile int* stop, unsigned* seen, int words) {
  const int me = threadIdx.x + blockIdx.x * blockDim.x;
  unsigned count = 0, sum = 0;
  for (int i = me; !*stop; i = (i + 4096) % words) {
    memory[i] = count++, sum += memory[(i + 77) % words];
    __threadfence_system();
  }
  seen[me] = sum + count;
}
"""

pytestmark = [pytest.mark.gpu, at_least(1)]


@pytest.mark.parametrize("there", sorted({0, DEVICES - 1} if DEVICES else {0}))
def test_a_kernel_outlives_the_memory_that_it_works_on(there: int) -> None:
    cp, gpu = cupy(), Gpu(0)
    gpu.use()
    spin, stream = cp.RawKernel(SPIN, "spin"), cp.cuda.Stream(non_blocking=True)
    flag = gpu.pinned(4)
    stop, seen = ctypes.c_int.from_address(flag), cp.zeros(BLOCKS * THREADS, "uint32")
    for _ in range(TIMES):
        command, env = [sys.executable, __file__, str(there)], {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as victim:
            assert victim.stdout is not None
            at = gpu.open(bytes.fromhex(victim.stdout.readline()))
            arguments = (cp.uint64(at), cp.uint64(flag), seen, cp.int32(NBYTES // 4))
            stop.value = 0
            with stream:
                spin((BLOCKS,), (THREADS,), arguments)
            time.sleep(0.05)
            assert not stream.done
            victim.kill()
        time.sleep(0.15)
        stop.value = 1
        stream.synchronize()
        with stream:  # what begins afterwards may use it, too
            spin((BLOCKS,), (THREADS,), arguments)
        stream.synchronize()
        gpu.shut(at)
        assert int(cp.arange(1000).sum()) == 499_500
    gpu.free_pinned(flag)


def be_the_victim(device: int) -> None:
    """Make memory, tell its handle, and wait to be killed."""
    gpu = Gpu(device)
    gpu.use()
    print(gpu.export(gpu.allocate(NBYTES)).hex(), flush=True)
    time.sleep(100)


if __name__ == "__main__":
    be_the_victim(int(sys.argv[1]))
