"""Point-to-point of GPU memory through pinned host memory, for an MPI that does not take GPU memory.

What is sent is copied to the host before MPI is called; what is received is copied to the GPU when MPI has it, as many
bytes as came. A non-blocking call gives a request of our own, which :class:`Poller`'s thread ends when the bytes are on
the GPU, so that MPI's functions of several requests (``Waitall``) work, too. To MPI these are messages like any other:
the peer may have its end in host memory.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI
from msgspec.structs import replace

from ...errors import ArgumentError, BufferTypeError, DeviceError
from ...program.memory import DeviceArray
from ...program.reduction import Array, dtype_of
from ...transport.cuda.device import cupy, device_of, why_none
from ...util.settings import log, read
from ..buffers import DelegatedToMPI, parse
from ..foreign import imported
from ..requests import Request

TO_HOST, TO_DEVICE = 2, 1  # cudaMemcpyKind
LONGEST_PAUSE_S = 1e-3  # between two looks at MPI's requests


class PinnedCopies:
    """Copies between GPU memory and pinned host memory, through CuPy."""

    def __init__(self) -> None:
        self._cupy = cupy()
        self._runtime = self._cupy.cuda.runtime
        self._streams: dict[int, Any] = {}  # our own, by device

    def room(self, nbytes: int) -> Array:
        """Pinned host memory, which lives as long as the array."""
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)

    def located(self, array: DeviceArray, name: str) -> DeviceArray:
        """The array with its device.

        Raises:
            BufferTypeError: if it is no memory of a GPU. ArgumentError: if its stream is being captured.
        """
        if array.device < 0 and array.nbytes:
            device = device_of(array.ptr)
            if device is None:
                raise BufferTypeError(f"{name}: {array.ptr:#x} is no memory of a GPU; pass a CuPy or NumPy array")
            array = replace(array, device=device)
        if self._runtime.streamIsCapturing(array.stream):
            raise ArgumentError(f"{name}: its stream is being captured in a CUDA graph, which host memory cannot join; "
                                "call it outside of the capture")  # fmt: skip
        return array

    def to_host(self, array: DeviceArray) -> Array:
        """What the array holds when the work on its stream is done."""
        room = self.room(array.nbytes)
        self._copy(room.ctypes.data, array.ptr, array.nbytes, TO_HOST, array)
        return room

    def to_device(self, room: Array, array: DeviceArray, nbytes: int) -> None:
        """Copy the first ``nbytes`` of the room to the GPU; returns when they are there."""
        self._copy(array.ptr, room.ctypes.data, nbytes, TO_DEVICE, array)

    def for_later(self, array: DeviceArray) -> DeviceArray:
        """The array on a stream of our own, behind the work that is on its stream now."""
        if not array.nbytes:
            return array
        with self._cupy.cuda.Device(array.device):
            if array.device not in self._streams:
                self._streams[array.device] = self._cupy.cuda.Stream(non_blocking=True)
            own = self._streams[array.device].ptr
            event = self._cupy.cuda.Event(disable_timing=True)
            self._runtime.eventRecord(event.ptr, array.stream)
            self._runtime.streamWaitEvent(own, event.ptr, 0)
        return replace(array, stream=own)

    def _copy(self, to: int, source: int, nbytes: int, kind: int, array: DeviceArray) -> None:
        if nbytes:
            with self._cupy.cuda.Device(array.device):
                self._runtime.memcpyAsync(to, source, nbytes, kind, array.stream)
                self._runtime.streamSynchronize(array.stream)


@cache
def copies() -> PinnedCopies:
    """What copies in this process.

    Raises:
        DeviceError: naming what is missing.
    """
    if why := why_none():
        raise DeviceError(why)
    return PinnedCopies()


@cache
def say_once(why: str) -> None:
    """Tell that messages are staged: as a warning on rank 0, for those who ask on others."""
    level = "WARN" if MPI.COMM_WORLD.rank == 0 else "INFO"
    log(read(), level, f"point-to-point of GPU memory goes through pinned host memory, because {why}")


def synchronize(obj: Any) -> None:
    """Wait until the work on the stream on which a GPU buffer was made is done: MPI knows of no streams.

    By the CUDA array interface an object that names no stream needs no waiting.
    """
    torch = imported("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        torch.cuda.current_stream(obj.device).synchronize()
    elif hasattr(obj, "__cuda_array_interface__"):
        stream = obj.__cuda_array_interface__.get("stream")
        if stream is not None:
            cupy().cuda.runtime.streamSynchronize(stream)
    else:
        cupy().cuda.runtime.deviceSynchronize()


@dataclass(slots=True)
class Staged:
    """A message's room in host memory, and where on the GPU it belongs."""

    room: Array
    array: DeviceArray
    kind: MPI.Datatype

    @property
    def spec(self) -> list[Any]:
        """The room as MPI is told of it."""
        size = self.kind.Get_size()
        return [self.room, self.room.nbytes // size, self.kind]


def stage(own: Callable[..., Any], arguments: dict[str, Any], ends: tuple[str, str], why: str) -> Any:
    """Make a point-to-point call of mpi4py with host memory in place of GPU memory.

    Args:
        own: mpi4py's method.
        arguments: its arguments by name, all of them, in their order.
        ends: the names of the argument that it sends from, and of the one that it receives into; or empty.

    Raises:
        BufferTypeError: where this process cannot copy, or for what is not staged.
    """
    name, (send, recv) = own.__name__, ends
    later = name.startswith("I")
    if later and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise BufferTypeError(
            f"{name} of GPU memory goes through host memory in another thread, for which MPI was not started "
            f"(mpi4py.rc.thread_level='multiple'); call {name[1:].capitalize()}, or pass NumPy copies"
        )
    try:
        by = copies()
    except DeviceError as error:
        raise BufferTypeError(
            f"{name} of GPU memory goes through host memory, because {why}, and here nothing can copy it there: "
            f"{error}; pass NumPy copies"
        ) from None
    here = dict(arguments)
    sent = _read(by, here[send], name, send, writable=send == recv) if send else None
    if sent is not None:
        sent.room = by.to_host(sent.array)
        here[send] = sent.spec
    received = sent if send == recv else _read(by, here[recv], name, recv, writable=True) if recv else None
    if received is not None:
        if received is not sent:
            received.room = by.room(received.array.nbytes)
        here[recv] = received.spec
        if later:
            received.array = by.for_later(received.array)
    say_once(why)
    if later:
        return POLLER.put(own(*here.values()), received, by)
    if received is None:
        own(*here.values())
        return None
    if here["status"] is None:
        here["status"] = MPI.Status()
    status: MPI.Status = here["status"]
    own(*here.values())
    by.to_device(received.room, received.array, status.Get_elements(MPI.BYTE))
    return None


def _read(by: PinnedCopies, spec: Any, method: str, name: str, *, writable: bool) -> Staged | None:
    """The GPU memory of a buffer specification; None for host memory, which stays as it is."""
    named = f"{method}({name})"
    if not isinstance(spec, list | tuple):
        kind: Any = None
    else:
        kind = next((part for part in spec[1:] if isinstance(part, MPI.Datatype | str)), None)
    try:
        buffer = parse(spec, name=named, writable=writable)
    except DelegatedToMPI as why:
        raise BufferTypeError(f"{why}, which is not staged; pass contiguous elements of one basic type") from None
    if not isinstance(buffer.array, DeviceArray):
        return None
    if kind is None:
        kind = dtype_of(buffer.dtype).char
    if isinstance(kind, str):
        kind = MPI._typedict.get(kind, MPI.BYTE)
    size = 0 if kind == MPI.DATATYPE_NULL else kind.Get_size()
    if size != buffer.array.itemsize:  # MPI lacks the element type: it is sent as bytes
        kind = MPI.BYTE
    return Staged(np.empty(0, np.uint8), by.located(buffer.array, named), kind)


@dataclass(slots=True)
class Pending:
    """A non-blocking call under way: MPI's request, and what becomes of it."""

    inner: MPI.Request
    received: Staged | None
    by: PinnedCopies
    status: MPI.Status = field(default_factory=MPI.Status)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, status: MPI.Status) -> None:
        """Fill in the status of our own request."""
        status.Set_source(self.status.source)
        status.Set_tag(self.status.tag)
        status.Set_elements(MPI.BYTE, self.nbytes)
        status.Set_cancelled(self.status.Is_cancelled())

    @property
    def nbytes(self) -> int:
        """Bytes that came."""
        return 0 if self.status.Is_cancelled() else self.status.Get_elements(MPI.BYTE)

    def cancel(self) -> None:
        """Cancel MPI's request, if it is still under way."""
        with self.lock:
            if self.inner != MPI.REQUEST_NULL:
                self.inner.Cancel()

    def test(self) -> bool:
        """Whether MPI's request is complete, and what it brought is on the GPU."""
        with self.lock:
            if not self.inner.Test(self.status):
                return False
        if self.received is not None and self.nbytes:
            self.by.to_device(self.received.room, self.received.array, self.nbytes)
        return True


