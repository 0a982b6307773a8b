"""Without a GPU: operands that live as long as the work on them, calls in graphs, and kernels that nobody waits for."""

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from blinkmpi.errors import SHRINK, CollectiveTimeout, PeerLost, PlanError
from blinkmpi.runtime.cuda import watch as watching
from blinkmpi.runtime.cuda.calls import CudaCalls
from blinkmpi.runtime.cuda.history import CallHistory
from blinkmpi.runtime.cuda.operands import CALLS, NBYTES, OperandsInFlight
from blinkmpi.runtime.requests import Persistent
from blinkmpi.util.settings import Settings


class FakeGpu:
    """A stream whose work is done when told."""

    device = 0

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.marks: list[int] = []
        self.captured = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def capturing(self, _: int) -> bool:
        return self.captured

    def mark(self, _: int) -> int:
        self.marks.append(len(self.marks))
        return self.marks[-1]

    def idle(self, event: int) -> bool:
        return event in self.done


class Array:
    """What a user passes."""


def alive(refs: list[Any]) -> list[bool]:
    gc.collect()
    return [ref() is not None for ref in refs]


@pytest.mark.slow
def test_operands_live_until_the_work_on_them_is_through() -> None:
    gpu = FakeGpu()
    kept, refs = OperandsInFlight(gpu), []  # type: ignore[arg-type]

    def call(nbytes: int) -> None:
        array = Array()
        refs.append(weakref.ref(array))
        kept.keep((array, "sum"), nbytes, 5)

    call(NBYTES)
    assert alive(refs) == [True]
    for _ in range(CALLS):
        call(100)
    assert (alive(refs), len(gpu.marks)) == ([True] * (1 + CALLS), 2)
    gpu.done = {0}
    call(NBYTES)
    assert alive(refs) == [False] + [True] * (CALLS + 1)
    gpu.done = {1, 2}
    call(NBYTES)
    assert alive(refs) == [False] * (CALLS + 2) + [True]


@pytest.mark.slow
def test_a_graphs_operands_are_its_owners() -> None:
    gpu = FakeGpu()
    kept, array = OperandsInFlight(gpu), Array()  # type: ignore[arg-type]
    gpu.captured, ref = True, weakref.ref(array)
    kept.keep((array,), NBYTES, 5)
    del array
    assert alive([ref]) == [False]
    assert not gpu.marks


def test_a_torch_without_cuda_is_not_asked_for_streams() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this torch has CUDA")
    kept = OperandsInFlight(FakeGpu())  # type: ignore[arg-type]
    kept.keep((Array(), "sum"), NBYTES, 5)


@pytest.mark.slow
def test_torch_is_told_of_the_stream_of_a_long_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    class Tensor:
        def record_stream(self, on: object) -> None:
            told.append(on)

    cuda = SimpleNamespace(ExternalStream=lambda address, device: (address, device))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=cuda))  # type: ignore[arg-type]
    kept = OperandsInFlight(FakeGpu())  # type: ignore[arg-type]
    one, other, array = Tensor(), Tensor(), Array()
    refs = [weakref.ref(x) for x in (one, array)]
    kept.keep((one, array, "sum"), NBYTES, 7)
    kept.keep((other,), 10, 7)
    del one, array
    assert told == [(7, 0)]
    assert alive(refs) == [False, True], "torch keeps its own memory, we the other's"


@pytest.mark.slow
def test_a_persistent_call_keeps_its_buffers_until_it_is_freed() -> None:
    array = Array()
    ref = weakref.ref(array)
    made = Persistent(lambda: None, lambda: None, lambda: True, (array,))
    del array
    assert alive([ref]) == [True]
    made.Free()
    assert alive([ref]) == [False]


def test_a_request_made_in_a_capture_is_complete() -> None:
    """Its stream may not be asked, and its result comes with each replay."""
    calls = CudaCalls(SimpleNamespace(gpu=FakeGpu()), SimpleNamespace(host=None), enqueues=False)  # type: ignore[arg-type]
    request = calls.request(SimpleNamespace(captured=True), (Array(),))  # type: ignore[arg-type]
    assert request.Test()
    assert request == MPI.REQUEST_NULL


class Job:
    """The calls of a communicator as the watch sees them."""

    def __init__(self) -> None:
        self.wrong: BaseException | None = None
        self.gone: list[int] = []
        self.transport = SimpleNamespace(aborted=False, abort=self.abort, error=CollectiveTimeout)
        self.context: Any = SimpleNamespace(transport=self.transport, gpu=FakeGpu())
        of_all = SimpleNamespace(gpus=self.context, rank=3, settings=Settings())
        self.sequence: Any = SimpleNamespace(context=of_all, dead=None)
        peers = SimpleNamespace(
            ended=lambda: self.gone, lost=lambda: self.gone, remedy=SHRINK,
            mismatch_so_far=lambda seq, text: self.wrong, states=lambda ranks, seq: f"{ranks}",
        )  # fmt: skip
        self.host: Any = SimpleNamespace(peers=peers)
        self.history = CallHistory(self.context, SimpleNamespace(host=self.host))  # type: ignore[arg-type]
        self.last: Any = SimpleNamespace(seq=9, text="a call")

    def abort(self) -> None:
        self.transport.aborted = True


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    watching.WATCHED.add(made)  # type: ignore[arg-type]
    yield made
    watching.WATCHED.discard(made)  # type: ignore[arg-type]
    watching.LOGGED.clear()


def test_a_failed_replay_is_told_of_once(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    assert watching.look(set()) == set()
    job.transport.aborted = True
    suspects = watching.look(set())
    assert (suspects, capfd.readouterr().err) == ({id(job)}, ""), "a call may be about to raise it"
    watching.look(suspects)
    said = capfd.readouterr().err
    assert "WARN rank 3: CollectiveTimeout: a call on a stream or in a graph; results since then are wrong" in said
    watching.look(suspects)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("why", ["gone", "refused"])
def test_kernels_give_up_on_a_peer_that_never_comes(job: Job, why: str, capfd: pytest.CaptureFixture[str]) -> None:
    if why == "gone":
        job.gone = [1]
    else:
        job.wrong = PlanError("rank 1 failed")
    suspects = watching.look(set())
    assert not job.transport.aborted
    suspects = watching.look(suspects)
    assert job.transport.aborted
    watching.look(suspects)
    assert ("PeerLost: [1]" if why == "gone" else "CollectiveTimeout") in capfd.readouterr().err


def test_a_kernel_that_others_had_give_up_is_told_by_the_process_that_died(job: Job) -> None:
    job.transport.error = PeerLost
    assert str(job.history.error("a call")) == "a call", "nobody has died: another rank has told why"
    job.gone = [1]
    error = job.history.error("a call")
    assert isinstance(error, PeerLost)
    assert error.ranks == (1,)
    assert str(error) == f"a call: [1]. The communicator is dead; {SHRINK}"
    job.transport.error = CollectiveTimeout
    assert isinstance(job.history.error("a call"), CollectiveTimeout), "which says more"


def test_what_is_closed_or_dead_is_watched_no_longer(job: Job) -> None:
    job.transport.aborted, job.sequence.dead = True, PlanError("it is known")
    assert watching.look({id(job)}) == set()
    assert job not in watching.WATCHED
