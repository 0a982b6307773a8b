"""Alltoallv, Gatherv and Scatterv in GPU memory: blocks of any lengths, whose ranks' hosts do not meet."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BlinkError, CollectiveTimeout, MismatchError
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


def call_and_meet(ours: blinkmpi.Communicator, send: list[Any], recv: list[Any]) -> None:
    """Make a call that fails on some rank; where it does not, the next call does."""
    ours.Alltoallv(send, recv)
    ours.Barrier()


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
        call_and_meet(ours, [x, sent], [y, got])
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
    if comm.rank:
        with pytest.raises(BlinkError):
            ours.Barrier()
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
    with pytest.raises(BlinkError) as raised:
        call()
    assert comm.rank or isinstance(raised.value, MismatchError), raised.value
    ours.free()


# ---------------------------------------------------------------- lengths in GPU memory


class Counted:
    """An Alltoallv of int32 whose lengths are in GPU memory, checked on the device.

    Args:
        room: elements of each rank's buffers.
    """

    def __init__(self, comm: MPI.Intracomm, room: int, stream: Any) -> None:
        cp = cupy()
        self.n, self.rank, self.room, self.stream = comm.size, comm.rank, room, stream
        self.base = cp.arange(room, dtype="int32")
        self.send, self.recv = cp.empty(room, "int32"), cp.empty(room, "int32")
        self.counts, self.told, self.places = (cp.zeros(self.n, "int64") for _ in range(3))
        self.wrong = cp.zeros((), "int64")

    def fill(self, lengths: Any, turn: int, places: list[int]) -> None:
        cp = cupy()
        with self.stream:
            self.counts[...] = cp.asarray(lengths[self.rank])
            self.places[...] = cp.asarray(places)
            self.send[...] = self.base + 100_000 * self.rank + turn
            self.recv[...] = -1
            self.told[...] = -1

    def check(self, lengths: Any, turn: int, places: list[int]) -> None:
        cp = cupy()
        with self.stream:
            want = cp.full(self.room, -1, "int32")
            for source in range(self.n):
                first, count = int(lengths[source, : self.rank].sum()), int(lengths[source, self.rank])
                at = places[source]
                want[at : at + count] = self.base[first : first + count] + 100_000 * source + turn
            self.wrong += (self.recv != want).sum() + (self.told != cp.asarray(lengths[:, self.rank])).sum()


def packed_places(lengths: Any, rank: int) -> list[int]:
    return [0, *np.cumsum(lengths[:-1, rank]).tolist()]


@mpi(ranks=RANKS, timeout=300)
@pytest.mark.parametrize("how", ["packed", "places"])
def test_counts_on_the_gpu(comm: MPI.Intracomm, how: str) -> None:
    n, draw = comm.size, random.Random(6)
    stream = cupy().cuda.Stream(non_blocking=True)
    with blinkmpi.Communicator(comm, timeout=30) as ours:
        most = 60_000
        work = Counted(comm, n * (most + 10), stream)
        cupy().cuda.runtime.deviceSynchronize()
        for turn in range(CALLS):
            lengths = np.array([[draw.choice((0, 1, 5, draw.randrange(most))) for _ in range(n)] for _ in range(n)])
            places = packed_places(lengths, comm.rank)
            if how == "places":  # in another order, with gaps
                places = [(most + 10) * ((source + turn) % n) + 7 for source in range(n)]
            work.fill(lengths, turn, places)
            told = work.told if how == "packed" else (work.told, work.places)
            ours.Alltoallv([work.send, work.counts], [work.recv, told], stream=stream)
            work.check(lengths, turn, places)
            if turn % 7 == 3:
                ours.Allreduce(MPI.IN_PLACE, work.send[:100], stream=stream)
        stream.synchronize()
        ours.check()
        assert int(work.wrong) == 0


@mpi(ranks=RANKS[:2], timeout=120)
def test_a_graph_whose_counts_change(comm: MPI.Intracomm) -> None:
    n, draw = comm.size, random.Random(7)
    stream = cupy().cuda.Stream(non_blocking=True)
    with blinkmpi.Communicator(comm, timeout=30) as ours:
        work = Counted(comm, n * 5000, stream)
        cupy().cuda.runtime.deviceSynchronize()
        args = [work.send, work.counts], [work.recv, work.told]
        ours.Alltoallv(*args, stream=stream)
        stream.synchronize()
        with stream:
            stream.begin_capture()
            ours.Alltoallv(*args, stream=stream)
            graph = stream.end_capture()
        for turn in range(300):
            lengths = np.array([[draw.randrange(5000) for _ in range(n)] for _ in range(n)])
            places = packed_places(lengths, comm.rank)
            work.fill(lengths, turn, places)
            graph.launch(stream)
            work.check(lengths, turn, places)
        stream.synchronize()
        ours.check()
        assert int(work.wrong) == 0


@mpi(ranks=RANKS[:2], timeout=120)
@pytest.mark.parametrize("wrong", ["negative", "beyond the send buffer", "too much to receive", "a place outside"])
def test_counts_that_do_not_fit(comm: MPI.Intracomm, wrong: str) -> None:
    """The rank whose buffer it is says so; nothing is written."""
    n, rank, cp = comm.size, comm.rank, cupy()
    ours = blinkmpi.Communicator(comm, timeout=20)
    x, y, told = cp.zeros(n * 100, "float32"), cp.full(n * 100, 7, "float32"), cp.full(n, -1, "int64")
    counts = cp.full(n, 100, "int64")
    receives: list[Any] = [y, told]
    if wrong == "negative" and rank == 0:
        counts[1] = -5
    elif wrong == "beyond the send buffer" and rank == 0:
        counts[n - 1] = 1 << 62
    elif wrong == "too much to receive" and rank == 0:
        receives = [y[:-1], told]
    elif wrong == "a place outside":
        receives = [y, (told, cp.asarray([0] * n if rank else [0] * (n - 1) + [n * 100 - 99], "int64"))]
    with pytest.raises(BlinkError) as raised:
        call_and_meet(ours, [x, counts], receives)
    if rank == 0:
        assert isinstance(raised.value, ArgumentError), raised.value
        text = {
            "negative": "counts[1] of rank 0 is -5",
            "beyond the send buffer": f"counts[{n - 1}] of rank 0 is {1 << 62}",
            "too much to receive": f"rank 0 gets 100 elements from rank {n - 1}, from element {100 * n - 100} on",
            "a place outside": f"rank 0 gets 100 elements from rank {n - 1}, from element {100 * n - 99} on",
        }[wrong]
        assert text in str(raised.value)
        assert (y == 7).all()
        assert (told == -1).all()
    ours.free()


@mpi(ranks=RANKS[:2], timeout=120)
def test_all_to_all_single(comm: MPI.Intracomm) -> None:
    """torch's call with split sizes is one of blocks."""
    torch = pytest.importorskip("torch")
    from tests.gpu.streams.test_torch import on_gpu
    from tests.torch.test_backend import job

    n, rank, draw = comm.size, comm.rank, random.Random(8)
    with on_gpu(), job() as group:
        for _ in range(30):
            lengths = np.array([[draw.choice((0, 1, draw.randrange(300))) for _ in range(n)] for _ in range(n)])
            sent, got = lengths[rank].tolist(), lengths[:, rank].tolist()
            x = torch.arange(sum(sent) * 16, dtype=torch.float32).reshape(-1, 16) + rank
            y = torch.full((sum(got), 16), -1.0)
            torch.distributed.all_to_all_single(y, x, got, sent)
            first = [int(lengths[source, :rank].sum()) for source in range(n)]
            want = [
                torch.arange(16 * first[r], 16 * (first[r] + got[r]), dtype=torch.float32).reshape(-1, 16) + r
                for r in range(n)
            ]
            assert torch.equal(y, torch.cat(want))
        assert "blocks" in [p.protocol for p in group.comm.stats().protocols]
