"""Arguments of a Communicator's calls: buffers of all kinds, what goes to MPI, what is an error."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError, FallbackError, MismatchError, RemoteError
from tests.harness import mpi
from tests.mpi.test_conformance import OURS
from tests.unit.runtime.test_buffers import Tensor


@mpi(ranks=(2, 3))
def test_buffers_of_all_kinds(comm: MPI.Intracomm) -> None:
    """What mpi4py takes, and what it lacks (bfloat16, float16, avg, names of operations)."""
    import array
    import ctypes

    rank, n = comm.rank, comm.size
    everybody = np.arange(n)
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        numbers = array.array("d", [rank] * 5)
        ours.Allreduce(MPI.IN_PLACE, numbers)
        assert list(numbers) == [everybody.sum()] * 5
        raw = bytearray(b"abc" if rank == 0 else 3)
        ours.Bcast(memoryview(raw), root=0)
        assert raw == b"abc"
        inside = (ctypes.c_int * 3)(rank, rank, rank)
        ours.Allreduce(sendbuf=None, recvbuf=inside, op=MPI.MAX)
        assert list(inside) == [n - 1] * 3
        zero_d = np.array(float(rank))
        ours.Allreduce(zero_d, zero_d)  # the same object on both sides is in place
        assert zero_d == everybody.sum()
        fortran = np.asfortranarray(np.full((3, 4), rank))
        ours.Allreduce(MPI.IN_PLACE, fortran, op="prod")
        assert (fortran == everybody.prod()).all()

        long = np.full(100, rank, np.float32)
        ours.Allreduce(MPI.IN_PLACE, [long, 7, MPI.FLOAT])
        ours.Allreduce(MPI.IN_PLACE, (long, (3, 10)))
        ours.Bcast([long, 5, 20, "f"], root=n - 1)
        want = np.full(100, float(rank))
        want[:7] = want[10:13] = everybody.sum()
        want[20:25] = n - 1
        assert (long == want).all()
        blocks = np.full(2 * n + 1, -1)
        ours.Allgather([np.full(9, rank), 2], [blocks, 2])  # counts are of one block
        assert blocks.tolist() == [*np.repeat(everybody, 2), -1]
        ours.Gather(sendbuf=(np.full(2, rank), MPI.INT64_T), recvbuf=blocks[:-1] if rank == 1 else None, root=1)
        mine = np.zeros(2, np.int64)
        ours.Scatter(sendbuf=[blocks, 2] if rank == 0 else None, recvbuf=mine, root=0)
        assert (mine == rank).all()
        part = np.zeros(rank, np.int64)
        ours.Reduce_scatter(np.arange(n * (n - 1) // 2), part)  # blocks as long as the receive buffers
        start = rank * (rank - 1) // 2
        assert part.tolist() == (n * np.arange(start, start + rank)).tolist()

        halves = np.full(33, 0.5 + rank, np.float16)
        ours.Allreduce(MPI.IN_PLACE, halves, "avg")
        assert (halves == 0.5 + everybody.mean()).all()
        brain = np.full(33, 0.5 + rank, ml_dtypes.bfloat16)
        ours.Iallreduce(MPI.IN_PLACE, brain).Wait()
        assert (brain.astype(float) == (0.5 + everybody).sum()).all()
        ours.Bcast([brain, MPI.BYTE])
        ours.Allreduce(MPI.IN_PLACE, np.zeros(0))
        ours.Bcast(np.zeros(0, np.int8))
    with blinkmpi.Communicator(comm) as small:  # by default, tiny vectors may be MPI's; not what it cannot do
        for dtype, op in ((ml_dtypes.bfloat16, "sum"), (np.float16, MPI.MAX), (np.float32, "avg"), (np.uint8, "sum")):
            one = np.ones(3, dtype)
            small.Allreduce(MPI.IN_PLACE, one, op)
            assert (one.astype(float) == (n if op == "sum" else 1)).all(), (dtype, op)


class OnGpu:
    """What looks like a GPU array."""

    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (1 << 40, False), "version": 3}  # noqa: RUF012


@mpi(ranks=(2,))
def test_tensors(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        tensor = Tensor(np.full(50, comm.rank, np.float32))
        ours.Allreduce(MPI.IN_PLACE, tensor)
        assert (tensor.data == 1).all()
        for call in (ours.Allreduce, ours.Iallreduce):
            with pytest.raises(BufferTypeError, match=r"GPU memory.*; pass NumPy copies"):
                call(MPI.IN_PLACE, OnGpu())
        ours.Barrier()


@mpi(ranks=(2,))
def test_torch(comm: MPI.Intracomm) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with blinkmpi.Communicator(comm) as ours:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = torch.full((70,), comm.rank + 1, dtype=dtype)
            ours.Allreduce(MPI.IN_PLACE, tensor)
            assert (tensor == 3).all()
        weight = torch.nn.Parameter(torch.full((4, 4), float(comm.rank)))
        ours.Bcast(weight, root=1)
        assert (weight == 1).all()


@mpi(ranks=(3,))
def test_what_is_mpis_alone_goes_to_mpi(comm: MPI.Intracomm) -> None:
    """User operations, locations, derived datatypes; also when the arguments of one rank alone are of that kind."""
    rank = comm.rank
    with blinkmpi.Communicator(comm, algo=OURS) as ours:
        pair = np.array([(rank, rank)], dtype=np.dtype([("value", "d"), ("where", "i")], align=True))
        best = np.zeros_like(pair)
        ours.Allreduce([pair, MPI.DOUBLE_INT], [best, MPI.DOUBLE_INT], MPI.MAXLOC)
        assert best["where"] == 2
        twice = MPI.Op.Create(lambda a, b, _: np.copyto(np.frombuffer(b), np.frombuffer(a) + 2 * np.frombuffer(b)))
        x = np.ones(2)
        request = ours.Iallreduce(MPI.IN_PLACE, x, op=twice)
        request.Wait()
        twice.Free()
        assert (x > 3).all()
        every_other = MPI.INT64_T.Create_vector(4, 1, 2).Commit()
        for root in range(3):
            for start in (ours.Bcast, ours.Ibcast):
                strided = np.full(8, rank)
                kind = every_other.Dup()
                request = start([strided, 1, kind] if rank == root else strided[:4], root)
                kind.Free()
                if request is not None:
                    request.Wait()
                assert (strided[: 8 if rank == root else 4] == root).all()
        every_other.Free()
        # calls of the user's own on the same communicator meanwhile do not get in the way
        requests = [ours.Iallreduce(MPI.IN_PLACE, np.ones(4, np.longdouble)) for _ in range(3)]
        assert ours.allgather(rank) == [0, 1, 2]
        MPI.Request.Waitall(requests)
    with blinkmpi.Communicator(comm, strict=True) as strict:
        with pytest.raises(FallbackError, match=r"strict=True: allreduce: MPI's own.*element type"):
            strict.Allreduce(MPI.IN_PLACE, np.ones(4, np.longdouble))
        strict.Barrier()


@mpi(ranks=(2,))
def test_the_peers_are_told_of_a_stream_that_is_none(comm: MPI.Intracomm) -> None:
    stream = {"stream": "soon"} if comm.rank == 1 else {}
    with blinkmpi.Communicator(comm, timeout=10) as ours:
        x = np.ones(8)
        for make in (ours.Allreduce, ours.Iallreduce):
            with pytest.raises(ArgumentError if comm.rank == 1 else RemoteError, match="stream='soon'"):  # noqa: PT012
                request = make(MPI.IN_PLACE, x, **stream)
                if request is not None:
                    request.Wait()
        ours.Allreduce(MPI.IN_PLACE, x)
        assert (x == 2).all()


@mpi(ranks=(2,))
def test_bad_arguments_are_errors_on_every_rank(comm: MPI.Intracomm) -> None:
    rank = comm.rank
    good, half = np.zeros(8), np.zeros(4)
    read_only = np.zeros(8)
    read_only.flags.writeable = False
    with blinkmpi.Communicator(comm) as ours:
        bad: list[tuple[str, type[Exception], tuple[Any, ...], dict[str, Any]]] = [
            ("Allreduce", ValueError, (good, half), {}),
            ("Allreduce", ValueError, (good, np.zeros(8, np.int64)), {}),
            ("Allreduce", ValueError, (good, read_only), {}),
            ("Allreduce", ValueError, (good[:6], good[2:]), {}),
            ("Allreduce", TypeError, (good, [1, 2, 3]), {}),
            ("Allreduce", TypeError, (good, np.array([None])), {}),
            ("Allreduce", TypeError, (good, good.astype(">f8")), {}),
            ("Allreduce", TypeError, (good, good.view("datetime64[s]")), {}),  # a type that MPI lacks, too
            ("Bcast", TypeError, (good.view([("a", "i4"), ("b", "f4")]),), {}),
            ("Allreduce", TypeError, (good, good, MPI.LAND), {}),
            ("Allreduce", ValueError, (good, good, "median"), {}),
            ("Allreduce", ValueError, ([good, 9], good), {}),
            ("Allreduce", ValueError, (np.zeros((4, 4))[:, ::2], good), {}),
            ("Bcast", ValueError, (good,), {"root": 2}),
            ("Bcast", TypeError, (None,), {}),
            ("Reduce", TypeError, (MPI.IN_PLACE, good), {"root": 1 - rank}),
            ("Allgather", ValueError, (half, np.zeros(7)), {}),
            ("Reduce_scatter", ValueError, (good, half, [4, 4, 4]), {}),
            ("Reduce_scatter", ValueError, (good, half, [4, 3]), {}),
            ("Reduce_scatter", TypeError, (good, half, ["a", "b"]), {}),
            ("Reduce_scatter", ValueError, (MPI.IN_PLACE, good), {}),
        ]
        for name, kind, args, keywords in bad:
            with pytest.raises(kind) as caught:
                getattr(ours, name)(*args, **keywords)
            assert isinstance(caught.value, BlinkError), (name, args)
        for name, kind, args, keywords in bad:  # on one rank alone: the other is told, and neither waits
            fine = (good,) if name == "Bcast" else (good, np.zeros(16 if name == "Allgather" else 8))
            if name == "Reduce_scatter":
                fine = (good, half, [4, 4]) if len(args) == 3 else (good, half)
            wrong = rank == len(args) % 2
            with pytest.raises(BlinkError) as caught:
                getattr(ours, name)(*(args if wrong else fine), **(keywords if wrong else {}))
            assert isinstance(caught.value, kind if wrong else (RemoteError, MismatchError)), (name, args)
        if rank == 0:  # as MPI does, a non-blocking call raises at once for its own arguments; the peer's Wait tells
            with pytest.raises(ValueError):
                ours.Iallreduce(good, half)
        else:
            with pytest.raises(RemoteError, match="rank 0 failed: ArgumentError: send and receive buffers differ"):
                ours.Iallreduce(good, good).Wait()
        ours.Allreduce(MPI.IN_PLACE, good, timeout=5)  # it lives
