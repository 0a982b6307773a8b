"""Calls in CUDA graphs as users make them: without ``stream=``, side by side, with a peer that does not come."""

import contextlib
import time
from typing import Any

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import BlinkError, CollectiveTimeout, PeerLost
from blinkmpi.transport.cuda.device import cupy
from tests.gpu.helpers import at_least, sizes, spinner
from tests.harness import PATIENCE_S, mpi

RANKS = sizes(2, 4)[-1:]
BIG = 3 << 20  # elements: 12 MiB, past all packets
SIZES = (1000, 1 << 18, BIG)

pytestmark = [pytest.mark.gpu, at_least(2)]


def replay_until_error(ours: blinkmpi.Communicator, graph: Any, stream: Any) -> None:
    for _ in range(100):
        ours.check()
        graph.launch(stream)
        stream.synchronize()


@mpi(ranks=RANKS, timeout=60)
def test_a_capture_without_stream_is_a_capture(comm: MPI.Intracomm) -> None:
    """Of calls that were never made before, too: what they load and allocate is no part of the graph."""
    cp, n = cupy(), comm.size
    with blinkmpi.Communicator(comm) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        for count in SIZES:
            with stream:
                x, y, z = (cp.zeros(count, "float32") for _ in range(3))
            stream.synchronize()
            with stream:
                stream.begin_capture()
                ours.Allreduce(x, y)
                request = ours.Iallreduce(y, z)
                request.Wait()
                graph = stream.end_capture()
            for i in range(5):
                with stream:
                    x[...] = comm.rank + i
                graph.launch(stream)
                stream.synchronize()
                assert (z == n * (n * i + n * (n - 1) / 2)).all(), (count, i)
            ours.Allreduce(x, y)
            assert (y == n * 4 + n * (n - 1) / 2).all()
        ours.check()


@mpi(ranks=RANKS, timeout=60)
def test_a_request_under_way_does_not_break_a_capture(comm: MPI.Intracomm) -> None:
    """The progress thread asks for events while the user captures another stream, in the strictest mode."""
    cp, spin, n = cupy(), spinner(), comm.size
    with blinkmpi.Communicator(comm) as ours:
        busy, captured = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
        x, y, z = (cp.full(BIG, comm.rank, "float32") for _ in range(3))
        cp.cuda.Device().synchronize()
        ours.Allreduce(x, y, stream=busy)
        busy.synchronize()
        for _ in range(5):
            spin(busy, 30_000)
            request = ours.Iallreduce(x, y, stream=busy)
            with captured:
                captured.begin_capture()  # global
                for _ in range(20):
                    z += 1
                    time.sleep(0.001)
                graph = captured.end_capture()
            graph.launch(captured)
            request.Wait()
            captured.synchronize()
        assert (z == comm.rank + 100).all()
        assert (y == n * (n - 1) / 2).all()


def captured(ours: blinkmpi.Communicator, stream: Any, x: Any, y: Any, calls: int = 5) -> Any:
    """A graph of Allreduces on a stream; the call was made before."""
    ours.Allreduce(x, y, stream=stream)
    stream.synchronize()
    stream.begin_capture()
    for _ in range(calls):
        ours.Allreduce(x, y, stream=stream)
    return stream.end_capture()


