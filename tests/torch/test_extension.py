"""torch_extension.cpp: compiled here for this torch, and tried on a device that has no memory; on GPUs in tests/gpu."""

import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blinkmpi.errors import BlinkError, CollectiveTimeout
from blinkmpi.runtime.cuda import torch_extension
from blinkmpi.transport.host.native import build, built

torch = pytest.importorskip("torch")
collectives = pytest.importorskip("blinkmpi.torch.collectives")
fast_path = pytest.importorskip("blinkmpi.torch.fast_path")
operands = pytest.importorskip("blinkmpi.torch.operands")
dist, c10d, Reduction = torch.distributed, torch.distributed.distributed_c10d, operands.Reduction
DEVICE = Path(__file__).with_name("no_device.cpp")
COMPILE_S = 300
SHORT = timedelta(milliseconds=20)


@pytest.fixture(scope="module")
def quick() -> Any:
    """The module, as a job gets it."""
    if build()[0] is None:
        pytest.skip("no C compiler")
    found = torch_extension.wait(COMPILE_S)
    assert not torch_extension.why_none()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def device(quick: Any) -> Any:
    """A device without memory."""
    path, why = built(DEVICE, torch_extension.flags_of(torch)[0])
    assert path is not None, why
    return torch_extension.loaded(DEVICE.stem, path)


def test_work_waits_on_the_current_stream_and_then_lets_its_operands_go(quick: Any, device: Any) -> None:
    """``wait`` tells the current stream to wait for the event; then the Work holds the results alone."""
    result, memory = torch.arange(3.0), np.ones(2)
    there = weakref.ref(memory)
    work = quick.work([result], [torch.from_numpy(memory)], device.stream(5), True)
    del memory
    assert there() is not None
    assert isinstance(work, dist._Work)
    recorded, blocked = device.counts()
    assert work.wait()
    assert device.counts() == (recorded, blocked + 1)
    assert there() is None
    assert work.result()[0] is result
    assert work.is_completed()
    assert work.is_success()


def test_a_wait_with_a_timeout_raises_ours(quick: Any, device: Any) -> None:
    """The host waits no longer than it was told, and other threads run meanwhile."""
    work = quick.work([torch.ones(1)], [], device.stream(5), True)
    device.say(False)
    try:
        assert not work.is_completed()
        began = time.monotonic()
        with pytest.raises(CollectiveTimeout, match=r"wait\(20 ms\): the call is still under way; wait longer"):
            work.wait(SHORT)
        assert time.monotonic() - began >= SHORT.total_seconds()
        later = threading.Timer(0.05, device.say, [True])
        later.start()
        assert work.wait(timedelta(seconds=30))
        later.join()
    finally:
        device.say(True)


def test_futures_have_the_results(quick: Any, device: Any) -> None:
    """``get_future`` has a list, as torch's own; a hook's has the one tensor, as a Python object."""
    result = torch.arange(3.0)
    future = quick.work([result], [], device.stream(5), True).get_future()
    assert future.done()
    assert [t.tolist() for t in future.value()] == [[0, 1, 2]]
    assert future.then(lambda f: f.value()[0].sum()).wait().item() == 3
    hooks = quick.future(result, result, device.stream(5))
    assert hooks.done()
    assert hooks.value() is result
    assert hooks.then(lambda f: f.value().sum()).wait().item() == 3


def test_a_stream_follows_another(quick: Any, device: Any) -> None:
    """One event of the current stream, for which the other one waits."""
    recorded, blocked = device.counts()
    quick.follow(device.stream(5))
    assert device.counts() == (recorded + 1, blocked + 1)


def test_work_on_the_current_stream_needs_no_event(quick: Any, device: Any) -> None:
    """What the user does next comes behind it anyhow."""
    result, before = torch.arange(3.0), device.counts()
    work = quick.work([result], [], device.stream(5), False)
    assert work.wait()
    assert device.counts() == before
    assert work.result()[0] is result
    device.say(False)
    try:
        assert not work.is_completed()
        with pytest.raises(CollectiveTimeout):
            work.wait(SHORT)
    finally:
        device.say(True)
    assert work.is_completed()
    assert work.is_success()


# ---- the fast path: what C++ reads of calls must be what Python reads

READS = ("read_allreduce", "read_broadcast", "read_allgather", "read_reduce_scatter")


