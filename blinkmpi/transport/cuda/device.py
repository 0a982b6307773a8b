"""The GPU of this rank, through CuPy and the CUDA driver: memory, IPC, streams, compilation, launches.

CuPy is imported when a GPU is asked for, never before.
"""

import contextlib
import ctypes
import importlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from ...errors import DeviceError

PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
OF_DEVICE = (2, 3)  # cudaMemoryType: device, managed
PINNED_MAPPED = 1 | 2  # cudaHostAllocPortable | cudaHostAllocMapped
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
NO_TIMES = 2  # CU_EVENT_DISABLE_TIMING
NOT_READY, INVALID_CONTEXT, INVALID_HANDLE, IMPLICIT = 600, 201, 400, 906  # of CUresult
REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS


@cache
def cupy() -> Any:
    """The cupy module.

    Raises:
        DeviceError: naming what to install.
    """
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise DeviceError(f"CuPy is missing ({error}); pip install 'blinkmpi[cuda13]' (or [cuda12])") from error


def device_count() -> int:
    """GPUs that this process sees; 0 without CuPy or without a driver, for which :func:`why_none` has the reason."""
    return 0 if why_none() else int(cupy().cuda.runtime.getDeviceCount())


@cache
def why_none() -> str:
    """Why this process has no GPU, or an empty text."""
    try:
        runtime = cupy().cuda.runtime
        return "" if runtime.getDeviceCount() else "the CUDA driver shows no device"
    except DeviceError as error:
        return str(error)
    except Exception as error:  # CUDARuntimeError, whose class comes with CuPy
        return f"CUDA: {error}"


def device_with(uuid: bytes) -> int:
    """CUDA's number of the GPU that has a UUID of 16 bytes, among those that this process sees.

    Raises:
        DeviceError: if it sees no such GPU.
    """
    if why := why_none():
        raise DeviceError(why)
    for index in range(device_count()):
        device, found = ctypes.c_int(), ctypes.create_string_buffer(16)
        code = _driver().cuDeviceGet(ctypes.byref(device), index) or _driver().cuDeviceGetUuid_v2(found, device)
        if not code and found.raw == uuid:
            return index
    raise DeviceError(f"none of the {device_count()} GPUs that CuPy sees has the UUID {uuid.hex()}; let CuPy and the "
                      "program use one driver and one CUDA_VISIBLE_DEVICES")  # fmt: skip


