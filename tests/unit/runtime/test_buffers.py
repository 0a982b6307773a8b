"""Buffer specifications: what is read, as what, and what is refused or left to MPI."""

import array
import ctypes
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError
from blinkmpi.program.memory import DeviceArray
from blinkmpi.program.reduction import DTYPES, dtype_of
from blinkmpi.runtime.buffers import (
    OPS,
    DelegatedOp,
    DelegatedToMPI,
    delegated_because,
    hold,
    in_place,
    mpi_op,
    op_name,
    parse,
)

X = np.arange(12.0)


def read(spec: Any, **options: Any) -> Any:
    return parse(spec, **{"name": "buf", "writable": False, **options})


class Tensor:
    """What exports DLPack alone; ``old`` as before version 1.0."""

    def __init__(self, data: np.ndarray[Any, Any], *, old: bool = False, device: int = 1) -> None:
        self.data, self.old, self.device = data, old, device

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options:
            raise TypeError("unexpected keyword argument 'max_version'")
        if self.device == 2:
            assert options == {"stream": 1}, "CUDA's default stream"
            options = {}
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


class Unshown:
    """What says that it exports DLPack, and has no memory: torch's tensors on the device ``meta``."""

    def __init__(self, device: int = 0) -> None:
        self.device = device  # which it says before it fails; 0: it does not say

    def __dlpack__(self, **_: Any) -> Any:
        raise RuntimeError("no memory")

    def __dlpack_device__(self) -> tuple[int, int]:
        if not self.device:
            raise ValueError("no device")
        return (self.device, 0)


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_of_ours_is_viewed_not_copied(dtype: str) -> None:
    x = np.zeros((3, 4), dtype_of(dtype))
    buffer = read(x, writable=True)
    assert (buffer.dtype, buffer.count) == (dtype, 12)
    assert buffer.array.ctypes.data == x.ctypes.data
    assert buffer.array.shape == (12,)


@pytest.mark.parametrize(("make", "dtype", "count"), [
    (lambda: array.array("i", [1, 2, 3]), "int32", 3),
    (lambda: bytearray(b"abcd"), "uint8", 4),
    (lambda: memoryview(bytearray(8)).cast("d"), "float64", 1),
    (lambda: (ctypes.c_float * 5)(), "float32", 5),
    (lambda: np.array(1.0), "float64", 1),
    (lambda: np.asfortranarray(np.ones((3, 2), "h")), "int16", 6),
    (lambda: np.zeros((0, 3)), "float64", 0),
    (lambda: np.ma.array([[1, 2]]), "int64", 2),
    (lambda: np.zeros(6)[2:4], "float64", 2),
    (lambda: MPI.buffer.allocate(7), "uint8", 7),
    (lambda: Tensor(np.zeros((2, 3), np.float32)), "float32", 6),
    (lambda: Tensor(np.zeros(3, np.complex64), old=True), "complex64", 3),
    (lambda: Tensor(np.zeros(3, np.bool_)), "bool", 3),
    (lambda: Tensor(np.zeros(0, np.uint16)), "uint16", 0),
])  # fmt: skip
def test_kinds_of_buffers(make: Callable[[], Any], dtype: str, count: int) -> None:
    obj = make()
    buffer = read(obj, writable=True)
    assert (buffer.dtype, buffer.count) == (dtype, count)
    if count and not isinstance(obj, Tensor):
        buffer.array[-1] = 1
        assert bytes(memoryview(obj))[-buffer.array.itemsize :] == buffer.array[-1:].tobytes()


