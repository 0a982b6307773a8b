"""Groups in GPU memory without a GPU: buckets, arguments of the kernels that gather and scatter, and their order."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from benchmarks.fake.gpu import fresh_order
from blinkmpi.program.call import Call
from blinkmpi.program.memory import DeviceArray, Segments
from blinkmpi.runtime import collectives as mpi
from blinkmpi.runtime.arguments import Prepared
from blinkmpi.runtime.collectives import CollectiveMethod
from blinkmpi.runtime.cuda.call import CudaCall
from blinkmpi.runtime.cuda.calls import CudaCalls
from blinkmpi.runtime.grouping.group import Groups
from blinkmpi.runtime.grouping.launches import GPU_ALONE, GroupLaunch, NotedCall, launches
from blinkmpi.transport.announcement import Called
from blinkmpi.transport.cuda.kernel_layout import (
    NO_PLACE,
    SEGMENT_CTAS,
    SEGMENT_HEAD,
    SEGMENT_ROOMS,
    SEGMENTS,
    room_for,
    segment_launches,
    segment_words,
)
from blinkmpi.transport.cuda.loaded_kernel import KernelCache, LoadedKernel, load_kernel
from blinkmpi.util.lru import LRU
from tests.unit.runtime.test_cuda_calls import Cai
from tests.unit.runtime.test_cuda_new_counts import CountingGpu, with_calls

N, BUCKET, MEMORY = 3, 1 << 16, 1 << 18
LENGTHS = (0, 5, 0, 33, 1, 8)
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def fake(rank: int) -> Any:
    """A maker of calls that reads arguments, and has a bucket."""

    def prepare(invocation: Any, *_: object) -> Any:
        return invocation.method.prepare(rank, N, *invocation.args)

    def room(nbytes: int) -> int:
        assert nbytes <= MEMORY - BUCKET
        return BUCKET

    cuda = SimpleNamespace(buckets=SimpleNamespace(room=room))
    binder, sequence = SimpleNamespace(prepare=prepare, calls=LRU(8)), SimpleNamespace(check_alive=lambda: None)
    context = SimpleNamespace(rank=rank)
    return SimpleNamespace(sequence=sequence, binder=binder, cuda=cuda, context=context, enqueues=False)


def grouped(rank: int, method: CollectiveMethod, rows: list[tuple[Any, ...]]) -> tuple[GroupLaunch, ...]:
    return launches(fake(rank), [NotedCall(method, args, None, None) for args in rows], kept=False)


def kernel(memory: Bytes, segments: Segments, *, gathers: bool) -> None:
    """What segments.cu does, from its arguments alone."""
    for ctas, words in segment_launches(segments, 0):
        bucket, _, stride, blocks, parts = words[: len(SEGMENT_HEAD)]
        rows = np.array(words[len(SEGMENT_HEAD) :], np.uint64).reshape(SEGMENTS, 2)
        assert ctas % (blocks * parts) == 0
        for at, packed in rows[: ctas // blocks // parts].tolist():
            place, nbytes = packed & 0xFFFFFFFF, packed >> 32
            for block in range(blocks):
                theirs = slice(at + block * nbytes, at + (block + 1) * nbytes)
                ours = bucket + 16 * place + block * stride
                if gathers:
                    memory[ours : ours + -(-nbytes // 16) * 16] = 0
                    memory[ours : ours + nbytes] = memory[theirs]
                else:
                    memory[theirs] = memory[ours : ours + nbytes]


def view(memory: Bytes, array: Any) -> Any:
    """A buffer's elements."""
    assert isinstance(array, DeviceArray)
    return memory[array.ptr : array.ptr + array.nbytes].view(np.float32)


def collective(kind: str, memories: list[Bytes], readies: list[Prepared], root: int) -> None:
    """The call on buckets."""
    sends = [None if r.send is None else view(m, r.send).copy() for m, r in zip(memories, readies, strict=True)]
    there = [send for send in sends if send is not None]
    for rank, (memory, ready) in enumerate(zip(memories, readies, strict=True)):
        if ready.recv is None:
            continue
        recv = view(memory, ready.recv)
        if kind in ("allreduce", "reduce"):
            recv[:] = sum(there)
        elif kind == "broadcast":
            recv[:] = sends[root]
        elif kind in ("allgather", "gather"):
            recv[:] = np.concatenate(there)
        elif kind == "alltoall":
            recv[:] = np.concatenate([send.reshape(N, -1)[rank] for send in there])
        else:
            recv[:] = (sum(there) if kind == "reduce_scatter" else there[0]).reshape(N, -1)[rank]


