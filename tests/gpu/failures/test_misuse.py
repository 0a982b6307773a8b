"""What users do, and what once ended in a crash, in wrong data or in silence: each ends right, or in a typed error."""

import contextlib
import gc
import struct
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import (
    BlinkError,
    BufferTypeError,
    DeviceError,
    MismatchError,
    RemoteError,
)
from blinkmpi.program.call import Call
from blinkmpi.transport.announcement import Called
from blinkmpi.transport.cuda.device import Gpu, cupy
from tests.gpu.helpers import at_least, sizes, spinner
from tests.harness import mpi

RANKS = sizes(2, 4)[-1:]
BIG = 3 << 20  # elements: 12 MiB, past all packets
SIZES = (1000, 1 << 18, BIG)

pytestmark = [pytest.mark.gpu, at_least(2)]


def raises(work: Callable[[], object], *kinds: type[BlinkError]) -> BlinkError:
    """The error that ``work`` must raise, here or on another rank."""
    with pytest.raises((*kinds, RemoteError)) as caught:
        work()
    return caught.value


# ---------------------------------------------------------------- memory


@mpi(ranks=RANKS, timeout=90)
def test_operands_may_be_dropped_as_soon_as_the_call_returns(comm: MPI.Intracomm) -> None:
    """The next tensor would take their memory while the kernel, which starts late, still has to read and write it."""
    torch = pytest.importorskip("torch")
    cp, spin, n = cupy(), spinner(), comm.size
    total = n * (n - 1) / 2
    with blinkmpi.Communicator(comm) as ours:
        assert ours.gpu is not None
        torch.cuda.set_device(ours.gpu.device)
        stream = torch.cuda.Stream()
        for count in SIZES:
            kept: list[Any] = []
            for i in range(40):
                for kind in ("torch", "cupy"):
                    if kind == "torch":
                        x, y = torch.full((count,), comm.rank + i, device="cuda"), torch.zeros(count, device="cuda")
                        x = x.to(torch.float32)
                        torch.cuda.synchronize()
                    else:
                        x, y = cp.full(count, comm.rank + i, "float32"), cp.zeros(count, "float32")
                        cp.cuda.Device().synchronize()
                    spin(cp.cuda.ExternalStream(stream.cuda_stream), 300)
                    ours.Allreduce(x, y, stream=stream)
                    with torch.cuda.stream(stream):
                        kept.append((i, torch.as_tensor(y, device="cuda").double().sum()))
                    del x, y
                    for _ in range(3):  # takes what was given back, on another stream, at once
                        waste = torch.full((count,), 1e30, device="cuda") if kind == "torch" else cp.full(
                            count, 1e30, "float32")  # fmt: skip
                        del waste
            torch.cuda.synchronize()
            wrong = [i for i, got in kept if abs(float(got) - count * (total + n * i)) > 1e-6 * count * (total + n * i)]
            assert not wrong, (count, len(wrong), wrong[:5])


@mpi(ranks=RANKS, timeout=60)
def test_a_request_and_a_persistent_call_keep_their_operands(comm: MPI.Intracomm) -> None:
    cp, spin, n = cupy(), spinner(), comm.size
    with blinkmpi.Communicator(comm) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        for count in SIZES:
            outs = [cp.zeros(count, "float32") for _ in range(5)]
            requests = []
            for out in outs:
                x = cp.full(count, comm.rank, "float32")
                cp.cuda.Device().synchronize()
                spin(stream, 1000)
                requests.append(ours.Iallreduce(x, out, stream=stream))
                del x
                cp.full(count, 1e30, "float32")
            for request in requests:
                request.Wait()
            assert all((out == n * (n - 1) / 2).all() for out in outs), count
            call = ours.Allreduce_init(cp.full(count, 1, "float32"), outs[0], stream=stream)
            gc.collect()
            cp.full(count, 1e30, "float32")
            call.Start()
            call.Wait()
            assert (outs[0] == n).all()
            call.Free()


