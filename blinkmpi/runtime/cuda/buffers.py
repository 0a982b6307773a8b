"""GPU memory as users pass it: CuPy arrays, torch tensors, whatever has the CUDA array interface; and their streams."""

import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from ...errors import ArgumentError, BufferTypeError
from ...program.memory import Buffer, DeviceArray
from ...program.reduction import DTYPES, NAMES, dtype_of
from ...util.dlpack import exported, header
from ..foreign import imported

BYTES = {name: dtype_of(name).itemsize for name in DTYPES}
HOST_DEVICES = (1, 3, 11, 13)  # DLPack: CPU, CUDA host, ROCm host, CUDA managed
ON_HOST = frozenset({
    np.ndarray, type(None), bool, int, float, str, bytes, bytearray, memoryview, MPI.Datatype, MPI.Op, MPI.Status,
    MPI.Info, MPI.buffer, type(MPI.IN_PLACE), type(MPI.BOTTOM), type(MPI.BUFFER_AUTOMATIC),
})  # fmt: skip  # types of arguments that are no GPU memory, whatever they hold
CUDA_DEVICE = 2  # DLPack's number
LEGACY_STREAM = 1  # what DLPack and the CUDA array interface call CUDA's default stream, whose address is 0


def on_device(obj: Any) -> bool:
    """Whether an object shows memory of a GPU."""
    if isinstance(obj, np.ndarray):
        return False
    if isinstance(obj, tensor_types()[:1]):
        return bool(obj.is_cuda)
    return _of_cupy(obj) or hasattr(obj, "__cuda_array_interface__") or on_device_by_dlpack(obj)


def on_device_by_dlpack(obj: Any) -> bool:
    """Whether an object says through DLPack alone that its memory is a device's."""
    return _dlpack_device(obj) not in (None, *HOST_DEVICES)


def _dlpack_device(obj: Any) -> int | None:
    """The type of the device on which an object's memory lies, by DLPack; None where it does not say."""
    ask = getattr(obj, "__dlpack_device__", None)
    try:
        return None if ask is None else int(ask()[0])
    except Exception:  # the code that reads the buffer meets the same error, and reports it
        return None


def _of_cupy(obj: Any) -> bool:
    return type(obj).__module__.partition(".")[0] == "cupy"


def lies_on_device(spec: Any) -> bool:
    """Whether a buffer specification, of whatever kind, shows memory of a GPU."""
    if isinstance(spec, list | tuple) and spec and type(spec[0]) is type(MPI.BOTTOM):
        kinds = (kind for part in spec for kind in (part if isinstance(part, list | tuple) else [part]))
        return any(map(_begins_on_device, kinds))
    return next(device_parts(spec), None) is not None


def device_parts(spec: Any) -> Iterator[Any]:
    """The parts of a buffer specification that lie on a GPU."""
    if isinstance(spec, list | tuple):
        for part in spec:
            yield from device_parts(part)
    elif type(spec) not in ON_HOST and on_device(spec):
        yield spec


def _begins_on_device(kind: Any) -> bool:
    """Whether a datatype of addresses, as MPI.BOTTOM has it, begins with one on a GPU."""
    if not isinstance(kind, MPI.Datatype) or kind.is_predefined or not (imported("cupy") or imported("torch")):
        return False
    from ...transport.cuda.device import device_of, why_none

    return not why_none() and device_of(kind.Get_true_extent()[0]) is not None