METHODS = {
    mpi.ALLREDUCE: (1, 1), mpi.REDUCE: (1, 1), mpi.BCAST: (1, 1), mpi.ALLGATHER: (1, N), mpi.GATHER: (1, N),
    mpi.SCATTER: (N, 1), mpi.BLOCKS: (N, 1), mpi.ALLTOALL: (N, N),
}  # fmt: skip


@pytest.mark.parametrize("skew", [0, 4])
@pytest.mark.parametrize("method", METHODS, ids=[f"{m.name}-{i}" for i, m in enumerate(METHODS)])
def test_a_group_moves_what_its_calls_would(method: CollectiveMethod, skew: int) -> None:
    """Every rank's gathering, the call on the buckets, and every rank's scattering, on memories of numbers."""
    (sent, received), root = METHODS[method], N - 1
    ends: list[tuple[Cai, Cai]] = []
    at = 1024
    for m in LENGTHS:
        ends.append((Cai((sent * m,), at=at + skew), Cai((received * m,), at=at + 2048 + skew)))
        at += 4096
    op = (MPI.SUM,) if method in (mpi.ALLREDUCE, mpi.REDUCE, mpi.BLOCKS) else ()
    rooted = (root,) if method in (mpi.REDUCE, mpi.BCAST, mpi.GATHER, mpi.SCATTER) else ()

    def rows(rank: int, some: list[tuple[Cai, Cai]]) -> list[tuple[Any, ...]]:
        if method is mpi.BCAST:
            return [(send, root) for send, _ in some]
        given = [(s if method is not mpi.SCATTER or rank == root else None,
                  r if method not in (mpi.REDUCE, mpi.GATHER) or rank == root else None) for s, r in some]  # fmt: skip
        return [(*pair, *op, *rooted) for pair in given]

    start = [np.random.default_rng(rank).integers(0, 100, MEMORY // 4).astype(np.float32) for rank in range(N)]
    one_by_one, together = ([m.copy().view(np.uint8) for m in start] for _ in range(2))
    for pair in ends:
        readies = [method.prepare(rank, N, *rows(rank, [pair])[0]) for rank in range(N)]
        assert all(isinstance(ready, Prepared) for ready in readies)
        if readies[0].call.total:
            collective(method.name, one_by_one, readies, root)  # type: ignore[arg-type]
    made = [grouped(rank, method, rows(rank, ends)) for rank in range(N)]
    assert [len(found) for found in made] == [1] * N
    found = [launch.ready for (launch,) in made]
    assert len({(ready.said, ready.call) for ready in found}) == 1  # type: ignore[union-attr]
    for memory, ready in zip(together, found, strict=True):
        kernel(memory, ready.segments[0], gathers=True)  # type: ignore[union-attr, index]
    collective(method.name, together, found, root)  # type: ignore[arg-type]
    for memory, ready in zip(together, found, strict=True):
        kernel(memory, ready.segments[1], gathers=False)  # type: ignore[union-attr, index]
    for rank, (one, other) in enumerate(zip(one_by_one, together, strict=True)):
        assert (one[:BUCKET] == other[:BUCKET]).all(), f"rank {rank}"


def test_arguments_of_many_segments() -> None:
    """More than a kernel takes, and long ones, which many CTAs share."""
    many = Segments(1 << 20, 512, 2, tuple((i << 12, 32 * i, 17) for i in range(SEGMENTS + 3)))
    first, second = segment_launches(many, 99)
    assert (first[0], second[0]) == (2 * SEGMENTS, 6)
    assert len(first[1]) == len(second[1]) == len(SEGMENT_HEAD) + 2 * SEGMENTS
    assert second[1][: len(SEGMENT_HEAD)] == [1 << 20, 99, 512, 2, 1]
    ((ctas, words),) = segment_launches(Segments(0, 0, 1, ((0, 0, 64 << 20), (0, 64 << 20, 1))), 0)
    assert ctas == SEGMENT_CTAS == 2 * words[4]


def place_of(words: list[int], block: int, pack: int) -> tuple[int, int]:
    """What exchange.cuh finds in its arguments: where a pack of a stream lies, and how many of its bytes."""
    rows = np.array(words, np.uint64).reshape(-1, 2).tolist()
    found, more = 0, 64 if len(rows) > 64 else len(rows) // 2
    while more:
        after = found + more
        if after < len(rows) and rows[after][1] & 0xFFFFFFFF <= pack:
            found = after
        more //= 2
    at, packed = rows[found]
    offset, nbytes = (pack - (packed & 0xFFFFFFFF)) * 16, packed >> 32
    return at + block * nbytes + offset, min(nbytes - offset, 16)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("many", [1, 2, 15, 16, 17, 100, 112])
def test_packets_find_their_segments(many: int, blocks: int) -> None:
    """Every pack of every stream, from the arguments alone."""
    lengths = np.random.default_rng(many).integers(1, 100, many).tolist()
    places = np.cumsum([0, *(-(-length // 16) * 16 for length in lengths)]).tolist()
    pieces = tuple((1000 + (i << 12), *piece) for i, piece in enumerate(zip(places[:-1], lengths, strict=True)))
    ways = Segments(0, places[-1], blocks, pieces), Segments(0, 0, 1, ())
    room = room_for(ways)
    assert room == (SEGMENT_ROOMS[0] if many <= SEGMENT_ROOMS[0] else SEGMENT_ROOMS[1])
    words = segment_words(ways, room)
    assert (len(words), words[-2:]) == (4 * room, [0, NO_PLACE])
    for block in range(blocks):
        found = [place_of(words[: 2 * room], block, pack) for pack in range(places[-1] // 16)]
        assert found == [
            (at + block * nbytes + offset, min(16, nbytes - offset))
            for at, _, nbytes in pieces
            for offset in range(0, nbytes, 16)
        ]


def test_which_groups_packets_carry_themselves() -> None:
    """Those over packets whose segments have room among the arguments."""
    gpu = CountingGpu()
    kernels, call = KernelCache(gpu, N), Call("allreduce", N, (100,), "float32", "sum")  # type: ignore[arg-type]
    kernel = kernels.packets(call, "ll16_one_shot")

    def own(protocol: str, many: int, nwords: int = 40) -> LoadedKernel | None:
        segments = Segments(0, 0, 1, tuple((1 << 20, 16 * i, 16) for i in range(many)))
        loaded = load_kernel(kernel, 3, 256, range(nwords), protocol, Called("said"))
        return kernels.of_group(loaded, call, (segments, segments))

    found = own("ll16_one_shot", 10)
    assert found is not None
    assert (found.grid, found.block, found.called.words) == (3, 256, "said")
    assert list(found.args[:41]) == [*range(40), 1 << 20]
    assert len(found.args) == 40 + 4 * SEGMENT_ROOMS[0]
    assert found.kernel is not kernel
    assert gpu.compiled == 2
    again = own("ll16_one_shot", SEGMENT_ROOMS[0])
    assert again is not None
    assert again.kernel is found.kernel
    assert own("ll16_one_shot", SEGMENT_ROOMS[-1]) is not None
    assert gpu.compiled == 3
    assert own("ll16_one_shot", SEGMENT_ROOMS[-1] + 1) is None
    assert own("ll16_one_shot", SEGMENT_ROOMS[-1], nwords=65) is None, "more than 4 KiB"
    assert own("direct", 10) is own("slots", 10) is None


def test_long_ones_are_by_themselves_and_keep_nothing_alive() -> None:
    long, short = Cai((GPU_ALONE // 4,), at=1 << 30), [Cai((4,), at=4096), Cai((8,), at=8192)]
    rows = [(MPI.IN_PLACE, one, MPI.SUM) for one in (short[0], long, short[1])]
    packed, alone = grouped(0, mpi.ALLREDUCE, rows)
    assert (packed.calls, alone.calls) == ((0, 2), (1,))
    ready = alone.ready
    assert isinstance(ready, Prepared)
    assert isinstance(ready.send, DeviceArray)
    assert (ready.send.ptr, ready.send.owner, ready.segments) == (1 << 30, None, None)
    assert ready.said == "allreduce(2097152 x float32, op sum) [calls 1]"
    assert isinstance(packed.ready, Prepared)
    assert packed.ready.said.endswith("; then allreduce(2097152 x float32, op sum) [calls 1]")
    assert "group of 2: 4 + 8 x float32, op sum) [calls 0, 2]" in packed.ready.said


def test_streams_are_joined() -> None:
    """A launch takes the first stream; buffers of others are waited for."""
    rows = [(MPI.IN_PLACE, Cai((4,), at=4096 * i, stream=20 + i % 2), MPI.SUM) for i in range(1, 4)]
    (launch,) = grouped(0, mpi.ALLREDUCE, rows)
    assert launch.streams == (21, 20)
    assert isinstance(launch.ready, Prepared)
    assert isinstance(launch.ready.send, DeviceArray)
    assert launch.ready.send.stream == 21
    after: list[tuple[int, int]] = []
    made: list[Any] = []
    kept: list[Any] = []
    gpu = SimpleNamespace(after=lambda stream, other: after.append((stream, other)))
    maker = fake(0)
    maker.cuda.context, maker.make = SimpleNamespace(gpu=gpu), lambda *args: made.append(args)
    maker.cuda.operands = SimpleNamespace(keep=lambda *args: kept.append(args))
    groups = Groups(maker)
    groups.make([NotedCall(mpi.ALLREDUCE, args, None, None) for args in rows], mpi.ALLREDUCE, ())
    assert (after, made[0][3], kept) == ([(21, 20)], None, []), "the host waits"
    groups.make([NotedCall(mpi.ALLREDUCE, args, None, 7 + i) for i, args in enumerate(rows)], mpi.ALLREDUCE, ())
    assert after[1:] == [(7, 8), (7, 9), (8, 7), (9, 7)]
    assert made[1][3] == 7
    assert [call.args for call in kept[0][0][0]] == rows


@pytest.mark.parametrize("many", [3, 3 + SEGMENT_ROOMS[-1]])
def test_one_kernel_or_one_before_and_one_behind(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    """On one stream, by how many tensors there are; one on another stream is behind all of it."""
    order: list[str] = []

    def starts(context: Any, gpu: CountingGpu, calls: CudaCalls) -> None:
        compiled = gpu.compile

        def compile(source: str, name: str) -> Any:
            made = compiled(source, name)

            def launcher(grid: int, block: int, stream: int, params: Any, what: str) -> Any:
                return lambda: order.append(f"{name} on {stream}")

            return SimpleNamespace(handle=made.handle, registers=1, launcher=launcher)

        monkeypatch.setattr(gpu, "compile", compile)
        monkeypatch.setattr(gpu, "record", lambda stream, event: order.append(f"record {stream}"))
        monkeypatch.setattr(gpu, "wait", lambda stream, event: order.append(f"wait {stream}"))
        rows = [(MPI.IN_PLACE, Cai((4,), at=4096 * i, stream=5), MPI.SUM) for i in range(1, many + 1)]
        (launch,) = launches(fake(1), [NotedCall(mpi.ALLREDUCE, args, None, None) for args in rows], kept=False)
        for stream in (5, 6):
            bound = calls.bind(launch.ready, stream, 60.0)  # type: ignore[arg-type]
            assert isinstance(bound, CudaCall)
            assert bound.text == f"allreduce(group of {many}: {many} times 4 x float32, op sum) in GPU memory"
            bound.start(1)

    with fresh_order():
        with_calls(starts, n=3)
    if many == 3:
        assert order == ["packets on 5", "record 5", "wait 6", "packets on 6", "record 6"]
        return
    around = ["gather on 5", "packets on 5", "scatter on 5"]
    assert order == [*around, "record 5", "wait 6", *(text.replace("5", "6") for text in around)]
