"""Slots in host memory that all GPUs of a node reach: the host path beside NVLink (Blink section 3.4).

Writers store over PCIe and readers load over PCIe. The memory is an unlinked file in /dev/shm, pinned by each rank.
"""

import mmap
import os
import tempfile
from collections.abc import Callable

from .device import Gpu

SHM = "/dev/shm"


class HostSlots:
    """This rank's mapping of the shared slots.

    Args:
        share: broadcasts rank 0's text; collective.
        barrier: of all ranks.
    """

    def __init__(
        self, gpu: Gpu, nbytes: int, rank: int, share: Callable[[str], str], barrier: Callable[[], None]
    ) -> None:
        path = ""
        if rank == 0:
            file, path = tempfile.mkstemp(prefix="blinkmpi-", dir=SHM)
            os.ftruncate(file, nbytes)
            os.close(file)
        path = share(path)
        file = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(file, nbytes)
        finally:
            os.close(file)
        barrier()
        if rank == 0:
            os.unlink(path)
        self._gpu, self._at = gpu, gpu.pin(self._map)
        self.address = gpu.seen_by_device(self._at)

    def close(self) -> None:
        """Unpin and unmap."""
        self._gpu.unpin(self._at)
        self._map.close()