def device_buffer(obj: Any, name: str, writable: bool) -> Buffer | None:
    """A view of GPU memory: CuPy, torch, whatever has the CUDA array interface or DLPack; None for other memory."""
    if isinstance(obj, np.ndarray):
        return None
    cupy, torch = imported("cupy"), imported("torch")
    if cupy is not None and isinstance(obj, cupy.ndarray):
        if not obj._c_contiguous and not obj.flags.f_contiguous:  # six times as fast as obj.flags.c_contiguous
            raise ArgumentError(f"{name} is not contiguous (shape {obj.shape}); pass cupy.ascontiguousarray({name})")
        data, stream = obj.data, cupy.cuda.get_current_stream().ptr
        return _buffer(data.ptr, obj.size, obj.dtype, stream, obj, name, data.device_id)
    if isinstance(obj, tensor_types()[:1]):
        if not obj.is_cuda:
            return None
        check_shown(obj, name)
        if not is_plain_tensor(obj, torch):
            raise ArgumentError(f"{name} is not contiguous (shape {tuple(obj.shape)}); pass {name}.contiguous()")
        index = obj.get_device()
        stream = current_stream_of_torch(torch, index)
        label = str(obj.dtype).removeprefix("torch.")
        return _buffer(obj.data_ptr(), obj.numel(), label, stream, obj, name, index)
    face = getattr(obj, "__cuda_array_interface__", None)
    if face is None:
        return _from_dlpack(obj, name, writable) if _dlpack_device(obj) == CUDA_DEVICE else None
    dtype, shape = np.dtype(face["typestr"]), tuple(face["shape"])
    strides, count = face.get("strides"), math.prod(shape)
    dense = tuple(dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if strides is not None and tuple(strides) != dense and count > 1:
        raise ArgumentError(f"{name} is not contiguous (shape {shape}, strides {strides}); pass a contiguous copy")
    at, read_only = face["data"]
    if writable and read_only:
        raise ArgumentError(f"{name} is read-only, and this call writes into it; pass a writable array")
    stream = face.get("stream") or 0
    return _buffer(at, count, dtype, 0 if stream == LEGACY_STREAM else stream, obj, name)


def tensor_types() -> tuple[Any, ...]:
    """torch's ``Tensor`` and a type made of it, ``Parameter``; none while torch is not, or not wholly, imported."""
    torch = imported("torch")
    nn: Any = getattr(torch, "nn", None)
    return (torch.Tensor, nn.Parameter) if torch is not None and hasattr(nn, "Parameter") else ()


def types_for_c() -> frozenset[Any]:
    """The types of arrays that C reads, too (device_arrays.h)."""
    cupy = imported("cupy")
    return frozenset(tensor_types() if cupy is None else (cupy.ndarray, *tensor_types()))


def check_shown(tensor: Any, name: str) -> None:
    """Raise ArgumentError for a view of a torch tensor whose memory has other values than it shows."""
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(f"{name} is a conjugate or negative view; pass {name}.resolve_conj().resolve_neg()")


def is_plain_tensor(tensor: Any, torch: Any) -> bool:
    """Whether a torch tensor's elements lie on a GPU one after another, with the values that it shows."""
    return (
        tensor.is_cuda
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def current_stream_of_torch(torch: Any, device: int) -> int:
    """The address of torch's current stream on a device."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # ten times as fast as torch.cuda.current_stream
    return int(raw(device) if raw is not None else torch.cuda.current_stream(device).cuda_stream)


def _from_dlpack(obj: Any, name: str, writable: bool) -> Buffer:
    """A view through DLPack, behind the producer's work: it is told that the legacy default stream consumes."""
    with exported(name):
        capsule = obj.__dlpack__(stream=LEGACY_STREAM)
    of = header(capsule)
    if not of.contiguous:
        raise ArgumentError(
            f"{name} is not contiguous (shape {of.shape}, strides {of.strides}); pass a contiguous copy"
        )
    if writable and of.read_only:
        raise ArgumentError(f"{name} is read-only, and this call writes into it; pass a writable array")
    label = of.dtype or "unknown"
    return _buffer(of.ptr, of.size, label, 0, (obj, capsule), name, of.device)


def _buffer(at: int, count: int, dtype: Any, stream: int, owner: Any, name: str, device: int = -1) -> Buffer:
    label = NAMES.get(dtype, dtype)
    itemsize = BYTES.get(label)
    if itemsize is None:
        raise BufferTypeError(f"{name} has element type {dtype} in GPU memory; use one of {', '.join(DTYPES)}")
    return Buffer(DeviceArray(at, count, itemsize, stream, owner, 0, device), label)


def stream_address(stream: Any) -> int | None:
    """The address of a CUDA stream: CuPy's, torch's, or a number; None for none.

    Raises:
        ArgumentError: for anything else.
    """
    if stream is None or type(stream) is int:
        return stream
    for name in ("ptr", "cuda_stream"):
        found = getattr(stream, name, None)
        if type(found) is int:
            return found
    raise ArgumentError(f"stream={stream!r}: expected a CuPy or torch stream, or its address")


def device_array(array: Any) -> DeviceArray:
    """An array in GPU memory.

    Raises:
        BufferTypeError: for anything else.
    """
    buffer = device_buffer(array, "array", writable=False)
    if buffer is None:
        raise BufferTypeError(f"{type(array).__name__} is no array in GPU memory; pass a CuPy array")
    return cast(DeviceArray, buffer.array)