@pytest.mark.parametrize("old", [False, True])
def test_dlpack_shares_memory_and_keeps_it(old: bool) -> None:
    x = np.arange(5, dtype=np.int16)
    view = read(Tensor(x, old=old), writable=True).array
    view[0] = 9
    assert x[0] == 9
    del x
    assert view.tolist() == [9, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex128", "uint8"])
def test_dlpack_alone_shows_gpu_memory(dtype: str) -> None:
    x = np.zeros((3, 4), dtype)
    buffer = read(Tensor(x, device=2), writable=True)
    assert isinstance(buffer.array, DeviceArray)
    assert (buffer.dtype, buffer.count, buffer.array.ptr) == (dtype, 12, x.ctypes.data)
    assert (buffer.array.device, buffer.array.stream) == (0, 0)
    part = read([Tensor(x, device=2), (5, 2), dtype_of(dtype).char], writable=True).array
    assert (part.ptr, part.size) == (x.ctypes.data + 2 * x.itemsize, 5)
    references = sys.getrefcount(x)
    del buffer, part
    assert sys.getrefcount(x) < references, "the capsules keep the memory, and nothing else does"


@pytest.mark.parametrize(("spec", "writable", "kind", "text"), [
    (X[::2], False, ValueError, r"not contiguous \(shape \(6,\), strides \(16,\)\); pass np.ascontiguousarray"),
    (np.zeros((4, 4))[:, :2], True, ValueError, "and copy the result back"),
    (b"constant", True, ValueError, "read-only"),
    (Tensor(np.zeros((4, 4))[:, ::2]), False, ValueError, "contiguous"),
    ([1, 2], False, TypeError, r"^buf\[0\] is of type int, which has no buffer"),
    (3.5, False, TypeError, "^buf is of type float, which has no buffer"),
    (None, False, TypeError, "is of type NoneType"),
    ("text", False, TypeError, "is of type str"),
    (np.array([None]), False, TypeError, "Python objects"),
    (X.astype(">f8"), False, TypeError, r"foreign byte order \(>f8\); pass buf\.astype"),
    (Tensor(X, device=4), False, TypeError, "neither host memory nor CUDA's"),
    (Unshown(), False, TypeError, r"^buf shows no memory \(ValueError: no device\); pass an array that has some"),
    (Unshown(1), False, TypeError, r"^buf shows no memory \(RuntimeError: no memory\)"),
    ([Unshown(2), 1], False, TypeError, r"^buf\[0\] shows no memory \(RuntimeError: no memory\)"),
    (Tensor(np.zeros((4, 4))[:, ::2], device=2), False, ValueError, "contiguous copy"),
    (Tensor(np.zeros(4, ">f4"), device=2), False, ValueError, "basic elements"),
])  # fmt: skip
def test_what_is_no_buffer_is_a_typed_error_with_the_remedy(
    spec: Any, writable: bool, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        read(spec, writable=writable)
    assert isinstance(caught.value, BlinkError)


def test_a_read_only_buffer_can_be_sent() -> None:
    assert read(b"abc").count == 3
    x = np.zeros(3)
    x.flags.writeable = False
    assert read(Tensor(x)).count == read(x).count == 3


# ---------------------------------------------------------------- specifications


@pytest.mark.parametrize(("spec", "want"), [
    ([X, 3], X[:3]),
    ((X, MPI.DOUBLE), X),
    ((X, None), X),
    ([X, None, MPI.DOUBLE], X),
    ([X, np.int64(2), MPI.DOUBLE], X[:2]),
    ([X, (2, 5)], X[5:7]),
    ([X, [2, 5], "d"], X[5:7]),
    ([X, (None, 5), "d"], X[5:]),
    ([X, 2, 5, "d"], X[5:7]),
    ([X, 0], X[:0]),
    ([X.view(np.int64), MPI.DOUBLE], X),
    ([X.view(np.uint8), 1, 1, MPI.DOUBLE], X[1:2]),
    ([bytearray(X.tobytes() + b"xyz"), 12, MPI.DOUBLE], X),
    ([X, MPI.BYTE], X.view(np.uint8)),
    ([X, "B"], X.view(np.uint8)),
    ([X.astype(ml_dtypes.bfloat16), MPI.UINT16_T], X.astype(ml_dtypes.bfloat16).view(np.uint16)),
])  # fmt: skip
def test_lists_and_tuples(spec: Any, want: Any) -> None:
    buffer = read(spec)
    assert buffer.array.dtype == want.dtype
    assert buffer.array.tolist() == want.tolist()


def test_counts_are_of_one_block() -> None:
    assert read([X, 3], blocks=4).array.tolist() == X.tolist()
    assert read([X, (3, 6)], blocks=2).array.tolist() == X[6:].tolist()
    assert read(X, blocks=5).count == 12


@pytest.mark.parametrize(("spec", "kind", "text"), [
    ([X, 13], ValueError, "elements 0 to 13 of an array that has 12"),
    ([X, (3, 10)], ValueError, "elements 10 to 13"),
    ([X, (None, 13)], ValueError, "elements 13"),
    ([X, -1], ValueError, "count -1 is negative"),
    ([X, (1, -1)], ValueError, "displacement -1 is negative"),
    ([X, "no type"], TypeError, "'no type' is no type of MPI"),
    ([X, 1.5], TypeError, "count 1.5 is no integer"),
    ([X, 1, object()], ValueError, "is no datatype"),
    ([X, MPI.DATATYPE_NULL], ValueError, "is no datatype"),
    ([X, (1, 2, 3)], ValueError, r"expected a number or \(count, displacement\)"),
    ([X], ValueError, "sequence of 1 items"),
    ([], ValueError, "sequence of 0 items"),
    ([X, 1, 2, "d", 5], ValueError, "sequence of 5 items"),
    ([bytearray(9), MPI.DOUBLE], ValueError, "9 bytes are no whole number of float64"),
    (np.zeros(2, "datetime64[s]"), BufferTypeError, "MPI has none either"),
    ([np.zeros(2, "S3"), 2], BufferTypeError, "MPI has none either"),
    (np.zeros(2, [("a", "i"), ("b", "d")]), BufferTypeError, "MPI has none either"),
    (np.zeros(2, ml_dtypes.int4), BufferTypeError, "MPI has none either"),
])  # fmt: skip
def test_bad_specifications(spec: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        read(spec)
    assert isinstance(caught.value, ArgumentError | BufferTypeError)


@pytest.mark.parametrize("spec", [
    [MPI.BOTTOM, 0, MPI.INT], (None, 0, "i"), np.zeros(3, np.longdouble), np.zeros(2, "S1"), [bytearray(3), MPI.CHAR],
    [np.zeros(4, "i"), MPI.TWOINT],
])  # fmt: skip
def test_what_mpi_alone_understands(spec: Any) -> None:
    with pytest.raises(DelegatedToMPI, match="buf"):
        read(spec)


def test_derived_datatypes_are_mpis_and_are_held_for_it() -> None:
    derived = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    with pytest.raises(DelegatedToMPI, match="derived datatype"):
        read([X, 1, derived])
    spec, own = hold([X, 1, derived])
    derived.Free()
    assert spec[0] is X
    assert spec[2] == own[0]
    assert spec[2].Get_size() == 16
    own[0].Free()
    assert hold(5) == (5, [])
    assert hold([X, MPI.DOUBLE])[1] == []
    still, _ = hold(Tensor(X))
    assert still.ctypes.data == X.ctypes.data, "a tensor is read at once, not in another thread later"


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 4))
def test_a_specification_is_a_slice(count: int, displacement: int, blocks: int) -> None:
    if displacement + count * blocks <= 12:
        got = read([X, (count, displacement)], blocks=blocks).array
        assert got.tolist() == X.tolist()[displacement:][: count * blocks]
    else:
        with pytest.raises(ArgumentError):
            read([X, (count, displacement)], blocks=blocks)


# ---------------------------------------------------------------- operations


def test_operations_have_names_both_ways() -> None:
    for name, op in OPS.items():
        assert op_name(op) == op_name(name) == name
        assert mpi_op(name) == mpi_op(op) == op
        assert delegated_because(op) == ""
    assert op_name("avg") == "avg"
    with pytest.raises(ArgumentError, match="avg"):
        mpi_op("avg")
    with pytest.raises(ArgumentError, match=r"'mean': expected an MPI\.Op or one of avg, sum"):
        op_name("mean")
    mine = MPI.Op.Create(lambda a, b, _: None)
    for op in (MPI.MAXLOC, MPI.REPLACE, mine):
        assert "MPI's alone" in delegated_because(op)
        with pytest.raises(DelegatedOp):
            op_name(op)
    mine.Free()


def test_in_place() -> None:
    assert in_place(None)
    assert in_place(MPI.IN_PLACE)
    assert not in_place(MPI.BOTTOM)
    assert not in_place(X)
