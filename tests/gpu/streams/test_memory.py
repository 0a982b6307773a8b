"""Memory pools on GPUs: arrays and tensors in them are registered, and results right; pools grow, fill up and end."""

import contextlib
import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, DeviceError, PoolExhausted, PoolInUse, RemoteError
from blinkmpi.transport.cuda.device import cupy
from tests.conformance import COLLECTIVES, cases
from tests.gpu.helpers import Pools, at_least, run_all, sizes
from tests.harness import mpi

RANKS = sizes(2, 4)[-1:]
BIG = 3 << 20  # elements: 12 MiB, past all packets
MIB = 1 << 20
ROOM = 160 * MIB  # of a pool
DIRECT = ";".join(f"{name}:onehop/direct" for name in ("allreduce", "allgather", "reduce_scatter"))

pytestmark = [pytest.mark.gpu, at_least(2)]


class PoolsOfMemory(Pools):
    """Buffers of the conformance suite in arrays of whatever CuPy allocates from."""

    def __init__(self) -> None:
        self.registered = True
        self.pools = [cupy().empty((16 * MIB,), "uint8") for _ in range(2)]


def address(array: Any) -> tuple[int, int]:
    """(address, bytes) of CuPy's array or torch's tensor."""
    return (array.data.ptr, array.nbytes) if hasattr(array.data, "ptr") else (array.data_ptr(), array.nbytes)


def is_registered(comm: blinkmpi.Communicator, *arrays: Any) -> bool:
    """Whether calls on these take them for registered."""
    return all(comm.context.cuda().transport.regions.ref(*address(array)) for array in arrays)


def by_direct(comm: blinkmpi.Communicator) -> int:
    """How many calls so far moved between registered buffers."""
    return sum(one.calls for one in comm.stats().protocols if one.protocol == "direct")


@contextlib.contextmanager
def all_direct(comm: blinkmpi.Communicator, calls: int) -> Iterator[None]:
    """So many calls within, and all without a copy through slots."""
    before = by_direct(comm)
    yield
    assert by_direct(comm) - before == calls


def on_gpu(body: Callable[[Any, Any], None]) -> Callable[[MPI.Intracomm], None]:
    """A test of torch, on this rank's GPU, and of a communicator whose long calls are direct where they can be."""

    def run(comm: MPI.Intracomm) -> None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("torch has no GPU")
        with blinkmpi.Communicator(comm, algo=DIRECT) as ours:
            assert ours.gpu is not None, ours.context.why_no_gpus
            torch.cuda.set_device(ours.gpu.device)
            body(torch, ours)
            torch.cuda.synchronize()
            gc.collect()

    run.__name__ = run.__qualname__ = body.__name__
    return mpi(ranks=RANKS, timeout=120)(run)