@mpi(ranks=RANKS, timeout=60)
def test_pointers_that_are_not_what_they_say(comm: MPI.Intracomm) -> None:
    cp, n = cupy(), comm.size
    host, pinned = np.ones(1000, "float32"), cp.cuda.alloc_pinned_memory(4000)

    class Fake:
        def __init__(self, at: int) -> None:
            self.__cuda_array_interface__ = {"shape": (1000,), "typestr": "<f4", "data": (at, False), "version": 3}

    with blinkmpi.Communicator(comm) as ours:
        for at in (host.ctypes.data, pinned.ptr):
            text = str(raises(lambda at=at: ours.Allreduce(MPI.IN_PLACE, Fake(at)), BufferTypeError))  # type: ignore[misc]
            assert "host memory, though its object says GPU" in text
        if comm.rank == 0:  # on one rank alone: the others hear of it
            raises(lambda: ours.Allreduce(MPI.IN_PLACE, Fake(host.ctypes.data)), BufferTypeError)
        else:
            raises(lambda: ours.Allreduce(MPI.IN_PLACE, host), MismatchError)
        assert (host == 1).all()
        for source in (cp.cuda.malloc_managed, cp.cuda.malloc_async):
            memory = source(4 * BIG)
            x = cp.ndarray(BIG, "float32", memory)
            x[...] = comm.rank
            ours.Allreduce(MPI.IN_PLACE, x)
            assert (x == n * (n - 1) / 2).all()
            raises(lambda x=x: ours.register(x), DeviceError)  # type: ignore[misc]
            del x, memory


