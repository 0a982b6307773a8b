"""Calls among a user's other work on the GPU: streams, graphs, requests, persistent calls, memory."""

import random

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BufferTypeError
from blinkmpi.transport.cuda.device import cupy
from tests.gpu.helpers import Stress, at_least, sizes, spinner
from tests.harness import mpi

RANKS = sizes(2, 4)[-1:]
BIG = 3 << 20  # elements: 12 MiB, past all packets

pytestmark = [pytest.mark.gpu, at_least(2)]


@mpi(ranks=RANKS, timeout=60)
def test_calls_keep_their_place_on_streams(comm: MPI.Intracomm) -> None:
    cp, spin, n = cupy(), spinner(), comm.size
    triangle = n * (n + 1) / 2
    with blinkmpi.Communicator(comm) as ours:
        one, two, three = (cp.cuda.Stream(non_blocking=True) for _ in range(3))
        x, y, z = (cp.zeros(BIG, "float32") for _ in range(3))
        cp.cuda.runtime.deviceSynchronize()
        for count in (5, BIG):
            for stream, told in ((one, one), (two, two.ptr), (cp.cuda.Stream.null, 0)):
                for late in range(n):  # one rank's input comes late, and its output is read at once
                    spin(stream, 3000 if late == comm.rank else 0)
                    with stream:
                        x[:count] = ours.rank + 1 + late
                        y[...] = z[...] = -1
                    ours.Allreduce(x[:count], y[:count], stream=told)
                    with stream:
                        cp.multiply(y, 2, out=z)
                    stream.synchronize()
                    assert (z[:count] == 2 * (triangle + n * late)).all(), (count, told, late)
                    assert (z[count:] == -2).all()
        # without stream=: CuPy's current stream, and the result is there
        with three:
            spin(three, 2000)
            x[...] = 3
            ours.Allreduce(x, y)
        assert (y.get() == 3 * n).all()
        # calls of one communicator run in their order, whatever their streams
        streams, rounds = (one, two, three), 60
        sends, recvs = (cp.empty((rounds, 1000), "float32") for _ in range(2))
        cp.cuda.runtime.deviceSynchronize()
        for i in range(rounds):
            stream = streams[i % 3]
            if i % 7 == comm.rank:
                spin(stream, 500)
            with stream:
                sends[i] = i + comm.rank
            ours.Allreduce(sends[i], recvs[i], stream=stream)
        cp.cuda.runtime.deviceSynchronize()
        want = n * np.arange(rounds) + n * (n - 1) / 2
        assert (recvs.get() == want[:, None]).all()


@mpi(ranks=RANKS, timeout=60)
def test_two_communicators_and_streams_that_come_and_go(comm: MPI.Intracomm) -> None:
    cp, spin, n = cupy(), spinner(), comm.size
    with blinkmpi.Communicator(comm) as first, blinkmpi.Communicator(comm) as second:
        pair = [(ours, cp.cuda.Stream(non_blocking=True)) for ours in (first, second)]
        sends, recvs = (cp.empty((200, 500), "float32") for _ in range(2))
        cp.cuda.runtime.deviceSynchronize()
        rng = random.Random(comm.rank)
        for i in range(200):  # small enough for both to have room on the GPU at once
            ours, stream = pair[i % 2]
            if rng.random() < 0.05:
                spin(stream, 1000)
            with stream:
                sends[i] = i + comm.rank
            ours.Allreduce(sends[i], recvs[i], stream=stream)
        cp.cuda.runtime.deviceSynchronize()
        assert (recvs.get() == (n * np.arange(200) + n * (n - 1) / 2)[:, None]).all()
        # a stream that is gone when the next call is made on another
        x, y = cp.ones(BIG, "float32"), cp.empty(BIG, "float32")
        cp.cuda.runtime.deviceSynchronize()
        kept = []
        for i in range(10):
            stream = cp.cuda.Stream(non_blocking=True)
            first.Allreduce(x, y, stream=stream)
            stream.synchronize()
            kept = [*kept[-1:], cp.cuda.Stream(non_blocking=True)] if i % 2 else kept
            del stream
        first.Allreduce(x, y)
        assert (y == n).all()


