"""Memory that a rank allocates once for its calls, and that all ranks of its node map.

Beside the symmetric memory itself there is what only the own kernels read: the table of registered buffers, the clocks
of emulated links, and, in pinned host memory, the report of a kernel that gave up.
"""

import ctypes
from contextlib import ExitStack

from ...errors import DeviceError
from ...util.together import Comm, gathered, together
from .device import Gpu
from .kernel_layout import REPORT
from .memory_layout import MAX_RANKS
from .regions import MAX_REGIONS

MAX_CLOCKS = 256
REPORT_WORDS = len(REPORT)


class SymmetricMemory:
    """This rank's memory, and the addresses at which it has mapped everybody's; collective.

    Args:
        nbytes: of each rank's symmetric memory.

    Raises:
        DeviceError: on every rank, if some rank has no room, or cannot map some other's; nothing stays allocated.
    """

    def __init__(self, comm: Comm, gpu: Gpu, nbytes: int) -> None:
        self._gpu = gpu
        self._opened: list[int] = []
        with ExitStack() as undo:

            def allocate(nbytes: int) -> int:
                at = gpu.allocate(nbytes)
                undo.callback(gpu.free, at)
                return at

            def prepare() -> bytes:
                gpu.use()
                self.own = allocate(nbytes)
                self.table = allocate(8 * MAX_RANKS * MAX_REGIONS)
                self.clocks = allocate(8 * MAX_CLOCKS)
                self.report_at = gpu.pinned(8 * REPORT_WORDS)
                undo.callback(gpu.free_pinned, self.report_at)
                return gpu.export(self.own)

            def map_all() -> None:
                for r, handle in enumerate(handles):
                    at = 0 if r == comm.rank else gpu.open(handle)
                    self._opened.append(at)
                    if at:
                        undo.callback(gpu.shut, at)

            handles = gathered(comm, prepare, bytes, error=DeviceError)
            together(comm, map_all, error=DeviceError)
            undo.pop_all()
        self.addresses = [at or self.own for at in self._opened]
        self.report = (ctypes.c_int64 * REPORT_WORDS).from_address(self.report_at)

    def unmap(self) -> None:
        """Unmap the other ranks' memory."""
        for at in filter(None, self._opened):
            self._gpu.shut(at)
        self._opened = []

    def free(self) -> None:
        """Free this rank's memory, when no rank has it mapped any more."""
        for at in (self.own, self.table, self.clocks):
            self._gpu.free(at)
        self._gpu.free_pinned(self.report_at)
