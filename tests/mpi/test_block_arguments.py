"""The v-variants, Alltoall and the scans: what ranks get wrong alone or together, and what goes to MPI."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError, MismatchError, RemoteError
from tests.harness import mpi
from tests.mpi.test_conformance import OURS


@mpi(ranks=(3,))
def test_bad_arguments_are_errors_on_every_rank(comm: MPI.Intracomm) -> None:
    """Of one rank alone, blocking and not: it gets its error, the others learn of it, and nothing was written."""
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        a, b = np.arange(12.0), np.full(12, -1.0)
        counts = [1, 2, 3]
        column = [counts[rank]] * n
        good: dict[str, tuple[Any, ...]] = {
            "Allgatherv": (a[: counts[rank]], [b, counts]),
            "Gatherv": (a[: counts[rank]], [b, counts], 0),
            "Scatterv": ([a, counts], b[: counts[rank]], 0),
            "Alltoallv": ([a, counts], [b, column]),
            "Alltoall": (a, b),
            "Scan": (a, b),
            "Exscan": (a, b),
        }
        shared = [b, ([2, 2, 2], [0, 1, 4])]
        bad: list[tuple[str, int, type[Exception], tuple[Any, ...]]] = [
            ("Allgatherv", 1, ValueError, (a[:2], [b, [1, 2]])),
            ("Allgatherv", 2, ValueError, (a[:3], [b, (counts, [0, 1, 10])])),
            ("Allgatherv", 0, ValueError, (a[:5], [b, counts])),
            ("Allgatherv", 0, TypeError, (a[:1], [b, [1.5, 2, 3]])),
            ("Gatherv", 0, ValueError, (a[:2], shared, 0)),
            ("Gatherv", 0, ValueError, (a[:1], [b, [1, 2, -3]], 0)),
            ("Gatherv", 1, TypeError, (MPI.IN_PLACE, None, 0)),
            ("Gatherv", 2, ValueError, (a[:3], None, 7)),
            ("Scatterv", 0, ValueError, ([a, [1, 2, 30]], b[:1], 0)),
            ("Scatterv", 0, ValueError, (([a, counts]), a[1:2], 0)),
            ("Scatterv", 1, TypeError, (None, None, 0)),
            ("Alltoallv", 1, ValueError, ([a, [1, 1, 3]], [b, column])),
            ("Alltoallv", 2, ValueError, ([a, (counts, [0, 0, 10])], [b, column])),
            ("Alltoallv", 0, ValueError, (a, a)),
            ("Alltoall", 1, ValueError, (a[:6], b)),
            ("Alltoall", 2, ValueError, (a[:11], b[:11])),
            ("Scan", 1, ValueError, (a, b[:3])),
            ("Exscan", 2, ValueError, (a, b, "median")),
            ("Exscan", 1, ValueError, (a, b, "avg")),
        ]
        for name, who, kind, args in bad:
            for start in ("", "I"):
                method = getattr(ours, name if not start else f"I{name.lower()}")
                with pytest.raises(BlinkError) as caught:  # noqa: PT012
                    request = method(*(args if rank == who else good[name]))
                    if request is not None:
                        request.Wait()
                if rank == who:
                    assert isinstance(caught.value, kind), (start, name, args, caught.value)
                else:
                    assert isinstance(caught.value, RemoteError), (start, name, args, caught.value)
                    assert f"rank {who} failed" in str(caught.value), (start, name, args, caught.value)
                assert (b == -1).all(), (start, name, args)
        for name, args in good.items():
            getattr(ours, name)(*args)


@mpi(ranks=(3,))
def test_lengths_that_do_not_fit_together_are_errors_on_every_rank(comm: MPI.Intracomm) -> None:
    """Each rank's arguments are right in themselves; the text names both ranks and both lengths."""
    rank, n = comm.rank, comm.size
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        a, b = np.arange(12.0), np.full(12, -1.0)
        ones = [1] * n
        sends = [1, 1, 2] if rank == 0 else ones
        cases: list[tuple[str, int, str, tuple[Any, ...]]] = [
            ("Alltoallv", 2, "rank 0 sends 2 elements to rank 2, which expects 1", ([a, sends], [b, ones])),
            ("Gatherv", 1, r"rank 2 sends 3 elements, but recvcounts\[2\] of the root 1 is 1",
             (a[: 3 if rank == 2 else 1], [b, ones] if rank == 1 else None, 1)),
            ("Scatterv", 1, r"rank 0 receives 2 elements, but sendcounts\[0\] of the root 1 is 1",
             ([a, ones], b[: 2 if rank == 0 else 1], 1)),
        ]  # fmt: skip
        for name, who, text, args in cases:
            for method in (getattr(ours, name), getattr(ours, f"I{name.lower()}")):
                with pytest.raises(ArgumentError if rank == who else RemoteError, match=text):  # noqa: PT012
                    request = method(*args)
                    if request is not None:
                        request.Wait()
                assert (b == -1).all()
        counts = [1, 1, 2] if rank == 2 else ones
        with pytest.raises(
            RemoteError if rank == 2 else ArgumentError, match=r"rank 2 sends 2 elements, but recvcounts"
        ):
            ours.Allgatherv(a[: counts[rank]], [b, counts])
        with pytest.raises(MismatchError, match=r"gatherv\(float64, root 0\)"):
            ours.Gatherv(a[:1], [b, ones]) if rank else ours.Alltoallv([a, ones], [b, ones])
        with pytest.raises(MismatchError):
            ours.Gatherv(a[:1], [b, ones]) if rank else ours.Barrier()
        with pytest.raises(MismatchError, match="root"):
            ours.Gatherv(a[:1], [b, ones], 0 if rank else 1)
        with pytest.raises(MismatchError, match="float32"):
            ours.Alltoallv([a, ones], [b, ones]) if rank else ours.Alltoallv(
                [a.astype("f4"), ones], [b.astype("f4"), ones]
            )
        with pytest.raises(MismatchError, match="op"):
            ours.Scan(a, b, "max" if rank == 1 else "sum")
        assert (b == -1).all()
        ours.Alltoallv([a, ones], [b, ones])
        assert b[:3].tolist() == [rank] * 3


