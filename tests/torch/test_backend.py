"""The backend ``blink`` of torch.distributed under mpirun, on torch's default device: the CPU, or in
tests/gpu/streams a GPU.
"""

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from mpi4py import MPI

from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError, MismatchError
from tests.harness import PATIENCE_S, mpi

torch = pytest.importorskip("torch")
dist = torch.distributed


@contextlib.contextmanager
def job(backend: str = "blink", **settings: Any) -> Iterator[Any]:
    """The default group, for the time of a test."""
    import blinkmpi.torch  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method="mpi://", **settings)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def needs(module: str, name: str) -> pytest.MarkDecorator:
    """A test for versions of torch that have this."""
    found = functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), importlib.import_module(module))
    return pytest.mark.skipif(found is None, reason=f"torch {torch.__version__} has no {module}.{name}")


def each(n: int, make: Callable[[int], Any]) -> list[Any]:
    return [make(r) for r in range(n)]


SUMMED = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int16", "complex64", "float8_e4m3fn")
MOVED = (*SUMMED, "bool", "uint16", "float8_e8m0fnu", "complex128")


def values(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Small whole numbers, exact in every type."""
    count = 1
    for length in shape:
        count *= length
    return ((torch.arange(count) + seed) % 3).to(torch.float32).to(getattr(torch, dtype)).reshape(shape)


@mpi(ranks=(1, 2, 3), long=(4,), timeout=120)
def test_every_collective(comm: MPI.Intracomm) -> None:
    rank, n = comm.rank, comm.size
    with job():
        assert dist.get_backend() == "blink"
        for dtype in [d for d in MOVED if hasattr(torch, d)]:
            for shape in ((), (1,), (5, 3), (0,), (257,)):
                for asynchronous in (False, True):
                    moving(dtype, shape, rank, n, asynchronous)
        for dtype in [d for d in SUMMED if hasattr(torch, d)]:
            for shape in ((), (1,), (5, 3), (0,), (257,)):
                for asynchronous in (False, True):
                    reducing(dtype, shape, rank, n, asynchronous)
        objects: list[Any] = [None] * n
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": r} for r in range(n)]
        mine = ["a", 2] if rank == n - 1 else [None, None]
        dist.broadcast_object_list(mine, src=n - 1)
        assert mine == ["a", 2]
        dist.barrier()


@mpi(ranks=(2, 3), timeout=60)
def test_several_tensors_of_unlike_shapes_are_gathered_together(comm: MPI.Intracomm) -> None:
    """torch has a list for each rank, of a tensor for each input; two inputs on two ranks would fit both ways."""
    with job():
        for count in (1, 2, 3):
            mine = [values("float32", (i + 1,) * (i + 1), comm.rank + i) for i in range(count)]
            found = [[torch.empty_like(x) for x in mine] for _ in range(comm.size)]
            dist.all_gather_coalesced(found, mine)
            for r, row in enumerate(found):
                assert all(same(x, values("float32", tuple(x.shape), r + i)) for i, x in enumerate(row))


@mpi(ranks=(1, 2, 3), timeout=60)
def test_coalesced_calls_are_few(comm: MPI.Intracomm) -> None:
    """As DDP, FSDP and DTensor make them: lists, and calls within a coalescing manager; of several element types."""
    rank, n = comm.rank, comm.size
    kinds = [("float32", 5), ("bfloat16", 3), ("float32", 0), ("float32", 33)]
    with job() as world, torch.no_grad():
        calls = lambda: world.comm._dispatcher().sequence.seq  # noqa: E731
        for asynchronous in (False, True):
            for _ in range(2):  # the first is planned for
                before = calls()
                some = [torch.full((k,), rank + i, dtype=getattr(torch, d)) for i, (d, k) in enumerate(kinds)]
                with dist._coalescing_manager(async_ops=asynchronous) as manager:
                    for x in some:
                        dist.all_reduce(x, async_op=asynchronous)
                if asynchronous:
                    manager.wait()
                assert all((x == n * (n - 1) / 2 + n * i).all() for i, x in enumerate(some))
            assert calls() - before == 2, "one call for each type"

            inputs = [torch.full((k, 2), rank + i, dtype=torch.int16) for i, k in enumerate((3, 1, 4))]
            wholes = [torch.empty(n * x.shape[0], 2, dtype=x.dtype) for x in inputs]
            with dist._coalescing_manager(async_ops=asynchronous) as manager:
                for whole, x in zip(wholes, inputs, strict=True):
                    dist.all_gather_into_tensor(whole, x, async_op=asynchronous)
            if asynchronous:
                manager.wait()
            for i, (whole, x) in enumerate(zip(wholes, inputs, strict=True)):
                assert (whole.view(n, -1) == torch.arange(n)[:, None] + i).all(), whole
                x += 1

            blocks = [torch.arange(n * k * 1.0).view(n, k).t().contiguous().t() for k in (2, 5)]
            outs = [torch.empty(k) for k in (2, 5)]
            with dist._coalescing_manager(async_ops=asynchronous) as manager:
                for out, x in zip(outs, blocks, strict=True):
                    dist.reduce_scatter_tensor(out, x, async_op=asynchronous)
            if asynchronous:
                manager.wait()
            for k, out in zip((2, 5), outs, strict=True):
                assert (out == n * torch.arange(rank * k, (rank + 1) * k)).all(), out

            moved, summed = [torch.full((k,), rank) for k in (2, 4)], torch.full((3,), rank)
            with dist._coalescing_manager(device=torch.device("cpu"), async_ops=asynchronous) as manager:
                works = [dist.broadcast(x, src=n - 1, async_op=asynchronous) for x in moved]
                works.append(dist.reduce(summed, dst=0, async_op=asynchronous))
            for work in works:
                done(work)
            assert all((x == n - 1).all() for x in moved)
            assert rank or (summed == n * (n - 1) // 2).all()
            dist.barrier()
        rows = [[torch.empty(r + 1) for _ in range(2)] for r in range(n)]
        dist.all_gather_coalesced(rows, [torch.full((rank + 1,), float(rank)) for _ in range(2)])
        assert all((x == r).all() for r, row in enumerate(rows) for x in row)
        if n > 1:
            wrong = [torch.zeros(3), torch.zeros(4) if rank else torch.zeros(5)]
            with pytest.raises(MismatchError, match="group of 2"):
                dist.all_reduce_coalesced(wrong)


def done(work: Any) -> None:
    if work is not None:
        work.wait()
        assert work.is_completed() or torch.get_default_device().type == "cuda"  # where the stream waits, not the host


def same(one: Any, other: Any) -> bool:
    seen = torch.uint8 if one.element_size() == 1 and one.dtype.is_floating_point else None
    if seen is not None:
        return bool(torch.equal(one.view(seen), other.view(seen)))
    return one.dtype is other.dtype and bool((one == other).all())


def moving(dtype: str, shape: tuple[int, ...], rank: int, n: int, asynchronous: bool) -> None:
    every = each(n, lambda r: values(dtype, shape, r))
    x = every[rank].clone()
    done(dist.broadcast(x, src=n - 1, async_op=asynchronous))
    assert same(x, every[n - 1]), (dtype, shape)

    found = [torch.empty_like(every[0]) for _ in range(n)]
    done(dist.all_gather(found, every[rank], async_op=asynchronous))
    assert all(map(same, found, every)), (dtype, shape)

    if shape:
        whole = torch.empty((n * shape[0], *shape[1:]), dtype=every[0].dtype)
        done(dist.all_gather_into_tensor(whole, every[rank], async_op=asynchronous))
        assert same(whole, torch.cat(every)), (dtype, shape)

        parts = [values(dtype, shape, 10 * rank + r) for r in range(n)]
        wanted = [values(dtype, shape, 10 * r + rank) for r in range(n)]
        whole = torch.empty_like(whole)
        done(dist.all_to_all_single(whole, torch.cat(parts), async_op=asynchronous))
        assert same(whole, torch.cat(wanted)), (dtype, shape)
        found = [torch.empty_like(part) for part in parts]
        done(dist.all_to_all(found, parts, async_op=asynchronous))
        assert all(map(same, found, wanted)), (dtype, shape)

    root = n // 2
    found = [torch.empty_like(every[0]) for _ in range(n)] if rank == root else None
    done(dist.gather(every[rank], found, dst=root, async_op=asynchronous))
    assert found is None or all(map(same, found, every)), (dtype, shape)
    x = torch.empty_like(every[0])
    done(dist.scatter(x, every if rank == root else None, src=root, async_op=asynchronous))
    assert same(x, every[rank]), (dtype, shape)


def reducing(dtype: str, shape: tuple[int, ...], rank: int, n: int, asynchronous: bool) -> None:
    every = each(n, lambda r: values(dtype, shape, r))
    kind = every[0].dtype
    total = sum(x.to(torch.complex128 if kind.is_complex else torch.float64) for x in every).to(kind)
    x = every[rank].clone()
    done(dist.all_reduce(x, async_op=asynchronous))
    assert same(x, total), (dtype, shape)

    root = n - 1
    x = every[rank].clone()
    done(dist.reduce(x, dst=root, async_op=asynchronous))
    assert same(x, total if rank == root else every[rank]), (dtype, shape)

    blocks = [values(dtype, shape, 7 * rank + r) for r in range(n)]
    exact = torch.complex128 if kind.is_complex else torch.float64
    mine = sum(values(dtype, shape, 7 * r + rank).to(exact) for r in range(n)).to(kind)
    x = torch.empty_like(every[0])
    done(dist.reduce_scatter(x, blocks, async_op=asynchronous))
    assert same(x, mine), (dtype, shape)
    if shape:
        x = torch.empty_like(every[0])
        done(dist.reduce_scatter_tensor(x, torch.cat(blocks), async_op=asynchronous))
        assert same(x, mine), (dtype, shape)


@mpi(ranks=(2, 3), timeout=120)
def test_operations_and_layouts(comm: MPI.Intracomm) -> None:
    rank, n = comm.rank, comm.size
    with job():
        for op, wanted in (
            (dist.ReduceOp.AVG, (n - 1) / 2 + 1),
            (dist.ReduceOp.MIN, 1),
            (dist.ReduceOp.MAX, n),
            (dist.ReduceOp.PRODUCT, float(torch.arange(1, n + 1).prod())),
            (dist._make_nccl_premul_sum(0.5), n * (n + 1) / 4),
        ):
            x = torch.full((7,), float(rank + 1))
            dist.all_reduce(x, op)
            assert (x == wanted).all(), op
            y = torch.empty(3)
            dist.reduce_scatter_tensor(y, torch.full((3 * n,), float(rank + 1)), op)
            assert (y == wanted).all(), op
        for op, wanted_bits in ((dist.ReduceOp.BAND, 0), (dist.ReduceOp.BOR, 2**n - 1), (dist.ReduceOp.BXOR, 2**n - 1)):
            bits = torch.tensor([1 << rank])
            dist.all_reduce(bits, op)
            assert bits.item() == wanted_bits, op
        flags = torch.tensor([rank == 0, True, False])
        dist.all_reduce(flags)
        assert flags.tolist() == [True, True, False]
        dist.all_reduce(flags := torch.tensor([rank == 0, True]), dist.ReduceOp.MIN)
        assert flags.tolist() == [n == 1, True]

        for layout in (
            lambda t: t.t(),
            lambda t: t[::2],
            lambda t: t[:, 1:3],
        ):
            whole = torch.arange(20.0).reshape(4, 5) + rank
            x, before = layout(whole), layout(torch.arange(20.0).reshape(4, 5))
            dist.all_reduce(x)
            assert (x == n * before + n * (n - 1) / 2).all()
            dist.broadcast(x, src=0)
            rows = torch.empty(2 * 4, n)[::2].t()
            dist.all_gather_into_tensor(rows, torch.full((1, 4), float(rank)))
            assert (rows == torch.arange(float(n))[:, None]).all()

        different = [torch.empty(r + 1, 2) for r in range(n)]
        dist.all_gather(different, torch.full((rank + 1, 2), float(rank)))
        assert all((x == r).all() for r, x in enumerate(different))
        mine = torch.empty(rank + 1)
        dist.reduce_scatter(mine, [torch.full((r + 1,), float(r)) for r in range(n)])
        assert (mine == n * rank).all()
        out = torch.empty(n * (rank + 1), 2)
        splits = [r + 1 for r in range(n)]
        sent = torch.cat([torch.full((r + 1, 2), float(rank)) for r in range(n)])
        dist.all_to_all_single(out, sent, [rank + 1] * n, splits)
        assert (out == torch.arange(float(n)).repeat_interleave(rank + 1)[:, None]).all()

        block = torch.zeros(n, 3)
        block[rank] = rank
        dist.all_gather_into_tensor(block, block[rank])  # in place, as FSDP has it
        assert (block == torch.arange(float(n))[:, None]).all()
        block = torch.arange(float(n))[:, None].repeat(1, 3) + 10 * rank
        dist.all_gather_into_tensor(block, block[(rank + 1) % n])  # from the place of another rank's block
        assert (block == torch.tensor([(r + 1.0) % n + 10 * r for r in range(n)])[:, None]).all()
        with dist._coalescing_manager():
            some = [torch.full((k,), float(rank)) for k in (3, 1, 4)]
            for x in some:
                dist.all_reduce(x)
        assert all((x == n * (n - 1) / 2).all() for x in some)


@mpi(ranks=(2,), long=(4,), timeout=120)
def test_messages_and_groups(comm: MPI.Intracomm) -> None:
    rank, n = comm.rank, comm.size
    with job() as world:
        right, left = (rank + 1) % n, (rank - 1) % n
        x, y = torch.full((1000,), float(rank)), torch.empty(1000)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)])
        for work in works:
            work.wait()
        assert (y == left).all()
        if rank == 0:
            dist.send(x, 1, tag=3)
        elif rank == 1:
            assert dist.recv(y, tag=3) == 0
            assert (y == 0).all()

        even = dist.new_group(list(range(0, n, 2)))
        backwards = dist.new_group(list(range(n))[::-1]) if n == 2 else world
        if rank % 2 == 0:
            z = torch.ones(3)
            dist.all_reduce(z, group=even)
            assert (z == n // 2).all()
            from blinkmpi.torch import explain

            assert "allreduce" in explain(even)
        z = torch.tensor([float(rank)])
        dist.broadcast(z, src=n - 1, group=backwards)
        assert z.item() == n - 1
        mesh = torch.distributed.device_mesh.init_device_mesh(
            torch.get_default_device().type, (n // 2, 2), mesh_dim_names=("a", "b")
        )
        z = torch.tensor([float(rank)])
        dist.all_reduce(z, group=mesh.get_group("b"))
        assert z.item() == (rank // 2 * 2) * 2 + 1


@mpi(ranks=(2, 3), timeout=120)
def test_errors_reach_every_rank(comm: MPI.Intracomm) -> None:
    from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError, MismatchError, RemoteError

    rank, n = comm.rank, comm.size
    with job():
        x = torch.ones(5)
        with pytest.raises(MismatchError):
            dist.all_reduce(torch.ones(5 + rank))
        for wrong, kind in (
            (lambda: dist.all_reduce(torch.ones(5).to_sparse()), BufferTypeError),
            (
                lambda: dist.all_to_all_single(torch.empty(5), torch.ones(5), [1] * (n + 1), [1] * (n + 1)),
                ArgumentError,
            ),
        ):
            with pytest.raises(kind if rank == 1 else RemoteError):
                wrong() if rank == 1 else dist.all_reduce(x)
        dist.all_reduce(x)
        assert (x == n).all(), "and the group lives on"
        work = dist.all_reduce(torch.ones(5 + rank), async_op=True)
        for what in (work.wait, work.get_future):
            with pytest.raises(BlinkError):
                (what(), dist.barrier())  # what only a GPU found wrong is raised by the next call


@mpi(ranks=(2, 3), timeout=120)
def test_a_rank_that_comes_too_late_is_named(comm: MPI.Intracomm) -> None:
    from blinkmpi.errors import CollectiveTimeout, PeerLost

    rank = comm.rank
    with job(timeout=timedelta(seconds=1)):
        dist.all_reduce(torch.ones(5))
        if rank == 1:
            comm.Barrier()  # the others have given up
        with pytest.raises((CollectiveTimeout, PeerLost), match="rank 1"):
            dist.all_reduce(torch.ones(5))
        if rank != 1:
            comm.Barrier()


@mpi(ranks=(2,), timeout=120)
def test_a_call_keeps_the_deadline_that_it_is_given(comm: MPI.Intracomm) -> None:
    from blinkmpi.errors import CollectiveTimeout, PeerLost

    with job(timeout=timedelta(seconds=3 * PATIENCE_S)) as group:
        dist.all_reduce(torch.ones(5))
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.5)
        given_up = comm.Ibarrier() if comm.rank == 1 else None
        end = time.monotonic() + PATIENCE_S
        while given_up and not given_up.Test() and time.monotonic() < end:
            time.sleep(0.01)  # then it comes; the other is still there if its deadline is the group's
        with pytest.raises((CollectiveTimeout, PeerLost), match="rank 1"):
            group.allreduce([torch.ones(5)], options).wait()
        if comm.rank != 1:
            comm.Ibarrier().Wait()


@mpi(ranks=(2,), timeout=120)
def test_setenv_gives_what_torchrun_would(comm: MPI.Intracomm) -> None:
    from blinkmpi.torch.variables import VARIABLES, setenv

    with mock.patch.dict(os.environ):
        for name in VARIABLES:
            os.environ.pop(name, None)
        setenv()
        assert [os.environ[name] for name in VARIABLES[:4]] == [str(comm.rank), "2", str(comm.rank), "2"]
        dist.init_process_group("blink")
        x = torch.ones(3)
        dist.all_reduce(x)
        assert (x == 2).all()
        dist.destroy_process_group()


# ---------------------------------------------------------------- beside other backends


@pytest.mark.parametrize(("backend", "ours"), [
    ("cpu:gloo,cuda:blink", False), ("cuda:blink,cpu:gloo", False), ("cpu:blink,cuda:gloo", True),
    ("cuda:gloo,cpu:blink", True),
])  # fmt: skip
@mpi(ranks=(2,), timeout=60)
def test_a_backend_is_of_the_device_that_is_named(comm: MPI.Intracomm, backend: str, ours: bool) -> None:
    with job(backend) as world:
        for group in (world, dist.new_group([0, 1])):
            x, found = torch.ones(4), [None] * comm.size
            before = group._get_sequence_number_for_group()
            dist.all_reduce(x, group=group)
            assert x.tolist() == [comm.size] * 4
            dist.all_gather_object(found, comm.rank, group=group)
            assert found == [*range(comm.size)]
            dist.barrier(group)
            assert (group._get_sequence_number_for_group() > before) == ours
        if ours:
            assert type(world._get_backend(torch.device("cuda"))) is dist.ProcessGroupGloo
        y = torch.full((3,), float(comm.rank))
        if comm.rank == 0:
            dist.send(y, 1)
        else:
            dist.recv(y, 0)
        assert y.tolist() == [0, 0, 0]


@mpi(ranks=(2,), timeout=60)
def test_options_of_another_backend_are_its_own_in_a_mixed_group_and_else_refused(comm: MPI.Intracomm) -> None:
    """In a mixed group torch passes what it has made for the backend before, as NCCL's."""
    from blinkmpi.torch import start

    theirs: Any = dist.ProcessGroupGloo._Options()
    with job("cuda:blink,cpu:gloo", pg_options=theirs):
        x = torch.ones(4)
        dist.all_reduce(x)
        assert x.tolist() == [comm.size] * 4
    with pytest.raises(ArgumentError, match="expected a dict of the Communicator's keyword arguments"):
        start.create(SimpleNamespace(), theirs)


@mpi(ranks=(2,), timeout=60)
def test_a_device_whose_backend_cannot_be_made_is_a_typed_error(comm: MPI.Intracomm) -> None:
    why = "cuda:fake behind blink's device cannot be made; name it first"
    with pytest.raises(ArgumentError, match=why), job("cpu:blink,cuda:fake"):
        pass
    comm.Barrier()


@mpi(ranks=(2,), timeout=60)
def test_a_group_beside_one_that_is_bound_to_a_device(comm: MPI.Intracomm) -> None:
    """torch asks the new group for its backend of that device; here as ``device_id=`` binds it, which needs a GPU."""
    bound = torch.device("cuda", comm.rank)
    for backend in ("gloo", "blink"):
        with job(backend) as world:
            world.bound_device_id = bound
            group = dist.new_group(backend="blink")
            x = torch.ones(4)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [comm.size] * 4
            assert not group._get_backend(bound).supports_splitting
            assert group._get_backend(bound).name() == "blink"


# ---------------------------------------------------------------- what other backends refuse, or do


@mpi(ranks=(2,), timeout=60)
def test_integers_are_averaged_as_nccl_does(comm: MPI.Intracomm) -> None:
    """Lightning's ``self.log(..., sync_dist=True)`` averages counts."""
    with job():
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
            x = torch.tensor([3, -3, -1, 1, -7], dtype=dtype) if comm.rank else torch.zeros(5, dtype=dtype)
            dist.all_reduce(x, op=dist.ReduceOp.AVG)
            assert x.tolist() == [1, -1, 0, 0, -3]
        part = torch.zeros(1, dtype=torch.int64)
        dist.reduce_scatter_tensor(part, torch.tensor([-3, 5]) * comm.rank, op=dist.ReduceOp.AVG)
        assert part.item() == (2 if comm.rank else -1)
        with pytest.raises(BufferTypeError if comm.rank else BlinkError, match="'avg' is not defined for bool"):
            dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG)


