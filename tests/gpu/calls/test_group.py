"""Groups on GPUs: what single calls give, in few launches; streams, graphs, mismatches. Ranks may share a GPU."""
# ruff: noqa: PT012  (what is wrong with a group is raised at its end)

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, MismatchError, PeerLost
from blinkmpi.program.call import REDUCTIONS
from blinkmpi.transport.cuda.device import cupy
from blinkmpi.transport.cuda.kernel_layout import SEGMENT_ROOMS
from blinkmpi.transport.cuda.packets import PROTOCOLS
from tests.gpu.helpers import at_least, sizes, spinner
from tests.harness import mpi

SIZES = sizes(1, 2, 3, 4, 8)
RANKS = sizes(2, 4)[-1:]
LENGTHS = (0, 5, 0, 1, 3000, 64, 16384, 7)
METHODS = {  # by collective: its method, and whether a block for each rank is sent, and received
    "allreduce": ("Allreduce", False, False), "allgather": ("Allgather", False, True),
    "reduce_scatter": ("Reduce_scatter_block", True, False), "alltoall": ("Alltoall", True, True),
}  # fmt: skip
MANY = (1, SEGMENT_ROOMS[0], SEGMENT_ROOMS[0] + 1, SEGMENT_ROOMS[-1], SEGMENT_ROOMS[-1] + 1)  # tensors of a group
TYPES = ("float32", "int8", "uint16", "complex128", "float16")

pytestmark = [pytest.mark.gpu, at_least(1)]


def numbers(rank: int, i: int, count: int, dtype: str, skew: int) -> Any:
    """What a rank gives to call ``i``, ``skew`` elements from where its allocation begins; sums of it are exact."""
    array = cupy().empty(count + skew, dtype)[skew:]
    array[...] = cupy().asarray(((np.arange(count) * 7 + 3 * rank + i) % 5).astype(dtype))
    return array


def calls(n: int, rank: int, dtype: str, skew: int, *, in_place: bool) -> list[tuple[str, list[Any]]]:
    """Calls of all grouped collectives, of several lengths, in turns."""
    root, found = n - 1, []
    for i, m in enumerate(LENGTHS):

        def one(count: int, i: int = i) -> Any:
            return numbers(rank, i, count, dtype, skew)

        at, own = rank == root, one(n * m)
        vector: list[Any] = [MPI.IN_PLACE, one(m)] if in_place else [one(m), one(m)]
        kept: Any = MPI.IN_PLACE if in_place and at else one(m)
        found += [
            ("Allreduce", [*vector, "sum"]),
            ("Bcast", [one(m), root]),
            ("Reduce", [kept, one(m) if at else None, "sum", root]),
            ("Allgather", [MPI.IN_PLACE, own] if in_place else [one(m), one(n * m)]),
            ("Gather", [kept, one(n * m) if at else None, root]),
            ("Scatter", [one(n * m) if at else None, MPI.IN_PLACE if in_place and at else one(m), root]),
            ("Alltoall", [one(n * m), one(n * m)]),
            ("Reduce_scatter_block", [MPI.IN_PLACE, one(n * m), "sum"] if in_place else [one(n * m), one(m), "sum"]),
        ]
    return found


