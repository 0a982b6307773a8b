"""Packets among more ranks than there are GPUs: kernels of ranks that share a GPU take turns on it.

So that what 8 ranks send one another is also tried where there are fewer GPUs. It is slow, for a kernel that waits
keeps its GPU until its turn is over; a Communicator refuses it, the transport does not.
"""

import numpy as np
import pytest
from mpi4py import MPI

from blinkmpi.program.call import Call
from blinkmpi.transport.announcement import Called
from blinkmpi.transport.cuda.device import Gpu, cupy
from blinkmpi.transport.cuda.packets import PROTOCOLS, fits
from blinkmpi.transport.cuda.transport import CudaTransport
from blinkmpi.trees.tree import COLLECTIVES
from tests.gpu.helpers import GPUS, at_least
from tests.harness import mpi
from tests.unit.trees.packings import call_of, reference, sends_of

COUNTS = (1, 1000, 50_021)
TIMEOUT_S = 30.0

pytestmark = [pytest.mark.gpu, at_least(1)]


@mpi(ranks=(3, 4, 8), timeout=150)
def test_packets_of_ranks_that_share_gpus(comm: MPI.Intracomm) -> None:
    gpu = Gpu(comm.rank % max(GPUS, 1))
    cp, transport, done = cupy(), CudaTransport(comm, gpu), 0
    stream = cp.cuda.Stream(non_blocking=True)
    calls = [
        Call("reduce_scatter", comm.size, (count,) * comm.size, "float32", "sum")
        if collective == "reduce_scatter"
        else call_of(collective, comm.size, count, root=count % comm.size)
        for collective in COLLECTIVES
        for count in COUNTS
        if collective != "barrier"
    ]
    for call in calls:
        sends = sends_of(call, np.random.default_rng(call.counts[0]))
        want = reference(call, sends)[comm.rank]
        for protocol in PROTOCOLS:
            if not fits(call, protocol):
                continue
            own = sends[comm.rank]
            send = cp.asarray(np.zeros(1, np.float32) if own is None else own)
            recv = cp.zeros(1 if want is None else want.size, "float32")
            cp.cuda.runtime.deviceSynchronize()
            loaded = transport.load(call, protocol, Called(f"{call} by {protocol}"))
            transport.fill(loaded, send.data.ptr, recv.data.ptr, 0, 0, TIMEOUT_S)
            for _ in range(2):  # both sets of LL buffers
                transport.starter(loaded, stream.ptr, stream, call.nbytes)()
            stream.synchronize()
            assert not transport.aborted, transport.error(Called(f"{call} by {protocol}"))
            if want is not None:
                wrong = np.flatnonzero(recv.get() != want)
                assert not wrong.size, f"{call} by {protocol}: {wrong.size} elements are wrong, {wrong[:8]} among them"
            done += 1
    transport.close(comm)
    assert done > len(calls)
