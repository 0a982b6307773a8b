"""The fast path of calls on GPUs, with tensors in host memory: what C++ reads of a call must be what Python reads."""

import itertools
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from benchmarks.fake.gpu import fake_gpus
from blinkmpi.errors import BlinkError
from blinkmpi.transport.host.native import built
from tests.harness import mpi
from tests.torch.conftest import DEVICE

torch = pytest.importorskip("torch")
collectives = pytest.importorskip("blinkmpi.torch.collectives")
torch_extension = pytest.importorskip("blinkmpi.torch.torch_extension")
fast_path = pytest.importorskip("blinkmpi.torch.fast_path")
operands = pytest.importorskip("blinkmpi.torch.operands")
dist, c10d, Reduction = torch.distributed, torch.distributed.distributed_c10d, operands.Reduction
STREAM = 5

READS = ("read_allreduce", "read_broadcast", "read_reduce", "read_allgather", "read_reduce_scatter")
KINDS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")


def read_in_python(read: str, given: tuple[Any, ...], opts: Any) -> tuple[Any, ...]:
    """The arguments of the Communicator's method, and the tensors' shapes and types as C++ should find them."""
    if read == "read_allreduce":
        return collectives._allreduce(given[0][0], Reduction(opts)).args
    if read == "read_broadcast":
        return collectives._broadcast(given[0][0], opts.rootRank).args
    if read == "read_reduce":
        return collectives._reduce(given[0][0], opts.rootRank == 1, opts.rootRank, Reduction(opts)).args
    if read == "read_allgather":
        return collectives._allgather_blocks(*given).args
    args = collectives._reduce_blocks(*given, Reduction(opts)).args
    return (operands.flat(given[1]), *args[1:])  # which Python copies if it is in place in host memory


def plain(arg: Any) -> Any:
    """A tensor or array as its address, bytes and type."""
    if isinstance(arg, torch.Tensor):
        assert arg.dim() == 1
        arg = operands._array(arg, operands.TYPES.get(arg.dtype, operands.BYTE))
    return (arg.ctypes.data, arg.nbytes, arg.dtype) if isinstance(arg, np.ndarray) else arg


def memory(dtype: Any, count: int) -> Any:
    return torch.arange(count).to(dtype)


def shapes_of(read: str, dtype: Any) -> list[tuple[Any, ...]]:
    """Calls of rank 1 of 3 that C++ reads: flat tensors, matrices, a single number, parts of others, in place."""
    if read in READS[:3]:
        whole = memory(dtype, 24)
        return [([whole],), ([whole.view(4, 6)],), ([whole[5]],), ([whole[3:9]],), ([whole.view(4, 6)[1:3]],)]
    apart = [(memory(dtype, 24), memory(dtype, 8)), (memory(dtype, 24).view(3, 8), memory(dtype, 8))]
    apart += [(memory(dtype, 24).view(3, 2, 4), memory(dtype, 8).view(2, 4))]
    together = [(whole := memory(dtype, 24), whole[8:16]), (rows := memory(dtype, 24).view(3, 8), rows[1])]
    one = memory(dtype, 48)
    pairs = [*apart, *together, (one[:24], one[24:32]), (one[24:], one[16:24])]
    return [(block, whole) for whole, block in pairs] if read == "read_reduce_scatter" else pairs


def call(module: Any, read: str, given: tuple[Any, ...], opts: Any, rank: int = 1, n: int = 3) -> Any:
    who = {"read_allgather": (rank,), "read_reduce": (rank,), "read_reduce_scatter": (rank, n)}.get(read, ())
    return getattr(module, read)(*given, *who, opts)


def options_of(read: str) -> Any:
    return {
        "read_allreduce": c10d.AllreduceOptions,
        "read_broadcast": c10d.BroadcastOptions,
        "read_reduce": c10d.ReduceOptions,
        "read_allgather": c10d.AllgatherOptions,
        "read_reduce_scatter": c10d.ReduceScatterOptions,
    }[read]()