def arrays(some: list[tuple[str, list[Any]]], n: int) -> list[Any]:
    """The arrays of calls, on the host; of a Reduce_scatter_block in place its result alone."""
    found = []
    for name, args in some:
        for arg in args:
            if hasattr(arg, "get"):
                part = name == "Reduce_scatter_block" and args[0] is MPI.IN_PLACE
                found.append(arg.get()[: arg.size // n] if part else arg.get())
    return found


@mpi(ranks=SIZES, timeout=240)
def test_a_group_gives_what_its_calls_give(comm: MPI.Intracomm) -> None:
    n, rank = comm.size, comm.rank
    with blinkmpi.Communicator(comm) as ours:
        for dtype in TYPES:
            for in_place in (False, True):
                for skew in (0, 1):
                    some, others = (calls(n, rank, dtype, skew, in_place=in_place) for _ in range(2))
                    for name, args in some:
                        getattr(ours, name)(*args)
                    for _ in range(1 + (not in_place)):  # the second time as it was bound
                        before = ours._dispatcher().sequence.seq
                        with ours.grouped():
                            for name, args in others:
                                getattr(ours, name)(*args)
                        launched = ours._dispatcher().sequence.seq - before
                    pairs = zip(arrays(some, n), arrays(others, n), strict=True)
                    for i, (one, other) in enumerate(pairs):
                        assert (one == other).all(), (dtype, in_place, skew, i)
                    assert in_place or launched == 8, "one launch for each collective"


@mpi(ranks=sizes(2, 3, 4, 8), timeout=240)
def test_many_short_tensors_by_every_protocol_of_packets(comm: MPI.Intracomm) -> None:
    """As they lie, as far as there is room for them among a kernel's arguments; from buckets, if there is not."""
    n, rank = comm.size, comm.rank
    for protocol, how in PROTOCOLS.items():
        kinds = ["allreduce"] if how.two_shot else ["allreduce", "allgather", "reduce_scatter", "alltoall"]
        with blinkmpi.Communicator(comm, algo=";".join(f"{kind}:onehop/{protocol}" for kind in kinds)) as ours:
            for dtype, many, skew in itertools.product(("float32", "int8"), MANY, (0, 1)):
                lengths = np.random.default_rng(many).integers(1, 70 if many > 16 else 700, many).tolist()

                def some(b: int, lengths: list[int] = lengths, dtype: str = dtype, skew: int = skew) -> list[Any]:
                    return [numbers(rank, i, b * m, dtype, skew) for i, m in enumerate(lengths)]

                for kind in kinds:
                    name, sent, received = METHODS[kind]
                    op = ["sum"] if kind in REDUCTIONS else []
                    sends, ones, others = some(n if sent else 1), *(some(n if received else 1) for _ in range(2))
                    for send, one in zip(sends, ones, strict=True):
                        getattr(ours, name)(send, one, *op)
                    getattr(ours, name)(sends, others, *op)
                    for i, (one, other) in enumerate(zip(ones, others, strict=True)):
                        assert (one == other).all(), (protocol, kind, dtype, many, skew, i)
                    if sent == received:
                        getattr(ours, name)(MPI.IN_PLACE, sends, *op)
                        assert all((one == x).all() for one, x in zip(ones, sends, strict=True)), (protocol, kind, many)


@mpi(ranks=RANKS, timeout=120)
def test_streams_graphs_and_tensors_that_are_dropped(comm: MPI.Intracomm) -> None:
    cp, spin, n, rank = cupy(), spinner(), comm.size, comm.rank
    triangle = n * (n - 1) / 2
    with blinkmpi.Communicator(comm) as ours:
        one, two = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
        some = [cp.zeros(k, "float32") for k in (16384, 3, 70001)]
        cp.cuda.runtime.deviceSynchronize()
        for i in range(20):
            stream = (one, two)[i % 2]
            spin(stream, 1000 if i % n == rank else 0)
            with stream:
                for x in some:
                    x[...] = rank + i
            ours.Allreduce(MPI.IN_PLACE, some, stream=stream)  # the bucket of the one before may still be used
            with stream:
                right = [cp.all(x == triangle + n * i) for x in some]
            stream.synchronize()
            assert all(right), i
        with one:  # buffers of a stream each, and the host waits
            x = cp.full(1000, rank, "float32")
        with two:
            spin(two, 3000)
            y = cp.full(1000, rank + 1, "float32")
            with ours.grouped():
                with one:
                    ours.Allreduce(MPI.IN_PLACE, x)
                ours.Allreduce(MPI.IN_PLACE, y)
        assert (x.get() == triangle).all()
        assert (y.get() == triangle + n).all()
        for i in range(30):
            with one:
                ours.Allreduce(
                    [cp.full(5000, i + rank, "float32") for _ in range(4)],
                    many := [cp.empty(5000, "float32") for _ in range(4)],
                    stream=one,
                )
        one.synchronize()
        assert all((z.get() == 29 * n + triangle).all() for z in many)
        with one:
            source = [cp.full(k, rank, "float32") for k in (100, 20000)]
            target = [cp.zeros(k, "float32") for k in (100, 20000)]
            one.begin_capture()
            ours.Allreduce(source, target, stream=one)
            graph = one.end_capture()
            for i in range(5):
                for x in source:
                    x[...] = rank + i
                graph.launch()
                one.synchronize()
                assert all((t.get() == triangle + n * i).all() for t in target), i


@mpi(ranks=RANKS, timeout=60)
def test_what_is_wrong_is_an_error_before_results_are_written(comm: MPI.Intracomm) -> None:
    cp, here = cupy(), comm.rank == 0
    ours = blinkmpi.Communicator(comm)  # first: it makes this rank's GPU the current one
    good = [cp.full(100, comm.rank, "float32") for _ in range(2)]
    ours.Allreduce(MPI.IN_PLACE, good)
    with pytest.raises(
        ArgumentError if here else MismatchError, match="use the same memory" if here else "calls 0 and 1"
    ):
        ours.Allreduce(MPI.IN_PLACE, [good[0], good[0] if here else good[1]])
    with pytest.raises(BlinkError) if here else contextlib.nullcontext():  # others' kernels have waited: they are dead
        ours.Free()
    sends = [cp.full(100, comm.rank, "float32") for _ in range(3)]
    recvs = [cp.full(100 if i != 1 else 100 + here, -1, "float32") for i in range(3)]
    sends[1] = cp.full(100 + here, comm.rank, "float32")
    with blinkmpi.Communicator(comm) as ours, pytest.raises((MismatchError, PeerLost)):
        ours.Allreduce(sends, recvs)
        ours.Barrier()
    assert all((recv.get() == -1).all() for recv in recvs), "nothing is scattered from a bucket without results"
