"""What a new count costs on the host, without a GPU: nothing is compiled, allocated, copied or read from a file."""

import ctypes
import gc
import pathlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.fake.gpu import fresh_order
from blinkmpi.errors import DeviceError
from blinkmpi.planning.on_demand import PlanOnDemand
from blinkmpi.planning.planner import make_plan
from blinkmpi.program.call import Call
from blinkmpi.program.partition import part_of
from blinkmpi.runtime import arguments
from blinkmpi.runtime.cuda import context as context_module
from blinkmpi.runtime.cuda import templates
from blinkmpi.runtime.cuda.call import CudaCall
from blinkmpi.runtime.cuda.calls import CudaCalls
from blinkmpi.runtime.cuda.context import CudaContext
from blinkmpi.topology import machine, modify
from blinkmpi.transport.announcement import encode
from blinkmpi.transport.cuda import device
from blinkmpi.transport.cuda.device import Capture, Kernel
from blinkmpi.transport.cuda.kernel_layout import COMMON, fingerprint_at
from blinkmpi.transport.cuda.memory_layout import slots_at
from blinkmpi.transport.cuda.stage_tables import TableMemory
from blinkmpi.transport.host.traffic import traffic_of
from tests.effort import Effort
from tests.unit.runtime.test_cuda_calls import Cai
from tests.unit.topology.test_gather import on_ranks
from tests.unit.transport.test_cuda_memory import FakeGpu

CALLS = 210  # Python functions that a new count calls, the check of its arguments included; 150 for a single kernel


