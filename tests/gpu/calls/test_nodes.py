"""GPUs on several nodes, made of one machine by BLINKMPI_NODES: chunks cross between them as messages of MPI."""

import importlib.util
import time

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import CollectiveTimeout, DeviceError, MismatchError
from blinkmpi.transport.cuda.device import cupy
from tests.conformance import COLLECTIVES
from tests.gpu.calls.test_conformance import FEW, SOME, chosen
from tests.gpu.helpers import Pools, at_least, run_all, sizes
from tests.harness import PATIENCE_S, mpi, run_ranks
from tests.mpi.test_nodes import split as on_nodes

SPLITS = {2: ("1+1",), 3: ("1+2",), 4: ("2+2", "1+3", "1+2+1"), 8: ("4+4", "3+5")}

LIBUCX = importlib.util.find_spec("libucx")  # NVIDIA's build of UCX with its CUDA parts, as a wheel

pytestmark = [pytest.mark.gpu, at_least(2)]


needs_ucx = pytest.mark.skipif(LIBUCX is None, reason="needs a UCX with CUDA parts: pip install libucx-cu13")


def ucx(tls: str) -> dict[str, str]:
    """The variables with which Open MPI takes GPU memory by that UCX; see docs/nodes.md."""
    places = LIBUCX.submodule_search_locations if LIBUCX else None
    found = {"OMPI_MCA_pml": "ucx", "UCX_TLS": tls, "BLINKMPI_CUDA_AWARE": "1"}
    found |= dict.fromkeys(("OMPI_MCA_opal_common_ucx_tls", "OMPI_MCA_opal_common_ucx_devices"), "any")
    return {**found, "LD_LIBRARY_PATH": f"{places[0]}/lib" if places else ""}


def split(comm: MPI.Intracomm, nodes: str, **arguments: object) -> blinkmpi.Communicator:
    """A communicator on virtual nodes, each with GPUs."""
    ours = on_nodes(comm, nodes, **arguments)
    assert ours.gpu is not None, ours.context.why_no_gpus
    return ours


@mpi(ranks=sizes(2, 3, 4, 8), timeout=200)
def test_collectives(comm: MPI.Intracomm) -> None:
    collectives(comm, "staged in pinned host memory (")


@mpi(ranks=sizes(2, 4)[-1:], timeout=100)
def test_large_vectors_streams_and_host_memory(comm: MPI.Intracomm) -> None:
    large_vectors(comm)


@needs_ucx
@mpi(ranks=sizes(2, 3, 4, 8), timeout=200, env=ucx("self,sm,cuda_copy,cuda_ipc,tcp"))
def test_collectives_from_gpu_memory(comm: MPI.Intracomm) -> None:
    collectives(comm, "sent by MPI from GPU memory (BLINKMPI_CUDA_AWARE: yes)")


@needs_ucx
@pytest.mark.parametrize("by", ["ipc", "tcp"])
def test_large_vectors_from_gpu_memory(by: str) -> None:
    """A job for each way that UCX may take: a peer's memory mapped, or copies and sockets."""
    tls = {"ipc": "self,sm,cuda_copy,cuda_ipc,tcp", "tcp": "self,cuda_copy,tcp"}[by]
    report = run_ranks(sizes(2, 4)[-1], large_vectors, 100, env=ucx(tls))
    assert report.problem is None, report.problem


def collectives(comm: MPI.Intracomm, crossing: str) -> None:
    """All collectives on every split, with chunks that cross as said."""
    for turn, nodes in enumerate(SPLITS[comm.size]):
        with split(comm, nodes) as ours:
            assert crossing in ours.explain("allreduce")
            pools = Pools(ours, registered=bool(turn % 2))
            for collective in COLLECTIVES:
                pairs = SOME if not turn and collective == "allreduce" else FEW[: 1 + (not turn)]
                run_all(ours, pools, chosen(collective, comm.size, pairs), skew=turn)


def large_vectors(comm: MPI.Intracomm) -> None:
    """Vectors of many chunks, on streams, many calls in a row, host memory between them."""
    cp, draw = cupy(), np.random.default_rng(3)
    with split(comm, SPLITS[comm.size][0]) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        x = cp.arange(20_000_003, dtype=cp.float32) % 101 + comm.rank
        y = cp.empty_like(x)
        for _ in range(3):
            y.fill(0)
            stream.wait_event(cp.cuda.get_current_stream().record())
            ours.Allreduce(x, y, stream=stream)
            stream.synchronize()
            want = comm.size * (cp.arange(x.size, dtype=cp.float32) % 101) + sum(range(comm.size))
            assert bool((y == want).all())
        for i in range(100):
            count = int(draw.integers(1, 100_000))
            z = cp.full(count, comm.rank + i, cp.int64)
            ours.Allreduce(MPI.IN_PLACE, z)
            assert int(z[0]) == int(z[-1]) == sum(r + i for r in range(comm.size))
            if i % 10 == 0:
                host = np.full(count, comm.rank, np.int32)
                ours.Allreduce(MPI.IN_PLACE, host)
                assert (host == sum(range(comm.size))).all()
        requests = [ours.Iallreduce(MPI.IN_PLACE, z) for z in (cp.ones(1000), cp.ones(5_000_000))]
        MPI.Request.Waitall(requests)
        started = ours.Allreduce_init(x, y)
        started.Start()
        started.Wait()
        assert bool((y == want).all())


@mpi(ranks=sizes(2, 4)[-1:], timeout=60)
def test_what_goes_wrong(comm: MPI.Intracomm) -> None:
    cp = cupy()
    ours = split(comm, SPLITS[comm.size][0], timeout=3)
    x, y = cp.ones(1000), cp.empty(1000)
    with pytest.raises(MismatchError, match="rank 1"):
        ours.Allreduce(x[: 1000 - (comm.rank == 1)], y[: 1000 - (comm.rank == 1)])
    ours.Allreduce(x, y)  # it lives on
    assert bool((y == comm.size).all())
    stream = cp.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    with pytest.raises(DeviceError, match="captured"):
        ours.Allreduce(x, y, stream=stream)
    stream.end_capture()
    comm.Barrier()
    since = time.monotonic()
    if comm.rank:
        with pytest.raises(CollectiveTimeout, match="rank 0"):
            ours.Allreduce(x, y)
        assert time.monotonic() - since < 3 + PATIENCE_S
    comm.Barrier()
    if not comm.rank:
        with pytest.raises(CollectiveTimeout, match="found by rank"):
            ours.Allreduce(x, y)
    ours.Free()
