"""Time calls of the door beside NCCL's, on the ranks that ``mpirun`` started: ``blinkmpi tune --beside nccl``.

Ours are launched by the door's own C from records, as in an unchanged program; NCCL is called by its C interface. Both
take turns on the same buffers, plain and in CUDA graphs. A time is the median of repeats, each the maximum over ranks.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ..communicator import Communicator
from ..errors import ArgumentError, DeviceError
from ..program.call import BLOCKED
from ..program.reduction import dtype_of
from ..transport.cuda.device import Gpu
from ..util.together import allgather, bcast, together
from .binder import COLLECTIVES, Kind, OpenGpus, Record
from .counts import OPS, TYPES
from .library import SONAME, door, find_nccl
from .table import DTYPES, Measured

REPEATS, WARMUP = 9, 2
BATCH_S, MOST, FEWEST = 0.004, 50, 5  # of one repeat, and its calls
REDUCTIONS = ("allreduce", "reduce_scatter", "reduce")
FUNCTIONS = {
    "allreduce": "ncclAllReduce", "allgather": "ncclAllGather", "reduce_scatter": "ncclReduceScatter",
    "broadcast": "ncclBroadcast", "reduce": "ncclReduce", "alltoall": "ncclAlltoAll",
}  # fmt: skip
Enqueue = Callable[[], None]


class DoorCall(ctypes.Structure):
    """``door_call_t`` of binder.h."""

    _fields_ = (
        ("send", ctypes.c_void_p), ("recv", ctypes.c_void_p), ("count", ctypes.c_uint64), ("number", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
    )  # fmt: skip


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class Nccl:
    """NCCL's communicator of these ranks; collective.

    Raises:
        ArgumentError, RemoteError: on every rank, if NCCL is missing or refuses.
    """

    def __init__(self, comm: Any) -> None:
        def opened() -> ctypes.CDLL:
            path = find_nccl()
            if path is None:
                raise ArgumentError(f"--beside nccl: no {SONAME} was found; set BLINKMPI_NCCL_LIBRARY to its path")
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)

        self.library = together(comm, opened)
        one, version, self._comm = UniqueId(), ctypes.c_int(), ctypes.c_void_p()
        if comm.rank == 0:
            self._checked("ncclGetUniqueId", self.library.ncclGetUniqueId(ctypes.byref(one)))
        one = UniqueId.from_buffer_copy(bcast(comm, bytes(one), bytes))
        self._checked("ncclGetVersion", self.library.ncclGetVersion(ctypes.byref(version)))
        self.version = f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"
        self.library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        code = self.library.ncclCommInitRank(ctypes.byref(self._comm), comm.size, one, comm.rank)
        together(comm, lambda: self._checked("ncclCommInitRank", code))

    def lacks(self, name: str) -> bool:
        """Whether this NCCL has no such collective."""
        return not hasattr(self.library, FUNCTIONS[name])

    def caller(self, kind: Kind, elements: int, send: int, recv: int, stream: int) -> Enqueue:
        """What enqueues a call of a kind."""
        function = getattr(self.library, FUNCTIONS[kind.name])
        more = [ctypes.c_int(number) for number in (kind.op, kind.root) if number >= 0]
        ends = ctypes.c_void_p(send), ctypes.c_void_p(recv), ctypes.c_size_t(elements), ctypes.c_int(kind.type)
        words = (*ends, *more, self._comm, ctypes.c_void_p(stream))

        def enqueue() -> None:
            if code := function(*words):
                self._checked(FUNCTIONS[kind.name], code)

        return enqueue

    def close(self) -> None:
        """Destroy it."""
        self.library.ncclCommDestroy(self._comm)

    def _checked(self, name: str, code: int) -> None:
        if code:
            raise DeviceError(f"{name}: NCCL's error {code}; NCCL_DEBUG=WARN says more")


class Ours:
    """Calls as the door makes them, of a communicator that is already open."""

    def __init__(self, context: OpenGpus, library: Path) -> None:
        self._context, self._numbers = context, count(1)
        self._launch = ctypes.CDLL(str(library)).blinkmpi_door_launch
        with context.gpu.entered():
            self._event = context.gpu.event().value or 0

    def caller(self, kind: Kind, elements: int, send: int, recv: int, stream: int) -> Enqueue:
        """What enqueues a call of a kind.

        Raises:
            DeviceError: if packets do not carry it; the same on all ranks.
        """
        record, call = Record(self._context, kind, self._event), DoorCall(send, recv, elements, 0, stream)
        words = ctypes.c_void_p(record.address), ctypes.byref(call)

        def enqueue() -> None:
            call.number = next(self._numbers)
            if self._launch(*words):
                raise DeviceError(f"CUDA refused to launch {record.called.text}")

        return enqueue


def kinds(collectives: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[Kind, str, int]]:
    """What is measured: a kind, its type by name, and the bytes of a call."""
    for name in collectives:
        for dtype in DTYPES.values():
            for nbytes in sizes:
                op = OPS.index("sum") if name in REDUCTIONS else -1
                root = 0 if name in ("broadcast", "reduce") else -1
                kind = Kind(COLLECTIVES.index(name), TYPES.index(dtype), op, root, (nbytes - 1).bit_length())
                yield kind, dtype, nbytes


def measure(
    comm: Communicator, nccl: Nccl, collectives: Sequence[str], sizes: Sequence[int],
    say: Callable[[str], None] = lambda text: None, *, library: Path | None = None,
) -> tuple[Measured, ...]:  # fmt: skip
    """Time calls of these sizes (bytes of the longer buffer); collective.

    Args:
        say: gets a line per size.
        library: the door.

    Raises:
        DeviceError: on every rank, if the job has no GPUs.
    """
    context, found = comm.context.cuda(), list[Measured]()
    gpu = context.gpu
    clock = Clock(comm, gpu)
    ours, stream = Ours(context, library or door()), clock.stream
    buffers = [gpu.allocate(max(sizes)) for _ in range(2)]
    for name in collectives:
        comm.plan(name, 0)
    for kind, dtype, nbytes in kinds([name for name in collectives if not nccl.lacks(name)], sizes):
        elements = nbytes // (dtype_of(dtype).itemsize * (comm.size if kind.name in BLOCKED else 1))
        if not elements:
            continue
        try:
            pair = [who.caller(kind, elements, buffers[0], buffers[1], stream.ptr) for who in (ours, nccl)]
        except DeviceError as error:  # on all ranks alike
            say(f"{kind.name} {dtype} {nbytes} B: NCCL's, for {error}")
            continue
        calls = [clock.calls(one) for one in pair]
        plain = clock.medians([repeated(one, n) for one, n in zip(pair, calls, strict=True)])
        graph = clock.medians([captured(stream, one, n) for one, n in zip(pair, calls, strict=True)])
        times = [tuple(s / n for s, n in zip(both, calls, strict=True)) for both in (plain, graph)]
        found.append(Measured(kind.name, dtype, nbytes, *times))  # type: ignore[arg-type]
        ways = zip(("plain", "graph"), times, strict=True)
        us = ", ".join(f"{how} {1e6 * a:.1f} us (NCCL {1e6 * b:.1f})" for how, (a, b) in ways)
        say(f"{kind.name} {dtype} {nbytes} B: {us}, {found[-1].gain:.2f} times as fast at least")
    stream.synchronize()
    for at in buffers:
        gpu.free(at)
    return tuple(found)


class Clock:
    """Times work on a stream of its own: the slowest rank's; collective."""

    def __init__(self, comm: Any, gpu: Gpu) -> None:
        self._comm, self._gpu, self.stream = comm, gpu, gpu.new_stream()

    def once(self, work: Enqueue) -> float:
        """Seconds of some work."""
        self._comm.Barrier()
        with self._gpu.timed(self.stream.ptr) as seconds:
            work()
        self.stream.synchronize()
        return float(max(allgather(self._comm, seconds(), float)))

    def calls(self, one: Enqueue) -> int:
        """How many calls of a kind a repeat has."""
        for _ in range(WARMUP):
            one()
        self.stream.synchronize()
        return max(FEWEST, min(MOST, int(BATCH_S / max(self.once(one), 1e-6))))

    def medians(self, works: Sequence[Enqueue]) -> list[float]:
        """Seconds of each; they take turns."""
        samples: list[list[float]] = [[] for _ in works]
        for _ in range(REPEATS):
            for work, seen in zip(works, samples, strict=True):
                seen.append(self.once(work))
        return [statistics.median(seen) for seen in samples]


def repeated(one: Enqueue, n: int) -> Enqueue:
    """So many calls."""

    def work() -> None:
        for _ in range(n):
            one()

    return work


def captured(stream: Any, one: Enqueue, n: int) -> Enqueue:
    """A graph of so many calls."""
    stream.begin_capture()
    for _ in range(n):
        one()
    graph = stream.end_capture()
    return lambda: graph.launch(stream)
