"""Calls on GPU memory without a GPU: buffers, streams, calls in place, waiting, and whether MPI takes GPU memory."""

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from blinkmpi.errors import (
    START_AGAIN,
    ArgumentError,
    BlinkError,
    BufferTypeError,
    CollectiveTimeout,
    MismatchError,
    PeerLost,
    SettingsError,
)
from blinkmpi.planning.plan import Rule
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import program_for
from blinkmpi.program.call import Call
from blinkmpi.program.memory import DeviceArray, overlap
from blinkmpi.runtime import arguments as calls
from blinkmpi.runtime import call_keys
from blinkmpi.runtime.arguments import Prepared
from blinkmpi.runtime.buffers import parse
from blinkmpi.runtime.cuda import in_flight
from blinkmpi.runtime.cuda.aware import agree, answers_of, claimed, words
from blinkmpi.runtime.cuda.buffers import device_buffer, stream_address
from blinkmpi.runtime.cuda.call import CudaCall
from blinkmpi.runtime.cuda.calls import CudaCalls
from blinkmpi.topology import machine, modify
from blinkmpi.transport.announcement import Called
from blinkmpi.transport.cuda.direct_segments import segment
from blinkmpi.util.settings import read
from tests.unit.topology.test_gather import on_ranks

H200 = machine("hgx-h200")


class Cai:
    """What has ``__cuda_array_interface__``."""

    def __init__(self, shape: tuple[int, ...], typestr: str = "<f4", at: int = 4096, **more: Any) -> None:
        data = (at, more.pop("read_only", False))
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": data, "version": 3, **more}


class Data:
    """What CuPy's arrays say of their memory."""

    ptr = 1 << 30


def device(spec: Any, *, writable: bool = False, blocks: int = 1) -> DeviceArray:
    found = parse(spec, name="buf", writable=writable, blocks=blocks).array
    assert isinstance(found, DeviceArray)
    return found


def test_gpu_memory_is_read_from_its_interface() -> None:
    array = Cai((3, 4), stream=77, strides=(16, 4))
    found = device(array)
    assert (found.ptr, found.size, found.nbytes, found.stream, found.owner) == (4096, 12, 48, 77, array)
    assert device(Cai((2,), stream=1)).stream == 0, "1 is the default stream"
    assert device(Cai((0,), strides=(8,))).size == 0
    part = found[2:5]
    assert (part.ptr, part.size) == (4096 + 8, 3)
    with pytest.raises(ArgumentError, match="step 2"):
        found[::2]
    assert device_buffer(np.zeros(3), "buf", True) is None
    assert device_buffer(b"bytes", "buf", False) is None


@pytest.mark.parametrize(("array", "error", "text"), [
    (Cai((3, 4), strides=(32, 4)), ArgumentError, r"not contiguous \(shape \(3, 4\), strides"),
    (Cai((3,), read_only=True), ArgumentError, "read-only"),
    (Cai((3,), typestr="<U4"), BufferTypeError, "element type <U4 in GPU memory"),
    ((Cai((3,)), 4), ArgumentError, "elements 0 to 4 of an array that has 3"),
    ((Cai((3,)), MPI.DOUBLE), BufferTypeError, "holds float32 in GPU memory, the type says float64"),
])  # fmt: skip
def test_gpu_memory_that_cannot_be_used(array: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        parse(array, name="buf", writable=True)


def test_specifications_of_gpu_memory() -> None:
    assert device((Cai((12,)), MPI.FLOAT)).size == 12
    assert device([Cai((12,)), (2, 3), MPI.FLOAT], blocks=4).ptr == 4096 + 12
    assert device([Cai((12,)), 2], blocks=4).size == 8


def test_cupy_and_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(ptr=1234)
    fake = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: current))
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    kind = type("ndarray", (SimpleNamespace,), {"__module__": "cupy._core"})
    fake.ndarray = kind
    flags = SimpleNamespace(c_contiguous=True, f_contiguous=False)
    data, dtype = SimpleNamespace(ptr=256, device_id=0), np.dtype("int16")
    array = kind(flags=flags, _c_contiguous=True, data=data, size=5, dtype=dtype, shape=(5,))
    found = device(array)
    assert (found.ptr, found.itemsize, found.stream) == (256, 2, 1234)

    call = calls.allreduce, (MPI.IN_PLACE, array, MPI.SUM)
    key = call_keys.key_of(*call, None, 0b11)
    assert key == call_keys.key_of(*call, None, 0b11)
    assert key != call_keys.key_of(*call, 99, 0b11)
    assert key != call_keys.key_of(calls.allreduce, (None, array, MPI.SUM), None, 0b11)
    assert call_keys.key_of(calls.allreduce, ([array, 5], array), None, 0b11) is None
    current.ptr = 0
    assert key != call_keys.key_of(*call, None, 0b11), "another current stream is another call"
    flags.c_contiguous = array._c_contiguous = False
    assert call_keys.key_of(*call, None, 0b11) is None
    with pytest.raises(ArgumentError, match=r"cupy\.ascontiguousarray"):
        device(array)


