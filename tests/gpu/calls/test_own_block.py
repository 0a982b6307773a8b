"""A reduce-scatter whose result lies in the rank's own block of its vector, as NCCL's in place, and as Megatron has it.

Nothing else of the vector changes; by every protocol, in all types, at any alignment, repeated, and from torch.
"""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.program.reduction import dtype_of
from blinkmpi.transport.cuda.device import cupy
from tests.gpu.helpers import Pools, at_least, fetch, sizes
from tests.harness import mpi

SIZES = (1, 28, 16 << 10, 1_200_004, 3_900_000)  # bytes of a block: packets of 16, lines, slots or direct
TIMES = 3
pytestmark = [pytest.mark.gpu, at_least(2)]


def vector(count: int, rank: int, dtype: str) -> Any:
    """Whole numbers, of which 16-bit floats have the sums."""
    return (np.arange(count) % 5 + rank).astype(dtype_of(dtype))


@pytest.mark.parametrize("algo", ["", "reduce_scatter:onehop/slots", "reduce_scatter:onehop/direct"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex128"])
@mpi(ranks=sizes(2, 3, 4), timeout=120)
def test_nothing_but_the_own_block_changes(comm: MPI.Intracomm, dtype: str, algo: str) -> None:
    n, rank = comm.size, comm.rank
    with blinkmpi.Communicator(comm, algo=algo) as ours:
        for registered in (False, True):
            pools = Pools(ours, registered=registered)
            for size, skew in ((size, skew) for size in SIZES for skew in (0, 1 + rank)):
                count = -(-size // dtype_of(dtype).itemsize)
                whole = vector(n * count, rank, dtype)
                want, own = whole.copy(), slice(rank * count, (rank + 1) * count)
                total = sum(vector(n * count, r, dtype).astype(complex) for r in range(n))
                want[own] = np.real_if_close(total[own]).astype(dtype_of(dtype))
                for _ in range(TIMES):  # found again from the second one on
                    x = pools.take(0, whole, skew)
                    stream = cupy().cuda.get_current_stream()
                    ours.Reduce_scatter_block(x, x[own], stream=stream)
                    stream.synchronize()
                    assert fetch(x, dtype).tobytes() == want.tobytes(), (count, skew, registered)


@mpi(ranks=sizes(2, 3, 4), timeout=60)
def test_torch_copies_nothing_for_it(comm: MPI.Intracomm) -> None:
    """``reduce_scatter_tensor`` into a view of its input."""
    torch = pytest.importorskip("torch")
    import blinkmpi.torch  # noqa: F401

    dist, n, rank = torch.distributed, comm.size, comm.rank
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("blink", init_method="mpi://")
    count = 1 << 20
    x = torch.empty(n * count, device="cuda")
    own = x[rank * count : (rank + 1) * count]
    for _ in range(TIMES):
        x.fill_(rank + 1)
        before = torch.cuda.memory_allocated()
        dist.reduce_scatter_tensor(own, x)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        assert bool((own == n * (n + 1) / 2).all())
        assert int((x == rank + 1).sum()) == (n - 1) * count
    dist.destroy_process_group()
