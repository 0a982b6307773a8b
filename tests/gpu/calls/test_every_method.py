"""Every public method that takes buffers, on CuPy arrays: right, or a typed error, and no rank dies."""

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.collectives import Collectives
from blinkmpi.errors import BufferTypeError
from blinkmpi.runtime.cuda.aware import known
from blinkmpi.transport.cuda.device import cupy
from tests.every_call import collectives, make_collective, walk_collectives, walk_point_to_point
from tests.every_method import COUNT, ByDLPack, Fake
from tests.gpu.helpers import at_least, sizes, spinner
from tests.harness import mpi

RANKS = sizes(2, 3, 4)

pytestmark = [pytest.mark.gpu, at_least(2)]


@mpi(ranks=RANKS, timeout=240)
def test_every_collective_is_right_or_refused(comm: MPI.Intracomm) -> None:
    cp, everybody = cupy(), list(range(comm.size))
    with blinkmpi.Communicator(comm) as ours:
        family = (
            ours,
            ours.Create_cart([comm.size], [True]),
            ours.Create_graph([comm.size * (i + 1) for i in everybody], everybody * comm.size),
            ours.Create_dist_graph_adjacent(everybody, everybody),
        )
        for of in family:
            outcomes = walk_collectives(of, cp.asarray, cp.asnumpy)
            assert set(outcomes.values()) <= {"right", "BufferTypeError"}, outcomes
            if of is ours:
                own = {name for name in outcomes if name in vars(Collectives)}
                assert {name for name in own if outcomes[name] != "right"} == set()
                by_dlpack = walk_collectives(
                    ours, lambda array: ByDLPack(cp.asarray(array)), lambda got: cp.asnumpy(got.array)
                )
                assert by_dlpack == outcomes
            if known(MPI)[0]:
                assert set(outcomes.values()) == {"right"}
        total = cp.zeros(1)
        ours.Allreduce(cp.ones(1), total)
        assert total.get() == comm.size


@mpi(ranks=RANKS, timeout=120)
def test_all_of_point_to_point_is_right(comm: MPI.Intracomm) -> None:
    cp, spin = cupy(), spinner()
    with blinkmpi.Communicator(comm) as ours:
        walk_point_to_point(ours, cp.asarray, cp.asnumpy)
        walk_point_to_point(ours, cp.asarray, cp.asnumpy)
        # behind what is on the arrays' stream, and with more requests than one
        stream, peer = cp.cuda.Stream(non_blocking=True), comm.size - 1 - comm.rank
        with stream:
            sent, got = cp.zeros((8, 100_000), "float32"), cp.zeros((8, 100_000), "float32")
            for count in (100_000, 0):
                spin(stream, 3000)
                sent[...] = cp.arange(8, dtype="float32")[:, None] + 1 + count
                spin(stream, 3000)
                got[...] = -1
                requests = [ours.Irecv(got[i, :count], peer, i) for i in reversed(range(8))]
                requests += [ours.Isend(sent[i, :count], peer, i) for i in range(8)]
                MPI.Request.Waitall(requests)
                want = np.full((8, 100_000), -1.0)
                want[:, :count] = np.arange(8)[:, None] + 1 + count
                assert (got.get() == want).all()
                spin(stream, 3000)
                sent[...] = 7
                ours.Sendrecv([sent, 4, MPI.FLOAT], peer, 0, [got, (4, 2), MPI.FLOAT], peer)
                assert got.ravel()[2:6].tolist() == [7] * 4
        torch = pytest.importorskip("torch")
        tensor, other = torch.full((10,), 3.0 + comm.rank).cuda(), torch.zeros(10).cuda()
        ours.Sendrecv(tensor, peer, 0, other, peer)
        assert other.tolist() == [3.0 + peer] * 10


@mpi(ranks=RANKS[:1], timeout=120)
def test_what_claims_to_lie_on_a_gpu_is_refused(comm: MPI.Intracomm) -> None:
    """Host memory, at which a kernel would die."""
    n = comm.size
    with blinkmpi.Communicator(comm) as ours:
        fake = Fake(np.ones(COUNT * n, np.float32), 0)
        for name, buffers in collectives(MPI.Intracomm):
            if name in vars(Collectives) or not known(MPI)[0]:
                for form in range(3):
                    with pytest.raises(BufferTypeError):
                        make_collective(ours, name, buffers, form, lambda array: Fake(array, 0))
        if not known(MPI)[0]:
            for receive in (ours.Recv, ours.Irecv, ours.Send, ours.Isend):
                with pytest.raises(BufferTypeError, match="no memory of a GPU"):
                    receive(fake, MPI.PROC_NULL)