def test_what_cupys_arrays_say_of_themselves() -> None:
    """``key_of`` asks them in a way that CuPy does not promise."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 20, 64, None, 0), 0)
    array = cupy.ndarray((4, 4), "float32", memory)
    assert array._c_contiguous is array.flags.c_contiguous is True
    assert array.T._c_contiguous is array.T.flags.c_contiguous is False
    assert call_keys.key_of(calls.broadcast, (array, 0), 7, 0b11) == (
        calls.broadcast, 1 << 20, 16, np.dtype("float32").num, 0, 7, False,
    )  # fmt: skip
    assert call_keys.key_of(calls.broadcast, (array.T, 0), 7, 0b11) is None


# ---------------------------------------------------------------- in place


@pytest.mark.parametrize("counts", [(5, 5, 5), (2, 1, 2), (1, 2, 3), (0, 0, 0), (0, 3, 2), (5, 0, 5)])
def test_a_reduce_scatter_in_place_is_copied_where_a_block_would_overlap_its_final_place(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everywhere else its result stands in the own block first, and goes to the front."""
    fake = SimpleNamespace(empty=lambda *_: SimpleNamespace(data=Data), ndarray=type(None))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    overlapping = any(0 < sum(counts[:r]) < counts[r] for r in range(3))
    whole, count = Cai((sum(counts),)), sum(counts)
    for rank in range(3):
        made = calls.reduce_scatter(rank, 3, MPI.IN_PLACE, whole, counts, "sum", lambda mine: (mine,))
        own = 4096 + 4 * sum(counts[:rank])
        final = DeviceArray(4096, counts[rank], 4, 0, whole, 0, -1)
        if overlapping:
            assert isinstance(made.send, DeviceArray)
            assert (made.send.ptr, made.send.copy_of, made.send.size) == (Data.ptr, 4096, count)
            assert (made.recv, made.final) == (final, None)
            continue
        moves = own > 4096 and counts[rank] > 0
        assert made.send == DeviceArray(4096, count, 4, 0, whole, 0, -1)
        assert made.recv == (DeviceArray(own, counts[rank], 4, 0, whole, 0, -1) if moves else final)
        assert made.final == (final if moves else None)


def test_the_result_of_a_reduce_scatter_may_lie_in_the_own_block() -> None:
    """On a GPU, as NCCL has it; nowhere else, and not on the host, where MPI forbids it."""
    whole = Cai((12,))
    for rank in range(3):
        block = Cai((4,), at=4096 + 16 * rank)
        for made in (
            calls.reduce_scatter_block(rank, 3, whole, block, "sum"),
            calls.reduce_scatter(rank, 3, whole, block, (4, 4, 4), "sum", lambda mine: (mine,)),
        ):
            assert (made.send, made.recv) == (device(whole), device(block))
            assert (made.final, made.before, made.after) == (None, (), ())
        for at in (4096 + 16 * ((rank + 1) % 3), 4096 + 16 * rank + 4, 4096 + 16 * rank - 4):
            with pytest.raises(ArgumentError, match="overlap"):
                calls.reduce_scatter_block(rank, 3, whole, Cai((4,), at=at), "sum")
        vector = np.zeros(12, np.float32)
        with pytest.raises(ArgumentError, match="overlap"):
            calls.reduce_scatter_block(rank, 3, vector, vector[4 * rank : 4 * rank + 4], "sum")