class Poller:
    """One thread that completes the staged non-blocking calls of this process, in whatever order they end."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[tuple[Pending, Request] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.under_way = 0  # calls that have not ended

    def put(self, inner: MPI.Request, received: Staged | None, by: PinnedCopies) -> Request:
        """A request that ends when MPI's has, and its data are on the GPU."""
        pending = Pending(inner, received, by)
        request = Request(pending.tell, pending.cancel)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="blinkmpi-staging", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        with self._lock:
            self.under_way += 1
        self._new.put((pending, request))
        return request

    def close(self) -> None:
        """End the thread, before MPI ends; what is under way stays so."""
        if self._thread is not None:
            self._new.put(None)
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        calls: list[tuple[Pending, Request]] = []
        pause = 0.0
        while True:
            while not calls or not self._new.empty():
                item = self._new.get()
                if item is None:
                    return
                calls.append(item)
                del item  # and with it the user's buffers, when the call has ended
                pause = 0.0
            left = [call for call in calls if not _ended(*call)]
            pause = 0.0 if len(left) < len(calls) else min(pause + 1e-6, LONGEST_PAUSE_S)
            with self._lock:
                self.under_way -= len(calls) - len(left)
            calls = left
            time.sleep(pause)


def _ended(pending: Pending, request: Request) -> bool:
    """Look at a call; if it has ended, well or not, tell the one who waits."""
    try:
        if not pending.test():
            return False
    except Exception as error:
        request.finish(error)
        return True
    request.finish(None)
    return True


POLLER = Poller()
