"""Calls of blocks on a GPU that is none: their kernels' arguments, by Python and by C, and who decides what."""

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from benchmarks.fake.gpu import fake_gpus
from blinkmpi.errors import ArgumentError, BufferTypeError
from blinkmpi.runtime.cuda.calls import CudaCalls
from blinkmpi.transport.cuda.blocks import ends_at
from blinkmpi.transport.cuda.kernel_layout import BLOCK_END, COUNTED, buffers_at, common_words
from blinkmpi.transport.cuda.memory_layout import lanes_of_block
from tests.effort import Effort
from tests.harness import mpi
from tests.mpi.launch.test_launches import STREAM, gpu_job, made_alike, made_by_c, torch, transport_of

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no DLPack exchange API"
)


def blocks_of(words: list[int], n: int) -> tuple[tuple[int, ...], dict[tuple[int, bool], tuple[int, int]]]:
    """Of a launch: what the rank keeps, and its blocks by the other rank and whether they are sent."""
    own, first = common_words(n) + 3, ends_at(n)
    size = len(BLOCK_END)
    rows = [words[first + size * i : first + size * (i + 1)] for i in range(words[common_words(n) + 2])]
    return tuple(words[own : own + 3]), {(peer, bool(sends)): (at, nbytes) for peer, sends, at, nbytes in rows}


def words_of(n: int) -> int:
    """Words of a kernel's arguments."""
    return ends_at(n) + 2 * (n - 1) * len(BLOCK_END)


@mpi(ranks=(2, 3), timeout=60)
def test_arguments(comm: MPI.Intracomm) -> None:
    """What each rank launches for itself, without a word from the others."""
    n, rank = comm.size, comm.rank
    x, y = torch.zeros(100_000), torch.zeros(100_000)
    sent, got = [100 * rank + r for r in range(n)], [100 * r + rank for r in range(n)]
    before = [sum(sent[:r]) for r in range(n)]
    apart = [1000 * r for r in range(n)]
    with gpu_job(comm) as (ours, driver):
        driver["words"], lanes = words_of(n), transport_of(ours).block_lanes
        ours.Alltoallv([x, sent], [y, (got, apart)], stream=STREAM)
        _, grid, _, stream, words = driver.last()
        kept, found = blocks_of(words, n)
        assert stream == STREAM
        assert words[buffers_at(n) : buffers_at(n) + 2] == [x.data_ptr(), y.data_ptr()]
        assert kept == (4 * before[rank], 4 * apart[rank], 4 * sent[rank])
        assert found == {
            **{(r, True): (4 * before[r], 4 * sent[r]) for r in range(n) if r != rank},
            **{(r, False): (4 * apart[r], 4 * got[r]) for r in range(n) if r != rank},
        }
        assert grid == 2 * n - 1
        ours.Alltoallv([x, [30_000] * n], [y, [30_000] * n], stream=STREAM)
        assert driver.last()[1] == (2 * n - 1) * lanes_of_block(120_000, lanes)
        counts = [7 + r for r in range(n)]
        ours.Gatherv(x[: counts[rank]], [y, counts] if rank == 1 else None, 1, stream=STREAM)
        kept, found = blocks_of(driver.last()[4], n)
        if rank == 1:
            assert kept == (0, 28, 32)
            assert found == {(r, False): (4 * sum(counts[:r]), 4 * counts[r]) for r in range(n) if r != 1}
        else:
            assert kept == (0, 0, 0)
            assert found == {(1, True): (0, 4 * counts[rank])}
        ours.Scatterv([x, counts] if rank == 1 else None, y[: counts[rank]], 1, stream=STREAM)
        kept, found = blocks_of(driver.last()[4], n)
        if rank == 1:
            assert kept == (28, 0, 32)
            assert found == {(r, True): (4 * sum(counts[:r]), 4 * counts[r]) for r in range(n) if r != 1}
        else:
            assert found == {(1, False): (0, 4 * counts[rank])}
        moved = ours.stats()
        assert [(p.protocol, p.calls) for p in moved.protocols] == [("blocks", 4)]
        (bytes_of,) = (c.bytes for c in moved.collectives if c.collective == "alltoall")
        assert bytes_of == max(4 * sum(sent), 4 * sum(got)) + 120_000 * n


