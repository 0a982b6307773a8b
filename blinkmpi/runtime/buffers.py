"""From what users pass to what programs need: buffer specifications as mpi4py defines them.

A specification is an array (NumPy, torch, anything with the buffer protocol or
DLPack, in host memory), or a list or tuple ``(array, count)``, ``(array, type)``,
``(array, count, type)``, ``(array, (count, displacement), type)``,
``(array, count, displacement, type)``; the count is that of one block where a
buffer holds one block for each rank. Where these may differ (the v-variants),
count and displacement are those of every rank, as a list or an array, or one
for all: a list of counts, or a tuple ``(counts, displacements)``. What is legal MPI but not ours (derived
datatypes, ``MPI.BOTTOM``) comes out as :class:`DelegatedToMPI`, and the call goes to MPI.
"""

import operator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util import dtlib

from ..errors import ArgumentError, BufferTypeError
from ..program.memory import Buffer
from ..program.reduction import DTYPES, NAMES, Array, dtype_of
from ..util.dlpack import exported, header
from .cuda.buffers import check_shown, device_buffer, on_device, on_device_by_dlpack, tensor_types

OPS: dict[str, MPI.Op] = {
    "sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX, "land": MPI.LAND, "lor": MPI.LOR,
    "lxor": MPI.LXOR, "band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR,
}  # fmt: skip


class DelegatedToMPI(Exception):
    """Legal for MPI, not for us; the text says what it is."""


class DelegatedOp(DelegatedToMPI):
    """An operation that is MPI's alone. MPI demands the same one of all ranks, so they all know."""


def in_place(spec: Any) -> bool:
    """Whether a specification stands for MPI.IN_PLACE."""
    return spec is None or spec is MPI.IN_PLACE


def op_name(op: MPI.Op | str) -> str:
    """Our name of an operation.

    Raises:
        DelegatedOp: for user-defined and location operations. ArgumentError: for what is no operation.
    """
    if isinstance(op, MPI.Op):
        for name, known in OPS.items():
            if op == known:
                return name
        raise DelegatedOp("the operation is MPI's alone")
    if op == "avg" or op in OPS:
        return op
    raise ArgumentError(f"op={op!r}: expected an MPI.Op or one of avg, {', '.join(OPS)}")


def delegated_because(op: MPI.Op | str) -> str:
    """Why an operation is MPI's alone, or nothing."""
    try:
        op_name(op)
    except DelegatedOp as why:
        return str(why)
    return ""


def mpi_op(op: MPI.Op | str) -> MPI.Op:
    """MPI's operation for one of our names.

    Raises:
        ArgumentError: for ``avg``, which MPI does not have.
    """
    if isinstance(op, MPI.Op):
        return op
    if op not in OPS:
        raise ArgumentError(f"op={op!r} in a call that is MPI's alone: expected {', '.join(OPS)}, or an MPI.Op")
    return OPS[op]