@pytest.mark.parametrize("read", READS)
def test_what_cpp_reads_of_a_call(on_cpu: Any, read: str) -> None:
    """The same memory, types, operation and root as Python; and the caller's options."""
    opts = options_of(read)
    opts.timeout = timedelta(seconds=7)
    if hasattr(opts, "rootRank"):
        opts.rootRank = 2
    kinds = [*KINDS] if hasattr(opts, "reduceOp") else [""]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for given in shapes_of(read, dtype):
            for kind in kinds:
                if kind:
                    opts.reduceOp = getattr(dist.ReduceOp, kind)
                args, apart, ms = call(on_cpu, read, given, opts)
                python = (*given, 1) if read == "read_allgather" else given
                python = (*given, 1, 3) if read == "read_reduce_scatter" else python
                wanted = [plain(arg) for arg in read_in_python(read, python, opts)]
                found = [plain(arg) for arg in args]
                if not kind:  # what only moves goes as bytes, on a GPU
                    wanted = [(*arg[:2], operands.BYTE) if isinstance(arg, tuple) else arg for arg in wanted]
                assert found == wanted
                assert (apart, ms) == (True, 7000)
                if read == "read_reduce":  # where this rank has the result
                    opts.rootRank = 3 - opts.rootRank


@pytest.mark.parametrize("read", READS)
def test_calls_that_are_pythons_to_read(on_cpu: Any, read: str) -> None:
    """Tensors with gaps, without memory, that show other values than lie there, that overlap; operations of bits."""
    opts, whole = options_of(read), memory(torch.complex64, 48)
    wrong = [whole[::2], whole.view(6, 8).t(), whole[:0], whole[:3].conj(), torch.ones(3, requires_grad=True)]
    wrong += [torch.ones(3).to_sparse(), torch.zeros(3, device="meta")]
    for tensor in wrong:
        pairs = [(tensor, memory(torch.complex64, 3)), (memory(torch.complex64, 3), tensor)]
        for given in [([tensor],)] if read in READS[:3] else pairs:
            assert call(on_cpu, read, given, opts) is None
    if read in READS[:3]:
        assert call(on_cpu, read, ([],), opts) is None
        assert call(on_cpu, read, ([whole, whole],), opts) is None
    else:
        for given in ((whole[:24], whole[4:12]), (whole[:24], whole[16:24]), (whole[:24], whole[20:28])):
            given = given[::-1] if read == "read_reduce_scatter" else given
            assert call(on_cpu, read, given, opts) is None
    if hasattr(opts, "reduceOp"):
        flags = (torch.ones(24, dtype=torch.bool), torch.ones(8, dtype=torch.bool))
        assert call(on_cpu, read, ([flags[0]],) if read in READS[:3] else flags[::-1], opts) is None
        opts.reduceOp = dist.ReduceOp.BAND
        assert call(on_cpu, read, ([whole],) if read in READS[:3] else (whole[:8], whole[8:32]), opts) is None