@pytest.mark.parametrize("gpus", ["0,1", "0,1,2,3", "0,1,2,3,4,5,6,7"])
def test_a_ranks_own_block_is_read_only_where_its_result_is_written(gpus: str) -> None:
    """By every scheme through slots; so the result may take the block's place while peers read the rest."""
    n = len(gpus.split(","))
    for topology in (modify(H200, gpus=gpus), *([machine("dgx-1v")] if n == 8 else [])):
        plan = make_plan(topology, collectives=("reduce_scatter",), gpus="onehop")
        for counts in ((1003,) * n, tuple(range(1000, 1000 + n))):
            call = Call("reduce_scatter", n, counts, "float32", "sum")
            for scheme in plan.schemes("reduce_scatter", -1):
                lowered = program_for(plan, call, Rule("reduce_scatter", 0, scheme, 1024, 4))
                for rank in range(n):
                    start, length = call.block(rank)
                    for stage in lowered.of(rank):
                        if stage.store is not None:
                            assert stage.local == start + stage.store, (scheme, rank, stage)
                        elif stage.local is not None:
                            assert stage.local + stage.count <= start or stage.local >= start + length, (scheme, stage)
    for r in range(n):  # by ``direct``
        sources, targets, src_at, dst_at, size = segment(Call("reduce_scatter", n, (1000,) * n, "float32", "sum"), r)
        assert (targets, src_at, dst_at) == (1 << r, r * size, 0)
        assert sources == (1 << n) - 1


def test_streams_are_addresses() -> None:
    assert stream_address(None) is None
    assert stream_address(5) == 5
    assert stream_address(SimpleNamespace(ptr=6)) == 6
    assert stream_address(SimpleNamespace(cuda_stream=7)) == 7
    with pytest.raises(ArgumentError, match="expected a CuPy or torch stream"):
        stream_address("default")


def test_pieces_of_gpu_memory_overlap_where_they_share_a_byte() -> None:
    ten, behind, last = (device(Cai((10,), at=at)) for at in (4096, 4136, 4132))
    assert not overlap(ten, behind)
    assert not overlap(behind, ten)
    assert overlap(ten, last)
    assert overlap(last, ten)


def test_both_buffers_lie_on_one_side() -> None:
    here, there = np.zeros(8, np.float32), Cai((8,))
    with pytest.raises(BufferTypeError, match="one buffer lies in GPU memory"):
        calls.allreduce(0, 2, here, there, MPI.SUM)
    ready = calls.allreduce(0, 2, MPI.IN_PLACE, there, MPI.SUM)
    assert ready.on_device
    assert ready.send is ready.recv
    with pytest.raises(ArgumentError, match="overlap"):
        calls.allreduce(0, 2, Cai((8,), at=4096 + 16), there, MPI.SUM)
    assert not overlap(device(Cai((8,))), device(Cai((8,), at=4096 + 32)))
    assert calls.allgather(1, 4, MPI.IN_PLACE, there).call.nbytes == 32


# ---------------------------------------------------------------- waiting, with everything around it made up


