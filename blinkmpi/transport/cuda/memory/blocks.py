"""``blocks.c`` as Python calls it."""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ....errors import DeviceError
from ....util.cache_folder import library as open_library
from ..device import Gpu

SOURCE = Path(__file__).with_name("blocks.c")
FLAGS = ("-O2", "-shared", "-fPIC", "-pthread")
DRIVER = (
    "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuCtxSynchronize", "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode", "cuMemFree_v2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PoolState:
    """Of a pool: bytes, bytes and blocks in use, the longest free stretch, failed mallocs, and what the last wanted."""

    size: int
    used: int
    blocks: int
    longest: int
    failures: int
    asked: int


@cache
def _loaded(path: Path) -> tuple[str, Any]:
    """The library and how it was opened; blocks in it go on when the pool's Python half is gone."""
    checked = open_library(path)
    library = ctypes.CDLL(checked)
    u64 = ctypes.c_uint64
    library.blink_memory_open.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    library.blink_memory_add.argtypes = [ctypes.c_int, u64, u64]
    library.blink_memory_malloc.argtypes = [ctypes.c_int, ctypes.c_ssize_t, ctypes.c_void_p]
    library.blink_memory_malloc.restype = ctypes.c_void_p
    library.blink_memory_free.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.blink_memory_state.argtypes = [ctypes.c_int, ctypes.c_void_p]
    for name in ("state", "unseal", "leave"):
        getattr(library, f"blink_memory_{name}").restype = None
    return checked, library


class PoolBlocks:
    """The blocks of one pool, which has no memory yet.

    Args:
        path: of the compiled library.

    Raises:
        DeviceError: if this process has made as many pools as there is room for.
    """

    def __init__(self, path: Path, gpu: Gpu) -> None:
        self.path, self._library = _loaded(path)
        driver = (ctypes.c_void_p * len(DRIVER))(*(_address(gpu.driver, name) for name in DRIVER))
        self.number = self._library.blink_memory_open(driver, gpu.context_address, gpu.device)
        if self.number < 0:
            raise DeviceError("64 memory pools were made in this process, which is all there is room for; grow one")

    @property
    def functions(self) -> tuple[str, str]:
        """What its malloc and free are called in the library, for torch."""
        return f"blink_malloc_0{self.number:o}", f"blink_free_0{self.number:o}"

    def add(self, begin: int, nbytes: int) -> None:
        """Take a chunk of cudaMalloc, and free it in the end."""
        if self._library.blink_memory_add(self.number, begin, nbytes):
            raise MemoryError("the host has no memory for a block of a memory pool")

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """A block for work on any stream; 0 where there is no room."""
        return int(self._library.blink_memory_malloc(self.number, nbytes, stream) or 0)

    def free(self, at: int) -> None:
        """Give a block back; it is used again when the GPU's work of now is through."""
        self._library.blink_memory_free(self.number, at)

    @property
    def state(self) -> PoolState:
        """How much of it is used."""
        found = (ctypes.c_int64 * 6)()
        self._library.blink_memory_state(self.number, found)
        return PoolState(*found)

    def seal(self) -> bool:
        """Give out no more blocks, if none is in use; whether that is so."""
        return not self._library.blink_memory_seal(self.number)

    def unseal(self) -> None:
        """Undo :meth:`seal`."""
        self._library.blink_memory_unseal(self.number)

    def leave(self) -> None:
        """Give out no more blocks, and all memory back to the GPU as soon as none is in use."""
        self._library.blink_memory_leave(self.number)


def _address(library: Any, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
