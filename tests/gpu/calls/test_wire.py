"""``wire="operand"`` on GPUs: partial results along trees of several hops, rounded on each."""

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.program.call import Call
from blinkmpi.program.interpreter import run
from blinkmpi.program.reduction import dtype_of
from blinkmpi.topology import machine, modify
from tests.gpu.helpers import DGX1, Pools, at_least, fetch, sizes
from tests.harness import mpi

COUNT = 300_001
pytestmark = [pytest.mark.gpu, at_least(3)]


@pytest.mark.parametrize("emulated", [False, True])
@mpi(ranks=sizes(3, 4, 8), timeout=180)
def test_the_bits_are_those_of_the_program(comm: MPI.Intracomm, emulated: bool) -> None:
    n = comm.size
    told = modify(machine("dgx-1v"), gpus=DGX1[n]) if emulated else None
    algo = "" if emulated else "allreduce:chain"
    with blinkmpi.Communicator(comm, wire="operand", topology=told, algo=algo) as ours:
        gpus = ours.context.cuda()
        pools = Pools(ours, registered=False)
        for dtype in ("bfloat16", "float16", "float32"):
            sends = [np.random.default_rng(r).uniform(-1, 1, COUNT).astype(dtype_of(dtype)) for r in range(n)]
            call = Call("allreduce", n, (COUNT,), dtype, "sum")
            send, recv = pools.take(0, sends[comm.rank], 1), pools.take(1, sends[comm.rank], 1)
            ours.Allreduce(send, recv)
            program = gpus.program(call, gpus.rule(call, registered=False))
            assert any(channel.partial for channel in program.channels)
            assert not any(channel.wide for channel in program.channels)
            want = run(program, sends)[comm.rank]
            assert want is not None
            assert fetch(recv, dtype).tobytes() == want.tobytes(), dtype