def test_what_cpp_reads_of_an_all_to_all(on_cpu: Any) -> None:
    """Rows of any shape, splits as lists or tuples, of nothing, too; and what is Python's to read or to refuse."""
    opts, n = c10d.AllToAllOptions(), 3
    for dtype, tail, splits in itertools.product(
        (torch.float32, torch.bfloat16, torch.bool),
        ((), (4,), (2, 3)),
        ([], [1, 3, 2], (0, 6, 0), [6, 0, 0], [2, 2, 2]),
    ):
        x, y = torch.zeros(6, *tail, dtype=dtype), torch.zeros(6, *tail, dtype=dtype)
        for out, into in ((splits, splits), (splits, [])):
            args, apart, _ = on_cpu.read_alltoall(y, x, out, into, n, opts)
            row = x.nbytes // 6
            sides = [([2 * row] * n if not part else [row * k for k in part]) for part in (into, out)]
            assert apart
            if not splits:
                assert [plain(arg) for arg in args] == [(t.data_ptr(), t.nbytes, operands.BYTE) for t in (x, y)]
                continue
            found = [(plain(one), parts) for one, parts in args]
            wanted = [(t.data_ptr(), t.nbytes, operands.BYTE) for t in (x, y)]
            assert found == [*zip(wanted, sides, strict=True)]
    x, y, none = torch.zeros(6), torch.zeros(6), torch.zeros(0)
    args, *_ = on_cpu.read_alltoall(none, x, [0, 0, 0], [2, 2, 2], n, opts)
    assert [(one.numel(), parts) for one, parts in args] == [(24, [8] * 3), (0, [0] * 3)]
    for wrong in (
        (y, x, [1, 2], [], n), (y, x, [1, 2, 4], [], n), (y, x, [7, -1, 0], [], n), (y, x, [2, 2.0, 2], [], n),
        (y, x, [True, 3, 2], [], n), (y, x, None, [], n), (y, x, [1 << 70, 2, 2], [], n), (y, x, [], [], 4),
        (none, x, [], [], n), (y[::2], x, [], [], n), (y, y, [2, 2, 2], [], n), (3, x, [], [], n),
        (y, x, range(3), [], n),
    ):  # fmt: skip
        assert on_cpu.read_alltoall(*wrong, opts) is None
    assert on_cpu.read_alltoall(y, x, [], [], n, c10d.AllreduceOptions()) is None


@pytest.mark.parametrize("read", READS)
def test_what_lies_in_host_memory_is_not_read_for_a_gpu(quick: Any, read: str) -> None:
    """They go to the executor on the host."""
    opts = options_of(read)
    for given in shapes_of(read, torch.float32):
        assert call(quick, read, given, opts) is None


@pytest.mark.parametrize("read", READS)
def test_what_is_no_such_call(on_cpu: Any, read: str) -> None:
    """Other types than tensors, torch's own subclasses too; options of another call, or none."""

    class Subclass(torch.Tensor):
        pass

    opts, given = options_of(read), shapes_of(read, torch.float32)[0]
    assert call(on_cpu, read, given, opts) is not None
    strange = torch.ones(3).as_subclass(Subclass)
    wrong = (3, None, "a", [], [3], [None], (strange,), [strange], strange, (torch.ones(3),))
    for one in wrong:
        for some in [(one,)] if read in READS[:3] else [(one, one), (given[0], one), (one, given[1])]:
            assert call(on_cpu, read, some, opts) is None
    for other in (None, 3, options_of(READS[READS.index(read) - 1]), c10d.BarrierOptions()):
        assert call(on_cpu, read, given, other) is None


class Group:
    """A group on rank 1 of 3, whose Communicator notes calls, or fails; C knows of none, or of all."""

    timeout_s, rank_here, rank, size = 7.0, 1, 1, 3
    coalescing = quick_calls = error = dead = None
    captured, begun = False, False

    def __init__(self) -> None:
        self.comm = self.repeated = self.sequence = self
        self.by_c, self.by_python, self.gone_on, self.told = list[Any](), list[Any](), list[Any](), list[Any]()

    def _dispatcher(self) -> Any:
        return self

    def capturing(self) -> bool:
        return self.captured

    def again(self, method: Any, args: Any, stream: Any, kept: bool) -> Any:
        """C++ asks, and keeps the operands, or knows that nobody needs to."""
        assert kept
        if self.error:
            raise self.error
        if self.begun is True:
            self.by_c.append((method, args, stream.stream_id))
        return self.begun

    def _call(self, method: Any, args: Any, timeout: Any, stream: Any) -> None:
        assert timeout is None
        if self.error:
            raise self.error
        self.by_python.append((method, args, stream.stream_id))

    def go_on(self, method: Any, args: Any, stream: Any, begun: Any) -> None:
        if begun is False:
            self._call(method, args, None, stream)
        else:
            self.gone_on.append((method, args, stream.stream_id, begun))

    def die(self, error: BaseException) -> None:
        self.dead = error

    def explain(self, error: BlinkError) -> None:
        self.told.append(error)


QUICK = (
    fast_path.allreduce, fast_path.broadcast, fast_path.reduce, fast_path.allgather, fast_path.reduce_scatter,
)  # fmt: skip


