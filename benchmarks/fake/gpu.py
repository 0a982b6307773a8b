"""A GPU that is none: kernels are compiled and launched by nobody, so that what is left of a call is the host's part.

Ranks make a Communicator within :func:`fake_gpus`, and calls on tensors of torch's in host memory, which are shown as
memory of the GPU. Used by benchmarks/launch_cost.py and by tests.
"""

import contextlib
import ctypes
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from blinkmpi.errors import DeviceError
from blinkmpi.planning.on_demand import PlanOnDemand
from blinkmpi.planning.planner import make_plan
from blinkmpi.runtime import call_keys
from blinkmpi.runtime import context as runtime_context
from blinkmpi.runtime.cuda import buffers
from blinkmpi.runtime.cuda.context import CudaContext
from blinkmpi.topology import machine, modify
from blinkmpi.transport.cuda import device
from blinkmpi.transport.cuda.device import Capture, Kernel
from blinkmpi.transport.cuda.order import ORDER

EVENT = 99  # an event's handle
GPUS = count()  # that were made
DRIVER = Path(__file__).with_name("driver.c")
TOLD = ("launch", "wait", "record")  # by their numbers in driver.c
EXCHANGE = "__dlpack_c_exchange_api__"


class Launched(ctypes.Structure):
    """A launch as the driver was given it."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("function", "grid", "block", "stream")),
        ("words", ctypes.c_uint64 * 512),
    )


class Done(ctypes.Structure):
    """What the driver was told of streams: a launch, a wait for an event, a record of one."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("what", "stream", "event"))


class FakeDriver:
    """The functions of driver.c, and what they remember: ``driver["launches"]`` has how many there were."""

    LOG = 64

    def __init__(self, folder: str) -> None:
        made = str(Path(folder) / "driver.so")
        include = sysconfig.get_path("include")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", f"-I{include}", "-o", made, str(DRIVER)], check=True)
        self.code = ctypes.CDLL(made)
        exchange = ctypes.PyDLL(made).fake_exchange
        exchange.argtypes, exchange.restype = [ctypes.py_object], ctypes.py_object
        self.exchange = exchange
        self._log = (Launched * self.LOG).in_dll(self.code, "fake_log")
        self._done = (Done * self.LOG).in_dll(self.code, "fake_done")

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int64.in_dll(self.code, f"fake_{name}").value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int64.in_dll(self.code, f"fake_{name}").value = value

    def last(self, back: int = 0) -> tuple[int, int, int, int, list[int]]:
        """Function, grid, block, stream and words of the last launch, or of one before it."""
        found = self._log[(self["launches"] - 1 - back) % self.LOG]
        return found.function, found.grid, found.block, found.stream, list(found.words)[: self["words"]]

    def told(self, since: int) -> list[tuple[str, int, int]]:
        """What it was told of streams since it had been told ``since`` things: what, the stream, the event."""
        assert self["did"] - since <= self.LOG, "no more is remembered"
        found = (self._done[i % self.LOG] for i in range(since, self["did"]))
        return [(TOLD[one.what], one.stream, one.event) for one in found]

    def launch(self, *numbers: int) -> None:
        """What CuPy calls ``launchKernel``."""
        function, grid, _, _, block, _, _, _, stream, parameters, _ = numbers
        code = self.code.cuLaunchKernel(
            ctypes.c_void_p(function), grid, 1, 1, block, 1, 1, 0, ctypes.c_void_p(stream),
            ctypes.c_void_p(parameters), None,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"CUDA error {code}")


class FakeStream:
    """What is asked of CuPy's streams. A graph that is launched counts as the launches that it has."""

    def __init__(self, ptr: int, driver: FakeDriver) -> None:
        self.ptr, self._driver, self._before = ptr, driver, 0

    def begin_capture(self) -> None:
        self._driver["captured"], self._before = 1, self._driver["launches"]

    def end_capture(self) -> Any:
        made, self._driver["captured"] = self._driver["launches"] - self._before, 0

        def launch(stream: Any) -> None:
            self._driver["launches"] += made

        return SimpleNamespace(launch=launch)

    def synchronize(self) -> None:
        """Nothing is under way."""