@mpi(ranks=RANKS, timeout=60)
def test_graphs(comm: MPI.Intracomm) -> None:
    """Several calls in one graph, replayed with new inputs among ordinary calls."""
    cp, spin, n = cupy(), spinner(), comm.size
    with blinkmpi.Communicator(comm) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        work = Stress(comm, stream, n << 21)
        kinds = [("allreduce", 100), ("broadcast", 7), ("allgather", 333), ("reduce_scatter", 4096), ("reduce", 999)]
        kinds += [("gather", 50), ("scatter", 51), ("allreduce", BIG), ("allreduce", 20_000), ("broadcast", BIG)]
        kinds.append(("allreduce", 1 << 22))  # 16 MiB: its chunk is still looked for when it is captured
        calls = []
        for kind, count in kinds:
            calls.append((kind, count, *work.ends(kind, count, *(cp.empty(n * count, "float32") for _ in range(2)))))
        calls.append(("allreduce", BIG, *(ours.empty(BIG) for _ in range(2))))
        source, target = calls[0][2][:64], calls[0][3][:64]
        persistent = ours.Allreduce_init(source, target, stream=stream)

        def enqueue() -> None:
            for kind, _, send, recv in calls:
                work.do(ours, kind, send, recv, 0, "", stream=stream)

        for _ in range(3):  # compiles, and finds the memory: a graph must not
            enqueue()
        stream.synchronize()
        stream.begin_capture()
        enqueue()
        graph = stream.end_capture()
        stream.begin_capture()
        for _ in range(5):
            persistent.Start()
        five = stream.end_capture()
        for i in range(40):
            if i % 9 == comm.rank:
                spin(stream, 700)
            for _, _, send, recv in calls:
                work.fill(send, recv, i)
            graph.launch(stream)
            for kind, count, _, recv in calls:
                work.compare(recv, kind, count, 0, i)
            work.fill(source, target, i + 1)
            five.launch(stream)
            work.compare(target, "allreduce", 64, 0, i + 1)
            kind, count, send, recv = calls[i % len(calls)]
            work.fill(send, recv, i + 2)
            work.do(ours, kind, send, recv, 0, "", stream=stream)
            work.compare(recv, kind, count, 0, i + 2)
        assert work.wrong == 0


@mpi(ranks=RANKS, timeout=60)
def test_persistent_calls_and_requests(comm: MPI.Intracomm) -> None:
    cp, n = cupy(), comm.size
    total = n * (n - 1) // 2
    with blinkmpi.Communicator(comm) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            x, y = cp.zeros(5000, "float64"), cp.zeros(5000, "float64")
            seen = cp.zeros(5000, "float64")
        call = ours.Allreduce_init(x, y, stream=stream)
        for i in range(20):
            with stream:
                x[...] = i + comm.rank
            call.Start()
            call.Wait()
            assert (y.get() == n * i + total).all(), i
        for i in range(200):  # nobody waits in between
            with stream:
                x[...] = i + comm.rank
            call.Start()
            with stream:
                seen += y
        call.Wait()
        stream.synchronize()
        assert call.Test()
        assert (seen.get() == n * 199 * 100 + 200 * total).all()
        call.Free()
        with pytest.raises(ArgumentError, match="freed"):
            call.Start()
        block, whole = cp.full(100, comm.rank, "int32"), cp.empty(100 * n, "int32")
        vector, part = cp.full(64 * n, comm.rank + 1, "float32"), cp.empty(64, "float32")
        told = cp.full(77, comm.rank, "float32")
        made = [
            ours.Allgather_init(block, whole),
            ours.Reduce_scatter_block_init(vector, part),
            ours.Bcast_init(told, root=n - 1),
        ]
        for _ in range(3):
            for each in made:
                each.Start()
            for each in made:
                each.Wait()
        assert (whole.reshape(n, 100) == cp.arange(n)[:, None]).all()
        assert (part == total + n).all()
        assert (told == n - 1).all()
        inside = cp.full(64 * n, comm.rank + 1, "float32")
        again = ours.Reduce_scatter_block_init(MPI.IN_PLACE, inside)
        for i in range(3):  # what lies in the buffer at Start counts
            inside[...] = comm.rank + i
            again.Start()
            again.Wait()
            assert (inside[:64] == total + n * i).all(), i
        # requests, several at once, with calls of other kinds behind them
        sends = [cp.full(1 + 3000 * i, comm.rank + i, "float32") for i in range(12)]
        recvs = [cp.zeros_like(s) for s in sends]
        pending = [ours.Iallreduce(s, r) for s, r in zip(sends, recvs, strict=True)]
        ours.Barrier()
        pending.append(ours.Ibcast(told, root=0))
        ours.Allreduce(x, y, stream=stream)
        for request in pending:
            request.Wait()
        assert all((r == n * i + total).all() for i, r in enumerate(recvs))
        MPI.Request.Waitall([ours.Iallreduce(s, r, stream=stream) for s, r in zip(sends, recvs, strict=True)])
        assert all((r == n * i + total).all() for i, r in enumerate(recvs))
        request = ours.Iallgather(block, whole)
        while not request.Test():
            pass
        assert (whole.reshape(n, 100) == cp.arange(n)[:, None]).all()