class Stage:
    """A stream that is through after some polls, and peers that are told what to be."""

    def __init__(self, busy: int) -> None:
        self.busy, self.aborted, self.told = busy, False, False
        self.mismatch: BlinkError | None = None
        self.report = [0, 0]
        self.gone: list[int] = []
        self.waits: list[tuple[dict[int, str], float, float]] = []
        self.came = False
        peers = SimpleNamespace(
            mismatch_so_far=lambda seq, text: self.mismatch,
            ended=lambda: self.gone,
            states=lambda ranks, seq: f"ranks {ranks}",
            remedy=START_AGAIN,
            warn=lambda seq, owed, waited_s, timeout_s: self.waits.append((owed(), waited_s, timeout_s)),
            absent=lambda seq: {} if self.came else {1: "its call"},
            owing=lambda what: dict.fromkeys((1, 2), what),
        )
        context: Any = SimpleNamespace(gpu=self, transport=self, here=())
        records = SimpleNamespace(encode=lambda called: (0, b""))
        host: Any = SimpleNamespace(peers=peers, raise_abort=lambda seq: None, records=records)
        calls = CudaCalls(context, SimpleNamespace(host=host), enqueues=False)  # type: ignore[arg-type]
        ready = Prepared(Call("broadcast", 2, (1,), "int8", "", 0), None, None)
        kernel: Any = SimpleNamespace(protocol="slots")
        self.call = CudaCall(calls.history, kernel, Called("a call"), ready, 0, None, None, 9.0)

    def starter(self, *_: object) -> Callable[[int], None]:
        return lambda _number: None

    def error(self, text: str) -> BlinkError:
        """What the kernel has left."""
        return CollectiveTimeout(text)

    def idle(self, on: object) -> bool:
        """Whether the kernel is through; one that is told to give up is so soon."""
        self.busy -= 1
        if self.told:
            self.aborted, self.busy = True, 0
        return self.busy <= 0

    def abort(self) -> None:
        self.told = True


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(in_flight, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(in_flight, "GRACE_S", 0.0)
    return iter([None])


def times(n: int) -> Callable[[], bool]:
    """Says n times that there is more."""
    left = iter(range(n))
    return lambda: next(left, None) is not None


def test_a_kernel_that_ends_ends_the_wait() -> None:
    stage = Stage(200)
    stage.call.wait()
    assert stage.busy == 0


@pytest.mark.parametrize("came", [False, True])
def test_a_long_wait_may_be_warned_of(came: bool) -> None:
    stage = Stage(40_000)
    stage.came = came
    stage.call.wait()
    owed, waited_s, timeout_s = stage.waits[0]
    assert list(owed) == ([1, 2] if came else [1])
    assert 0 < waited_s < stage.waits[-1][1] < 5
    assert timeout_s == 9.0


def test_a_wait_goes_on_until_all_is_carried() -> None:
    stage, carry = Stage(3), times(500)
    stage.call.wait(carry)
    assert not carry()
    assert stage.busy < -400


def test_a_kernel_that_gave_up_is_told_of() -> None:
    stage = Stage(3)
    stage.aborted = True
    with pytest.raises(CollectiveTimeout, match="a call"):
        stage.call.wait()


@pytest.mark.parametrize("busy", [10_000_000, 3])
def test_a_rank_that_makes_another_call_ends_the_kernel_and_the_wait(busy: int) -> None:
    """Also where the kernel is through and only messages to that rank's node are left."""
    stage = Stage(busy)
    stage.mismatch = MismatchError("rank 1 does something else")
    with pytest.raises(MismatchError, match="something else") as caught:
        stage.call.wait(lambda: True)
    assert stage.aborted
    assert caught.value is stage.mismatch


def test_a_process_that_is_gone_is_named() -> None:
    stage = Stage(10_000_000)
    stage.gone = [2]
    with pytest.raises(PeerLost, match=r"ranks \[2\]; start the job again") as caught:
        stage.call.wait()
    assert caught.value.ranks == (2,)


def test_an_error_in_carrying_is_raised() -> None:
    def carry() -> bool:
        raise CollectiveTimeout("nothing went between the nodes")

    with pytest.raises(CollectiveTimeout, match="between the nodes"):
        Stage(10_000_000).call.wait(carry)


# ---------------------------------------------------------------- whether MPI takes GPU memory


class Info(dict[str, str]):
    def Free(self) -> None:
        self.clear()


def test_every_source_is_asked_and_none_is_believed_blindly() -> None:
    mpi = SimpleNamespace(
        COMM_WORLD=SimpleNamespace(Get_info=lambda: Info(mpi_memory_alloc_kinds="system,cuda:device"))
    )
    env = {"MV2_USE_CUDA": "0", "MPICH_GPU_SUPPORT_ENABLED": "1"}
    assert dict(answers_of(mpi, "/nowhere/libmpi.so", env)) == {
        "MV2_USE_CUDA": "no", "mpi_memory_alloc_kinds": "yes", "MPIX_Query_cuda_support": "absent",
        "MPICH_GPU_SUPPORT_ENABLED": "yes",
    }  # fmt: skip
    silent = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_info=Info))
    assert dict(answers_of(silent, "", {})) == {"mpi_memory_alloc_kinds": "absent", "MPIX_Query_cuda_support": "absent"}


