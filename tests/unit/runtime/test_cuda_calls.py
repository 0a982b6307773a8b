"""Calls on GPU memory without a GPU: which buffers and streams are taken, and what a call in place reads and writes."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from blinkmpi.errors import ArgumentError, BufferTypeError
from blinkmpi.planning.plan import Rule
from blinkmpi.planning.selection import make_plan, program_for
from blinkmpi.program.call import Call
from blinkmpi.program.memory import DeviceArray, overlap
from blinkmpi.runtime import arguments as calls
from blinkmpi.runtime.arguments import key_of
from blinkmpi.runtime.buffers import parse
from blinkmpi.runtime.device_buffers import device_buffer, stream_address
from blinkmpi.topology import machine, modify
from blinkmpi.transport.cuda.direct_segments import segment

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


@pytest.mark.parametrize(
    ("array", "error", "text"),
    [
        (Cai((3, 4), strides=(32, 4)), ArgumentError, r"not contiguous \(shape \(3, 4\), strides"),
        (Cai((3,), read_only=True), ArgumentError, "read-only"),
        (Cai((3,), typestr="<U4"), BufferTypeError, "element type <U4 in GPU memory"),
        ((Cai((3,)), 4), ArgumentError, "elements 0 to 4 of an array that has 3"),
        ((Cai((3,)), MPI.DOUBLE), BufferTypeError, "holds float32 in GPU memory, the type says float64"),
    ],
)
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
    key = key_of(*call, None)
    assert key == key_of(*call, None)
    assert key != key_of(*call, 99)
    assert key != key_of(calls.allreduce, (None, array, MPI.SUM), None)
    assert key_of(calls.allreduce, ([array, 5], array), None) is None
    current.ptr = 0
    assert key != key_of(*call, None), "another current stream is another call"
    flags.c_contiguous = array._c_contiguous = False
    assert key_of(*call, None) is None
    with pytest.raises(ArgumentError, match=r"cupy\.ascontiguousarray"):
        device(array)


def test_what_cupys_arrays_say_of_themselves() -> None:
    """``key_of`` asks them in a way that CuPy does not promise."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 20, 64, None, 0), 0)
    array = cupy.ndarray((4, 4), "float32", memory)
    assert array._c_contiguous is array.flags.c_contiguous is True
    assert array.T._c_contiguous is array.T.flags.c_contiguous is False
    assert key_of(calls.broadcast, (array, 0), 7) == (
        calls.broadcast, 1 << 20, 16, np.dtype("float32").num, 0, 7, False,
    )  # fmt: skip
    assert key_of(calls.broadcast, (array.T, 0), 7) is None


# ---------------------------------------------------------------- in place


@pytest.mark.parametrize("counts", [(5, 5, 5), (2, 1, 2), (1, 2, 3), (0, 0, 0), (0, 3, 2), (5, 0, 5)])
def test_a_reduce_scatter_in_place_is_copied_where_a_block_would_overlap_its_final_place(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everywhere else its result stands in the own block first, and goes to the front."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=lambda *_: SimpleNamespace(data=Data)))
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