@mpi(ranks=RANKS, timeout=90)
def test_a_thousand_calls_in_a_row(comm: MPI.Intracomm) -> None:
    """Of changing sizes and kinds, each with memory of its own, compared when all are done."""
    cp, n, rng = cupy(), comm.size, random.Random(1)
    with blinkmpi.Communicator(comm) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        counts = [1, 3, 64, 500, 4096, 12_345, 70_001]
        work = Stress(comm, stream, n * max(counts))
        plan = [(rng.choice(Stress.KINDS), rng.choice(counts), rng.randrange(n), i) for i in range(1000)]
        with stream:
            stops = np.cumsum([n * count for _, count, _, _ in plan]).tolist()
            sends, recvs = (cp.empty(stops[-1], "float32") for _ in range(2))
        spans = [slice(stop - n * count, stop) for stop, (_, count, _, _) in zip(stops, plan, strict=True)]
        ends = [
            work.ends(kind, count, sends[span], recvs[span], root)
            for span, (kind, count, root, _) in zip(spans, plan, strict=True)
        ]
        for (source, target), (_, _, _, salt) in zip(ends, plan, strict=True):
            work.fill(source, target, salt)
        for (source, target), (kind, _, root, _) in zip(ends, plan, strict=True):
            work.do(ours, kind, source, target, root, "", stream=stream)
        for (_, target), step in zip(ends, plan, strict=True):
            work.compare(target, *step)
        assert work.wrong == 0


