"""Alltoallv, Gatherv and Scatterv in GPU memory: blocks of any lengths, whose ranks' hosts do not meet."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import BlinkError, CollectiveTimeout, MismatchError
from blinkmpi.program.reduction import DTYPES, dtype_of
from blinkmpi.transport.cuda.device import cupy
from tests.gpu.helpers import at_least, sizes
from tests.harness import mpi

RANKS = sizes(2, 3, 4, 8)
LENGTHS = (0, 0, 1, 3, 17, 4095, 16_384, 16_385, 65_537, 1_000_003)
LONG = 12 << 20  # bytes: more than the slots of a block
PAD = 8
CALLS = 500

pytestmark = [pytest.mark.gpu, at_least(2)]


def values(source: int, target: int, count: int) -> Any:
    """What goes from one rank to another, in bytes."""
    return ((cupy().arange(count) * 7 + 31 * source + 5 * target) % 251).astype("uint8")


class Exchange:
    """Buffers of bytes between margins, for an Alltoallv of one matrix of lengths after another."""

    def __init__(self, comm: MPI.Intracomm, room: int) -> None:
        self.rank, self.n = comm.rank, comm.size
        self.send, self.recv = (cupy().empty(room + PAD, "uint8") for _ in range(2))

    def fill(self, lengths: Any, skew: int = 0, gap: int = 0) -> tuple[list[Any], list[Any]]:
        """The arguments of a call; blocks are ``gap`` bytes apart, and the whole is ``skew`` bytes off."""
        sent, got = [int(k) for k in lengths[self.rank]], [int(k) for k in lengths[:, self.rank]]
        self.recv[...] = 253
        places = [np.cumsum([0, *(k + gap for k in some[:-1])]).tolist() for some in (sent, got)]
        for target, (at, count) in enumerate(zip(places[0], sent, strict=True)):
            self.send[skew + at : skew + at + count] = values(self.rank, target, count)
        self.want = [(skew + at, count) for at, count in zip(places[1], got, strict=True)]
        return [self.send[skew:], sent, places[0], MPI.BYTE], [self.recv[skew:], got, places[1], MPI.BYTE]

    def check(self, text: object) -> None:
        """Every block is right, and nothing beside the blocks was written."""
        want = cupy().full(self.recv.size, 253, "uint8")
        for source, (at, count) in enumerate(self.want):
            want[at : at + count] = values(source, self.rank, count)
        assert (self.recv == want).all(), text


def matrix(n: int, draw: random.Random, lengths: tuple[int, ...] = LENGTHS) -> Any:
    return np.array([[draw.choice(lengths) for _ in range(n)] for _ in range(n)])


def in_blocks(ours: blinkmpi.Communicator) -> bool:
    """Whether calls of blocks are made without a program here."""
    assert ours.context.gpus is not None
    return ours.context.gpus.why_no_blocks == ""


@mpi(ranks=RANKS, timeout=300)
def test_any_lengths_and_places(comm: MPI.Intracomm) -> None:
    n, draw = comm.size, random.Random(3)
    with blinkmpi.Communicator(comm, timeout=30) as ours:
        assert in_blocks(ours)
        work = Exchange(comm, n * (LENGTHS[-1] + 64) + 64)
        for turn in range(60):
            lengths = matrix(n, draw)
            skew, gap = draw.choice((0, 0, 1, 4, 16)), draw.choice((0, 0, 3, 16))
            args = work.fill(lengths, skew, gap)
            ours.Alltoallv(*args)
            work.check((turn, lengths.tolist(), skew, gap))
        work = Exchange(comm, n * LONG)
        for lengths in (np.full((n, n), LONG), np.eye(n, dtype=int) * LONG, np.zeros((n, n), int)):
            ours.Alltoallv(*work.fill(lengths))
            work.check(lengths.tolist())


@mpi(ranks=RANKS[:2], timeout=180)
def test_every_type(comm: MPI.Intracomm) -> None:
    n, rank, cp = comm.size, comm.rank, cupy()
    torch = pytest.importorskip("torch")
    with blinkmpi.Communicator(comm, timeout=30) as ours:
        for dtype in DTYPES:
            item = dtype_of(dtype).itemsize
            sent, got = [5 + 3 * rank + r for r in range(n)], [5 + 3 * r + rank for r in range(n)]
            x = cp.concatenate([values(rank, r, sent[r] * item) for r in range(n)])
            x = x % 2 if dtype == "bool" else x
            y = cp.zeros(sum(got) * item, "uint8")
            kind = getattr(torch, dtype, None)
            if kind is None:
                kinds = [array.view(dtype_of(dtype)) for array in (x, y)]
            else:
                kinds = [torch.from_dlpack(array).view(kind) for array in (x, y)]
            ours.Alltoallv([kinds[0], sent], [kinds[1], got])
            want = cp.concatenate([values(r, rank, got[r] * item) for r in range(n)])
            assert (y == (want % 2 if dtype == "bool" else want)).all(), dtype


@mpi(ranks=RANKS, timeout=180)
def test_gatherv_and_scatterv(comm: MPI.Intracomm) -> None:
    n, rank, cp, draw = comm.size, comm.rank, cupy(), random.Random(4)
    with blinkmpi.Communicator(comm, timeout=30) as ours:
        for turn in range(40):
            counts, root = [draw.choice(LENGTHS) for _ in range(n)], draw.randrange(n)
            places = [0, *np.cumsum([count + 3 for count in counts]).tolist()]
            mine = values(rank, root, counts[rank])
            whole = cp.full(places[-1] + PAD, 253, "uint8")
            inside = turn % 3 == 0  # the root's own block lies where it belongs
            if inside and rank == root:
                whole[places[rank] : places[rank] + counts[rank]] = mine
            send = MPI.IN_PLACE if inside and rank == root else mine
            ours.Gatherv(send, [whole, counts, places[:-1], MPI.BYTE] if rank == root else None, root)
            if rank == root:
                want = cp.full(places[-1] + PAD, 253, "uint8")
                for r in range(n):
                    want[places[r] : places[r] + counts[r]] = values(r, root, counts[r])
                assert (whole == want).all(), (turn, counts, root)
            got = cp.full(counts[rank] + PAD, 253, "uint8")
            recv = MPI.IN_PLACE if inside and rank == root else [got, counts[rank], MPI.BYTE]
            ours.Scatterv([whole, counts, places[:-1], MPI.BYTE] if rank == root else None, recv, root)
            if recv is not MPI.IN_PLACE:
                assert (got[: counts[rank]] == values(rank, root, counts[rank])).all(), (turn, counts, root)
                assert (got[counts[rank] :] == 253).all()


@mpi(ranks=RANKS, timeout=300)
def test_calls_by_chance_beside_others(comm: MPI.Intracomm) -> None:
    """New lengths in each call, on a stream, with other collectives between; nobody waits on the host."""
    n, rank, cp, draw = comm.size, comm.rank, cupy(), random.Random(5)
    with blinkmpi.Communicator(comm, timeout=30) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        x, y = cp.full(5000, rank + 1.0, "float32"), cp.zeros(5000, "float32")
        most = 200_000
        base, wrong = cp.arange(n * most, dtype="int32"), cp.zeros((), "int64")
        send, recv = cp.empty(n * most, "int32"), cp.empty(n * most, "int32")
        cp.cuda.runtime.deviceSynchronize()
        for turn in range(CALLS):
            lengths = np.array([[draw.choice((0, 5, 1000, draw.randrange(most))) for _ in range(n)] for _ in range(n)])
            sent, got = lengths[rank].tolist(), lengths[:, rank].tolist()
            with stream:
                send[: sum(sent)] = base[: sum(sent)] + 1000 * rank + turn
                recv[...] = -1
            ours.Alltoallv([send[: sum(sent) or 1], sent], [recv[: sum(got) or 1], got], stream=stream)
            with stream:
                at = 0
                for source in range(n):
                    first = int(lengths[source, :rank].sum())
                    want = base[first : first + got[source]] + 1000 * source + turn
                    wrong += (recv[at : at + got[source]] != want).sum()
                    at += got[source]
                wrong += (recv[at:] != -1).sum()
            if draw.random() < 0.3:
                root = draw.randrange(n)
                ours.Bcast(x, root, stream=stream)
                ours.Gatherv(
                    x[: 10 + rank], [y, [10 + r for r in range(n)]] if rank == root else None, root, stream=stream
                )
            if draw.random() < 0.3:
                ours.Allreduce(x, y, stream=stream)
            with stream:
                x[...] = rank + 1.0
        stream.synchronize()
        ours.check()
        assert int(wrong) == 0


@mpi(ranks=RANKS[:2], timeout=120)
def test_a_graph_a_thousand_times(comm: MPI.Intracomm) -> None:
    n, rank, cp = comm.size, comm.rank, cupy()
    lengths = np.array([[(3 * r + 5 * s) * 1111 % 40_000 for r in range(n)] for s in range(n)])
    sent, got = lengths[rank].tolist(), lengths[:, rank].tolist()
    with blinkmpi.Communicator(comm, timeout=30) as ours:
        stream = cp.cuda.Stream(non_blocking=True)
        x, y, z = cp.zeros(sum(sent) or 1, "int32"), cp.zeros(sum(got) or 1, "int32"), cp.zeros(n * 7, "int32")
        wrong = cp.zeros((), "int64")
        want = cp.concatenate([cp.full(got[r], 100 * r, "int32") for r in range(n)])
        cp.cuda.runtime.deviceSynchronize()

        def enqueue() -> None:
            ours.Alltoallv([x, sent], [y, got], stream=stream)
            ours.Gatherv(x[:1], [z, [1] * n] if rank == 0 else None, 0, stream=stream)

        with stream:
            enqueue()
            stream.synchronize()
            stream.begin_capture()
            enqueue()
            graph = stream.end_capture()
            for turn in range(1000):
                x[...] = 100 * rank + turn
                graph.launch(stream)
                wrong += (y[: sum(got)] != want + turn).sum()
                if turn % 100 == 50:
                    enqueue()
        stream.synchronize()
        ours.check()
        assert int(wrong) == 0


@mpi(ranks=RANKS[:2], timeout=120)
@pytest.mark.parametrize("counts", [(100, 300), (0, 5), (3 << 20, 17), (17, 3 << 20), (1 << 22, 1 << 23)])
@pytest.mark.parametrize("way", ["sends", "expects"])
def test_lengths_that_differ_are_named_on_both_ranks(comm: MPI.Intracomm, counts: tuple[int, int], way: str) -> None:
    """Bytes from rank 0 to rank 1; that block is not written."""
    n, rank, cp = comm.size, comm.rank, cupy()
    right, other = counts if way == "sends" else counts[::-1]
    sent = [right if (rank, r) == (0, 1) else 10 for r in range(n)]
    got = [other if (r, rank) == (0, 1) else 10 for r in range(n)]
    x, y = cp.zeros(sum(sent), "uint8"), cp.full(sum(got), 253, "uint8")
    ours = blinkmpi.Communicator(comm, timeout=20)
    with pytest.raises(BlinkError) as raised:
        ours.Alltoallv([x, sent], [y, got])
    if rank == 0:
        assert isinstance(raised.value, MismatchError), raised.value
        assert f"rank 0 sends {right} bytes to rank 1, which expects {other}" in str(raised.value)
    if rank == 1:
        assert isinstance(raised.value, MismatchError), raised.value
        assert f"rank 1 expects {other} bytes from rank 0, which sends {right}" in str(raised.value)
        assert (y[:other] == 253).all()
    ours.free()


@mpi(ranks=RANKS[:1], timeout=120)
@pytest.mark.parametrize("count", [100, 4 << 20])
def test_a_rank_that_does_not_come_is_named(comm: MPI.Intracomm, count: int) -> None:
    n, cp = comm.size, cupy()
    ours = blinkmpi.Communicator(comm, timeout=2)
    x, y = (cp.zeros(n * count, "float32") for _ in range(2))
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"alltoallv.*waited too long for rank"):
            ours.Alltoallv([x, [count] * n], [y, [count] * n])
    comm.Barrier()
    ours.free()


@mpi(ranks=RANKS[:1], timeout=120)
def test_the_host_waits_for_nobody(comm: MPI.Intracomm) -> None:
    """With stream= a call returns before a peer has come."""
    n, cp = comm.size, cupy()
    with blinkmpi.Communicator(comm, timeout=30) as ours:
        x, y, stream = cp.ones(n * 100), cp.zeros(n * 100), cp.cuda.Stream(non_blocking=True)
        cp.cuda.runtime.deviceSynchronize()
        for counts in ([100] * n, [50] * n):
            if comm.rank == 0:
                ours.Alltoallv([x, counts], [y, counts], stream=stream)
            comm.Barrier()  # which rank 0 comes to when its call is on the stream
            if comm.rank:
                ours.Alltoallv([x, counts], [y, counts], stream=stream)
            stream.synchronize()
            assert (y[: counts[0] * n] == 1).all()


@mpi(ranks=RANKS[:1], timeout=120)
def test_another_collective_is_a_mismatch(comm: MPI.Intracomm) -> None:
    n, cp = comm.size, cupy()
    ours = blinkmpi.Communicator(comm, timeout=20)
    x, y = cp.ones(n * 100, "float32"), cp.zeros(n * 100, "float32")
    call = partial(ours.Alltoallv, [x, [100] * n], [y, [100] * n]) if comm.rank == 0 else partial(ours.Allreduce, x, y)
    with pytest.raises(MismatchError):
        call()
    ours.free()