class CountingGpu(FakeGpu):
    """A GPU that compiles and launches nothing, and counts what it is asked for."""

    sms, name, device = 132, "fake", 0

    def __init__(self) -> None:
        super().__init__()
        self.compiled, self.uploads, self.marks, self.through, self.launched = 0, 0, 0, True, 0
        self.graph = False
        self.runtime = SimpleNamespace(deviceSynchronize=lambda: None)

    def compile(self, source: str, name: str) -> Kernel:
        self.compiled += 1
        return Kernel(None, self.compiled, 64, self)  # type: ignore[arg-type]

    def upload(self, to: int, data: bytes) -> None:
        self.uploads += 1

    def capturing(self, stream: int) -> bool:
        return self.graph

    def mark(self, stream: int) -> int:
        self.marks += 1
        return self.marks

    def idle(self, on: Any) -> bool:
        return self.through

    def after(self, stream: int, other: int) -> None:
        """Nothing is under way."""

    def capture(self, stream: int) -> Capture:
        return Capture(1, 1, ())

    def event(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(1)

    def add_record(self, *_: object) -> int:
        return 1

    wait = record = move_node = lambda *_, **__: None

    def why_not_here(self, at: int) -> str:
        return ""

    def current_stream(self) -> int:
        return 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        yield

    @property
    def made(self) -> tuple[int, int, int]:
        return len(self.allocated), self.uploads, self.compiled


@pytest.fixture(autouse=True)
def _launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def launch(*_: int) -> None:
        """Nothing."""

    cuda = SimpleNamespace(driver=SimpleNamespace(launchKernel=launch))
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    with fresh_order():
        yield


Maker = Callable[[int], CudaCall]


def with_calls(work: Callable[[CudaContext, CountingGpu, CudaCalls], Any], n: int = 4, algo: str = "") -> Any:
    """What ``work`` gives on rank 1 of ``n``, of the plan of one-hop GPUs."""
    topology = modify(machine("hgx-h200"), gpus=",".join(map(str, range(n))))
    plan = make_plan(topology, gpus="onehop", algo=algo)

    def one(comm: Any, _: Any) -> Any:
        comm.size, gpu = n, CountingGpu()
        plans = PlanOnDemand(comm, topology, plan)
        context = CudaContext(comm, gpu, topology, plans, emulated=False, say=lambda text, level: None)  # type: ignore[arg-type]
        if comm.rank != 1:
            return None
        records = SimpleNamespace(encode=lambda called: encode(called, 1000), announce_kernel=lambda *_: None)
        told: list[dict[Any, tuple[int, int]]] = []  # what is counted
        recorder = SimpleNamespace(tally=lambda moved: SimpleNamespace(add=lambda: told.append(moved)), told=told)
        host: Any = SimpleNamespace(records=records, peers=None, recorder=recorder)
        if "direct" in algo or "rs_ag" in algo:  # of registered buffers
            regions: Any = SimpleNamespace(ref=lambda at, nbytes: 1 << 48, seen_at=lambda ref: [0] * n)
            context.transport.regions = regions
        return work(context, gpu, CudaCalls(context, SimpleNamespace(host=host), enqueues=False))  # type: ignore[arg-type]

    found = on_ranks([0] * n, one)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found[1]


def allreduce(calls: CudaCalls, elements: int, n: int = 4, *, typestr: str = "<f4") -> CudaCall:
    send, recv = Cai((elements,), typestr, stream=5), Cai((elements,), typestr, at=1 << 40, stream=5)
    ready = arguments.allreduce(1, n, send, recv, "sum")
    calls.context.check("allreduce", ready)
    bound = calls.bind(ready, 5, 60.0)
    bound.start(1)
    assert isinstance(bound, CudaCall)
    return bound


COUNTS = {
    "onehop/ll16_one_shot": range(1, 2000),
    "onehop/ll128_two_shot": range(3000, 5000),
    "onehop/direct": range(100_000, 102_000),
    "chain": range(1, 2000),
    "trees": range(600_000, 602_000),
    "chain/rs_ag": range(100_000, 102_000),
}


@pytest.mark.parametrize("algo", COUNTS)
def test_a_new_count_makes_nothing_new(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second count of a size, and all after it."""
    reads: list[str] = []
    read = pathlib.Path.read_text
    monkeypatch.setattr(pathlib.Path, "read_text", lambda *a, **k: (reads.append(str(a[0])), read(*a, **k))[1])

    def work(context: CudaContext, gpu: CountingGpu, calls: CudaCalls) -> None:
        numbers = COUNTS[algo]
        octaves = {(c - 1).bit_length(): c for c in numbers}
        for c in octaves.values():
            first = allreduce(calls, c)
        before, read_before = gpu.made, len(reads)
        protocol = (algo.partition("/")[2] or "slots").replace("rs_ag", "slots")
        assert (first.kernel.then is not None) == ("rs_ag" in algo)
        assert first.kernel.protocol == protocol
        for c in numbers:
            bound = allreduce(calls, c)
            assert bound.kernel.protocol == protocol
        assert gpu.made == before
        assert len(reads) == read_before

    with_calls(work, algo=f"allreduce:{algo}")


@pytest.mark.parametrize("algo", COUNTS)
def test_another_type_of_as_many_bytes_has_kernels_of_its_own(algo: str) -> None:

    def work(context: CudaContext, gpu: CountingGpu, calls: CudaCalls) -> None:
        handles = set()
        for typestr in ("<f4", "<i4", "<u4"):
            for _ in range(2):
                handles.add(allreduce(calls, COUNTS[algo][0], typestr=typestr).kernel.kernel.handle)
        assert len(handles) == 3

    with_calls(work, algo=f"allreduce:{algo}")


@pytest.mark.parametrize("algo", ["trees", "chain", "onehop/slots", "onehop/ll128_two_shot"])
def test_what_many_counts_have_moved_is_added_up(algo: str) -> None:
    """As if each call were counted for itself, also where trees carry nothing of short vectors."""

    def work(context: CudaContext, gpu: CountingGpu, calls: CudaCalls) -> None:
        numbers = [1, 2, 5, 37, 3000, 3001, 4999, 3001, 600_000, 600_001] if "ll" not in algo else [3000, 3001, 3000]
        for c in numbers:
            allreduce(calls, c)
        calls.history.started.flush()
        (told,) = calls.host.recorder.told  # type: ignore[attr-defined]
        want: dict[Any, tuple[int, int]] = {}

        def add(name: Any, nbytes: int, times: int) -> None:
            before = want.get(name, (0, 0))
            want[name] = before[0] + nbytes, before[1] + times

        for c in numbers:
            call = Call("allreduce", 4, (c,), "float32", "sum")
            rule = context.rule(call)
            add(("collective", "allreduce"), 4 * c, 1)
            if rule.protocol != "slots":
                add(("protocol", rule.protocol), 0, 1)
                continue
            program = context.program(call, rule)
            for name, (nbytes, _) in traffic_of(part_of(program, range(4)), program, 1, {}, ()).moved.items():
                if name[0] != "collective":
                    add(name, nbytes, 1)
        assert told == want
        calls.history.started.flush()
        assert calls.host.recorder.told[-1] == {}, "what was counted is counted once"  # type: ignore[attr-defined]

    with_calls(work, algo=f"allreduce:{algo}")


@pytest.mark.parametrize("algo", COUNTS)
def test_a_new_count_calls_few_functions(algo: str) -> None:
    """Time differs from machine to machine; this number does not."""

    def work(context: CudaContext, gpu: CountingGpu, calls: CudaCalls) -> int:
        numbers = iter(COUNTS[algo])
        for _ in range(3):
            allreduce(calls, next(numbers))
        with Effort() as effort:
            allreduce(calls, next(numbers))
        return effort.entered

    assert with_calls(work, algo=f"allreduce:{algo}") < CALLS


def test_tables_are_few_whatever_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is used again when nobody holds them and the work is through; a graph's table never."""
    monkeypatch.setattr(templates, "TEMPLATES", 4)
    monkeypatch.setattr(context_module, "KERNELS", 2)

    def work(context: CudaContext, gpu: CountingGpu, calls: CudaCalls) -> None:
        used: list[int] = []
        tables = context.transport.tables

        def table_of(bound: CudaCall) -> int:
            return int(bound.kernel.args[4 + len(COMMON)])

        gpu.graph = True
        captured = table_of(allreduce(calls, 1 << 1))  # the bound call is gone, the graph is not
        gpu.graph = False
        lengths = []
        for less in (0, 1) * 10:
            for octave in range(2, 20):
                used.append(table_of(allreduce(calls, (1 << octave) - less)))
            lengths.append(len(tables._all))
        assert captured not in used
        most = lengths[-1]
        assert set(lengths[2:]) == {most}
        assert most < 20, "360 were made: 4 templates, 2 kernels, a graph's, and a few that wait, of several lengths"
        gpu.through = False  # a kernel that never ends
        for octave in range(2, 20):
            allreduce(calls, 1 << octave)
        assert len(tables._all) > most, "nothing is used again before the work is through"
        gpu.through = True
        context.transport.tables.close()
        assert not set(used) & gpu.allocated

    with_calls(work, algo="allreduce:trees")


@pytest.mark.parametrize("algo", ["onehop/ll16_one_shot", "chain", "chain/rs_ag"])
def test_kernels_compare_all_calls_so_far(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both kernels of a call that has two: a root that waits for nobody does not see that a peer is a root, too."""
    long = 100_000 if "rs_ag" in algo else 1000
    words: list[int] = []

    def launch(*numbers: int) -> None:
        arguments_at = ctypes.c_uint64.from_address(numbers[9]).value
        words.append(ctypes.c_uint64.from_address(arguments_at + 8 * fingerprint_at(4)).value)

    driver = SimpleNamespace(launchKernel=launch)
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(driver=driver)))

    def work(context: CudaContext, gpu: CountingGpu, calls: CudaCalls) -> None:
        def told(made: list[tuple[int, int]]) -> list[list[int]]:
            """The fingerprints of a rank that makes calls of these lengths, with these numbers."""
            own = CudaCalls(context, calls.sequence, enqueues=False)
            bound = {length: allreduce(own, length) for length in (long, long + 1)}
            own.history.number.value, found = 0, []
            for length, seq in made:
                words.clear()
                bound[length].start(seq)
                found.append([*words])
            return found

        same = [(long, seq) for seq in (1, 2, 3, 1 << 40)]
        usual = told(same)
        assert usual == told(same)
        assert len({word for words in usual for word in words}) == len(usual) * len(usual[0])
        assert all(word < 1 << 32 for words in usual for word in words)
        other_call, other_number = told([same[0], (long + 1, 2), *same[2:]]), told([same[0], (long, 3), (long, 4)])
        assert other_call[0] == other_number[0] == usual[0]
        for others in (other_call, other_number):
            assert not any(set(one) & set(other) for one, other in zip(usual[1:], others[1:], strict=False))

    with_calls(work, algo=f"allreduce:{algo}")


@pytest.mark.slow
def test_a_table_that_is_held_keeps_its_memory() -> None:
    gpu = CountingGpu()
    memory = TableMemory(gpu, lambda: 7)  # type: ignore[arg-type]
    one, other = memory.put(b"1" * 100), memory.put(b"2" * 100)
    at = one.at
    assert at != other.at
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
    gpu.through = False
    third = memory.put(b"3")
    assert third.at not in (at, other.at), "a kernel may still read it"
    gpu.through = True
    assert memory.put(b"4").at == at
    assert memory.put(b"5" * 5000).at != at
    memory.close()
    assert not gpu.allocated


def test_what_does_not_fit_takes_a_table_for_each_count() -> None:
    """By the same rule on every rank, and it says so."""
    said: list[str] = []

    def work(context: CudaContext, gpu: CountingGpu, calls: CudaCalls) -> None:
        assert context._templates is not None
        context._templates._say = lambda text, level: said.append(text())
        context.transport.symmetric_bytes = slots_at(4) + (16 << 10)
        with pytest.raises(DeviceError, match="bytes of slots"):
            allreduce(calls, 1 << 20)
        for elements in (40, 41, 42):
            before = gpu.uploads
            allreduce(calls, elements)
            assert gpu.uploads == before + 1

    with_calls(work, algo="allreduce:trees")
    assert said
    assert all("every new count makes a table of its own: allreduce by trees needs" in text for text in said)