@mpi(ranks=RANKS, timeout=120)
def test_all_collectives_on_arrays_of_the_pool(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        ours.memory_pool(ROOM)
        with ours.cupy_memory():
            pools = PoolsOfMemory()
        assert is_registered(ours, *pools.pools)
        for collective in COLLECTIVES:
            some = [c for c in cases(collective, comm.size) if c.dtype == "float32" and c.op in ("sum", "")]
            run_all(ours, pools, some)


@mpi(ranks=RANKS, timeout=120)
def test_arrays_come_and_go_and_the_pool_grows_while_peers_kernels_wait(comm: MPI.Intracomm) -> None:
    cp, n, rank = cupy(), comm.size, comm.rank
    total = n * (n - 1) // 2
    with blinkmpi.Communicator(comm, algo=DIRECT) as ours:
        pool, stream = ours.memory_pool(ROOM), cp.cuda.Stream(non_blocking=True)
        with ours.cupy_memory(), stream:
            other = [cp.empty(rank * MIB + 1, "uint8")]  # so that places differ
            early, result = cp.full(BIG, rank, "float32"), cp.zeros(BIG, "float32")
            for turn in range(4):
                with all_direct(ours, 2):
                    ours.Allreduce(early, result, stream=stream)  # a kernel that waits for the rank that sleeps
                    if rank == turn % n:
                        time.sleep(0.2)
                    other.append(cp.empty(8 * MIB, "uint8") if rank == turn % n else None)
                    send = cp.full(BIG, rank + turn, "float32")
                    ours.Allreduce(send, result, stream=stream)
                stream.synchronize()
                assert (result == n * turn + total).all(), turn
                assert (send == rank + turn).all(), turn
                if turn == 2 and rank == 0:
                    time.sleep(0.2)
                with all_direct(ours, 1):
                    ours.Allreduce(MPI.IN_PLACE, send[4:-8], stream=stream)
                if turn == 2:
                    assert pool.state.size == ROOM
                    pool.grow((1 + rank) * 16 * MIB)  # the call before waits for rank 0
                    assert pool.state.size == ROOM + (1 + rank) * 16 * MIB
                stream.synchronize()
                assert (send[4:-8] == n * turn + total).all(), turn
                del send


@mpi(ranks=RANKS, timeout=120)
def test_a_full_pool_says_so_and_what_is_added_is_reached_by_all(comm: MPI.Intracomm) -> None:
    cp, n, rank = cupy(), comm.size, comm.rank
    with blinkmpi.Communicator(comm, algo=DIRECT) as ours:
        with pytest.raises(ArgumentError, match="has no memory pool"):
            ours.memory_pool()
        pool = ours.memory_pool(32 * MIB)
        with pytest.raises((ArgumentError, RemoteError), match="there is a memory pool of"):
            ours.memory_pool(MIB)
        with ours.cupy_memory():
            first = cp.full(BIG, rank, "float32")
            with pytest.raises(cp.cuda.memory.OutOfMemoryError) as caught:
                cp.empty(64 * MIB, "uint8")
        assert f"{64 * MIB} bytes were asked of the memory pool" in caught.value.__notes__[0]
        with pytest.raises(PoolExhausted, match=r"memory_pool\(\)\.grow"):
            pool.malloc(64 * MIB)
        pool.grow(64 * MIB)
        with ours.cupy_memory():
            added = cp.empty(16 * MIB, "float32")
        assert is_registered(ours, first, added)
        with all_direct(ours, 1):
            ours.Allreduce(first, added[:BIG])
        assert (added[:BIG] == n * (n - 1) // 2).all()
        with pytest.raises((DeviceError, RemoteError), match="bytes on GPU"):
            pool.grow(1 << 50)
        assert pool.state.size == 96 * MIB
        ours.Allreduce(first, added[:BIG])
        assert (added[:BIG] == n * (n - 1) // 2).all()


@mpi(ranks=RANKS, timeout=120)
def test_a_pool_that_is_used_on_one_rank_is_not_closed_on_any(comm: MPI.Intracomm) -> None:
    cp, n, rank = cupy(), comm.size, comm.rank
    with blinkmpi.Communicator(comm, algo=DIRECT) as ours:
        for turn in range(3):
            pool = ours.memory_pool(ROOM)
            with ours.cupy_memory():
                a, b = cp.full(BIG, rank + turn, "float32"), cp.zeros(BIG, "float32")
            with all_direct(ours, 1):
                ours.Allreduce(a, b)
            assert (b == n * (n - 1) // 2 + n * turn).all()
            del b
            if rank:
                del a
            with pytest.raises(PoolInUse, match=r"rank 0 failed.*1 blocks of"):
                pool.close()
            if rank == 0:
                assert (a == turn).all()
                del a
            with ours.cupy_memory():  # it goes on
                a, b = cp.full(BIG, rank, "float32"), cp.zeros(BIG, "float32")
            with all_direct(ours, 1):
                ours.Allreduce(a, b)
            assert (b == n * (n - 1) // 2).all()
            del a, b
            pool.close()
            assert pool.state.size == 0
            with pytest.raises(DeviceError, match="is closed"):
                pool.malloc(MIB)


@mpi(ranks=RANKS, timeout=120)
def test_two_pools_and_one_that_outlives_its_communicator(comm: MPI.Intracomm) -> None:
    cp, n = cupy(), comm.size
    with blinkmpi.Communicator(comm, algo=DIRECT) as second:
        second.memory_pool(ROOM)
        with blinkmpi.Communicator(comm, algo=DIRECT) as first:
            pool = first.memory_pool(ROOM)
            with first.cupy_memory():
                a, b = cp.full(BIG, comm.rank, "float32"), cp.zeros(BIG, "float32")
            with second.cupy_memory():
                c = cp.full(BIG, comm.rank + 1, "float32")
            plain = cp.zeros(BIG, "float32")
            assert is_registered(first, a, b)
            assert is_registered(second, c)
            assert not is_registered(second, a)
            assert not is_registered(first, c)
            assert not is_registered(first, plain)
            with all_direct(first, 1):
                first.Allreduce(a, b)
            assert (b == n * (n - 1) // 2).all()
            with all_direct(second, 0):
                second.Allreduce(a, c)  # memory of the other communicator's pool goes by slots
            assert (c == n * (n - 1) // 2).all()
            first.register(a[:100])
            first.deregister(a[:100])
            first.register(a if comm.rank else plain)  # a place in the pool, and one outside
            first.deregister(a if comm.rank else plain)
            assert is_registered(first, a)
            stream = cp.cuda.Stream(non_blocking=True)
            with stream:
                b[...] = 1
                stream.begin_capture()
                first.Allreduce(MPI.IN_PLACE, b, stream=stream)
                graph = stream.end_capture()
                for _ in range(3):
                    graph.launch(stream)
            stream.synchronize()
            pool.grow(MIB)
            graph.launch(stream)
            stream.synchronize()
            assert (b == n**4).all()
            del graph
        assert (a == comm.rank).all(), "it is this rank's own memory still"
        assert pool.state.blocks == 2
        a += 1
        c[...] = 2
        second.Allreduce(MPI.IN_PLACE, c)
        assert (c == 2 * n).all()
        assert (a == comm.rank + 1).all()
        pool.trim()
        assert pool.state.size == ROOM + 2 * MIB
        assert (a == comm.rank + 1).all()
        del a, b
        pool.trim()
        assert (pool.state.blocks, pool.state.size) == (0, 0), "nothing lies in it any more"


@on_gpu
def test_tensors(torch: Any, ours: Any) -> None:
    import blinkmpi.torch

    n, rank = ours.size, ours.rank
    total = n * (n - 1) // 2
    pool = blinkmpi.torch.memory_pool(2 * ROOM, ours)
    with blinkmpi.torch.memory(ours):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
        out = torch.empty(n * BIG, device="cuda")
    outside = torch.zeros(BIG, device="cuda")
    assert not is_registered(ours, outside)
    assert is_registered(ours, out, *model.parameters())
    with torch.no_grad(), all_direct(ours, 8):
        for parameter in model.parameters():
            parameter.fill_(rank + 1)
            ours.Allreduce(MPI.IN_PLACE, parameter.data)
            assert (parameter == total + n).all()
    mine = out[rank * BIG : (rank + 1) * BIG]
    with all_direct(ours, 2):
        out.fill_(rank)
        ours.Allgather(MPI.IN_PLACE, out)
        assert all((out[r * BIG : (r + 1) * BIG] == r).all() for r in range(n))
        with blinkmpi.torch.memory(ours):
            summed = torch.zeros_like(mine)
        ours.Reduce_scatter_block(out, summed)
        assert (summed == n * rank).all()
    with pytest.raises(torch.OutOfMemoryError) as caught, blinkmpi.torch.memory(ours):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    assert "blinkmpi: " in caught.value.__notes__[0]
    assert f"of the memory pool on GPU {ours.gpu.device}, which has {2 * ROOM} bytes" in caught.value.__notes__[0]
    assert torch.zeros(1, device="cuda").item() == 0, "torch goes on"
    with pytest.raises(PoolInUse, match="blocks of"):
        pool.close()
    assert (summed == n * rank).all()
    with blinkmpi.torch.memory(ours):  # another MemPool over the same memory
        again = torch.full((BIG,), float(rank), device="cuda")
    with all_direct(ours, 1):
        ours.Allreduce(MPI.IN_PLACE, again)
    assert (again == total).all()
    del model, out, mine, summed, parameter, caught, again
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    pool.close()
    assert pool.state.size == 0


@on_gpu
def test_buffers_of_fsdp(torch: Any, ours: Any) -> None:
    """Those of its collectives lie in the pool, where the torch has a way to say so; without a pool it is said once."""
    import blinkmpi.torch
    from blinkmpi.torch import torch_extension
    from tests.torch import test_training
    from tests.torch.test_backend import job

    torch_extension.wait()  # its compiler would outlive the ranks
    gather, reduce = blinkmpi.torch.AllGather(ours), blinkmpi.torch.ReduceScatter(ours)
    device = torch.device("cuda", ours.gpu.device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loose = [gather.allocate((1000,), dtype=torch.bfloat16, device=device) for _ in range(2)]
    assert not is_registered(ours, *loose)
    assert len(said) == (ours.rank == 0)
    ours.memory_pool(ROOM)
    flat = gather.allocate((ours.size * 1000,), dtype=torch.bfloat16, device=device)
    assert flat.dtype == torch.bfloat16
    assert is_registered(ours, flat)
    with pytest.raises(torch.OutOfMemoryError):
        reduce.allocate((2 * ROOM,), dtype=torch.uint8, device=device)
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_all_gather"):
        pytest.skip(f"torch {torch.__version__} has no set_custom_all_gather")
    seen = []
    for one in (gather, reduce):
        one.allocate = functools.partial(_noted, seen, one.allocate)  # type: ignore[method-assign]
    torch.set_default_device(device)
    weights = []
    with job():
        for custom in (False, True):
            model = fsdp.fully_shard(test_training.plain_network())
            if custom:
                model.set_custom_all_gather(gather)
                model.set_custom_reduce_scatter(reduce)
            test_training.train(model, torch.optim.SGD(model.parameters(), 0.1), ours.rank)
            weights.append(test_training.of(model))
    torch.set_default_device("cpu")
    assert seen
    assert is_registered(ours, *seen)
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _noted(seen: list[Any], allocate: Callable[..., Any], *args: Any, **keys: Any) -> Any:
    seen.append(allocate(*args, **keys))
    return seen[-1]


@on_gpu
def test_expandable_segments(torch: Any, ours: Any) -> None:
    """Memory of torch's own that is made to be shared can be registered; other is refused, and goes by slots."""
    import blinkmpi.torch

    n, rank = ours.size, ours.rank
    total = n * (n - 1) // 2
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    tensor = torch.full((BIG,), float(rank), device="cuda")
    refused = ""
    try:
        ours.register(tensor)
    except (DeviceError, RemoteError) as error:
        refused = str(error)
    print(f"rank {rank}: {refused or 'registered'}")
    assert is_registered(ours, tensor) == (not refused)
    assert not refused or "shared" in refused
    if not refused:
        with all_direct(ours, 1):
            ours.Allreduce(MPI.IN_PLACE, tensor)
        assert (tensor == total).all()
        ours.deregister(tensor)
        tensor.fill_(rank)
    with all_direct(ours, 0):
        ours.Allreduce(MPI.IN_PLACE, tensor)
    assert (tensor == total).all()
    ours.memory_pool(ROOM)
    with blinkmpi.torch.memory(ours):
        pooled = torch.full((BIG,), float(rank), device="cuda")
    assert is_registered(ours, pooled)
    with all_direct(ours, 1):
        ours.Allreduce(MPI.IN_PLACE, pooled)
    assert (pooled == total).all()
