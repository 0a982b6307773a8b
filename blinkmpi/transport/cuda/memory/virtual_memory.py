"""CUDA's virtual memory management, as far as others' memory is shared: export it, import a peer's, map it."""

import ctypes
import os
from contextlib import ExitStack
from typing import Any

from ....errors import DeviceError

FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
u64, size = ctypes.c_uint64, ctypes.c_size_t


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VirtualMemory:
    """Addresses and memory of one device.

    Args:
        driver: libcuda.
        device: CUDA's number of it.
    """

    def __init__(self, driver: Any, device: int) -> None:
        self._driver, self.device = driver, device

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses; returns the first."""
        at = u64()
        self._do("cuMemAddressReserve", ctypes.byref(at), size(nbytes), size(0), u64(0), u64(0))
        return at.value

    def unreserve(self, at: int, nbytes: int) -> None:
        """Undo :meth:`reserve`."""
        self._do("cuMemAddressFree", u64(at), size(nbytes))

    def is_mapped(self, at: int) -> bool:
        """Whether what lies at an address is memory of this kind."""
        handle = u64()
        if self._driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(at)):
            return False
        self._do("cuMemRelease", handle)
        return True

    def export_at(self, at: int) -> int:
        """A file descriptor of the memory that is mapped at an address; the caller's to close.

        Raises:
            DeviceError: if it was not made to be shared by file descriptors, or is not memory of this kind.
        """
        handle = u64()
        self._do("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(at))
        descriptor = ctypes.c_int(-1)
        try:
            self._do("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, FILE_DESCRIPTOR, u64(0))
            return descriptor.value
        finally:
            self._do("cuMemRelease", handle)

    def map(self, descriptor: int, at: int, nbytes: int) -> None:
        """Map a peer's memory at reserved addresses, for this device; its descriptor may then be closed."""
        handle, access = u64(), _Access(_Location(ON_DEVICE, self.device), READ_WRITE)
        with ExitStack() as undo:
            self._do(
                "cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), FILE_DESCRIPTOR
            )
            try:
                self._do("cuMemMap", u64(at), size(nbytes), size(0), handle, u64(0))
            finally:
                self._do("cuMemRelease", handle)  # what is mapped stays
            undo.callback(self.unmap, at, nbytes)
            self._do("cuMemSetAccess", u64(at), size(nbytes), ctypes.byref(access), size(1))
            undo.pop_all()

    def unmap(self, at: int, nbytes: int) -> None:
        """Undo :meth:`map`."""
        self._do("cuMemUnmap", u64(at), size(nbytes))

    def _do(self, name: str, *args: Any) -> None:
        code = getattr(self._driver, name)(*args)
        if code:
            raise DeviceError(f"{name} on GPU {self.device}: {self.error(code)}")

    def error(self, code: int) -> str:
        """What the driver calls an error."""
        text = ctypes.c_char_p()
        self._driver.cuGetErrorName(code, ctypes.byref(text))
        return text.value.decode() if text.value else f"CUDA error {code}"


def close_all(descriptors: list[int]) -> None:
    """Close file descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
