"""Slots in host memory that all ranks of a node share and all their GPUs reach: the host path beside NVLink.

Writers store over PCIe, readers load over PCIe (Blink section 3.4, hybrid
transfers). The memory is a file in /dev/shm without a name, pinned by each rank.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable

from .device import Gpu

SHM = "/dev/shm"


class HostSlots:
    """This rank's map of the shared slots.

    Args:
        share: gives rank 0's text to all ranks; collective.
        meet: a barrier of all ranks.
    """

    def __init__(self, gpu: Gpu, nbytes: int, rank: int, share: Callable[[str], str], meet: Callable[[], None]) -> None:
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
        meet()
        if rank == 0:
            os.unlink(path)
        self._gpu, self._at = gpu, gpu.pin(self._map)
        self.address = gpu.seen_by_device(self._at)

    def close(self) -> None:
        """Unpin and unmap."""
        self._gpu.unpin(self._at)
        self._map.close()
