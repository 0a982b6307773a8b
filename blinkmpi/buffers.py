"""From what users pass to what programs need: buffer specifications as mpi4py defines them.

A specification is an array (NumPy, anything with the buffer protocol, DLPack or
``__array_interface__`` on the CPU), or a list or tuple ``(array, count)``,
``(array, type)``, ``(array, count, type)``, ``(array, (count, displacement), type)``.
What is legal MPI but not ours (derived datatypes, displacements, ``MPI.BOTTOM``)
comes out as :class:`Foreign`, and the call goes to MPI.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util import dtlib

from .errors import ArgumentError, BufferTypeError
from .numerics import DTYPES, Array, dtype_of

OPS: dict[str, MPI.Op] = {
    "sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX, "land": MPI.LAND, "lor": MPI.LOR,
    "lxor": MPI.LXOR, "band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR,
}  # fmt: skip


class Foreign(Exception):
    """Legal for MPI, not for us; the text says what it is."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A flat, contiguous view of the user's memory."""

    array: Array
    dtype: str

    @property
    def count(self) -> int:
        """Elements."""
        return self.array.size


def in_place(spec: Any) -> bool:
    """Whether a specification stands for MPI.IN_PLACE."""
    return spec is None or spec is MPI.IN_PLACE


def op_name(op: MPI.Op | str) -> str:
    """Our name of an operation.

    Raises:
        Foreign: for user-defined and location operations. ArgumentError: for an unknown string.
    """
    if isinstance(op, str):
        if op == "avg" or op in OPS:
            return op
        raise ArgumentError(f"op={op!r}: expected an MPI.Op or one of avg, {', '.join(OPS)}")
    for name, known in OPS.items():
        if op == known:
            return name
    raise Foreign("an operation that is MPI's alone")


def parse(spec: Any, *, name: str, writable: bool) -> Buffer:
    """Read one buffer specification.

    Args:
        name: the argument's name, for messages.
        writable: whether the call writes into it.

    Raises:
        Foreign: if MPI must do it. BufferTypeError, ArgumentError: with the remedy.
    """
    if isinstance(spec, list | tuple):
        return _from_list(spec, name, writable)
    if spec is MPI.BOTTOM:
        raise Foreign("MPI.BOTTOM")
    return _named(_array(spec, name, writable), name)


def _array(obj: Any, name: str, writable: bool) -> Array:
    """A flat view of ``obj``, in its own element type."""
    if hasattr(obj, "__cuda_array_interface__"):
        raise BufferTypeError(f"{name} lies in GPU memory; this version moves host memory: pass a NumPy copy of it")
    if isinstance(obj, np.ndarray):
        array = obj
    elif type(obj).__module__ == "torch":
        array = _from_torch(obj)
    else:
        try:
            array = np.asarray(memoryview(obj))
        except TypeError:
            if not hasattr(obj, "__dlpack__"):
                raise BufferTypeError(
                    f"{name} is a {type(obj).__name__}, which has no buffer; pass an array, "
                    "or use the lower-case method for Python objects"
                ) from None
            array = np.from_dlpack(obj)
    if array.dtype.hasobject:
        raise BufferTypeError(f"{name} holds Python objects; use the lower-case method, or convert to numbers first")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise ArgumentError(
            f"{name} is not contiguous (shape {array.shape}, strides {array.strides}); "
            f"pass np.ascontiguousarray({name}){' and copy the result back' if writable else ''}"
        )
    if writable and not array.flags.writeable:
        raise ArgumentError(f"{name} is read-only, and this call writes into it; pass a writable array")
    return array.reshape(-1, order="A")


def _from_torch(tensor: Any) -> Array:
    """A view of a CPU tensor; NumPy has no bfloat16 of its own, so its bits are viewed."""
    if str(tensor.dtype) == "torch.bfloat16":
        return np.asarray(tensor.detach().view(sys.modules["torch"].int16).numpy()).view(dtype_of("bfloat16"))
    return np.asarray(tensor.detach().numpy())


def _named(array: Array, name: str) -> Buffer:
    kind = array.dtype
    label = "bfloat16" if kind == dtype_of("bfloat16") else kind.name
    if label not in DTYPES:
        raise Foreign(f"element type {kind}")
    if not kind.isnative:
        native = kind.newbyteorder("=").str
        raise BufferTypeError(f"{name} has foreign byte order ({kind.str}); pass {name}.astype({native!r})")
    return Buffer(array, label)


def _from_list(spec: list[Any] | tuple[Any, ...], name: str, writable: bool) -> Buffer:
    if not spec or spec[0] is None or spec[0] is MPI.BOTTOM or len(spec) > 3:
        raise Foreign("a buffer specification that is MPI's alone")
    kind: Any = None
    count: Any = None
    for part in spec[1:]:
        if isinstance(part, MPI.Datatype | str):
            kind = part
        elif part is not None:
            count = part
    array = _array(spec[0], name, writable)
    if kind is not None:
        array = _as_type(array, kind, name)
    buffer = _named(array, name)
    if count is None:
        return buffer
    if not isinstance(count, int | np.integer):
        raise Foreign("counts with displacements")
    if not 0 <= count <= buffer.count:
        raise ArgumentError(f"{name}: count {count}, but the array has {buffer.count} elements; correct the count")
    return Buffer(buffer.array[:count], buffer.dtype)


def _as_type(array: Array, kind: MPI.Datatype | str, name: str) -> Array:
    """The same memory seen as MPI type ``kind``."""
    if isinstance(kind, str):
        dtype = np.dtype(kind) if kind in np.typecodes["All"] else None
    else:
        try:
            dtype = dtlib.to_numpy_dtype(kind) if kind.is_predefined and kind != MPI.DATATYPE_NULL else None
        except (ValueError, MPI.Exception):
            dtype = None
    if dtype is None or dtype.hasobject or dtype.fields or dtype.itemsize == 0:
        raise Foreign("a datatype that is MPI's alone")
    if dtype.itemsize == array.dtype.itemsize and dtype.kind == array.dtype.kind:
        return array
    if array.nbytes % dtype.itemsize:
        raise ArgumentError(f"{name}: {array.nbytes} bytes are no whole number of {dtype}; correct the type")
    return array.view(np.uint8).view(dtype)