@mpi(ranks=(2, 3))
def test_what_is_mpis_alone_goes_to_mpi(comm: MPI.Intracomm) -> None:
    """Derived datatypes of all ranks or of one, user operations, types that we lack; blocking and not."""
    rank, n = comm.rank, comm.size
    kind = MPI.DOUBLE.Create_contiguous(2).Commit()
    with blinkmpi.Communicator(comm, algo=OURS) as ours:

        def both(name: str, *args: Any) -> None:
            getattr(ours, name)(*args)
            getattr(ours, f"I{name.lower()}")(*args).Wait()

        for derived in (range(n), [n - 1]):
            mine = rank in derived
            data, recv = np.full(2 * n, float(rank)), np.zeros(2 * n)
            spec = [data, [1] * n, kind] if mine else [data, [2] * n]
            both("Alltoallv", spec, [recv, [2] * n])
            assert recv.tolist() == np.repeat(np.arange(n), 2).tolist()
            block = [data[:2], 1, kind] if mine else data[:2]
            for name, args in (("Gatherv", (n - 1,)), ("Allgatherv", ())):
                recv[:] = 0
                both(name, block, [recv, [2] * n], *args)
                assert recv.tolist() == np.repeat(np.arange(n), 2).tolist() or (args and rank < n - 1)
            part = np.zeros(2)
            both("Scatterv", [recv, [2] * n], [part, 1, kind] if mine else part, n - 1)
            assert part.tolist() == [rank] * 2
            both("Alltoall", [data, 1, kind] if mine else data, recv)
            assert recv.tolist() == np.repeat(np.arange(n), 2).tolist()
        long = np.full(3, rank + 1, np.longdouble)
        got = np.zeros(3, np.longdouble)
        both("Scan", long, got)
        assert (got == sum(range(1, rank + 2))).all()
        both("Exscan", long, None if rank == 0 else got)
        assert rank == 0 or (got == sum(range(1, rank + 1))).all()
        twice = MPI.Op.Create(lambda a, b, _: np.copyto(np.frombuffer(b), np.frombuffer(a) + 2 * np.frombuffer(b)))
        x, y = np.ones(2), np.zeros(2)
        both("Scan", x, y, twice)
        assert y[0] == 2 * rank + 1 or n > 2
        twice.Free()
    with blinkmpi.Communicator(comm) as ours:  # by the table, whatever it says
        x, y = np.full(4, rank + 1.0), np.zeros(4)
        ours.Exscan(x, None if rank == 0 else y)
        assert (y == (sum(range(1, rank + 1)))).all()
    kind.Free()


@mpi(ranks=(2,))
def test_non_blocking_calls_wait_for_nobody(comm: MPI.Intracomm) -> None:
    """Lengths are told when all have come: a message that the peer waits for may be sent after the call was begun."""
    rank = comm.rank
    with blinkmpi.Communicator(comm, algo=OURS, timeout=20) as ours:
        ones, a, b = [1, 1], np.full(2, float(rank)), np.zeros(2)
        for begin in (
            lambda: ours.Ialltoallv([a, ones], [b, ones]),
            lambda: ours.Igatherv(a[:1], [b, ones], 1),
            lambda: ours.Iscatterv([a, ones], b[:1], 1),
            lambda: ours.Iallgatherv(a[:1], [b, ones]),
        ):
            token = np.zeros(1)
            if rank == 0:
                request = begin()
                comm.Send(token, 1)
            else:
                comm.Recv(token, 0)
                request = begin()
            request.Wait()


@mpi(ranks=(2,))
def test_gpu_memory_without_gpus(comm: MPI.Intracomm) -> None:
    class OnGpu:
        """What looks like a GPU array."""

        __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (1 << 40, False), "version": 3}  # noqa: RUF012

    with blinkmpi.Communicator(comm) as ours:
        gpu = OnGpu()
        for name, args in (
            ("Alltoall", (gpu, gpu)), ("Alltoallv", (MPI.IN_PLACE, gpu)), ("Allgatherv", (MPI.IN_PLACE, gpu)),
            ("Gatherv", (gpu, [gpu, [2, 2]])), ("Scatterv", ([gpu, [2, 2]], gpu)), ("Scan", (MPI.IN_PLACE, gpu)),
            ("Exscan", (MPI.IN_PLACE, gpu)),
        ):  # fmt: skip
            for method in (getattr(ours, name), getattr(ours, f"I{name.lower()}")):
                with pytest.raises((BufferTypeError, ArgumentError)):
                    method(*args)
        ours.Barrier()


@mpi(ranks=(2,))
def test_more_ranks_than_numbers_fit_are_told_in_several_calls(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        assert ours._blink is not None
        said = [(comm.rank << 62) + i for i in range(200)]
        before = ours._blink.sequence.seq
        rows = ours._blink.sequence.numbers_of_all(said, 10.0, "alltoallv")
        assert rows == tuple(tuple((r << 62) + i for i in range(200)) for r in range(2))
        assert ours._blink.sequence.seq == before + 3
