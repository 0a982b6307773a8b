"""What the driver alone takes to launch a kernel: the floor of a call's time on the host."""

import ctypes
import statistics
from pathlib import Path
from typing import Any

from blinkmpi.errors import DeviceError
from blinkmpi.transport.host.native import built

SOURCE = Path(__file__).with_suffix(".c")
WORDS, THREADS = 32, 512  # about those of a call of two ranks
KERNEL = f'struct Words {{ unsigned long long word[{WORDS}]; }};\nextern "C" __global__ void nothing(Words) {{}}\n'
LAUNCHES, REPEATS = 100, 9  # at a time, which no queue keeps waiting; times


def bare_launch_us(comm: Any, stream: Any) -> float:
    """Microseconds of the host for the launch of a kernel that does nothing; the largest of all ranks' medians.

    Args:
        comm: a Communicator on GPUs; collective.
        stream: of CuPy or torch, on which nothing else is.

    Raises:
        DeviceError: if there is no C compiler, or the driver refuses the launch.
    """
    path, why = built(SOURCE, ["-O2", "-shared", "-fPIC"])
    if path is None:
        raise DeviceError(f"the launch of a kernel cannot be measured: {why}; install a C compiler, such as gcc")
    measure, gpu = ctypes.CDLL(str(path)).bare_launch_ns, comm.context.cuda().gpu
    measure.restype = ctypes.c_double
    at = stream.ptr if hasattr(stream, "ptr") else stream.cuda_stream
    function = gpu.compile(KERNEL, "nothing").handle
    given = [ctypes.c_void_p(where) for where in (gpu.functions["launch"], function, at)]
    found = []
    for _ in range(1 + REPEATS):
        stream.synchronize()
        comm.Barrier()
        ns = measure(*given, ctypes.c_int64(THREADS), ctypes.c_int64(LAUNCHES))
        if ns < 0:
            raise DeviceError(f"cuLaunchKernel: CUDA error {-ns:.0f}; this process must be started again")
        found.append(ns / 1e3)
    stream.synchronize()
    return float(max(comm.allgather(statistics.median(found[1:]))))