def lengths_by_chance(n: int, draw: random.Random) -> Any:
    return np.array([[draw.choice((0, 1, 5, draw.randrange(5000))) for _ in range(n)] for _ in range(n)])


@mpi(ranks=(2, 3), timeout=120)
def test_c_launches_what_python_launches(comm: MPI.Intracomm) -> None:
    """New lengths in each call, at other addresses, in several forms, word by word; and as the statistics have it."""
    n, rank, slab, draw = comm.size, comm.rank, torch.zeros(60_000), random.Random(9)

    def calls(ours: blinkmpi.Communicator) -> Iterator[Callable[[], None]]:
        draw.seed(9)
        for _ in range(60):
            lengths, at = lengths_by_chance(n, draw), draw.randrange(100)
            sent, got = lengths[rank].tolist(), lengths[:, rank].tolist()
            x, y = slab[at : at + sum(sent) + 1], slab[30_000 + at : 30_001 + at + sum(got)]
            gaps = np.cumsum([0, *(count + 2 for count in got[:-1])])
            far = slab[30_000 + at : 30_000 + at + int(gaps[-1]) + got[-1] + 1]
            yield partial(ours.Alltoallv, [x, sent], [y, got], stream=STREAM)
            yield partial(ours.Alltoallv, (x, sent), [far, (got, gaps.tolist())], stream=STREAM)
            root, whole = draw.randrange(n), slab[30_000 : 30_000 + int(lengths[0].sum()) + 1]
            block = slab[at : at + 1 + int(lengths[0][rank])]
            one = [block, int(lengths[0][rank])]
            yield partial(ours.Gatherv, one, [whole, lengths[0]] if rank == root else None, root, stream=STREAM)
            yield partial(ours.Scatterv, [whole, lengths[0]] if rank == root else None, one, root, stream=STREAM)

    assert made_alike(comm, "", calls, [], words_of(n)) > 150


@mpi(ranks=(2,), timeout=60)
def test_few_python_functions(comm: MPI.Intracomm) -> None:
    """Time differs from machine to machine; this number does not."""
    x, y = torch.zeros(20_000), torch.zeros(20_000)
    with gpu_job(comm) as (ours, _):
        for counts in ([5, 6], [7, 8]):
            ours.Alltoallv([x, counts], [y, counts], stream=STREAM)
        comm.Barrier()
        sent, got = [x[:400], [9, 300]], [y[:500], [9, 300]]
        with Effort() as effort:
            ours.Alltoallv(sent, got, stream=STREAM)
        found = ours._dispatcher().repeated.last_launch
        assert found is not None
        assert found[1] == ours._dispatcher().sequence.seq
        assert found[0].text == "alltoallv(float32) in GPU memory"
        assert effort.entered <= 10
        comm.Barrier()


@mpi(ranks=(2,), timeout=60)
def test_what_c_leaves_to_python(comm: MPI.Intracomm) -> None:
    """Python refuses what is wrong, and makes what C does not read; then C goes on."""
    x, y = torch.zeros(1000), torch.zeros(1000)
    with gpu_job(comm) as (ours, driver):
        call = partial(ours.Alltoallv, stream=STREAM)
        call([x, [5, 6]], [y, [5, 6]])
        assert made_by_c(ours, lambda: call([x, [0, 7]], [y, [0, 7]]))
        for wrong in ([[x, [5, 999]], [y, [5, 6]]], [[x, [5, -1]], [y, [5, 6]]]):
            launches = driver["launches"]
            with pytest.raises(ArgumentError):
                call(*wrong)
            assert driver["launches"] == launches
        assert not made_by_c(ours, lambda: call([x, ([5, 6], [100, 0])], [y, ([5, 6], [100, 0])]))  # not in order
        assert made_by_c(ours, lambda: call([x, [1, 2]], [y, [1, 2]]))
        assert made_by_c(ours, lambda: call([x, [1, 0]], [y[:1], [1, 0]]))
        for nothing in ([x, x[:0]], [x[:0], y], [x[:0], y[:0]]):  # a rank that gets nothing, as one without tokens
            assert made_by_c(ours, lambda nothing=nothing: call([nothing[0], [0, 0]], [nothing[1], [0, 0]]))