@mpi(ranks=RANKS, timeout=120)
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("what", ["two graphs", "a graph and a call", "four graphs", "two communicators", "groups"])
def test_graphs_and_calls_run_as_they_are_launched(comm: MPI.Intracomm, count: int, what: str) -> None:
    """On streams that nobody orders."""
    cp, n, many = cupy(), comm.size, 4 if what == "four graphs" else 2
    with blinkmpi.Communicator(comm, timeout=20) as ours, blinkmpi.Communicator(comm, timeout=20) as other:
        comms = [other if what == "two communicators" and k % 2 else ours for k in range(many)]
        streams = [cp.cuda.Stream(non_blocking=True) for _ in range(many)]
        ends = [[cp.full(count, comm.rank + k, "float32"), cp.zeros(count, "float32")] for k in range(many)]
        more = [[cp.full(count // 2, comm.rank - k, "float32"), cp.zeros(count // 2, "float32")] for k in range(many)]

        def enqueue(k: int) -> None:
            (x, y), (a, b) = ends[k], more[k]
            if what == "groups":
                comms[k].Allreduce([x, a], [y, b], stream=streams[k])
            else:
                comms[k].Allreduce(x, y, stream=streams[k])

        cp.cuda.Device().synchronize()
        graphs = []
        for k, stream in enumerate(streams):
            enqueue(k)
            stream.synchronize()
            stream.begin_capture()
            for _ in range(5):
                enqueue(k)
            graphs.append(stream.end_capture())
        for i in range(50):
            for _, y in (*ends, *more):
                y[...] = -1
            cp.cuda.Device().synchronize()
            order = range(many) if i % 2 else reversed(range(many))
            for k in order:
                if what == "a graph and a call" and k:
                    for _ in range(5):
                        enqueue(k)
                else:
                    graphs[k].launch(streams[k])
            for stream in streams:
                stream.synchronize()
            ours.check()
            for k, (_, y) in enumerate(ends):
                assert (y == n * k + n * (n - 1) / 2).all(), (i, k)
            for k, (_, b) in enumerate(more if what == "groups" else ()):
                assert (b == n * (n - 1) / 2 - n * k).all(), (i, k)


@mpi(ranks=RANKS, timeout=60)
def test_a_capture_on_a_stream_that_the_default_one_waits_for(comm: MPI.Intracomm) -> None:
    """After calls on the default stream, which CUDA lets nobody ask during such a capture."""
    cp, n = cupy(), comm.size
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        for count in SIZES:
            x, y = cp.full(count, comm.rank, "float32"), cp.zeros(count, "float32")
            ours.Allreduce(x, y)
            stream = cp.cuda.Stream()
            with stream:
                stream.begin_capture()
                ours.Allreduce(x, y)
                graph = stream.end_capture()
            for _ in range(3):
                y[...] = -1
                graph.launch(stream)
                ours.Allreduce(MPI.IN_PLACE, x)
                x[...] = comm.rank
                stream.synchronize()
                assert (y == n * (n - 1) / 2).all(), count
        ours.check()


@mpi(ranks=RANKS, timeout=90, env={"BLINKMPI_GRAPH_MIXING": "0"})
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("pair", ["two graphs", "a graph and a call"])
def test_graphs_that_overlap_without_mixing_are_right_or_an_error(comm: MPI.Intracomm, count: int, pair: str) -> None:
    cp, n = cupy(), comm.size
    ours = blinkmpi.Communicator(comm, timeout=10)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    ends = [[cp.full(count, comm.rank + k, "float32"), cp.zeros(count, "float32")] for k in range(2)]
    cp.cuda.Device().synchronize()
    graphs = [captured(ours, stream, *end) for end, stream in zip(ends, streams, strict=True)]
    error: BlinkError | None = None
    wrong = 0
    for _ in range(50):
        for _, y in ends:
            y[...] = -1
        cp.cuda.Device().synchronize()
        graphs[0].launch(streams[0])
        try:
            if pair == "two graphs":
                graphs[1].launch(streams[1])
            else:
                for _ in range(5):
                    ours.Allreduce(*ends[1], stream=streams[1])
            for stream in streams:
                stream.synchronize()
            ours.check()
        except BlinkError as found:
            error = found
            break
        wrong += sum(int((y != n * k + n * (n - 1) / 2).sum()) for k, (_, y) in enumerate(ends))
    assert not wrong, f"{wrong} wrong elements and no error"
    errors = comm.allgather(type(error).__name__ if error else "")
    for stream in streams:
        stream.synchronize()
    if any(errors):
        assert {"DeviceError", "PeerLost", "CollectiveTimeout", "MismatchError"} >= set(filter(None, errors)), errors
        # Which of them depends on who sees it first, this GPU or one that runs the other graph; either names the cause.
        assert {"DeviceError", "MismatchError"} & set(errors), errors
        said = comm.allgather(str(error or ""))
        assert any("graph" in text for text in said), said
    comm.Barrier()
    with contextlib.suppress(BlinkError):
        ours.Free()


@mpi(ranks=RANKS, timeout=60)
def test_a_replay_that_fails_is_told_of(comm: MPI.Intracomm) -> None:
    cp = cupy()
    ours = blinkmpi.Communicator(comm, timeout=2)
    stream = cp.cuda.Stream(non_blocking=True)
    x, y = cp.ones(1000, "float32"), cp.zeros(1000, "float32")
    cp.cuda.Device().synchronize()
    ours.Allreduce(x, y, stream=stream)
    stream.synchronize()
    stream.begin_capture()
    ours.Allreduce(x, y, stream=stream)
    graph = stream.end_capture()
    if comm.rank == 0:
        graph.launch(stream)
        stream.synchronize()
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            ours.check()
    comm.Barrier()
    if comm.rank:
        with pytest.raises((CollectiveTimeout, PeerLost)):
            replay_until_error(ours, graph, stream)
    comm.Barrier()


@mpi(ranks=RANKS, timeout=60)
def test_a_call_that_nobody_waits_for_gives_up_when_a_peer_refuses(comm: MPI.Intracomm) -> None:
    cp = cupy()
    ours = blinkmpi.Communicator(comm, timeout=300)
    stream = cp.cuda.Stream(non_blocking=True)
    x, y = cp.ones(1000, "float32"), cp.zeros(1000, "float32")
    cp.cuda.Device().synchronize()
    ours.plan("allreduce")  # in a first call all ranks meet, and hear of a refusal at once
    began = time.monotonic()
    if comm.rank:
        with pytest.raises(BlinkError):
            ours.Allreduce(x, y[:10], stream=stream)
    else:
        ours.Allreduce(x, y, stream=stream)
        stream.synchronize()
        with pytest.raises(BlinkError):
            ours.check()
    assert time.monotonic() - began < PATIENCE_S
    comm.Barrier()
