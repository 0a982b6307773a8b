"""Calls of blocks on a GPU that is none: their kernels' arguments, by Python and by C, and who decides what."""

import pytest
from mpi4py import MPI

from blinkmpi.transport.cuda.blocks import ends_at
from blinkmpi.transport.cuda.kernel_layout import BLOCK_END, buffers_at, common_words
from blinkmpi.transport.cuda.memory_layout import lanes_of_block
from tests.harness import mpi
from tests.mpi.launch.test_launches import STREAM, gpu_job, torch, transport_of

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no DLPack exchange API"
)

WORDS = 60


def blocks_of(words: list[int], n: int) -> tuple[tuple[int, ...], dict[tuple[int, bool], tuple[int, int]]]:
    """Of a launch: what the rank keeps, and its blocks by the other rank and whether they are sent."""
    own, first = common_words(n) + 3, ends_at(n)
    size = len(BLOCK_END)
    rows = [words[first + size * i : first + size * (i + 1)] for i in range(words[common_words(n) + 2])]
    return tuple(words[own : own + 3]), {(peer, bool(sends)): (at, nbytes) for peer, sends, at, nbytes in rows}


@mpi(ranks=(2, 3), timeout=60)
def test_arguments(comm: MPI.Intracomm) -> None:
    """What each rank launches for itself, without a word from the others."""
    n, rank = comm.size, comm.rank
    x, y = torch.zeros(100_000), torch.zeros(100_000)
    sent, got = [100 * rank + r for r in range(n)], [100 * r + rank for r in range(n)]
    before = [sum(sent[:r]) for r in range(n)]
    apart = [1000 * r for r in range(n)]
    with gpu_job(comm) as (ours, driver):
        driver["words"], lanes = WORDS, transport_of(ours).block_lanes
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