@pytest.fixture
def group(on_cpu: Any, device: Any, monkeypatch: pytest.MonkeyPatch) -> Group:
    """One whose calls go on stream 5, or on stream 6 if that is the current one."""
    group = Group()
    monkeypatch.setattr(fast_path, "extension", lambda: on_cpu)
    monkeypatch.setattr(fast_path, "communication_stream", lambda _: device.stream(5))
    monkeypatch.setattr(fast_path, "communication_stream_here", lambda: (-1, device.stream(5)))
    monkeypatch.setattr(fast_path, "current_stream", lambda _: device.stream(6))
    monkeypatch.setattr(fast_path, "capturing", group.capturing)
    return group


EVERY = [(call, read, method) for call, read, method in zip(QUICK, READS, fast_path.METHODS[: len(QUICK)], strict=True)]


@pytest.mark.parametrize(("call", "read", "method"), EVERY)
def test_the_fast_path(
    group: Group, device: Any, monkeypatch: pytest.MonkeyPatch, call: Any, read: str, method: Any
) -> None:
    """On a stream apart, or on the current one; other calls are left to the long way."""
    opts, given = options_of(read), shapes_of(read, torch.float32)[0]
    output = given[0][0] if read in READS[:3] else given[0]
    recorded, blocked = device.counts()
    made = call(group, *given, opts)
    assert isinstance(made, dist._Work)
    assert made.result()[0] is output
    assert [(one[0], one[-1]) for one in group.by_python] == [(method, 5)]
    assert device.counts() == (recorded + 3, blocked + 2)  # of the stream before, twice, and behind the call
    group.captured = True
    assert call(group, *given, opts)
    assert group.by_python[-1][-1] == 6
    group.captured = False
    if hasattr(opts, "asyncOp"):
        opts.asyncOp = False
        assert call(group, *given, opts)
        assert group.by_python[-1][-1] == 6
        opts.asyncOp = True
    opts.timeout = timedelta(seconds=group.timeout_s)
    assert call(group, *given, opts)
    opts.timeout = timedelta(seconds=1)
    assert call(group, *given, opts) is None
    opts.timeout = timedelta(seconds=group.timeout_s)
    group.error = BlinkError("no")
    group.captured = True
    with pytest.raises(BlinkError):
        call(group, *given, opts)
    assert group.told == [group.error]
    assert call(group, *given, None) is None
    assert call(group, *(["a"] for _ in given), opts) is None
    group.coalescing = []
    assert call(group, *given, opts) is None
    group.coalescing = group.quick_calls = None
    monkeypatch.setattr(fast_path, "extension", lambda: None)
    assert call(group, *given, opts) is None
    assert not group.by_c


@pytest.mark.parametrize(("call", "read", "method"), EVERY)
def test_calls_that_c_knows(group: Group, device: Any, call: Any, read: str, method: Any) -> None:
    """They are made with no Python of the Communicator's; what C has begun is gone on with; an interrupt ends it."""
    opts, given = options_of(read), shapes_of(read, torch.float32)[0]
    group.begun = True
    recorded, blocked = device.counts()
    made = call(group, *given, opts)
    assert isinstance(made, dist._Work)
    assert made.result()[0] is (given[0][0] if read in READS[:3] else given[0])
    assert device.counts() == (recorded + 2, blocked + 1)
    (found,) = group.by_c
    assert (found[0], found[2]) == (method, 5)
    if hasattr(opts, "asyncOp"):
        opts.asyncOp = False
        recorded, blocked = device.counts()
        for _ in range(3):
            assert isinstance(call(group, *given, opts), dist._Work)
        assert device.counts() == (recorded, blocked), "there is nothing to wait for on the current stream"
        assert [one[2] for one in group.by_c[1:]] == [6] * 3
        opts.asyncOp = True
    python = (*given, 1) if read == "read_allgather" else given
    python = (*given, 1, 3) if read == "read_reduce_scatter" else python
    wanted = read_in_python(read, python, opts)
    assert [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in found[1]] == [
        arg.ctypes.data if isinstance(arg, np.ndarray) else arg.data_ptr() if isinstance(arg, torch.Tensor) else arg
        for arg in wanted
    ]
    group.begun = ("bound", 7, 719)  # a launch that the driver has refused
    assert call(group, *given, opts)
    assert group.gone_on[-1][0] is method
    assert group.gone_on[-1][2:] == (5, group.begun)
    assert not group.by_python
    group.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        call(group, *given, opts)
    assert group.dead is group.error


