"""The backend ``blink`` on GPUs: what tests/torch tries in host memory, and streams, memory and graphs."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
from mpi4py import MPI

import blinkmpi
from tests.gpu.helpers import at_least, sizes
from tests.gpu.streams.test_launch import made_by_c
from tests.harness import mpi
from tests.torch import test_backend, test_own_messages, test_training
from tests.torch.test_backend import job

torch = pytest.importorskip("torch")
torch_extension = pytest.importorskip("blinkmpi.torch.torch_extension")
dist = torch.distributed

RANKS = sizes(2, 3, 4)
COUNT = 3 << 20  # elements of a vector that takes a while
SUMMED = ("float32", "bfloat16", "int64", "float8_e4m3fn")  # a kernel each for every length and collective
TOLERANCE = 1e-4  # between a GPU's matrix products and a CPU's, after a few steps

pytestmark = [
    pytest.mark.gpu,
    at_least(2),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU"),
]


@contextlib.contextmanager
def on_gpu() -> Iterator[None]:
    """Make this rank's GPU the place of new tensors, once torch_extension.cpp is compiled where it can be."""
    comm = MPI.COMM_WORLD
    torch_extension.wait()
    device = torch.device("cuda", comm.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device("cpu")


def gpu(ranks: tuple[int, ...], timeout: float = 180.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test on some ranks, whose tensors are made on their GPUs."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def run(comm: MPI.Intracomm, **params: Any) -> None:
            with on_gpu():
                body(comm, **params)

        run.__module__ = __name__  # where the ranks find it
        return mpi(ranks=ranks, timeout=timeout)(run)

    return decorate


test_operations_and_layouts = gpu(RANKS)(test_backend.test_operations_and_layouts.body)  # type: ignore[attr-defined]
test_errors_reach_every_rank = gpu(RANKS[:1])(test_backend.test_errors_reach_every_rank.body)  # type: ignore[attr-defined]
test_messages_and_groups = gpu(sizes(2, 4))(test_backend.test_messages_and_groups.body)  # type: ignore[attr-defined]
test_messages_to_oneself = gpu(RANKS[:1])(test_own_messages.test_messages_to_oneself.body)  # type: ignore[attr-defined]
test_the_profiler_shows_collectives = gpu(RANKS[:1])(
    test_own_messages.test_the_profiler_shows_collectives.body  # type: ignore[attr-defined]
)


@pytest.mark.parametrize("compiled", [True, False])
@gpu(RANKS, 300)
def test_every_collective(comm: MPI.Intracomm, compiled: bool) -> None:
    moved, compiling = (*SUMMED, "bool", "complex128"), torch_extension._compiling
    if not compiled:
        compiling = torch_extension._Compiling()
        compiling.why = "not in this test"
    with (
        mock.patch.object(torch_extension, "_compiling", compiling),
        mock.patch.object(test_backend, "SUMMED", SUMMED),
        mock.patch.object(test_backend, "MOVED", moved),
    ):
        test_backend.test_every_collective.body(comm)  # type: ignore[attr-defined]


@gpu(RANKS[:1])
def test_contiguous_tensors_take_the_fast_path(comm: MPI.Intracomm) -> None:
    """Asynchronous or not, in place or not, also during the capture of a graph; C makes those that were made before."""
    n, rank = comm.size, comm.rank
    if torch_extension.why_none():
        pytest.skip(torch_extension.why_none())
    x, whole, summed = torch.ones(4, 3), torch.zeros(n, 12), torch.ones(n, 7)

    whole[rank] = rank
    some = (
        partial(dist.all_reduce, x),
        partial(dist.broadcast, x, src=n - 1),
        partial(dist.all_gather_into_tensor, whole, whole[rank]),
        partial(dist.reduce_scatter_tensor, summed[rank], summed),
    )
    with job() as group:
        ours = group.comm
        with mock.patch.object(type(group), "_make", side_effect=AssertionError("the long way")):
            for asynchronous in (True, True, False, False):  # on another stream: C learns of what is made twice
                for call in some:
                    test_backend.done(call(async_op=asynchronous))
            by_c = []
            for call in some:
                comm.Barrier()  # what a late peer has not read yet is Python's
                by_c.append(made_by_c(ours, call))
            assert by_c == [True] * len(some)
            test_backend.done(some[2](async_op=True))  # on another stream than the calls before, which is Python's
            works = []
            for call in some:
                comm.Barrier()
                by_c.append(made_by_c(ours, lambda call=call: works.append(call(async_op=True))))  # type: ignore[misc]
            for work in works:
                work.wait()
            assert by_c == [True] * 2 * len(some)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for call in some:
                    call()
            for _ in range(2):
                graph.replay()
            torch.cuda.synchronize()
        assert (x == n**8).all()  # four loops, two by C, two of the graph
        assert torch.equal(whole, torch.arange(n * 1.0)[:, None].expand(n, 12))
        assert (summed[rank] == 1 + 8 * (n - 1)).all()  # the others' blocks stay ones
        del graph


@pytest.mark.parametrize("name", sorted(test_training.TRAININGS))
@mpi(ranks=RANKS[:1], timeout=180)
def test_the_weights_are_those_of_gloo_on_cpus(comm: MPI.Intracomm, name: str) -> None:
    with job("gloo"):
        wanted = test_training.TRAININGS[name](comm.rank)
    with on_gpu(), job():
        found = test_training.TRAININGS[name](comm.rank)
    assert wanted
    assert all(w.is_cuda for w in found)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=TOLERANCE, atol=TOLERANCE)


@gpu(RANKS[-1:])
def test_wait_is_the_streams_and_not_the_hosts(comm: MPI.Intracomm) -> None:
    """Results come behind a slow input; the host is through long before, and frees what the call still reads."""
    n = comm.size
    with job():
        dist.all_reduce(torch.ones(COUNT))
        torch.cuda.synchronize()
        for late in range(n):
            x = torch.zeros(COUNT)
            if comm.rank == late:
                torch.cuda._sleep(20_000_000)
            x += comm.rank + 1
            work = dist.all_reduce(x, async_op=True)
            other = torch.full((1000,), 2.0) @ torch.full((1000,), 3.0)  # on the current stream, beside the call
            work.wait()
            y = x * 2
            del x, work
            junk = [torch.full((COUNT,), -1.0) for _ in range(4)]  # takes the memory, if it was given back too early
            assert other.item() == 6000
            assert (y == n * (n + 1)).all()
            del junk


@gpu(RANKS[-1:])
def test_memory_of_calls_that_nobody_waits_for(comm: MPI.Intracomm) -> None:
    n = comm.size
    with job():
        kept = []
        for i in range(40):
            x = torch.full((COUNT // 4,), float(comm.rank + i))
            whole = torch.empty(n * (COUNT // 4))
            dist.all_gather_into_tensor(whole, x, async_op=True)  # its Work is dropped at once
            del x
            kept.append(whole)
            torch.full((COUNT // 4,), -7.0)
        dist.barrier()
        torch.cuda.synchronize()
        for i, whole in enumerate(kept):
            wanted = torch.arange(float(n)).repeat_interleave(COUNT // 4) + i
            assert torch.equal(whole, wanted), i


@gpu(RANKS[-1:])
def test_futures_come_behind_the_call(comm: MPI.Intracomm) -> None:
    n = comm.size
    with job():
        for count in (5, COUNT):
            x = torch.full((count,), float(comm.rank))
            if comm.rank == 0:
                torch.cuda._sleep(5_000_000)
            then = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] / n)
            assert (then.wait() == (n - 1) / 2).all()


@gpu(RANKS[-1:])
def test_graphs(comm: MPI.Intracomm) -> None:
    """Captured calls run again with whatever lies in their buffers then."""
    n = comm.size
    with job():
        for count in (100, COUNT):
            x, y = torch.zeros(count), torch.zeros(n * count)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                dist.all_reduce(x)  # what the first call allocates may not be captured
                dist.all_gather_into_tensor(y, x)
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                dist.all_reduce(x)
                dist.all_gather_into_tensor(y, x)
            for turn in range(3):
                x.fill_(comm.rank + turn)
                graph.replay()
                torch.cuda.synchronize()
                assert (y == n * (n - 1) / 2 + n * turn).all()
            del graph


@gpu(RANKS[-1:])
def test_the_hook_and_the_communicator_on_tensors(comm: MPI.Intracomm) -> None:
    """A Communicator of its own beside the group's: one stream each, one order."""
    from blinkmpi.torch import ddp_hook

    weights = []
    with job(), blinkmpi.Communicator(comm) as ours:
        assert ours.gpu is not None, ours.context.why_no_gpus
        for hooked in (False, True):
            model = torch.nn.parallel.DistributedDataParallel(test_training.network(), bucket_cap_mb=0.002)
            if hooked:
                model.register_comm_hook(None, ddp_hook(ours))
            test_training.train(model, torch.optim.SGD(model.parameters(), 0.1), comm.rank)
            weights.append(test_training.of(model))
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@test_backend.needs("torch.distributed.fsdp", "FSDPModule.set_custom_all_gather")
@gpu(RANKS[:1])
def test_fsdp2_with_collectives_of_ours(comm: MPI.Intracomm) -> None:
    from torch.distributed.fsdp import fully_shard

    from blinkmpi.torch import AllGather, ReduceScatter

    weights = []
    with job(), blinkmpi.Communicator(comm) as ours:
        for custom in (False, True):
            model = fully_shard(test_training.plain_network())
            if custom:
                model.set_custom_all_gather(AllGather(ours))
                model.set_custom_reduce_scatter(ReduceScatter(ours))
            test_training.train(model, torch.optim.Adam(model.parameters(), lr=0.01), comm.rank)
            weights.append(test_training.of(model))
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
