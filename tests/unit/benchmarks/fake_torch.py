"""A torch whose GPU is a clock: work that is put on a stream takes as long as the test says, and tensors are the CPU's.

Streams, events and NCCL's process groups are those that ``benchmarks/beside_compute`` asks for.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERTZ = 1e9


class FakeStream:
    """A stream: when all that was put on it is done."""

    cuda_stream = 5

    def __init__(self, priority: int = 0) -> None:
        self.priority, self.now = priority, 0.0

    def wait_event(self, event: "FakeEvent") -> None:
        self.now = max(self.now, event.at)


class FakeEvent:
    """An event: when the stream has come to it."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda, self.at = cuda, 0.0

    def record(self) -> None:
        self.at = self.cuda.current.now

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: "FakeEvent") -> float:
        return (end.at - self.at) * 1e3


class FakeCuda:
    """``torch.cuda``."""

    nccl = SimpleNamespace(version=lambda: (2, 28, 9))

    def __init__(self) -> None:
        self.current = FakeStream()
        self.streams = [self.current]

    def Stream(self, priority: int = 0) -> FakeStream:
        self.streams.append(FakeStream(priority))
        return self.streams[-1]

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def busy(self, seconds: float) -> None:
        """Put work on the current stream."""
        self.current.now += seconds

    def _sleep(self, cycles: int) -> None:
        self.busy(cycles / HERTZ)

    def synchronize(self) -> None:
        latest = max(stream.now for stream in self.streams)
        for stream in self.streams:
            stream.now = latest

    def set_device(self, device: Any) -> None:
        """There is one."""


class FakeDist:
    """``torch.distributed`` with NCCL's groups: the other ranks have 1 less each, and no rank less than 1."""

    def __init__(self, cuda: FakeCuda, size: int, log: Path, *, call_s: float, right: bool) -> None:
        self.cuda, self.size, self.log, self.call_s, self.right = cuda, size, log, call_s, right
        self.groups: list[Any] = []

        class Options:
            def __init__(self, is_high_priority_stream: bool = False) -> None:
                self.high, self.config = is_high_priority_stream, SimpleNamespace(min_ctas=None, max_ctas=None)

        self.ProcessGroupNCCL = SimpleNamespace(Options=Options)

    def init_process_group(self, backend: str, *, init_method: str, rank: int, world_size: int) -> None:
        assert (backend, init_method.partition(":")[0]) == ("nccl", "tcp")

    def new_group(self, *, backend: str, pg_options: Any) -> Any:
        assert backend == "nccl"
        self.groups.append(pg_options)
        return pg_options

    def all_reduce(self, x: Any, *, group: Any) -> None:
        with self.log.open("a") as file:  # NCCL makes a communicator with the first call
            file.write(f"NCCL INFO {group.config.max_ctas or 24} coll channels, 0 collnet channels\n")
        self.sum(x, right=self.right)
        self.cuda.busy(self.call_s if x.numel() > 1000 else 1e-6)

    def sum(self, x: Any, *, right: bool = True) -> None:
        """What an AllReduce makes of the largest rank's number."""
        n = self.size
        if bool(x[0]):
            x.fill_(n * (n + 1) / 2 + (not right))

    def destroy_process_group(self, group: Any = None) -> None:
        """Nothing is held."""


class FakeTorch:
    """The module: the CPU's, but for what is above."""

    def __init__(self, real: Any, log: Path, size: int = 1, *, mm_s: float, nccl_s: float, right: bool = True) -> None:
        self._real, self.mm_s = real, mm_s
        self.cuda = FakeCuda()
        self.distributed = FakeDist(self.cuda, size, log, call_s=nccl_s, right=right)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def device(self, *_: Any) -> Any:
        return self._real.device("cpu")

    def mm(self, *args: Any, **keywords: Any) -> None:
        self._real.mm(*args, **keywords)
        self.cuda.busy(self.mm_s)


class FakeCommunicator:
    """Ours, on a fake GPU; ``made`` has the limits of CTAs that were asked for."""

    made: list[int | None]
    torch: FakeTorch
    call_s: float
    gpu = SimpleNamespace(device=0, name="a GPU", versions={"driver": "1"})
    machine = SimpleNamespace(name="a machine", fingerprint="0")
    executor = "CUDA kernels"
    context = SimpleNamespace(why_no_gpus="")

    def __init__(self, world: Any, *, max_ctas: int | None = None, stream: str | None = None) -> None:
        assert stream in (None, "current")
        self.made.append(max_ctas)
        self.registered: list[Any] = []

    def __enter__(self) -> "FakeCommunicator":
        return self

    def __exit__(self, *_: object) -> None:
        self.Free()

    def register(self, memory: Any) -> None:
        self.registered.append(memory)

    def Allreduce(self, place: Any, x: Any, *, stream: Any) -> None:
        self.torch.distributed.sum(x)
        with self.torch.cuda.stream(stream):
            self.torch.cuda.busy(self.call_s if x.numel() > 1000 else 1e-6)

    def Free(self) -> None:
        """Nothing is held."""