@mpi(ranks=RANKS, timeout=60)
def test_memory(comm: MPI.Intracomm) -> None:
    """Registered and plain buffers in turn, memory that comes and goes, in place."""
    cp, n = cupy(), comm.size
    total = n * (n - 1) // 2
    with blinkmpi.Communicator(comm) as ours:
        plain = [cp.full(BIG, comm.rank, "float32"), cp.empty(BIG, "float32")]
        for i in range(6):
            symmetric = ours.empty((2, BIG // 2), "float32")
            assert symmetric.shape == (2, BIG // 2)
            own = cp.cuda.alloc(4 * BIG)  # of CuPy's pool: the whole of its chunk is registered
            other = cp.ndarray(BIG, "float32", memptr=own)
            ours.register(other)
            symmetric[...] = comm.rank + i
            flat = symmetric.ravel()
            for send, recv in ((flat, other), (flat, plain[1]), (plain[0], other), (plain[0], plain[1])):
                recv[...] = -1
                ours.Allreduce(send, recv)
                assert (recv == (n * i + total if send is flat else total)).all(), i
                recv[100:200] = -1
                ours.Allreduce(send[100:200], recv[100:200])
                assert (recv == (n * i + total if send is flat else total)).all(), i
            ours.deregister(other)
            with pytest.raises(BufferTypeError, match="not registered"):
                ours.deregister(other)
            del own, other
            ours.Allreduce(MPI.IN_PLACE, flat)
            assert (flat == n * i + total).all()
            if i % 2:
                ours.deregister(symmetric)
            del symmetric, flat
        ours.register(plain[0])
        ours.register(plain[1])
        ours.Allreduce(*plain)
        assert (plain[1] == total).all()
        # in place, the same buffer again and again
        aside = cp.cuda.Stream(non_blocking=True)
        for count in (16, BIG):
            for stream in (None, aside):
                vector = cp.empty(n * count, "float32")
                for i in range(4):
                    vector[...] = comm.rank + i
                    cp.cuda.runtime.deviceSynchronize()
                    ours.Reduce_scatter_block(MPI.IN_PLACE, vector, stream=stream)
                    cp.cuda.runtime.deviceSynchronize()
                    assert (vector[:count] == total + n * i).all(), (count, i)
                    vector[...] = comm.rank + i
                    cp.cuda.runtime.deviceSynchronize()
                    ours.Reduce_scatter(MPI.IN_PLACE, vector, [count] * n, stream=stream)
                    cp.cuda.runtime.deviceSynchronize()
                    assert (vector[:count] == total + n * i).all(), (count, i)
        parts = cp.empty(3 * n + 5, "float32")
        for i in range(2):  # a part of an array, as mpi4py says it
            parts[...] = comm.rank + i
            ours.Allreduce(MPI.IN_PLACE, [parts, (3 * n, 5), MPI.FLOAT])
            assert (parts[:5] == comm.rank + i).all()
            assert (parts[5:] == total + n * i).all()
            parts[:5] = 1000
            parts[5:] = comm.rank + i
            ours.Reduce_scatter_block(MPI.IN_PLACE, [parts, (3, 5), MPI.FLOAT])
            assert (parts[5:8] == total + n * i).all()


@mpi(ranks=RANKS, timeout=90)
def test_tensors_of_torch(comm: MPI.Intracomm) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    n = comm.size
    total = n * (n - 1) // 2
    with blinkmpi.Communicator(comm) as ours:
        assert ours.gpu is not None
        torch.cuda.set_device(ours.gpu.device)
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for count in (10, BIG):
                x = torch.full((count,), comm.rank, dtype=dtype, device="cuda")
                y = torch.empty_like(x)
                ours.Allreduce(x, y)
                assert bool((y == total).all()), (dtype, count)
                ours.Allreduce(MPI.IN_PLACE, x)
                assert bool((x == total).all()), (dtype, count)
        stream = torch.cuda.Stream()
        x, y = torch.zeros(BIG, device="cuda"), torch.zeros(BIG, device="cuda")
        torch.cuda.synchronize()
        for i in range(20):
            with torch.cuda.stream(stream):
                x.fill_(comm.rank + i)
            ours.Allreduce(x, y, stream=stream)
            with torch.cuda.stream(stream):
                y.mul_(2)
            stream.synchronize()
            assert bool((y == 2 * (total + n * i)).all())
        ours.Bcast(x.view(512, -1), root=n - 1)
        assert bool((x == n - 1 + 19).all())
        with pytest.raises(ArgumentError, match="contiguous"):
            ours.Allreduce(x.view(512, -1).t(), y)
        assert ours.allreduce(1) == n


@mpi(ranks=RANKS, timeout=60)
def test_calls_on_the_current_stream_return_at_once(comm: MPI.Intracomm) -> None:
    """As torch's and NCCL's do: of CuPy arrays and torch tensors, first calls and repeated ones, new tensors too."""
    torch = pytest.importorskip("torch")
    cp, spin, n = cupy(), spinner(), comm.size
    with pytest.raises(ArgumentError, match="expected None or 'current'"):
        blinkmpi.Communicator(comm, stream="mine")  # type: ignore[arg-type]
    with blinkmpi.Communicator(comm, stream="current") as ours:
        assert ours.gpu is not None
        torch.cuda.set_device(ours.gpu.device)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), cp.cuda.ExternalStream(stream.cuda_stream):
            for count in (1000, 1 << 18):
                ours.Allreduce(MPI.IN_PLACE, torch.zeros(count, device="cuda"))
                for turn in range(6):
                    x = torch.full((count,), float(comm.rank + turn), device="cuda")
                    y = cp.full(count, comm.rank + turn, "float32")
                    stream.synchronize()
                    spin(cp.cuda.ExternalStream(stream.cuda_stream), 3000)
                    for _ in range(3):
                        ours.Allreduce(MPI.IN_PLACE, x)
                        ours.Allreduce(MPI.IN_PLACE, y)
                    assert not stream.query(), "the host did not wait"
                    want = n**2 * (n * turn + n * (n - 1) / 2)
                    assert bool((x == want).all())
                    assert bool((y == want).all())
        z = torch.ones(100, dtype=torch.complex64, device="cuda")
        for odd in (z.conj(), z.conj().imag):
            with pytest.raises(ArgumentError):
                ours.Allreduce(MPI.IN_PLACE, odd)