def test_the_average_of_a_bucket(group: Group, on_cpu: Any, device: Any) -> None:
    """A future of the tensor itself; None and what C says as above."""
    apart, x = fast_path.quick_calls(group), torch.ones(4)
    assert apart.average(x)[1:] == (True, False)
    group.begun = True
    future = apart.average(x)
    assert future.done()
    assert future.value() is x
    method, args, stream = group.by_c[0]
    assert method is fast_path.ALLREDUCE
    assert args[0] is None
    assert args[1].data_ptr() == x.data_ptr()
    assert args[2] is sys.intern("avg")  # by which C finds a call again
    assert stream == 5
    for other in (torch.ones(4)[::2], 3, torch.zeros(3, device="meta"), torch.ones(3, dtype=torch.bool)):
        assert apart.average(other) is None
    group.captured = True
    assert apart.average(x)[1:] == (True, False)


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="no DLPack exchange API")
@mpi(ranks=(2,), timeout=120)
def test_c_makes_repeated_calls_of_the_fast_path(comm: MPI.Intracomm) -> None:
    """On a GPU that is none: what C++ reads of a call must be the same objects each time, but for its tensors."""
    path, why = built(torch_extension.SOURCE, [*torch_extension.flags_of()[0], "-DBLINK_DEVICE=CPU"])
    assert path is not None, why
    module = torch_extension.loaded(f"in_host_memory.{torch_extension.NAME}", path)
    path, why = built(DEVICE, torch_extension.flags_of()[0])
    assert path is not None, why
    device = torch_extension.loaded(DEVICE.stem, path).stream(STREAM)
    apart = CudaStream(STREAM, device.device_index, device.device_type)
    with (
        fake_gpus() as driver,
        blinkmpi.Communicator(comm, stream="current") as ours,
        mock.patch.object(fast_path, "extension", return_value=module),
        mock.patch.object(fast_path, "current_stream", return_value=STREAM),
        mock.patch.object(fast_path, "communication_stream_here", return_value=(-1, apart)),
        mock.patch.object(fast_path, "communication_stream", return_value=apart),
        mock.patch.object(fast_path, "capturing", return_value=False),
        mock.patch.object(fast_path, "work_on", return_value=True),
    ):
        driver["words"] = 16
        group = SimpleNamespace(comm=ours, rank_here=comm.rank, timeout_s=1.0, coalescing=None, quick_calls=None)
        dispatcher = ours._dispatcher()
        for (call, read), asynchronous in itertools.product(zip(QUICK, READS, strict=True), (False, True)):
            for kind in KINDS if hasattr(opts := options_of(read), "reduceOp") else [""]:
                if kind:
                    opts.reduceOp = getattr(dist.ReduceOp, kind)
                opts.asyncOp = asynchronous
                by_c = []
                for given in calls_of(read, comm.size):
                    comm.Barrier()
                    assert call(group, *given, opts)
                    found = dispatcher.repeated.last_launch
                    by_c.append(found is not None and found[1] == dispatcher.sequence.seq)
                assert all(by_c[2:]), (read, kind, asynchronous, by_c)


class CudaStream(torch.Stream):  # type: ignore[misc]
    """A stream of a device without memory, that looks like one of CUDA's."""

    cuda_stream = STREAM


def calls_of(read: str, n: int) -> Iterator[tuple[Any, ...]]:
    """The tensors of some calls of one length."""
    for _ in range(5):
        block, whole = torch.zeros(1000), torch.zeros(n, 1000)
        yield ([block],) if read in READS[:3] else (block, whole) if read == READS[4] else (whole, block)
