"""Memory of others (torch's expandable segments, other libraries' pools) that was made to be shared by descriptors.

Such memory has no IPC handle. It is mapped in parts, each of an allocation of its own, and a buffer may lie in several.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ....errors import DeviceError
from ....util.together import Comm, gathered
from ..device import Gpu
from .descriptors import exchange, listen
from .virtual_memory import VirtualMemory, close_all

INSTEAD = "make it in a comm.memory_pool(bytes), or with cudaMalloc"


class Parts:
    """The parts that a buffer of this rank lies in.

    Raises:
        DeviceError: if they cannot be shared, with ``why``, the reason why there is no IPC handle.
    """

    def __init__(self, gpu: Gpu, at: int, nbytes: int, why: DeviceError) -> None:
        self.sizes: list[int] = []
        self.descriptors: list[int] = []
        memory, end = VirtualMemory(gpu.driver, gpu.device), at + nbytes
        if not memory.is_mapped(at):
            raise why
        with ExitStack() as undo:
            undo.callback(self.close)
            self.begin, _ = gpu.allocation(at)
            place = self.begin
            while place < end:
                _, size = gpu.allocation(place)
                try:
                    self.descriptors.append(memory.export_at(place))
                except DeviceError as error:
                    text = f"memory at {place:#x} was not made to be shared by file descriptors ({error}); {INSTEAD}"
                    raise DeviceError(text) from error
                self.sizes.append(size)
                place += size
            undo.pop_all()

    def close(self) -> None:
        """Close the descriptors, when peers have them or will not."""
        close_all(self.descriptors)
        self.descriptors = []


@contextmanager
def to_all(comm: Comm, own: Parts | None) -> Iterator[Callable[[], list[list[int]]]]:
    """What gives everybody's descriptors, by rank; collective, as its call is. They are closed at the end."""
    ends: list[socket.socket] = []
    with ExitStack() as opened:

        def begin() -> bytes:
            listener, address = listen()
            opened.callback(listener.close)
            ends.append(listener)
            return address

        addresses = gathered(comm, begin, bytes, error=DeviceError)

        def get() -> list[list[int]]:
            found = exchange(ends[0], addresses, comm.rank, own.descriptors if own else [])
            for some in found:
                opened.callback(close_all, some)
            return found

        yield get


def map_parts(gpu: Gpu, descriptors: list[int], sizes: list[int]) -> tuple[int, Callable[[], None]]:
    """Map a peer's parts one behind another; the address, and what unmaps them."""
    memory, at = VirtualMemory(gpu.driver, gpu.device), 0
    with ExitStack() as undo:
        at = memory.reserve(sum(sizes))
        undo.callback(memory.unreserve, at, sum(sizes))
        place = at
        for descriptor, size in zip(descriptors, sizes, strict=True):
            memory.map(descriptor, place, size)
            undo.callback(memory.unmap, place, size)
            place += size
        return at, undo.pop_all().close