def parse(spec: Any, *, name: str, writable: bool, blocks: int = 1) -> Buffer:
    """Read one buffer specification.

    Args:
        name: the argument's name, for messages.
        writable: whether the call writes into it.
        blocks: how many blocks of the specification's count the buffer holds.

    Raises:
        DelegatedToMPI: if MPI must do it. BufferTypeError, ArgumentError: with the remedy.
    """
    if not isinstance(spec, list | tuple):
        return device_buffer(spec, name, writable) or _named(flat(spec, name, writable), name)
    data, count, displacement, kind = unpack(spec, name)
    if data is None or data is MPI.BOTTOM:
        raise DelegatedToMPI(f"{name} is MPI.BOTTOM or None with a datatype")
    if (device := device_buffer(data, f"{name}[0]", writable)) is not None:
        _check_device_type(device.dtype, kind, name)
        return Buffer(device.array[_part(device.count, count, displacement, blocks, name)], device.dtype)
    array = flat(data, f"{name}[0]", writable)
    if kind is not None:
        array = _as_type(array, kind, name, whole=count is None)
    _named(array, name)
    return _named(array[_part(array.size, count, displacement, blocks, name)], name)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A buffer with a block for each rank: where it begins and how many elements it has."""

    buffer: Buffer
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    name: str

    def block(self, rank: int) -> Buffer:
        """The block for a rank."""
        return Buffer(self.buffer.array[self.starts[rank] : self.starts[rank] + self.counts[rank]], self.buffer.dtype)

    @property
    def filled(self) -> list[tuple[int, int, int]]:
        """(start, stop, rank) of the blocks that are not empty, by start."""
        blocks = zip(self.starts, self.counts, range(len(self.counts)), strict=True)
        return sorted((start, start + count, rank) for start, count, rank in blocks if count)

    @property
    def packed(self) -> bool:
        """Whether the blocks lie one behind another, in the order of ranks."""
        at = self.first
        for start, count in zip(self.starts, self.counts, strict=True):
            if count and start != at:
                return False
            at += count
        return True

    @property
    def first(self) -> int:
        """Where the first block begins that is not empty; 0 if all are."""
        return next((start for start, count in zip(self.starts, self.counts, strict=True) if count), 0)

    def check_disjoint(self) -> None:
        """Raise ArgumentError if two blocks, which are written, overlap."""
        for (_, stop, one), (start, _, other) in () if self.packed else pairwise(self.filled):
            if start < stop:
                raise ArgumentError(
                    f"{self.name}: the blocks of ranks {one} and {other} overlap (counts {list(self.counts)}, "
                    f"displacements {list(self.starts)}), and this call writes both; move them apart"
                )


def parse_blocks(spec: Any, *, name: str, writable: bool, n: int) -> Blocks:
    """Read one specification of ``n`` blocks, each of a length and at a place of its own; raises as :func:`parse`."""
    data, counts, starts, kind, where = spec, None, None, None, name
    if isinstance(spec, list | tuple):
        data, counts, starts, kind = unpack(spec, name, pairs=tuple)
        where = f"{name}[0]"
    if data is None or data is MPI.BOTTOM:
        raise DelegatedToMPI(f"{name} is MPI.BOTTOM or None")
    if (device := device_buffer(data, where, writable)) is not None:
        _check_device_type(device.dtype, kind, name)
        buffer = device
    else:
        array = flat(data, where, writable)
        buffer = _named(array if kind is None else _as_type(array, kind, name, whole=counts is None), name)
    if counts is None:
        if buffer.count % n:
            raise ArgumentError(
                f"{name} has {buffer.count} elements, no multiple of {n} ranks; pass every block's count"
            )
        counts = buffer.count // n
    lengths = _each(counts, n, f"{name}: count")
    if starts is None:
        places = (0, *accumulate(lengths[:-1]))
    elif _is_number(starts):
        places = tuple(rank * _natural(starts, f"{name}: displacement") for rank in range(n))
    else:
        places = _each(starts, n, f"{name}: displacement")
    for rank, (start, length) in enumerate(zip(places, lengths, strict=True)):
        if length and start + length > buffer.count:
            raise ArgumentError(
                f"{name}: the block of rank {rank}, elements {start} to {start + length}, lies outside of an array "
                f"that has {buffer.count}; correct count or displacement"
            )
    return Blocks(buffer, lengths, places, name)


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not getattr(value, "shape", ())


def _each(values: Any, n: int, what: str) -> tuple[int, ...]:
    """A number for each rank."""
    if _is_number(values):
        return (_natural(values, what),) * n
    try:
        some = list(values)
    except TypeError:
        raise BufferTypeError(f"{what}s {values!r} are no integers; pass {n} of them") from None
    numbers = tuple(_natural(value, f"{what} of rank {rank}") for rank, value in enumerate(some))
    if len(numbers) != n:
        raise ArgumentError(f"{what}s {list(numbers)}: there are {len(numbers)}, expected one for each of {n} ranks")
    return numbers


def _part(size: int, count: Any, displacement: Any, blocks: int, name: str) -> slice:
    """The elements of an array of ``size`` that a specification names."""
    start = 0 if displacement is None else _natural(displacement, f"{name}: displacement")
    stop = size if count is None else start + blocks * _natural(count, f"{name}: count")
    if max(start, stop) > size:
        raise ArgumentError(
            f"{name}: elements {start} to {stop} of an array that has {size}; correct count or displacement"
        )
    return slice(start, stop)


def _check_device_type(dtype: str, kind: Any, name: str) -> None:
    """Raise BufferTypeError unless a type, if given, only repeats that of an array in GPU memory."""
    if kind is not None:
        wanted = NAMES.get(_as_type(np.empty(0, dtype_of(dtype)), kind, name, whole=True).dtype)
        if wanted != dtype:
            raise BufferTypeError(f"{name} holds {dtype} in GPU memory, the type says {wanted}; make them equal")


def hold(spec: Any) -> tuple[Any, list[MPI.Datatype]]:
    """An argument that MPI may read later, in another thread, and the datatypes to free when it is done with them.

    The user may free a derived datatype while a call is under way; a tensor is asked for its memory here and now.
    """
    if not isinstance(spec, list | tuple):
        return _still(spec), []
    own = {i: t.Dup() for i, t in enumerate(spec) if isinstance(t, MPI.Datatype) and t and not t.is_predefined}
    return [own.get(i, _still(part)) for i, part in enumerate(spec)], list(own.values())


def detached(spec: Any) -> Any:
    """A specification whose torch tensors say nothing of gradients: those that do, give their memory to nobody."""
    if type(spec) in (list, tuple):
        return type(spec)(map(detached, spec))
    return spec.detach() if isinstance(spec, tensor_types()[:1]) and spec.requires_grad else spec


def _still(obj: Any) -> Any:
    if isinstance(obj, np.ndarray) or not hasattr(obj, "__dlpack_device__") or on_device(obj):
        return obj
    try:
        return _from_dlpack(detached(obj), "buffer")
    except DelegatedToMPI:
        return obj


def unpack(
    spec: list[Any] | tuple[Any, ...], name: str, pairs: Any = (list, tuple)
) -> tuple[Any, Any, Any, MPI.Datatype | str | None]:
    """(data, count, displacement, type) of a list or tuple; what is not given is None.

    Args:
        pairs: the types of a (count, displacement) in one.
    """
    match spec:
        case [data, MPI.Datatype() | str() as kind]:
            count: Any = None
        case [data, count]:
            kind = None
        case [data, count, kind]:
            pass
        case [data, count, displacement, kind]:
            return data, count, displacement, kind
        case _:
            raise ArgumentError(f"{name} is a sequence of {len(spec)} items; expected (array, count, type) or less")
    if isinstance(count, pairs):
        if len(count) != 2:
            raise ArgumentError(f"{name}: count {count!r}; expected a number or (count, displacement)")
        return data, count[0], count[1], kind
    return data, count, None, kind


def _natural(value: Any, what: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise BufferTypeError(f"{what} {value!r} is no integer; pass an int") from None
    if number < 0:
        raise ArgumentError(f"{what} {number} is negative; pass at least 0")
    return number


def flat(obj: Any, name: str, writable: bool) -> Array:
    """A view of ``obj`` as a vector, in its own element type; raises as :func:`parse`."""
    if obj is MPI.IN_PLACE:
        raise BufferTypeError(f"{name} is MPI.IN_PLACE, which stands for the other buffer of a call; pass an array")
    if isinstance(obj, np.ndarray):
        array = np.asarray(obj)
    else:
        try:
            array = np.asarray(memoryview(obj))
        except (TypeError, ValueError, NotImplementedError):  # no buffer protocol, or an element type that it lacks
            array = _other(obj, name)
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


def _other(obj: Any, name: str) -> Array:
    """A view of what is no buffer for Python: tensors."""
    if isinstance(obj, tensor_types()[:1]):
        check_shown(obj, name)
        obj = obj.detach()
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        if not on_device_by_dlpack(obj):
            return _from_dlpack(obj, name)
    elif not hasattr(obj, "__cuda_array_interface__"):
        raise BufferTypeError(
            f"{name} is of type {type(obj).__name__}, which has no buffer that we can read; pass an array, "
            "or use the lower-case method for Python objects"
        )
    raise BufferTypeError(f"{name} lies in memory that is neither host memory nor CUDA's; pass a NumPy copy of it")


def _from_dlpack(obj: Any, name: str) -> Array:
    """A view through DLPack: mpi4py finds the memory (and does not consume the capsule), its header tells the type.

    NumPy's from_dlpack has no bfloat16, and calls the memory of older exporters read-only.
    """
    with exported(name):
        memory: Any = _memory(obj)
    label = header(memory.obj).dtype
    if label is None:
        raise DelegatedToMPI(f"{name} has a DLPack element type that NumPy lacks")
    dtype = dtype_of(label) if label in DTYPES else np.dtype(label)
    return np.asarray(memoryview(memory)).view(dtype)


def _memory(obj: Any) -> MPI.buffer:
    try:
        return MPI.buffer.frombuffer(obj)
    except BufferError:  # perhaps only because it is read-only
        return MPI.buffer.frombuffer(obj, readonly=True)


def _named(array: Array, name: str) -> Buffer:
    label = NAMES.get(array.dtype)
    if label is not None:
        return Buffer(array, label)
    native = array.dtype.newbyteorder("=")
    if native in NAMES:
        raise BufferTypeError(f"{name} has foreign byte order ({array.dtype.str}); pass {name}.astype({native.str!r})")
    if not _mpi_has(array):
        raise BufferTypeError(
            f"{name} has element type {array.dtype}, of which MPI has none either; pass {name}.view('uint8'), or "
            "another type that blinkmpi has"
        )
    raise DelegatedToMPI(f"{name} has element type {array.dtype}")


def _mpi_has(array: Any) -> bool:
    """Whether mpi4py knows a datatype for an array's elements."""
    try:
        return memoryview(array).format in MPI._typedict
    except ValueError:  # dates, and types of other libraries
        return False


