"""Messages from GPU to GPU: all lengths and alignments, many at once, beside collectives, in graphs, and mistakes."""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from mpi4py import MPI

from blinkmpi.errors import BlinkError, CollectiveTimeout, MismatchError, PeerLost
from tests.gpu.helpers import at_least
from tests.gpu.streams.test_torch import RANKS, on_gpu
from tests.harness import mpi
from tests.torch.test_backend import job

torch = pytest.importorskip("torch")
dist = torch.distributed
LENGTHS = (0, 1, 3, 17, 4095, 16384, 16385, 65537, 1_000_003, 5_000_001)
PAD = 8
LONG = 4 << 20  # elements: more bytes than a FIFO's slots have
pytestmark = [
    pytest.mark.gpu,
    at_least(2),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU"),
]


@contextlib.contextmanager
def group_on_gpus(**settings: Any) -> Iterator[Any]:
    """The default group, and this rank's GPU as the place of new tensors."""
    with on_gpu(), job(**settings) as group:
        yield group


def exchange(sent: list[tuple[Any, int]], received: list[tuple[Any, int]], tag: int = 0) -> None:
    """Send and receive tensors to and from ranks, all at once."""
    ops = [dist.P2POp(dist.isend, x, peer, tag=tag) for x, peer in sent]
    ops += [dist.P2POp(dist.irecv, y, peer, tag=tag) for y, peer in received]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def content(rank: int, count: int, dtype: Any) -> Any:
    return (torch.arange(count) * (rank + 3) % 251).to(dtype)


@mpi(ranks=RANKS, timeout=180)
def test_every_length_and_alignment(comm: MPI.Intracomm) -> None:
    n, rank = comm.size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    with group_on_gpus() as group:
        assert group.device_messages.why_not == ""
        for dtype in (torch.uint8, torch.float32, torch.bfloat16):
            for count in LENGTHS:
                for shift in (0, 1, 3):
                    memory = torch.full((shift + count + PAD,), 77, dtype=dtype)
                    y = memory[shift : shift + count]
                    exchange([(content(rank, shift + count, dtype)[shift:], right)], [(y, left)], tag=5)
                    assert torch.equal(y, content(left, shift + count, dtype)[shift:]), (dtype, count, shift)
                    assert (memory[:shift] == 77).all()
                    assert (memory[shift + count :] == 77).all()
        matrix, whole = torch.zeros(6, 40).T, torch.arange(240.0).reshape(40, 6) + rank  # which is no flat memory
        exchange([(whole.T, right)], [(matrix.T, left)])
        assert torch.equal(matrix.T, (torch.arange(240.0).reshape(40, 6) + left).T)
        leaf = torch.zeros(3, requires_grad=True)  # as pipelines receive activations
        exchange([(torch.ones(3), right)], [(leaf, left)])
        assert leaf.detach().sum().item() == 3


@mpi(ranks=RANKS, timeout=180)
def test_all_pairs_in_any_order_beside_collectives(comm: MPI.Intracomm) -> None:
    """Each rank lists its operations in an order of its own, and makes collectives beside."""
    n, rank = comm.size, comm.rank
    others = [p for p in range(n) if p != rank]
    with group_on_gpus():
        summed = torch.zeros(1 << 18)
        dist.all_reduce(summed)  # whose code is loaded before any message waits
        for count in (100, LONG):
            for turn in range(4):
                sent = [torch.full((count,), float(10 * rank + p + turn)) for p in range(n)]
                got = [torch.zeros(count) for _ in range(n)]
                ops = [dist.P2POp(dist.isend, sent[p], p) for p in others]
                ops += [dist.P2POp(dist.irecv, got[p], p) for p in others]
                shift = (rank + turn) % len(ops)
                works = dist.batch_isend_irecv(ops[shift:] + ops[:shift])
                summed.fill_(1.0)
                dist.all_reduce(summed)
                for work in works:
                    work.wait()
                for p in others:
                    assert (got[p] == 10 * p + rank + turn).all(), (count, turn, p)
                assert (summed == n).all()


@mpi(ranks=RANKS[:1], timeout=180)
def test_a_batch_of_a_thousand_and_calls_one_by_one(comm: MPI.Intracomm) -> None:
    rank, peer = comm.rank, 1 - comm.rank
    with group_on_gpus():
        sent = [torch.full((100 + i % 7,), float(i)) for i in range(500)]
        got = [torch.zeros_like(x) for x in sent]
        exchange([(x, peer) for x in sent], [(y, peer) for y in got])
        assert all(map(torch.equal, sent, got))
        x, y = torch.full((LONG,), float(rank)), torch.zeros(LONG)
        for _ in range(10):  # a ring of long messages that are not batched
            begun = dist.irecv(y, peer), dist.isend(x, peer)
            x = x + 1
            for work in begun:
                work.wait()
        assert (y == peer + 9).all()
        if rank == 0:
            dist.send(x, 1)
            dist.recv(y, 1)
        else:
            dist.recv(y, 0)
            dist.send(y, 0)
        assert rank == 1 or torch.equal(x, y)