def test_the_users_word_is_above_all_others() -> None:
    mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_info=lambda: Info(mpi_memory_alloc_kinds="system,cuda")))
    assert claimed(answers_of(mpi, "", {}))
    denied = answers_of(mpi, "", {"BLINKMPI_CUDA_AWARE": "0"})
    assert not claimed(denied)
    assert words(denied).startswith("BLINKMPI_CUDA_AWARE: no; mpi_memory_alloc_kinds: yes")
    assert claimed((("BLINKMPI_CUDA_AWARE", "yes"), ("MPIX_Query_cuda_support", "no")))


def test_the_setting_is_yes_no_or_nothing() -> None:
    assert [read({"BLINKMPI_CUDA_AWARE": text}).cuda_aware for text in ("1", "0", "")] == [True, False, None]
    assert read({}).cuda_aware is None
    with pytest.raises(SettingsError, match=r"BLINKMPI_CUDA_AWARE='yes': expected 0 or 1"):
        read({"BLINKMPI_CUDA_AWARE": "yes"})


def test_gates_begin_at_a_number_of_bytes_or_are_off() -> None:
    texts = {"": None, "off": None, "0": 0, "1048576": 1 << 20, " 8388608 ": 8 << 20, str(1 << 40): 1 << 40}
    assert {text: read({"BLINKMPI_GATE_FROM": text}).gate_from for text in texts} == texts
    assert read({}).gate_from is None
    for text in ("1M", "-1", "1.5", "on", str((1 << 40) + 1), "9" * 30):
        with pytest.raises(
            SettingsError, match=r"BLINKMPI_GATE_FROM='.*': expected a number of bytes, 0 to .*, or off"
        ):
            read({"BLINKMPI_GATE_FROM": text})


def test_all_ranks_must_know_it() -> None:
    answers = ["yes", "no", "yes"]

    def climbed(comm: object, node: object) -> object:
        rank: int = comm.rank  # type: ignore[attr-defined]
        return agree(comm, None, lambda: (("MPIX_Query_cuda_support", answers[rank]),))  # type: ignore[arg-type]

    why = "rank 1 knows of no MPI that takes GPU memory: MPIX_Query_cuda_support: no"
    assert on_ranks([0, 0, 1], climbed) == [(False, f"staged in pinned host memory ({why})")] * 3
    answers[1] = "yes"
    assert on_ranks([0, 0, 1], climbed) == [(True, "sent by MPI from GPU memory (MPIX_Query_cuda_support: yes)")] * 3


@pytest.mark.parametrize("asserted", [True, False])
def test_what_the_job_says_is_not_asked_again(asserted: bool) -> None:
    def never() -> object:
        raise AssertionError("asked")

    found = on_ranks([0, 1], lambda comm, node: agree(comm, asserted, never))  # type: ignore[arg-type]
    assert [yes for yes, _ in found] == [asserted] * 2
    assert f"(BLINKMPI_CUDA_AWARE: {'yes' if asserted else 'no'})" in found[0][1]
