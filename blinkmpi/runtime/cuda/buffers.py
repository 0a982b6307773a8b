"""GPU memory as users pass it: CuPy arrays, torch tensors, whatever has the CUDA array interface; and their streams."""

import math
import sys
from typing import Any, cast

import numpy as np

from ...errors import ArgumentError, BufferTypeError
from ...program.memory import Buffer, DeviceArray
from ...program.reduction import DTYPES, NAMES, dtype_of

BYTES = {name: dtype_of(name).itemsize for name in DTYPES}
HOST_DEVICES = (1, 3, 11, 13)  # DLPack: CPU, CUDA host, ROCm host, CUDA managed


def on_device(obj: Any) -> bool:
    """Whether an object shows memory of a GPU, also by DLPack alone, which :func:`device_buffer` does not read."""
    if isinstance(obj, np.ndarray):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return bool(obj.is_cuda)
    return _of_cupy(obj) or hasattr(obj, "__cuda_array_interface__") or _by_dlpack(obj)


def _by_dlpack(obj: Any) -> bool:
    """Whether an object says through DLPack alone that its memory is a device's."""
    ask = getattr(obj, "__dlpack_device__", None)
    try:
        return ask is not None and ask()[0] not in HOST_DEVICES
    except Exception:  # whoever reads the buffer finds it, and says so
        return False


def _of_cupy(obj: Any) -> bool:
    return type(obj).__module__.partition(".")[0] == "cupy"


def lies_on_device(spec: Any) -> bool:
    """Whether a buffer specification, of whatever kind, shows memory of a GPU."""
    return any(map(on_device, spec if isinstance(spec, list | tuple) else (spec,)))


def device_buffer(obj: Any, name: str, writable: bool) -> Buffer | None:
    """A view of GPU memory: CuPy, torch, or whatever has ``__cuda_array_interface__``; None for what has not."""
    if isinstance(obj, np.ndarray):
        return None
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and isinstance(obj, cupy.ndarray):
        if not obj._c_contiguous and not obj.flags.f_contiguous:  # a sixth of the time of obj.flags.c_contiguous
            raise ArgumentError(f"{name} is not contiguous (shape {obj.shape}); pass cupy.ascontiguousarray({name})")
        data, stream = obj.data, cupy.cuda.get_current_stream().ptr
        return _buffer(data.ptr, obj.size, obj.dtype, stream, obj, name, data.device_id)
    if torch is not None and isinstance(obj, torch.Tensor):
        if not obj.is_cuda:
            return None
        if not obj.is_contiguous():
            raise ArgumentError(f"{name} is not contiguous (shape {tuple(obj.shape)}); pass {name}.contiguous()")
        stream = torch.cuda.current_stream(obj.device).cuda_stream
        label = str(obj.dtype).removeprefix("torch.")
        return _buffer(obj.data_ptr(), obj.numel(), label, stream, obj, name, obj.device.index or 0)
    face = getattr(obj, "__cuda_array_interface__", None)
    if face is None:  # or only through DLPack
        return None
    dtype, shape = np.dtype(face["typestr"]), tuple(face["shape"])
    strides, count = face.get("strides"), math.prod(shape)
    dense = tuple(dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if strides is not None and tuple(strides) != dense and count > 1:
        raise ArgumentError(f"{name} is not contiguous (shape {shape}, strides {strides}); pass a contiguous copy")
    at, read_only = face["data"]
    if writable and read_only:
        raise ArgumentError(f"{name} is read-only, and this call writes into it; pass a writable array")
    stream = face.get("stream") or 0
    return _buffer(at, count, dtype, 0 if stream == 1 else stream, obj, name)


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