@mpi(ranks=RANKS[:1], timeout=180)
def test_the_host_goes_on_and_frees_what_is_sent(comm: MPI.Intracomm) -> None:
    peer = 1 - comm.rank
    with group_on_gpus():
        exchange([(torch.ones(1), peer)], [(torch.ones(1), peer)])
        for late in (0, 1):
            torch.cuda.synchronize()
            comm.Barrier()
            if comm.rank == late:
                torch.cuda._sleep(200_000_000)
            x, y = torch.full((LONG,), float(comm.rank)), torch.zeros(LONG)
            x += 2
            works = dist.isend(x, peer), dist.irecv(y, peer)
            through = works[1].is_completed()
            for work in works:
                work.wait()
            del x, works, work
            junk = [torch.full((LONG,), -1.0) for _ in range(4)]  # takes the memory, if it was given back too early
            assert not through
            assert (y == peer + 2).all()
            del junk


@mpi(ranks=RANKS[:1], timeout=180)
def test_graphs_and_calls_beside_them(comm: MPI.Intracomm) -> None:
    """Replayed on other streams than they were captured on, without synchronising in between."""
    rank, peer = comm.rank, 1 - comm.rank
    with group_on_gpus():
        for count in (100, LONG):
            x, y = torch.zeros(count), torch.zeros(count)
            exchange([(x, peer)], [(y, peer)])
            graphs, streams = [], [torch.cuda.Stream() for _ in range(3)]
            for stream in streams[:2]:
                torch.cuda.synchronize()
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1], stream=stream):
                    for _ in range(3):
                        x += 1
                        exchange([(x, peer)], [(y, peer)])
            x.zero_()
            other, seen = torch.zeros(count), torch.zeros(count)
            torch.cuda.synchronize()
            for turn in range(300 if count == 100 else 20):
                with torch.cuda.stream(streams[2]):
                    graphs[0].replay()
                    x_now = x + 0
                exchange(
                    [(other, peer)], [(seen, peer)]
                )  # on another stream: only the FIFOs' own order holds them apart
                streams[0].wait_stream(streams[2])
                with torch.cuda.stream(streams[0]):
                    graphs[1].replay()
                streams[2].wait_stream(streams[0])
                other += 1
                if turn % 50 == 0:
                    torch.cuda.synchronize()
                    assert (x_now == 6 * turn + 3).all()
                    assert (y == 6 * turn + 6).all()
                    assert (seen == turn).all(), (rank, turn)
            torch.cuda.synchronize()
            del graphs


@pytest.mark.parametrize("wrong", ["length", "tag"])
@mpi(ranks=RANKS[:1], timeout=180)
def test_messages_that_do_not_meet(comm: MPI.Intracomm, wrong: str) -> None:
    with group_on_gpus():
        y = torch.full((11,), 77.0)
        with pytest.raises(MismatchError, match="rank 1 receives 44 bytes with tag 3 from rank 0, which has sent"):
            unlike(comm.rank, wrong, y)
        assert (y == 77).all()  # nothing was written


def unlike(rank: int, wrong: str, y: Any) -> None:
    """A message of which the two ends say other things."""
    if rank == 0:
        dist.send(torch.ones(10 if wrong == "length" else 11), 1, tag=3 + (wrong == "tag"))
    else:
        dist.recv(y, 0, tag=3)
    heard(lambda: dist.all_reduce(torch.ones(3)))


@mpi(ranks=RANKS[:1], timeout=180)
def test_a_message_that_never_comes(comm: MPI.Intracomm) -> None:
    def wait() -> None:
        if comm.rank == 0:
            dist.recv(torch.ones(5), 1, tag=2)
        heard(lambda: dist.all_reduce(torch.ones(3)))

    with group_on_gpus(timeout=timedelta(seconds=3)):
        dist.all_reduce(torch.ones(3))
        with pytest.raises(BlinkError) as caught:
            wait()
    assert isinstance(caught.value, CollectiveTimeout | PeerLost)
    if comm.rank == 0:
        text = "rank 0 waited too long to receive 20 bytes with tag 2 from rank 1"
        assert isinstance(caught.value, CollectiveTimeout)
        assert text in str(caught.value)


def heard(call: Callable[[], object]) -> None:
    """Make calls until one raises what has gone wrong before."""
    for _ in range(400):
        torch.cuda.synchronize()
        call()
        time.sleep(0.02)
