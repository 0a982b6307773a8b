"""Messages of a rank to itself, and what torch's profiler shows, by backend ``blink``."""

from datetime import timedelta

import pytest
from mpi4py import MPI

from blinkmpi.errors import ArgumentError, CollectiveTimeout
from tests.harness import mpi
from tests.torch.test_backend import job

torch = pytest.importorskip("torch")
dist = torch.distributed


@mpi(ranks=(1, 2), timeout=120)
def test_messages_to_oneself(comm: MPI.Intracomm) -> None:
    """Which ``batch_isend_irecv`` takes; received in the order in which they were sent, whichever comes first."""
    rank, n = comm.rank, comm.size
    with job():
        sent = [torch.full((r + 1, 2), float(rank)) for r in range(n)]
        got = [torch.empty(rank + 1, 2) for r in range(n)]
        receives = [dist.P2POp(dist.irecv, x, r) for r, x in enumerate(got)]
        for work in dist.batch_isend_irecv(receives + [dist.P2POp(dist.isend, x, r) for r, x in enumerate(sent)]):
            work.wait()
        assert all((x == float(r)).all() for r, x in enumerate(got))
        for tag in (0, 7):
            for value in (1.0, 2.0):
                changed = torch.full((3,), value + tag)
                assert dist.isend(changed, rank, tag=tag).wait()
                changed.fill_(-1)
        for tag in (7, 0):
            for value in (1.0, 2.0):
                y = torch.empty(3)
                receive = dist.irecv(y, rank, tag=tag)
                assert receive.is_completed()
                receive.wait()
                receive.wait()
                assert (y == value + tag).all()
        late = dist.irecv(torch.empty(3), rank)
        assert not late.is_completed()
        with pytest.raises(CollectiveTimeout, match=rf"rank {rank} waits for a message from itself.*within 0.05 s"):
            late.wait(timedelta(seconds=0.05))
        dist.isend(torch.ones(2), rank)
        for _ in range(2):
            with pytest.raises(ArgumentError, match=rf"rank {rank} receives 3 x torch.float32 from itself.* sent 2 x"):
                late.wait()
        assert not late.is_success()
        dist.isend(torch.ones(3, dtype=torch.bfloat16), rank)
        one_place = dist.irecv(torch.zeros(1, dtype=torch.bfloat16).expand(3), rank)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="single memory location"):
                one_place.wait()


@mpi(ranks=(2,), long=(1,), timeout=120)
def test_the_profiler_shows_collectives(comm: MPI.Intracomm) -> None:
    """By the names that other backends' have, after ours."""
    n = comm.size
    with job(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        x, y = torch.ones(4), torch.empty(4 * n)
        for _ in range(3):
            dist.all_reduce(x)
        dist.all_gather_into_tensor(y, x)
        dist.broadcast(x, 0, async_op=True).wait()
        dist.barrier()
    found = {row.key: row.count for row in profile.key_averages() if row.key.startswith("blink:")}
    assert found == {
        "blink:all_reduce": 3, "blink:all_gather_into_tensor": 1, "blink:broadcast": 1, "blink:barrier": 1,
    }  # fmt: skip