def device_of(at: int) -> int | None:
    """CUDA's number of the GPU whose memory lies at an address; None for what is no memory of a GPU."""
    found = cupy().cuda.runtime.pointerGetAttributes(at)
    return int(found.device) if found.type in OF_DEVICE else None


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel."""

    module: Any  # keeps the code loaded
    handle: int
    registers: int
    gpu: "Gpu"

    def launcher(self, grid: int, block: int, stream: int, params: Any, what: str) -> Callable[[], None]:
        """A function that launches the kernel, with all arguments converted beforehand; it raises DeviceError.

        It uses CuPy's launchKernel, because ctypes takes half as long again.

        Args:
            params: a ctypes array of pointers to the arguments, which must outlive the function.
            what: names the call in the error.
        """
        launch = cupy().cuda.driver.launchKernel
        numbers = (self.handle, grid, 1, 1, block, 1, 1, 0, stream, ctypes.addressof(params), 0)

        def start() -> None:
            try:
                try:
                    launch(*numbers)
                except Exception as error:  # CuPy's CUDADriverError
                    if getattr(error, "status", 0) not in (INVALID_CONTEXT, INVALID_HANDLE):
                        raise
                    with self.gpu.entered():  # a thread that has not used the GPU before, or uses another one
                        launch(*numbers)
            except Exception as error:
                raise DeviceError(f"launch of {what}: {error}; this process must be started again") from error

        return start


class Capture(NamedTuple):
    """What a stream is captured into: the number of the capture, the graph, and what the next node would follow."""

    number: int
    graph: int
    before: tuple[int, ...]


class Gpu:
    """One device, used by one process.

    Args:
        index: CUDA's number among the devices that this process sees.

    Raises:
        DeviceError: if CUDA makes no context there.
    """

    def __init__(self, index: int) -> None:
        self.device = index
        self._cupy = cupy()
        self.runtime = self._cupy.cuda.runtime
        try:
            self.use()
            self.runtime.free(0)  # makes the context
        except Exception as error:  # CuPy's CUDARuntimeError
            why = "does another process have it for itself (nvidia-smi: compute mode), or has its MPS server failed?"
            raise DeviceError(f"GPU {index} cannot be used: {error}; {why}") from error
        properties = self.runtime.getDeviceProperties(index)
        self.name: str = properties["name"].decode()
        self.sms: int = properties["multiProcessorCount"]
        self.capability: tuple[int, int] = (properties["major"], properties["minor"])
        self.bus_id: str = self.runtime.deviceGetPCIBusId(index)
        self.driver = _driver()
        self.stream = self._cupy.cuda.Stream(non_blocking=True)  # of our own copies, which wait for no other work
        self._context = ctypes.c_void_p()
        self.driver.cuCtxGetCurrent(ctypes.byref(self._context))
        self._kernels: dict[tuple[str, str], Kernel] = {}

    def use(self) -> None:
        """Make it the current device of this thread."""
        self.runtime.setDevice(self.device)

    @property
    def context_address(self) -> int:
        """CUDA's context of it, for C."""
        return self._context.value or 0

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Work with this GPU in a thread whose current device may be another, also while a stream is captured."""
        return _Entered(self.driver, self._context)

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        """Allocate zeroed device memory, by an allocation of its own as IPC needs it; returns its address.

        Raises:
            DeviceError: if there is no room.
        """
        try:
            at = int(self.runtime.malloc(nbytes))
        except Exception as error:  # CuPy's CUDARuntimeError
            raise DeviceError(f"{nbytes} bytes on GPU {self.device}: {error}; free memory, or take less") from error
        self.runtime.memsetAsync(at, 0, nbytes, self.stream.ptr)
        self.stream.synchronize()
        return at

    def free(self, at: int) -> None:
        """Free what :meth:`allocate` returned."""
        self.runtime.free(at)

    def pinned(self, nbytes: int) -> int:
        """Allocate zeroed pinned host memory, which host and device see at the same address."""
        at = int(self.runtime.hostAlloc(nbytes, PINNED_MAPPED))
        ctypes.memset(at, 0, nbytes)
        return at

    def free_pinned(self, at: int) -> None:
        """Free what :meth:`pinned` returned."""
        self.runtime.freeHost(at)

    def pin(self, memory: mmap.mmap) -> int:
        """Pin mapped host memory so that the device reaches it; returns its address here."""
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        at = ctypes.addressof(view)
        del view  # or the map could never be closed
        self.runtime.hostRegister(at, len(memory), PINNED_MAPPED)
        return at

    def unpin(self, at: int) -> None:
        """Undo :meth:`pin`."""
        self.runtime.hostUnregister(at)

    def seen_by_device(self, at: int) -> int:
        """The device's address of pinned host memory."""
        found = ctypes.c_uint64()
        code = self.driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(at), 0)
        if code:
            raise DeviceError(f"cuMemHostGetDevicePointer: CUDA error {code}")
        return found.value

    def export(self, at: int) -> bytes:
        """The IPC handle of the allocation that begins at ``at``.

        Raises:
            DeviceError: for memory that CUDA does not share, or where it shares none (MIG, containers).
        """
        try:
            return bytes(self.runtime.ipcGetMemHandle(at))
        except Exception as error:  # CuPy's CUDARuntimeError
            raise DeviceError(
                f"cudaIpcGetMemHandle of {at:#x}: {error}; memory that is shared comes from cudaMalloc, "
                "or lies in a comm.memory_pool(bytes)"
            ) from error

    def open(self, handle: bytes) -> int:
        """Map a peer's allocation; returns its address here. DeviceError where it cannot be reached."""
        try:
            return int(self.runtime.ipcOpenMemHandle(handle, PEER_ACCESS))
        except Exception as error:  # CuPy's CUDARuntimeError
            raise DeviceError(f"cudaIpcOpenMemHandle: {error}; blinkmpi doctor looks for the reason") from error

    def shut(self, at: int) -> None:
        """Unmap a peer's allocation."""
        self.runtime.ipcCloseMemHandle(at)

    def allocation(self, at: int) -> tuple[int, int]:
        """(begin, bytes) of the allocation that holds an address.

        Raises:
            DeviceError: if it is not device memory of this process.
        """
        begin, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self.driver.cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(at))
        if code:
            raise DeviceError(f"address {at:#x} is no memory of this GPU (CUDA error {code}); pass a device array")
        return begin.value, size.value

    def why_not_here(self, at: int) -> str:
        """Why this GPU's kernels may not use an address, or an empty text; asks the driver."""
        device = device_of(at)
        if device is None:
            return f"address {at:#x} is host memory, though its object says GPU"
        return "" if device == self.device else f"it lies on GPU {device}, this rank's is GPU {self.device}"

    def upload(self, to: int, data: bytes) -> None:
        """Copy host bytes to device memory; waits."""
        source = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
        self.runtime.memcpyAsync(to, source, len(data), 1, self.stream.ptr)
        self.stream.synchronize()

    def download(self, at: int, nbytes: int) -> bytes:
        """Device memory's content; waits."""
        buffer = ctypes.create_string_buffer(nbytes)
        self.runtime.memcpy(ctypes.addressof(buffer), at, nbytes, 2)
        return buffer.raw

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy device memory on a stream."""
        self.runtime.memcpyAsync(to, source, nbytes, 3, stream)

    def array(self, at: int, count: int, dtype: Any, owner: Any) -> Any:
        """A 1-D CuPy array over device memory that ``owner`` keeps allocated."""
        nbytes = count * self._cupy.dtype(dtype).itemsize
        memory = self._cupy.cuda.UnownedMemory(at, nbytes, owner, self.device)
        return self._cupy.ndarray((count,), dtype, self._cupy.cuda.MemoryPointer(memory, 0))

    # ---- code

    def compile(self, source: str, name: str) -> Kernel:
        """Compile a kernel for this GPU, once; what was made is kept on disk, too.

        Raises:
            DeviceError: with the compiler's messages.
        """
        from .kernels.compiler import machine_code

        key = (source, name)
        if key not in self._kernels:
            try:
                code = machine_code(self._cupy.cuda.nvrtc, source, self.capability)
                module = self._cupy.cuda.Module()
                module.load(code)
                handle = int(module.get_function(name).ptr)
            except Exception as error:  # CuPy's NVRTCError and CUDADriverError
                raise DeviceError(f"kernel {name} does not compile for {self.name}: {error}") from error
            registers = ctypes.c_int()
            self.driver.cuFuncGetAttribute(ctypes.byref(registers), REGISTERS, ctypes.c_void_p(handle))
            self._kernels[key] = Kernel(module, handle, registers.value, self)
        return self._kernels[key]

    # ---- streams

    @cached_property
    def functions(self) -> dict[str, int]:
        """For who calls the driver without Python: where its functions lie, our context, and our number."""
        names = {
            "launch": "cuLaunchKernel", "current": "cuCtxGetCurrent", "attribute": "cuPointerGetAttribute",
            "capturing": "cuStreamIsCapturing", "wait": "cuStreamWaitEvent", "record": "cuEventRecord",
        }  # fmt: skip
        at = {name: ctypes.cast(getattr(self.driver, symbol), ctypes.c_void_p) for name, symbol in names.items()}
        found = {name: address.value or 0 for name, address in at.items()}
        return {**found, "context": self._context.value or 0, "device": self.device}

    def new_stream(self) -> Any:
        """A stream of our own, whose kernels begin before those of the user's that wait."""
        return self._cupy.cuda.Stream(non_blocking=True, priority=-1)

    def current_stream(self) -> Any:
        """CuPy's current stream, as an object that keeps it alive."""
        return self._cupy.cuda.get_current_stream()

    def capturing(self, stream: int) -> bool:
        """Whether a stream is captured into a CUDA graph; or it is the default one, and one that waits for it is."""
        try:
            return bool(self.runtime.streamIsCapturing(stream))
        except Exception as error:  # CuPy's CUDARuntimeError
            if getattr(error, "status", 0) != IMPLICIT:
                raise
            return True

    def capture(self, stream: int) -> Capture:
        """What a stream is being captured into."""
        state, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        before, n = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        out = map(ctypes.byref, (state, number, graph, before, n))
        self._checked("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *out)
        return Capture(number.value, graph.value or 0, tuple(before[i] or 0 for i in range(n.value)))

    def event(self) -> ctypes.c_void_p:
        """An event without times, which lives as long as the process."""
        made = ctypes.c_void_p()
        self._checked("cuEventCreate", ctypes.byref(made), NO_TIMES)
        return made

    def wait(self, stream: int, event: ctypes.c_void_p, *, external: bool = False) -> None:
        """Make later work on a stream wait for an event as it is now; as it is when the graph runs, if ``external``."""
        self._checked("cuStreamWaitEvent", ctypes.c_void_p(stream), event, int(external))

    def record(self, stream: int, event: ctypes.c_void_p) -> None:
        """Let an event stand for the work that is now on a stream."""
        self._checked("cuEventRecord", event, ctypes.c_void_p(stream))

    def add_record(self, capture: Capture, event: ctypes.c_void_p) -> int:
        """Add a node to a graph that records an event, and that follows nothing yet."""
        made, none = ctypes.c_void_p(), ctypes.c_size_t()
        self._checked(
            "cuGraphAddEventRecordNode", ctypes.byref(made), ctypes.c_void_p(capture.graph), None, none, event
        )
        return made.value or 0

    def move_node(self, capture: Capture, node: int, before: Sequence[int]) -> None:
        """Let a node of a graph follow what is captured so far, in place of the nodes ``before``."""
        for name, nodes in ("cuGraphRemoveDependencies", before), ("cuGraphAddDependencies", capture.before):
            if nodes:
                n = len(nodes)
                ends = (ctypes.c_void_p * n)(*nodes), (ctypes.c_void_p * n)(*[node] * n)
                self._checked(name, ctypes.c_void_p(capture.graph), *ends, ctypes.c_size_t(n))

    def _checked(self, name: str, *args: Any) -> None:
        """Call a function of the driver, in our context.

        Raises:
            DeviceError: with its error.
        """
        with self.entered():
            code = getattr(self.driver, name)(*args)
        if code:
            raise DeviceError(f"{name}: CUDA error {code}")

    def after(self, stream: int, other: int) -> None:
        """Make later work on ``stream`` wait for the work that is now on ``other``."""
        with self.entered():
            event = self._cupy.cuda.Event(disable_timing=True)
            self.runtime.eventRecord(event.ptr, other)
            self.runtime.streamWaitEvent(stream, event.ptr, 0)

    def mark(self, stream: int) -> Any:
        """An event behind the work that is now on ``stream``."""
        with self.entered():
            event = self._cupy.cuda.Event(disable_timing=True)
            self.runtime.eventRecord(event.ptr, stream)
            return event

    @contextlib.contextmanager
    def timed(self, stream: int) -> Iterator[Callable[[], float]]:
        """Time the work enqueued within the block; the result gives seconds, after the stream has finished."""
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        self.runtime.eventRecord(begin.ptr, stream)
        yield lambda: float(self._cupy.cuda.get_elapsed_time(begin, end)) * 1e-3
        self.runtime.eventRecord(end.ptr, stream)

    def idle(self, on: Any) -> bool:
        """Whether a stream (given by its address) has finished its work, or an event has occurred.

        Raises:
            DeviceError: if its work failed; the process must end, CUDA does not recover.
        """
        query = self.driver.cuStreamQuery if isinstance(on, int) else self.driver.cuEventQuery
        at = ctypes.c_void_p(on if isinstance(on, int) else on.ptr)
        code = query(at)
        if code in (INVALID_CONTEXT, INVALID_HANDLE):  # a thread that has not used the GPU before
            with self.entered():
                code = query(at)
        if code == NOT_READY:
            return False
        if code:
            raise DeviceError(f"the GPU's work failed with CUDA error {code}; this process must be started again")
        return True

    @cached_property
    def versions(self) -> dict[str, str]:
        """CuPy, CUDA runtime and driver."""
        numbers = {"driver_api": self.runtime.driverGetVersion(), "runtime": self.runtime.runtimeGetVersion()}
        named = {name: f"{v // 1000}.{v % 1000 // 10}" for name, v in numbers.items()}
        return {"cupy": str(self._cupy.__version__), **named}


class _Entered(contextlib.AbstractContextManager[None]):
    """Makes a context the thread's current one, and its capture mode relaxed.

    CUDA forbids allocations, loading of code and queries of events to a thread that captures a stream, and, if the
    capture is global, to all threads; whoever does not touch the captured stream may allow them to itself.
    """

    __slots__ = "_context", "_driver", "_mode"

    def __init__(self, driver: Any, context: ctypes.c_void_p) -> None:
        self._driver, self._context = driver, context
        self._mode = ctypes.c_int(RELAXED)

    def __enter__(self) -> None:
        self._driver.cuCtxPushCurrent_v2(self._context)
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))

    def __exit__(self, *_: object) -> None:
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@cache
def _driver() -> Any:
    """libcuda."""
    return ctypes.CDLL("libcuda.so.1")