def read_in_python(read: str, given: tuple[Any, ...], opts: Any) -> tuple[Any, ...]:
    """The arguments of the Communicator's method, and the tensors' shapes and types as C++ should find them."""
    if read == "read_allreduce":
        return collectives._allreduce(given[0][0], Reduction(opts)).args
    if read == "read_broadcast":
        return collectives._broadcast(given[0][0], opts.rootRank).args
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
    if read in ("read_allreduce", "read_broadcast"):
        whole = memory(dtype, 24)
        return [([whole],), ([whole.view(4, 6)],), ([whole[5]],), ([whole[3:9]],), ([whole.view(4, 6)[1:3]],)]
    apart = [(memory(dtype, 24), memory(dtype, 8)), (memory(dtype, 24).view(3, 8), memory(dtype, 8))]
    apart += [(memory(dtype, 24).view(3, 2, 4), memory(dtype, 8).view(2, 4))]
    together = [(whole := memory(dtype, 24), whole[8:16]), (rows := memory(dtype, 24).view(3, 8), rows[1])]
    one = memory(dtype, 48)
    pairs = [*apart, *together, (one[:24], one[24:32]), (one[24:], one[16:24])]
    return [(block, whole) for whole, block in pairs] if read == "read_reduce_scatter" else pairs


@pytest.fixture(scope="module")
def on_cpu(quick: Any) -> Any:
    """The module, compiled to read tensors in host memory."""
    path, why = built(torch_extension.SOURCE, [*torch_extension.flags_of(torch)[0], "-DBLINK_DEVICE=CPU"])
    assert path is not None, why
    return torch_extension.loaded(f"in_host_memory.{torch_extension.NAME}", path)  # another module by its name


def call(module: Any, read: str, given: tuple[Any, ...], opts: Any, rank: int = 1, n: int = 3) -> Any:
    who = {"read_allgather": (rank,), "read_reduce_scatter": (rank, n)}.get(read, ())
    return getattr(module, read)(*given, *who, opts)


def options_of(read: str) -> Any:
    return {
        "read_allreduce": c10d.AllreduceOptions,
        "read_broadcast": c10d.BroadcastOptions,
        "read_allgather": c10d.AllgatherOptions,
        "read_reduce_scatter": c10d.ReduceScatterOptions,
    }[read]()


@pytest.mark.parametrize("read", READS)
def test_what_cpp_reads_of_a_call(on_cpu: Any, read: str) -> None:
    """The same memory, types, operation and root as Python; and the caller's options."""
    opts = options_of(read)
    opts.timeout = timedelta(seconds=7)
    if read == "read_broadcast":
        opts.rootRank = 2
    kinds = ["SUM", "AVG", "MIN", "MAX", "PRODUCT"] if hasattr(opts, "reduceOp") else [""]
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


@pytest.mark.parametrize("read", READS)
def test_calls_that_are_pythons_to_read(on_cpu: Any, read: str) -> None:
    """Tensors with gaps, without memory, that show other values than lie there, that overlap; operations of bits."""
    opts, whole = options_of(read), memory(torch.complex64, 48)
    wrong = [whole[::2], whole.view(6, 8).t(), whole[:0], whole[:3].conj(), torch.ones(3, requires_grad=True)]
    wrong += [torch.ones(3).to_sparse(), torch.zeros(3, device="meta")]
    for tensor in wrong:
        pairs = [(tensor, memory(torch.complex64, 3)), (memory(torch.complex64, 3), tensor)]
        for given in [([tensor],)] if read in READS[:2] else pairs:
            assert call(on_cpu, read, given, opts) is None
    if read in READS[:2]:
        assert call(on_cpu, read, ([],), opts) is None
        assert call(on_cpu, read, ([whole, whole],), opts) is None
    else:
        for given in ((whole[:24], whole[4:12]), (whole[:24], whole[16:24]), (whole[:24], whole[20:28])):
            given = given[::-1] if read == "read_reduce_scatter" else given
            assert call(on_cpu, read, given, opts) is None
    if hasattr(opts, "reduceOp"):
        flags = (torch.ones(24, dtype=torch.bool), torch.ones(8, dtype=torch.bool))
        assert call(on_cpu, read, ([flags[0]],) if read in READS[:2] else flags[::-1], opts) is None
        opts.reduceOp = dist.ReduceOp.BAND
        assert call(on_cpu, read, ([whole],) if read in READS[:2] else (whole[:8], whole[8:32]), opts) is None


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
        for some in [(one,)] if read in READS[:2] else [(one, one), (given[0], one), (one, given[1])]:
            assert call(on_cpu, read, some, opts) is None
    for other in (None, 3, options_of(READS[READS.index(read) - 1]), c10d.BarrierOptions()):
        assert call(on_cpu, read, given, other) is None


