"""What a DLPack capsule says of its tensor. The capsule is read, not consumed: it keeps the memory while it lives.

The structs are those of DLPack's header, ``DLManagedTensor`` and, from version 1.0, ``DLManagedTensorVersioned``.
"""

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..errors import ArgumentError, BufferTypeError
from .text import error_text

TYPES = {  # by type code and bits
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    **{(5, bits): f"complex{bits}" for bits in (64, 128)},
    (4, 16): "bfloat16", (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2", (6, 8): "bool",
    (2, 128): "longdouble", (5, 256): "clongdouble",
}  # fmt: skip
VERSIONED = b"dltensor_versioned"
BEFORE_TENSOR, FLAGS_AT, READ_ONLY = 32, 24, 1  # bytes of the versioned struct before the tensor; its flags


class _Tensor(ctypes.Structure):
    """``DLTensor``."""

    _fields_ = (
        ("data", ctypes.c_uint64), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class Header(NamedTuple):
    """A tensor: where it begins, on which device, its element type (None if it has no name here) and shape."""

    ptr: int
    device: int
    dtype: str | None
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None for C order
    read_only: bool

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after another, in C order."""
        if self.strides is None or self.size <= 1:
            return True
        dense = (math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        return all(n == 1 or s == d for n, s, d in zip(self.shape, self.strides, dense, strict=True))


@contextmanager
def exported(name: str) -> Iterator[None]:
    """While an argument is asked for its memory: what its exporter raises becomes an error that names it.

    Raises:
        ArgumentError: for a layout or type that DLPack cannot express.
        BufferTypeError: for anything else, as torch's ValueError for a tensor on ``meta``.
    """
    try:
        yield
    except BufferError as error:
        raise ArgumentError(f"{name}: {error}; pass a contiguous array of basic elements") from error
    except Exception as error:
        raise BufferTypeError(f"{name} shows no memory ({error_text(error)}); pass an array that has some") from error


def header(capsule: Any) -> Header:
    """Read a capsule."""
    get_name, get_pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    kind = get_name(capsule)
    at = get_pointer(capsule, kind)
    read_only = kind == VERSIONED and bool(ctypes.c_uint64.from_address(at + FLAGS_AT).value & READ_ONLY)
    tensor = _Tensor.from_address(at + (BEFORE_TENSOR if kind == VERSIONED else 0))
    code, bits, lanes = tensor.code, tensor.bits, tensor.lanes
    if (code, lanes) == (2, 2):  # two floats: how older exporters say complex
        code, bits, lanes = 5, 2 * bits, 1
    return Header(
        (tensor.data or 0) + tensor.byte_offset,
        tensor.device,
        TYPES.get((code, bits)) if lanes == 1 else None,
        tuple(tensor.shape[: tensor.ndim]),
        tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        read_only,
    )