@mpi(ranks=(2,), timeout=60)
def test_counts_on_the_gpu(comm: MPI.Intracomm) -> None:
    """What the kernel is told. Calls of the same counts are bound once, and C makes the third, of whatever arrays."""
    n, x, y, other, another = comm.size, *(torch.zeros(count) for count in (1000, 2000, 1000, 2000))
    counts, told, places = (torch.zeros(n, dtype=torch.int64) for _ in range(3))
    with gpu_job(comm) as (ours, driver):
        behind = words_of(n)
        driver["words"], lanes = behind + len(COUNTED), transport_of(ours).block_lanes
        for receives, where in (([y, told], 0), ([y, (told, places)], places.data_ptr())):
            for turn in range(4):
                bound = mock.patch.object(CudaCalls, "bind", side_effect=AssertionError("it is bound already"))
                sent, got = (x, receives) if turn < 3 else (other, [another, *receives[1:]])
                with bound if turn else contextlib.nullcontext():
                    made = made_by_c(ours, partial(ours.Alltoallv, [sent, counts], got, stream=STREAM))
                assert made == (turn > 1)
                _, grid, _, _, words = driver.last()
                assert grid == (2 * n - 1) * lanes
                assert words[behind:] == [4, 1000, 2000, counts.data_ptr(), told.data_ptr(), where]
                assert words[buffers_at(n) : buffers_at(n) + 2] == [sent.data_ptr(), got[0].data_ptr()]
            assert not made_by_c(ours, partial(ours.Alltoallv, [x, counts.clone()], receives, stream=STREAM))
        assert sum(c.bytes for c in ours.stats().collectives) == 10 * 8000
        call = partial(ours.Alltoallv, stream=STREAM)
        for wrong in (
            ([x, counts[:1]], [y, told]), ([x, counts.int()], [y, told]), ([x, counts], [y.int(), told]),
            ([x, counts], [y, [1, 1]]), ([x, [1, 1]], [y, told]), ([x, counts], [y, counts]), ([x, counts], y),
            ([x, counts], [y, (told, places, places)]), ([x, counts], [x, told]), (MPI.IN_PLACE, [y, told]),
        ):  # fmt: skip
            with pytest.raises((ArgumentError, BufferTypeError)):
                call(*wrong)
    with (
        gpu_job(comm) as (ours, _),
        mock.patch.object(ours.context.gpus, "why_no_blocks", "there is no NVLink"),
        pytest.raises(ArgumentError, match=r"here there is no NVLink; pass counts as lists"),
    ):
        ours.Alltoallv([x, counts], [y, told], stream=STREAM)


@mpi(ranks=(2,), timeout=60)
def test_a_scheme_that_was_asked_for_is_taken(comm: MPI.Intracomm) -> None:
    """Then the ranks tell one another the lengths, and a program carries the blocks; explain says either."""
    x, y, counts = torch.zeros(100), torch.zeros(100), [[3, 4], [5, 6]]  # from each rank to each
    sent, got = counts[comm.rank], [row[comm.rank] for row in counts]
    for algo, protocol, said in (
        ("", "blocks", "Alltoallv: no trees; from GPU to GPU in 32 lanes"),
        ("alltoall:onehop", "slots", "Alltoallv: by trees, and the ranks tell one another the lengths before"),
    ):
        with fake_gpus(algo), blinkmpi.Communicator(comm, algo=algo or None) as ours:
            ours.Alltoallv([x, sent], [y, got], stream=STREAM)
            assert said in ours.explain("alltoall", 1000)
            assert [p.protocol for p in ours.stats().protocols] == [protocol]
            if not algo:
                assert "Allgatherv:" not in ours.explain("allgather", 1000)
                assert "Gatherv: no trees" in ours.explain("gather", 1000)