@mpi(ranks=(2,), timeout=60)
def test_leaves_that_require_grad_are_not_gathered_into(comm: MPI.Intracomm) -> None:
    with job():
        x = torch.ones(3)

        def leaves() -> list[Any]:
            return [torch.zeros(3, requires_grad=True) for _ in range(comm.size)]

        with pytest.raises(BufferTypeError, match=r"all_gather into tensor 0, a leaf .* within torch\.no_grad"):
            dist.all_gather(leaves(), x)
        with pytest.raises(BlinkError, match="gather into tensor 0, a leaf"):
            dist.gather(x, leaves() if comm.rank == 0 else None, dst=0)
        with torch.no_grad():
            found = leaves()
            dist.all_gather(found, x)
        assert all(one.tolist() == [1, 1, 1] for one in found)
        y = torch.zeros(3, requires_grad=True)  # as pipelines receive activations
        if comm.rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(y, 0)
            assert y.tolist() == [1, 1, 1]


@mpi(ranks=(2,), timeout=60)
def test_parts_that_differ_are_told_in_elements(comm: MPI.Intracomm) -> None:
    with job():
        length = 4 if comm.rank else 6
        with pytest.raises(MismatchError, match=r"alltoall\(3 x float32\).*alltoall\(2 x float32\)"):
            dist.all_to_all_single(torch.zeros(length), torch.ones(length))
        with pytest.raises(BlinkError, match=r"sendbuf has 2 elements for rank \d itself, recvbuf room for 3"):
            dist.all_to_all_single(torch.zeros(5), torch.ones(4), [2 + (comm.rank == 0), 2 + comm.rank], [2, 2])


@mpi(ranks=(2,), timeout=60)
def test_without_gloo_collectives_work_and_messages_are_a_typed_error(comm: MPI.Intracomm) -> None:
    why = RuntimeError("no interface")
    with mock.patch.object(dist.ProcessGroupGloo, "create_default_device", side_effect=why), job():
        x = torch.ones(4)
        dist.all_reduce(x)
        assert x.tolist() == [comm.size] * 4
        with pytest.raises(BlinkError, match="no interface; set GLOO_SOCKET_IFNAME"):
            dist.send(x, 1 - comm.rank)