class Group:
    """A group on rank 1 of 3, whose Communicator notes calls, or fails."""

    timeout_s, rank_here = 7.0, 1
    _coalescing = None

    def __init__(self) -> None:
        self.comm, self.size, self.made, self.error, self.told = self, 3, list[Any](), None, list[Any]()

    def _note(self, *args: Any, stream: Any) -> None:
        if self.error:
            raise self.error
        self.made.append((*args, stream.stream_id))

    Allreduce = Bcast = Allgather = Reduce_scatter_block = _note

    def explain(self, error: BlinkError) -> None:
        self.told.append(error)


QUICK = (fast_path.allreduce, fast_path.broadcast, fast_path.allgather, fast_path.reduce_scatter)


@pytest.fixture
def group(on_cpu: Any, device: Any, monkeypatch: pytest.MonkeyPatch) -> Group:
    """One whose calls go on stream 5, or on stream 6 if that is the current one."""
    monkeypatch.setattr(fast_path, "extension", lambda: on_cpu)
    monkeypatch.setattr(fast_path, "communication_stream", lambda _: device.stream(5))
    monkeypatch.setattr(fast_path, "current_stream", lambda _: device.stream(6))
    monkeypatch.setattr(fast_path, "capturing", lambda: False)
    return Group()


@pytest.mark.parametrize(("call", "read"), list(zip(QUICK, READS, strict=True)))
def test_the_fast_path(group: Group, device: Any, monkeypatch: pytest.MonkeyPatch, call: Any, read: str) -> None:
    """On a stream apart, or on the current one; other calls are left to the long way."""
    opts, given = options_of(read), shapes_of(read, torch.float32)[0]
    recorded = device.counts()[0]
    made = call(group, *given, opts)
    assert isinstance(made, dist._Work)
    assert made.result()[0] is (given[0][0] if read in READS[:2] else given[0])
    assert group.made[-1][-1] == 5
    assert device.counts()[0] == recorded + 2  # of the stream before, and behind the call
    monkeypatch.setattr(fast_path, "capturing", lambda: True)
    assert call(group, *given, opts)
    assert group.made[-1][-1] == 6
    monkeypatch.setattr(fast_path, "capturing", lambda: False)
    if hasattr(opts, "asyncOp"):
        opts.asyncOp = False
        assert call(group, *given, opts)
        assert group.made[-1][-1] == 6
        opts.asyncOp = True
    opts.timeout = timedelta(seconds=group.timeout_s)
    assert call(group, *given, opts)
    opts.timeout = timedelta(seconds=1)
    assert call(group, *given, opts) is None
    opts.timeout = timedelta(seconds=group.timeout_s)
    group.error = BlinkError("no")
    with pytest.raises(BlinkError):
        call(group, *given, opts)
    assert group.told == [group.error]
    assert call(group, *given, None) is None
    assert call(group, *(["a"] for _ in given), opts) is None
    group._coalescing = []
    assert call(group, *given, opts) is None
    group._coalescing = None
    monkeypatch.setattr(fast_path, "extension", lambda: None)
    assert call(group, *given, opts) is None


def test_a_compiler_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Then calls go on through Python, and the log says why, once."""
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && echo none && exit\necho no luck >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    compiling = torch_extension._Compiling()
    compiling.begin()
    end = time.monotonic() + COMPILE_S
    while not compiling.why and time.monotonic() < end:
        compiling.look()
        time.sleep(0.05)
    assert "compiling torch_extension.cpp failed" in compiling.why
    assert "no luck" in compiling.why
    compiling.begin()
    compiling.look()
    said = [line for line in capfd.readouterr().err.splitlines() if "go through Python" in line]
    assert len(said) == 1
    assert "no luck" in said[0]


def test_a_process_that_cannot_be_started_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The call that asked for it goes on."""
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(torch_extension, "kept_library", lambda *_: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    compiling = torch_extension._Compiling()
    compiling.begin()
    assert "cannot begin" in compiling.why
    assert "no-python" in capfd.readouterr().err


def test_a_library_that_does_not_load_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One of another C++ library, say."""
    path = tmp_path / "torch_extension.so"
    path.write_bytes(b"no library")
    compiling = torch_extension._Compiling()
    compiling._load(path)
    assert compiling.module is None
    assert str(path) in compiling.why
    assert compiling.why in capfd.readouterr().err


def test_the_process_that_compiles_touches_neither_mpi_nor_torch() -> None:
    """It runs beside ranks of MPI."""
    code = f"import sys, {torch_extension.__name__}; print([m for m in ('mpi4py.MPI', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