def _as_type(array: Array, kind: MPI.Datatype | str, name: str, *, whole: bool) -> Array:
    """The same memory seen as MPI type ``kind``; unless ``whole``, the last bytes may be left over."""
    if isinstance(kind, str):
        if kind not in MPI._typedict:
            raise BufferTypeError(f"{name}: {kind!r} is no type of MPI; pass an MPI.Datatype, or a code such as 'd'")
        kind = MPI._typedict[kind]
    if not isinstance(kind, MPI.Datatype) or kind == MPI.DATATYPE_NULL:
        raise ArgumentError(f"{name}: {kind!r} is no datatype; pass an MPI.Datatype such as MPI.DOUBLE")
    if not kind.is_predefined:
        raise DelegatedToMPI(f"{name} has a derived datatype")
    try:
        dtype = dtlib.to_numpy_dtype(kind)
    except (ValueError, MPI.Exception):
        raise DelegatedToMPI(f"{name} has datatype {kind.name}") from None
    if dtype.name not in DTYPES:
        raise DelegatedToMPI(f"{name} has datatype {kind.name}")
    if dtype.itemsize == array.dtype.itemsize and dtype.kind == array.dtype.kind:
        return array
    left = array.nbytes % dtype.itemsize
    if left and whole:
        raise ArgumentError(f"{name}: {array.nbytes} bytes are no whole number of {dtype}; correct the type")
    return array.view(np.uint8)[: array.nbytes - left].view(dtype)
