"""Slots in host memory that all GPUs of a node reach: the host path beside NVLink (Blink section 3.4).

Writers store over PCIe and readers load over PCIe. The memory is shared by the processes and pinned by each rank.
"""

from ...errors import DeviceError
from ...util.shared_memory import SHM, shared_memory
from ...util.text import size_text
from ...util.together import Comm, together
from .device import Gpu


class HostSlots:
    """This rank's mapping of the shared slots; collective over ``comm``, the ranks of a node.

    Raises:
        DeviceError: on every rank, if there is no room for them, or some rank cannot pin them.
    """

    def __init__(self, gpu: Gpu, nbytes: int, comm: Comm) -> None:
        share = -(-nbytes // comm.size)
        memory = shared_memory(comm, nbytes, [(comm.rank * share, min(share, nbytes - comm.rank * share))])
        if memory is None:
            raise DeviceError(
                f"the host path beside NVLink takes {size_text(nbytes)} of {SHM}, which has no room for it: enlarge it "
                "(docker run --shm-size=1g), or choose schemes without it (BLINKMPI_ALGO)"
            )
        self._map, self._gpu = memory, gpu
        self._at = together(comm, lambda: gpu.pin(memory), error=DeviceError)
        self.address = gpu.seen_by_device(self._at)

    def close(self) -> None:
        """Unpin and unmap."""
        self._gpu.unpin(self._at)
        self._map.close()