class FakeGpu:
    """What is asked of a :class:`blinkmpi.transport.cuda.device.Gpu`."""

    sms, name, device, bus_id, capability = 132, "fake", 0, "0000:00:00.0", (9, 0)

    def __init__(self, driver: FakeDriver) -> None:
        self.fake, self.driver = driver, driver.code
        self._at, self.compiled = count(1 << 40, 1 << 30), 0
        self._captures = next(GPUS) << 32  # a capture has a number of its own
        self.records, self.followed = (
            0,
            dict[int, tuple[int, ...]](),
        )  # nodes that record an event, and what they follow
        self._pinned: dict[int, Any] = {}
        self._streams = count(1000)
        self.runtime = SimpleNamespace(deviceSynchronize=lambda: None)
        self.versions: dict[str, str] = {}

    @property
    def functions(self) -> dict[str, int]:
        """As the real one has it."""
        names = {
            "launch": "cuLaunchKernel", "current": "cuCtxGetCurrent", "attribute": "cuPointerGetAttribute",
            "capturing": "cuStreamIsCapturing", "wait": "cuStreamWaitEvent", "record": "cuEventRecord",
        }  # fmt: skip
        code = self.fake.code
        found = {name: ctypes.cast(getattr(code, symbol), ctypes.c_void_p).value or 0 for name, symbol in names.items()}
        return {**found, "context": 77, "device": 0}

    def use(self) -> None:
        """Nothing to do."""

    def allocate(self, nbytes: int) -> int:
        return next(self._at)

    def pinned(self, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(nbytes)
        self._pinned[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, at: int) -> None:
        """It was never allocated."""

    free_pinned = shut = free

    def export(self, at: int) -> bytes:
        return at.to_bytes(8, "little")

    def open(self, handle: bytes) -> int:
        return next(self._at)

    def allocation(self, at: int) -> tuple[int, int]:
        return at, 1 << 20

    def array(self, at: int, count: int, dtype: Any, owner: Any) -> Any:
        """Its address alone, as of CuPy's."""
        made = SimpleNamespace(data=SimpleNamespace(ptr=at))
        made.reshape = lambda shape: made
        return made

    def upload(self, to: int, data: bytes) -> None:
        """Nowhere."""

    def download(self, at: int, nbytes: int) -> bytes:
        """Zeros, as nothing was ever written."""
        return bytes(nbytes)

    def compile(self, source: str, name: str) -> Kernel:
        self.compiled += 1
        return Kernel(None, self.compiled, 64, self)  # type: ignore[arg-type]

    def capturing(self, stream: int) -> bool:
        return bool(self.fake["captured"]) and self.fake["only"] in (0, stream)

    def capture(self, stream: int) -> Capture:
        return Capture(self._captures + self.fake["captured"], 1, (self.fake["launches"],))

    def new_stream(self) -> Any:
        return FakeStream(next(self._streams), self.fake)

    @contextlib.contextmanager
    def timed(self, stream: int) -> Iterator[Callable[[], float]]:
        """Microseconds, one for each launch."""
        before = self.fake["launches"]
        yield lambda: 1e-6 * (self.fake["launches"] - before)

    def event(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(EVENT)

    def wait(self, stream: int, event: ctypes.c_void_p, *, external: bool = False) -> None:
        self._checked("cuStreamWaitEvent", ctypes.c_void_p(stream), event, int(external))

    def record(self, stream: int, event: ctypes.c_void_p) -> None:
        self._checked("cuEventRecord", event, ctypes.c_void_p(stream))

    def _checked(self, name: str, *args: Any) -> None:
        if code := getattr(self.driver, name)(*args):
            raise DeviceError(f"{name}: CUDA error {code}")

    def add_record(self, capture: Capture, event: ctypes.c_void_p) -> int:
        self.records += 1
        return self.records

    def move_node(self, capture: Capture, node: int, before: Sequence[int]) -> None:
        assert self.followed.get(node, ()) == tuple(before)
        self.followed[node] = capture.before

    def mark(self, stream: int) -> int:
        return 0

    def idle(self, on: Any) -> bool:
        return True

    def after(self, stream: int, other: int) -> None:
        """Nothing is under way."""

    def why_not_here(self, at: int) -> str:
        self.fake["asked"] += 1
        return "it lies on GPU 1" if at == self.fake["foreign"] else ""

    def current_stream(self) -> int:
        return 0

    def entered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.contextmanager
def fresh_order() -> Iterator[None]:
    """The process's order of calls as if none had been made; then again as it was."""
    state, holders = ORDER.state, [*ORDER.holders]
    before = bytes(state)
    ORDER.holders.clear()
    ctypes.memset(ctypes.byref(state), 0, ctypes.sizeof(state))
    try:
        yield
    finally:
        ctypes.memmove(ctypes.byref(state), before, len(before))
        ORDER.holders[:] = holders


@contextlib.contextmanager
def fake_gpus(algo: str = "", gate_from: int | None = None) -> Iterator[FakeDriver]:
    """Communicators that are made within this have GPUs of an H200 machine, whose memory torch's tensors lie in.

    Args:
        algo: as in ``BLINKMPI_ALGO``.
        gate_from: as in ``BLINKMPI_GATE_FROM``.
    """
    import torch

    def open_fakes(comm: Any, *_: Any, **__: Any) -> tuple[CudaContext, str]:
        topology = modify(machine("hgx-h200"), gpus=",".join(map(str, range(comm.size))))
        plans = PlanOnDemand(comm, topology, make_plan(topology, gpus="onehop", algo=algo))
        gpu: Any = FakeGpu(driver)
        say: Any = lambda text, level: None  # noqa: E731
        return CudaContext(comm, gpu, topology, plans, emulated=False, say=say, gate_from=gate_from), ""

    def current_stream(*_: Any) -> int:
        return driver["current_stream"]

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        driver = FakeDriver(folder)
        cupy = SimpleNamespace(cuda=SimpleNamespace(driver=SimpleNamespace(launchKernel=driver.launch)))
        patches: Sequence[tuple[Any, str, Any]] = (
            (device, "cupy", lambda: cupy), (runtime_context, "open_gpus", open_fakes), (torch.Tensor, "is_cuda", True),
            (torch.Tensor, "get_device", lambda _: 0),
            *((module, "current_stream_of_torch", current_stream) for module in (buffers, call_keys)),
        )  # fmt: skip
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        own = getattr(torch.Tensor, EXCHANGE, None)
        if own is not None:
            stack.enter_context(mock.patch.object(torch.Tensor, EXCHANGE, driver.exchange(own), create=True))
        with fresh_order():
            yield driver
