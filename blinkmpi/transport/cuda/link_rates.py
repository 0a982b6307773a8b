"""Link measurements of one GPU for ``blinkmpi topo --measure``: copies and stores to peers, flags, the host path.

Every rank has one allocation that the others map: a send buffer, a receive buffer, and a flag for each peer.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import DeviceError
from .device import Gpu, cupy
from .kernels.compiler import kernel_source

NBYTES = 256 << 20
HOST_BYTES = 64 << 20
PACK = 16
LINE = 128
THREADS = 512
WARM = 200
TRIPS = 2000
PATIENCE_S = 10.0
SOURCE = "rates.cu"


class Rates:
    """The measurements of one rank.

    Args:
        me, n: this rank's number and how many there are on the node.
    """

    def __init__(self, gpu: Gpu, me: int, n: int, *, nbytes: int = NBYTES, host_bytes: int = HOST_BYTES) -> None:
        self.gpu, self.me, self.n, self.nbytes, self.host_bytes = gpu, me, n, nbytes, host_bytes
        self._sink, self._flags, self._spent = nbytes, 2 * nbytes, 2 * nbytes + n * LINE
        self._base = self._host = 0
        self._peers: dict[int, int] = {}
        self._trips = [0] * n
        self._stream: Any = cupy().cuda.Stream(non_blocking=True)
        try:
            self._base = gpu.allocate(self._spent + LINE)
            self._host = gpu.pinned(2 * host_bytes)
            self._push = gpu.compile(kernel_source(SOURCE), "push")
            self._flag = gpu.compile(kernel_source(SOURCE), "flag")
        except BaseException:
            self.close()
            raise

    def handle(self) -> bytes:
        """The IPC handle of this rank's memory."""
        return self.gpu.export(self._base)

    def connect(self, handles: Sequence[bytes]) -> dict[int, str]:
        """Map the peers' memory, given all handles; returns those that cannot be mapped, and why."""
        lost: dict[int, str] = {}
        for peer, handle in enumerate(handles):
            if peer != self.me:
                try:
                    self._peers[peer] = self.gpu.open(handle)
                except Exception as error:  # CUDARuntimeError, whose class comes with CuPy
                    lost[peer] = str(error)
        return lost

    def disconnect(self) -> None:
        """Unmap the peers' memory; they may free it after all ranks have done so."""
        self._stream.synchronize()
        while self._peers:
            self.gpu.shut(self._peers.popitem()[1])

    def close(self) -> None:
        """Free this rank's memory."""
        if self._base:
            self.gpu.free(self._base)
        if self._host:
            self.gpu.free_pinned(self._host)
        self._base = self._host = 0

    # ---- seconds

    def copy(self, peer: int, times: int) -> float:
        """Copies into a peer's memory by the copy engine."""
        to = self._peers[peer] + self._sink
        return self._timed(lambda: self.gpu.copy(to, self._base, self.nbytes, self._stream.ptr), times)

    def push(self, peer: int, times: int) -> float:
        """Copies into a peer's memory by 16-byte stores from all multiprocessors."""
        args = self._arguments(self._peers[peer] + self._sink, self._base, self.nbytes // PACK)
        launch = self._push.launcher(self.gpu.sms, THREADS, self._stream.ptr, args[0], "push")
        return self._timed(launch, times)

    def to_host(self, times: int) -> float:
        """Copies into pinned host memory."""
        return self._timed(lambda: self._host_copy(self._host, self._base, 2), times)

    def from_host(self, times: int) -> float:
        """Copies from pinned host memory."""
        to, source = self._base + self._sink, self._host + self.host_bytes
        return self._timed(lambda: self._host_copy(to, source, 1), times)

    def flag(self, peer: int) -> float:
        """One round trip of a flag, the mean of many; the peer must call it at the same time.

        Raises:
            DeviceError: if the peer does not answer.
        """
        spent = self._base + self._spent
        self.gpu.upload(spent, bytes(8))
        theirs, mine = self._peers[peer] + self._flags + self.me * LINE, self._base + self._flags + peer * LINE
        numbers = (ctypes.c_uint32(x) for x in (self._trips[peer], WARM, TRIPS, int(self.me < peer)))
        args = self._arguments(theirs, mine, spent, *numbers, round(PATIENCE_S * 1e9))
        self._trips[peer] += WARM + TRIPS
        self._flag.launcher(1, 32, self._stream.ptr, args[0], "flag")()
        self._stream.synchronize()
        found = int.from_bytes(self.gpu.download(spent, 8), "little")
        if not found:
            raise DeviceError(f"GPU {peer} of the node has not answered for {PATIENCE_S:g} s; is it in use by others?")
        return found / TRIPS * 1e-9

    def received(self, nbytes: int, *, at: int = 0) -> bytes:
        """The content of the receive buffer."""
        return self.gpu.download(self._base + self._sink + at, nbytes)

    def send(self, data: bytes, *, at: int = 0) -> None:
        """Fill the send buffer."""
        self.gpu.upload(self._base + at, data)

    def _timed(self, enqueue: Callable[[], None], times: int) -> float:
        with self.gpu.timed(self._stream.ptr) as seconds:
            for _ in range(times):
                enqueue()
        self._stream.synchronize()
        return seconds()

    def _host_copy(self, to: int, source: int, kind: int) -> None:
        self.gpu.runtime.memcpyAsync(to, source, self.host_bytes, kind, self._stream.ptr)

    @staticmethod
    def _arguments(*values: Any) -> tuple[Any, list[Any]]:
        """Pointers to a kernel's arguments, and the arguments, to be kept as long; plain integers have 64 bits."""
        held = [ctypes.c_uint64(v) if isinstance(v, int) else v for v in values]
        return (ctypes.c_void_p * len(held))(*(ctypes.addressof(v) for v in held)), held
