"""Calls that C puts on a stream again: right at whatever address, and what they cost the host."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BufferTypeError
from blinkmpi.transport.cuda.device import cupy
from tests.effort import Effort
from tests.gpu.helpers import at_least, sizes
from tests.harness import mpi

RANKS = sizes(2, 3, 4)
COUNTS = (256, 40_000, 1 << 20)  # elements: packets of both kinds, and more than they carry
CALLS = 450
AGAIN, NEW = 3, 5  # Python functions that a call on the same array enters, and one on an array that no call has seen

pytestmark = [pytest.mark.gpu, at_least(2)]


def made_by_c(comm: blinkmpi.Communicator, call: Callable[[], object]) -> bool:
    """Make a call, and say whether C has made it."""
    dispatcher = comm._dispatcher()
    call()
    found = dispatcher.repeated.last_launch
    return found is not None and found[1] == dispatcher.sequence.seq


@mpi(ranks=RANKS, timeout=60)
def test_calls_at_other_addresses_are_right(comm: MPI.Intracomm) -> None:
    """Of torch tensors and CuPy arrays, in place and not, with a root, in blocks; registered or not, and in part."""
    torch = pytest.importorskip("torch")
    cp, n, rank = cupy(), comm.size, comm.rank
    total = n * (n + 1) / 2
    with blinkmpi.Communicator(comm) as ours:
        assert ours.gpu is not None
        torch.cuda.set_device(ours.gpu.device)
        stream = torch.cuda.Stream()
        on_cupy = cp.cuda.ExternalStream(stream.cuda_stream)
        for count in COUNTS:
            slab = ours.empty(12 * count, "float32")
            for registered in (False, True):
                by_c = []
                for turn in range(6):
                    with torch.cuda.stream(stream), on_cupy:
                        x = torch.full((count,), rank + 1.0, device="cuda")
                        y = torch.full((count,), -1.0, device="cuda")
                        a, b = cp.full(count, rank + 1, "float32"), cp.full(n * count, -1, "float32")
                        if registered:
                            first = slab[turn * count : (turn + 1) * count]
                            second = slab[(6 + turn) * count : (7 + turn) * count]
                            first.fill(rank + 1)
                            x, y = torch.from_dlpack(first), torch.from_dlpack(second)
                    calls = [
                        partial(ours.Allreduce, x, y, stream=stream),
                        partial(ours.Allreduce, MPI.IN_PLACE, x, MPI.MAX, stream=stream),
                        partial(ours.Bcast, y, root=n - 1, stream=stream),
                        partial(ours.Allgather, a, b, stream=on_cupy),
                        partial(ours.Allreduce, a, a, stream=on_cupy),
                    ]
                    by_c += [made_by_c(ours, call) for call in calls]
                    stream.synchronize()
                    where = f"{count} elements, turn {turn}, registered {registered}, rank {rank}"
                    assert bool((y == total).all()), where
                    assert bool((x == n).all()), where
                    assert bool((b.reshape(n, count) == cp.arange(1, n + 1)[:, None]).all()), where
                    assert bool((a == total).all()), where
                assert all(by_c[2 * 5 :]) or count == COUNTS[-1], (count, registered, by_c)
            stream.synchronize()
            ours.deregister(slab)


@mpi(ranks=RANKS, timeout=60)
def test_what_c_may_not_make_is_made_or_refused_in_python(comm: MPI.Intracomm) -> None:
    """Memory of the host, overlapping buffers, odd tensors, other streams, captures, other threads, the dead."""
    torch = pytest.importorskip("torch")
    cp, n = cupy(), comm.size
    with blinkmpi.Communicator(comm) as ours:
        assert ours.gpu is not None
        torch.cuda.set_device(ours.gpu.device)
        stream, other = torch.cuda.Stream(), torch.cuda.Stream()
        pool = torch.ones(3 * 256, device="cuda")
        x = pool[:256]
        torch.cuda.synchronize()
        for _ in range(3):
            ours.Allreduce(MPI.IN_PLACE, x, MPI.MAX, stream=stream)
        assert made_by_c(ours, lambda: ours.Allreduce(MPI.IN_PLACE, x, MPI.MAX, stream=stream))
        on_host = cp.cuda.alloc_pinned_memory(1024)
        memory = cp.cuda.UnownedMemory(on_host.ptr, 1024, on_host, ours.gpu.device)
        lying = cp.ndarray(256, "float32", cp.cuda.MemoryPointer(memory, 0))
        right = cp.ones(256, "float32")
        cp.cuda.Device().synchronize()
        for _ in range(3):
            ours.Allreduce(MPI.IN_PLACE, right, stream=stream)
        with pytest.raises(BufferTypeError):
            ours.Allreduce(MPI.IN_PLACE, lying, stream=stream)
        for _ in range(3):
            ours.Allreduce(x, pool[256:512], MPI.MAX, stream=stream)
        with pytest.raises(ArgumentError, match="overlap"):
            ours.Allreduce(x, pool[100:356], MPI.MAX, stream=stream)
        with pytest.raises(ArgumentError, match="contiguous"):
            ours.Allreduce(MPI.IN_PLACE, pool[::3], MPI.MAX, stream=stream)
        z = torch.ones(256, dtype=torch.complex64, device="cuda").conj().imag
        with pytest.raises(ArgumentError):
            ours.Allreduce(MPI.IN_PLACE, z, MPI.MAX, stream=stream)
        y = torch.full((1 << 18,), 1.0, device="cuda")
        torch.cuda.synchronize()
        for i in range(12):  # each on another stream than the one before: behind it
            ours.Allreduce(MPI.IN_PLACE, y, stream=other if i % 2 else stream)
            with torch.cuda.stream(other if i % 2 else stream):
                pass
        torch.cuda.synchronize()
        assert bool((y == float(n) ** 12).all())
        failed: list[BaseException] = []

        def elsewhere() -> None:  # a thread that has not used CUDA
            try:
                for _ in range(5):
                    ours.Allreduce(MPI.IN_PLACE, x, MPI.MAX, stream=stream)
                stream.synchronize()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert not failed
        assert bool((x == 1).all())
        for count in COUNTS:
            graph, g = torch.cuda.CUDAGraph(), torch.ones(count, device="cuda")
            for _ in range(3):
                ours.Allreduce(MPI.IN_PLACE, g, stream=stream)
            torch.cuda.synchronize()
            g.fill_(1)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                ours.Allreduce(MPI.IN_PLACE, g, stream=torch.cuda.current_stream())
            assert bool((g == 1).all()), "only captured"
            for replays in (1, 2):
                graph.replay()
                torch.cuda.synchronize()
                assert bool((g == n**replays).all())
            for _ in range(3):
                ours.Allreduce(MPI.IN_PLACE, g, stream=stream)
            stream.synchronize()
            assert bool((g == n**5).all())


@mpi(ranks=sizes(2), timeout=120)
def test_what_a_call_costs_the_host(comm: MPI.Intracomm) -> None:
    """A few functions of Python lead to C; ``benchmarks/host_time.py`` has the times."""
    torch = pytest.importorskip("torch")
    cp = cupy()
    with blinkmpi.Communicator(comm) as told, blinkmpi.Communicator(comm, stream="current") as current:
        assert told.gpu is not None
        torch.cuda.set_device(told.gpu.device)
        stream = torch.cuda.Stream()
        on_cupy = cp.cuda.ExternalStream(stream.cuda_stream)
        ways: dict[str, Callable[[Any], object]] = {
            "torch, stream=": lambda t: told.Allreduce(MPI.IN_PLACE, t, stream=stream),
            "torch, current stream": lambda t: current.Allreduce(MPI.IN_PLACE, t),
            "CuPy, stream=": lambda t: told.Allreduce(MPI.IN_PLACE, t, stream=on_cupy),
            "CuPy, current stream": lambda t: current.Allreduce(MPI.IN_PLACE, t),
        }
        with torch.cuda.stream(stream), on_cupy:
            for nbytes in (1 << 10, 1 << 16, 1 << 20):
                for name, call in ways.items():
                    slab = torch.zeros((1 + CALLS, nbytes // 4), device="cuda")
                    first, *fresh = map(cp.from_dlpack, slab) if name.startswith("CuPy") else slab
                    for _ in range(20):
                        call(first)
                    for most, arrays in ((AGAIN, [first] * CALLS), (NEW, fresh)):
                        stream.synchronize()
                        comm.Barrier()
                        with Effort() as effort:
                            for array in arrays:
                                call(array)
                        assert effort.ours <= most * CALLS, (name, nbytes, effort.calls.most_common(9))
                    stream.synchronize()