@mpi(ranks=RANKS, timeout=60)
def test_register_and_empty_on_all_ranks_or_on_none(comm: MPI.Intracomm) -> None:
    cp, n, total = cupy(), comm.size, comm.size * (comm.size - 1) / 2
    with blinkmpi.Communicator(comm) as ours:
        one, other = (cp.full(BIG, comm.rank, "float32") for _ in range(2))
        managed = cp.ndarray(BIG, "float32", cp.cuda.malloc_managed(4 * BIG))
        raises(lambda: ours.register(managed if comm.rank == 1 else one), DeviceError)
        raises(lambda: ours.register([1, 2] if comm.rank == 0 else one), BufferTypeError)
        raises(lambda: ours.empty(1 << 42 if comm.rank == 1 else 100), BlinkError)
        ours.register(one)
        ours.register(one[: BIG // 2])
        ours.register(other)
        for _ in range(3):
            other[...] = -1
            ours.Allreduce(one, other)
            assert (other == total).all()
        ours.deregister(one[: BIG // 2])
        ours.Allreduce(one, other)
        assert (other == total).all()
        raises(lambda: ours.deregister(one[: BIG // 2] if comm.rank == 0 else one), BufferTypeError)
        ours.deregister(one)
        raises(lambda: ours.deregister(one), BufferTypeError)
        refs = ours.context.cuda().transport.regions
        assert len(refs.known) == 1
        ours.Allreduce(one, other)
        assert (other == total).all()
        assert n > 1


@mpi(ranks=RANKS, timeout=60)
@pytest.mark.parametrize("count", SIZES)
def test_a_rank_that_leaves_out_a_call_never_gets_anothers_data(comm: MPI.Intracomm, count: int) -> None:
    """One call refused there, and the next one, just alike, made by all: its kernel would meet the peers' first one."""
    cp, n = cupy(), comm.size
    ours = blinkmpi.Communicator(comm, timeout=10)
    stream = cp.cuda.Stream(non_blocking=True)
    first, second = (cp.full(count, comm.rank + 1000 * k, "float32") for k in range(2))
    results = [cp.full(count, -1, "float32") for _ in range(2)]
    cp.cuda.Device().synchronize()
    errors: list[BlinkError] = []
    for x, y, op in ((first, results[0], "band" if comm.rank == 1 else "sum"), (second, results[1], "sum")):
        try:
            ours.Allreduce(x, y, op, stream=stream)
        except BlinkError as error:
            errors.append(error)
    stream.synchronize()
    try:
        ours.check()
    except BlinkError as error:
        errors.append(error)
    assert errors
    sums = [n * (n - 1) / 2 + 1000 * n * k for k in range(2)]
    for y, right in zip(results, sums, strict=True):
        assert bool(((y == -1) | (y == right)).all()), "data of another call"
    comm.Barrier()


# ---------------------------------------------------------------- threads, numbers, room


@mpi(ranks=RANKS, timeout=60)
def test_threads_that_never_touched_cuda(comm: MPI.Intracomm) -> None:
    cp, n = cupy(), comm.size
    failed: list[BaseException] = []

    def in_thread(work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    with blinkmpi.Communicator(comm) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        for count in SIZES:
            x, y = cp.full(count, comm.rank, "float32"), cp.zeros(count, "float32")
            cp.cuda.Device().synchronize()
            for _ in range(2):  # bound there, and found again by another one
                y[...] = 0
                cp.cuda.Device().synchronize()
                in_thread(lambda x=x, y=y: ours.Allreduce(x, y, stream=stream))  # type: ignore[misc]
                stream.synchronize()
                assert (y == n * (n - 1) / 2).all()
            in_thread(lambda x=x, y=y: ours.Allreduce(x, y))  # type: ignore[misc]
            in_thread(lambda x=x, y=y: ours.Iallreduce(x, y).Wait())  # type: ignore[misc]
            assert (y == n * (n - 1) / 2).all()


@mpi(ranks=RANKS, timeout=90)
def test_two_threads_with_a_communicator_each(comm: MPI.Intracomm) -> None:
    """They take turns in the same order on all ranks, as is asked for; their launches never tear each other's order."""
    cp, n = cupy(), comm.size
    pair = [blinkmpi.Communicator(comm, timeout=20) for _ in range(2)]
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    results: list[Any] = [None, None]

    def work(me: int) -> None:
        cp.cuda.Device(pair[me].gpu.device if pair[me].gpu else 0).use()
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            x, y = cp.full(BIG, comm.rank + me, "float32"), cp.zeros(BIG, "float32")
        for _ in range(100):
            turns[me].acquire()
            pair[me].Allreduce(x, y, stream=stream)
            turns[1 - me].release()
        stream.synchronize()
        results[me] = float(y.min()), float(y.max())

    threads = [threading.Thread(target=work, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(n * me + n * (n - 1) / 2,) * 2 for me in range(2)]
    for each in pair:
        each.Free()


@mpi(ranks=RANKS, timeout=60)
def test_numbers_of_calls_around_2_to_the_32(comm: MPI.Intracomm) -> None:
    """Packets' flags have 32 bits of them, and memory that was never written holds 0."""
    cp, n = cupy(), comm.size
    with blinkmpi.Communicator(comm) as ours:
        memory = ours.context.cuda().transport.memory
        for begin in ((1 << 31) - 4, (1 << 32) - 4):  # they only grow
            assert ours.gpu is not None
            ours.gpu.upload(memory.own, struct.pack("Q", begin))
            comm.Barrier()
            for count in SIZES:
                x, y = cp.zeros(count, "float32"), cp.zeros(count, "float32")
                for i in range(10):
                    x[...] = comm.rank + i
                    y[...] = -1
                    ours.Allreduce(x, y)
                    assert (y == n * i + n * (n - 1) / 2).all(), (begin, count, i)


@mpi(ranks=RANKS, timeout=60)
def test_few_ctas(comm: MPI.Intracomm) -> None:
    cp, n = cupy(), comm.size
    for most in (1, 8):
        with blinkmpi.Communicator(comm, max_ctas=most) as ours:
            gpus = ours.context.cuda()
            for count in SIZES:
                x, y = cp.full(count, comm.rank, "float32"), cp.zeros(count, "float32")
                ours.Allreduce(x, y)
                assert (y == n * (n - 1) / 2).all()
                grid = gpus.kernel(Call("allreduce", n, (count,), "float32", "sum"), Called(""), registered=False).grid
                assert grid <= max(most, 2 * n), (count, grid)  # a program's stages each have one


@mpi(ranks=RANKS, timeout=60)
def test_gpus_that_cannot_share_their_memory(comm: MPI.Intracomm) -> None:
    cp, n = cupy(), comm.size

    def refused(self: Gpu, at: int) -> bytes:
        raise DeviceError("cudaIpcGetMemHandle: operation not supported")

    with (
        mock.patch.object(Gpu, "export", refused) if comm.rank == 1 else contextlib.nullcontext(),
        blinkmpi.Communicator(comm) as ours,
    ):
        x = np.full(1000, comm.rank, "float32")
        ours.Allreduce(MPI.IN_PLACE, x)
        assert (x == n * (n - 1) / 2).all()
        with pytest.raises(BufferTypeError, match=r"cannot share GPU memory.*not supported"):
            ours.Allreduce(MPI.IN_PLACE, cp.ones(10, "float32"))
