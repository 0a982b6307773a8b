"""Calls that C puts on streams, on a GPU that is none: they are what Python would launch, and nothing else is C's."""

import contextlib
import gc
import itertools
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from mpi4py import MPI

import blinkmpi
from benchmarks.fake.gpu import EVENT, FakeDriver, FakeGpu, fake_gpus
from blinkmpi.errors import ArgumentError, BlinkError, BufferTypeError, DeviceError, PeerLost
from blinkmpi.transport.cuda.order import ORDER, PER_THREAD
from tests.effort import Effort
from tests.harness import mpi

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no DLPack exchange API"
)

COUNT = 5000
STREAM = 5
IMPLICIT = 906  # CUDA's error of who asks the default stream while another one is captured


def made_by_c(comm: blinkmpi.Communicator, call: Callable[[], object]) -> bool:
    """Make a call when all ranks are through with those before it, and say whether C has made it."""
    MPI.COMM_WORLD.Barrier()
    return by_c(comm, call)


def by_c(comm: blinkmpi.Communicator, call: Callable[[], object]) -> bool:
    """Make a call, and say whether C has made it."""
    dispatcher = comm._dispatcher()
    call()
    found = dispatcher.repeated.last_launch
    return found is not None and found[1] == dispatcher.sequence.seq


@contextmanager
def gpu_job(comm: MPI.Intracomm, algo: str = "", **options: Any) -> Iterator[tuple[blinkmpi.Communicator, FakeDriver]]:
    """A communicator with GPUs that are none, and their driver."""
    with fake_gpus(algo) as driver, blinkmpi.Communicator(comm, **options) as ours:
        driver["words"] = 16
        yield ours, driver


def transport_of(ours: blinkmpi.Communicator) -> Any:
    """The transport of its GPUs."""
    assert ours.context.gpus is not None
    return ours.context.gpus.transport


def operands_of(ours: blinkmpi.Communicator) -> Any:
    """What keeps the operands of its calls."""
    calls = ours._dispatcher().cuda
    assert calls is not None
    return calls.operands


def last_of(ours: blinkmpi.Communicator) -> Any:
    """The last call that C has launched."""
    found = ours._dispatcher().repeated.last_launch
    assert found is not None
    return found[0]


def in_short(driver: FakeDriver, since: int) -> list[str]:
    """What the driver was told of streams: what, and the stream."""
    return [f"{what} {stream}" for what, stream, _ in driver.told(since)]


def tensors(n: int, count: int = COUNT) -> list[Any]:
    return [torch.zeros(count) for _ in range(n)]


ALGOS = {  # and whether the buffers of some calls are registered
    "onehop/ll16_one_shot": False, "onehop/ll128_two_shot": True, "onehop/direct": True, "trees": False,
    "chain/rs_ag": True,
}  # fmt: skip


def launched(ours: blinkmpi.Communicator, driver: FakeDriver, calls: Iterable[Callable[[], object]]) -> Iterator[Any]:
    """Make calls; the launches of each, its number and announcement, whether C has made it; then what was counted."""
    sequence, transport = ours._dispatcher().sequence, transport_of(ours)
    for call in calls:
        before = driver["launches"]
        by_c_alone = made_by_c(ours, call)
        for back in range(driver["launches"] - before):
            *shape, words = driver.last(back)
            words[transport.n] = 0  # the address of the report, which is real memory
            yield *shape, words
        yield by_c_alone, sequence.seq, sequence.host.records.fingerprint(sequence.seq)
    assert transport.kernels_started.value == driver["launches"]
    moved = ours.stats()
    yield moved.collectives, moved.protocols, moved.trees


def made_alike(
    comm: MPI.Intracomm, algo: str, calls: Callable[[blinkmpi.Communicator], Iterable[Callable[[], object]]],
    registered: Sequence[Any], words: int = 16,
) -> int:  # fmt: skip
    """Make calls by C and by Python, which launch the same; returns how many of them C has made.

    Args:
        calls: makes them of a communicator.
        registered: buffers.
        words: of each kernel's arguments, to compare.
    """
    found = []
    for executor in ("numpy", "c"):
        with gpu_job(comm, f"allreduce:{algo}" if algo else "", executor=executor) as (ours, driver):
            driver["words"] = words
            for buffer in registered:
                ours.register(buffer)
            found.append([*launched(ours, driver, calls(ours))])
    made = [sum(row[0] is True for row in rows) for rows in found]
    assert made[0] == 0
    one, other = ([row[1:] if isinstance(row[0], bool) else row for row in rows] for rows in found)
    assert one == other, algo
    return made[1]


@mpi(ranks=(2,), timeout=60)
def test_c_launches_what_python_launches(comm: MPI.Intracomm) -> None:
    """The same calls by both: kernels, arguments, streams, fingerprints and numbers are the same, word by word."""
    n, slab = comm.size, torch.zeros(40 * COUNT)
    pieces = [slab[i * COUNT : (i + 1) * COUNT] for i in range(40)]
    fresh = tensors(20)
    stream = SimpleNamespace(cuda_stream=9)

    def calls(ours: blinkmpi.Communicator) -> Iterator[Callable[[], None]]:
        for i in range(8):
            some = [pieces[2 * i], pieces[2 * i + 1]] if i < 5 else [fresh[2 * i], fresh[2 * i + 1]]
            x, y = some
            for _ in range(3):
                yield partial(ours.Allreduce, x, y, stream=STREAM)
                yield partial(ours.Allreduce, MPI.IN_PLACE, x, MPI.MAX, stream=STREAM)
            yield partial(ours.Allreduce, y, y, "sum", stream=STREAM)
            yield partial(ours.Bcast, y, root=n - 1, stream=stream)
            yield partial(ours.Reduce, x, y if comm.rank == 0 else None, stream=stream)
            yield ours.Barrier
            yield partial(ours.Allgather, x[: COUNT // n], y[: COUNT // n * n], stream=STREAM)
            yield partial(ours.Allreduce, x, y)
            whole, block = y[: COUNT // n * n], y[comm.rank * (COUNT // n) : (comm.rank + 1) * (COUNT // n)]
            root = comm.rank == 1
            yield partial(ours.Allgather, block, whole, stream=STREAM)
            yield partial(ours.Allgather, MPI.IN_PLACE, whole, stream=STREAM)
            yield partial(ours.Gather, MPI.IN_PLACE if root else block, whole if root else None, 1, stream=STREAM)
            yield partial(ours.Scatter, whole if root else None, MPI.IN_PLACE if root else block, 1, stream=STREAM)
            yield partial(ours.Reduce_scatter_block, whole, block)

    for algo, register in ALGOS.items():
        some = made_alike(comm, algo, calls, [slab] if register else [])
        assert some >= 80, (algo, some)


@mpi(ranks=(2,), timeout=60)
def test_calls_that_are_not_plain_come_through_python(comm: MPI.Intracomm) -> None:
    with gpu_job(comm, "allreduce:trees") as (ours, driver):
        x, y, z = tensors(3)
        allreduce = partial(ours.Allreduce, MPI.IN_PLACE, stream=STREAM)
        for _ in range(2):
            assert not made_by_c(ours, partial(allreduce, x)), "what is made once need not be known to C"
        assert made_by_c(ours, partial(allreduce, x))
        assert made_by_c(ours, partial(allreduce, y))
        parameter = torch.nn.Parameter(x, requires_grad=False)
        for _ in range(2):
            assert not made_by_c(ours, partial(allreduce, parameter)), "a new type"
        assert made_by_c(ours, partial(allreduce, parameter))
        face = {"shape": (COUNT,), "typestr": "<f4", "data": (z.data_ptr(), False), "version": 3}
        other = SimpleNamespace(__cuda_array_interface__=face)  # which may say another address each time
        for _ in range(4):
            assert not made_by_c(ours, partial(ours.Allreduce, other, y, stream=STREAM)), "of a library C does not read"
            assert driver.last()[4][transport_of(ours).n + 1 :].count(z.data_ptr()) == 1
        driver["gil"] = 1
        assert made_by_c(ours, partial(allreduce, x))
        assert not driver["gil"], "the queue of launches may be full"
        asked = driver["asked"]
        assert made_by_c(ours, partial(allreduce, y))
        assert driver["asked"] == asked, "of a known address the driver is not asked again"
        driver["context"] = 78
        assert not made_by_c(ours, partial(allreduce, x)), "a thread that uses another GPU"
        driver["context"] = 77
        assert made_by_c(ours, partial(allreduce, x))
        for _ in range(2):
            assert not made_by_c(ours, partial(ours.Allreduce, MPI.IN_PLACE, x, stream=6)), "another stream"
        for stream in (STREAM, 6, STREAM):
            told = driver["did"]
            assert made_by_c(ours, partial(ours.Allreduce, MPI.IN_PLACE, x, stream=stream))
            assert in_short(driver, told)[-3:] == [f"wait {stream}", f"launch {stream}", f"record {stream}"]
        told = driver["did"]
        assert made_by_c(ours, partial(allreduce, x))
        assert in_short(driver, told) == [f"launch {STREAM}"]
        driver["captured"] = 1
        assert not made_by_c(ours, partial(allreduce, x)), "calls in graphs are chained, and a graph may name its table"
        driver["captured"] = 0
        assert made_by_c(ours, partial(allreduce, x))
        assert not made_by_c(ours, partial(ours.Allreduce, MPI.IN_PLACE, x, stream=STREAM, timeout=30))
        ours.Ibarrier().Wait()
        assert not made_by_c(ours, partial(allreduce, x)), "behind a non-blocking call, Python looks"
        assert made_by_c(ours, partial(allreduce, x))
        pair = torch.zeros(2 * COUNT)
        for _ in range(2):
            ours.Allreduce(x, y, stream=STREAM)
        assert made_by_c(ours, partial(ours.Allreduce, pair[:COUNT], pair[COUNT:], stream=STREAM)), "side by side"
        for bad, error, said in (
            ((pair[:COUNT], pair[9 : 9 + COUNT]), ArgumentError, "overlap"),
            ((x, pair[::2]), ArgumentError, "contiguous"),
            ((x, torch.zeros(COUNT, dtype=torch.int32)), BlinkError, ""),
            ((x, torch.zeros(COUNT - 1)), BlinkError, ""),
            (
                (torch.ones(COUNT, dtype=torch.complex64).conj().imag.contiguous()._neg_view(), y),
                ArgumentError,
                "negative",
            ),
        ):
            with pytest.raises(error, match=said):
                ours.Allreduce(*bad, stream=STREAM)
        driver["foreign"] = z.data_ptr()
        with pytest.raises(BufferTypeError, match="GPU 1"):
            allreduce(z)
        driver["foreign"] = 1
        assert made_by_c(ours, partial(allreduce, z))
        for host in ((x.numpy().copy(), y.numpy().copy()),):
            with pytest.raises(ArgumentError, match="stream= is for buffers in GPU memory"):
                ours.Allreduce(*host, stream=STREAM)
            ours.Allreduce(*host)
        assert made_by_c(ours, partial(allreduce, x))


@mpi(ranks=(2,), timeout=60)
def test_calls_that_are_waited_for(comm: MPI.Intracomm) -> None:
    """C launches them on the stream of their arrays; they return when that is idle, and what went wrong is raised."""
    with gpu_job(comm, "allreduce:onehop/ll16_one_shot") as (ours, driver):
        x, y, z = tensors(3)
        idle = SimpleNamespace(asked=0, busy=0)

        def is_idle(self: object, on: object) -> bool:
            idle.asked += 1
            idle.busy -= 1
            return idle.busy < 0

        with mock.patch.object(FakeGpu, "idle", is_idle):
            for _ in range(2):
                assert not made_by_c(ours, partial(ours.Allreduce, x, y))
            for a, b in ((x, y), (z, x), (y, z)):
                idle.asked, idle.busy = 0, 5
                assert made_by_c(ours, partial(ours.Allreduce, a, b))
                assert idle.asked == 6
                assert driver.last()[3] == driver["current_stream"]
            for _ in range(2):
                assert not made_by_c(ours, partial(ours.Allreduce, [x, 9], [y, 9]))
            assert made_by_c(ours, partial(ours.Allreduce, [z, 9], [x, 9])), "with a count"
            for count in (5, 6, 7):
                ours.Allreduce(MPI.IN_PLACE, x[:count])
            assert made_by_c(ours, partial(ours.Allreduce, MPI.IN_PLACE, x[:8])), "of another count"
            driver["current_stream"] = 4
            for _ in range(2):
                assert not made_by_c(ours, partial(ours.Allreduce, x, y)), "another current stream"
            assert made_by_c(ours, partial(ours.Allreduce, x, y))
            idle.asked, driver["captured"] = 0, 1
            assert not made_by_c(ours, partial(ours.Allreduce, x, y))
            assert not idle.asked, "a graph is made, and nothing is to be waited for"
            driver["captured"] = 0
            ours.Iallreduce(x, y).Wait()
            assert not made_by_c(ours, partial(ours.Allreduce, x, y, timeout=9))
            assert made_by_c(ours, partial(ours.Allreduce, x, y, stream=4)), "which differs only in that nobody waits"
            transport_of(ours).report[1] = 1
            with pytest.raises(BlinkError):
                ours.Allreduce(x, y)
        ours.free()


@mpi(ranks=(2,), timeout=60)
@pytest.mark.parametrize("mixes", [True, False])
def test_calls_are_chained_once_one_is_captured(comm: MPI.Intracomm, *, mixes: bool) -> None:
    """By C, too: each waits for the event and records it behind itself; a call in a graph has two nodes for that."""
    with gpu_job(comm) as (ours, driver):
        transport = transport_of(ours)
        transport.mixes = mixes
        x, y = tensors(2)
        call = partial(ours.Allreduce, MPI.IN_PLACE, x, stream=STREAM)
        group = partial(ours.Allreduce, MPI.IN_PLACE, [x, y], stream=STREAM)
        for each in (call, group) * 3:
            each()
        assert made_by_c(ours, call)
        assert made_by_c(ours, group)
        assert (driver["waits"], driver["records"]) == (0, 1), "of the first call"
        gpu = transport.gpu
        for number in (1, 2, 1):
            driver["captured"] = number
            assert made_by_c(ours, call) == (not mixes)
            if mixes:
                assert gpu.followed[number] == (driver["launches"],), "behind the last kernel alone"
        driver["captured"] = 0
        assert (driver["waits"], driver["external"], gpu.records) == ((2, 2, 2) if mixes else (0, 0, 0))
        assert driver["records"] == 1, "all streams are captured, the last call's, too"
        for each, by_c in ((call, True), (group, True), (partial(ours.Allreduce, x, y, stream=6), False)):
            waits, records, launches = driver["waits"], driver["records"], driver["launches"]
            assert made_by_c(ours, each) == by_c
            if mixes:
                assert driver["waits"] > waits
                assert driver["records"] > records
                assert (driver["before"], driver["behind"]) == (launches, driver["launches"]), "around all kernels"
            else:
                assert (driver["waits"], driver["records"]) == ((0, 1) if by_c else (1, 3)), "to stream 6"
        if not mixes:
            ORDER.chain_from_now(gpu)  # as another communicator's captured call does
            driver["captured"] = 3
            assert not made_by_c(ours, call)
            assert (driver["waits"], gpu.records) == (1, 0)
            driver["captured"] = 0
            assert made_by_c(ours, call)
            assert (driver["waits"], driver["records"]) == (2, 4)


@mpi(ranks=(2,), timeout=60)
def test_streams_that_alternate(comm: MPI.Intracomm) -> None:
    """A wait before the kernel and a record behind it; the last stream is not named again: it may be gone by then."""
    with gpu_job(comm) as (ours, driver):
        (x,) = tensors(1)
        other = blinkmpi.Communicator(comm)

        def call(stream: int, by: blinkmpi.Communicator = ours) -> tuple[bool, list[str]]:
            told = driver["did"]
            by_c_alone = made_by_c(by, partial(by.Allreduce, MPI.IN_PLACE, x, stream=stream))
            return by_c_alone, in_short(driver, told)

        for by, stream in itertools.product((ours, other), (5, 6, PER_THREAD) * 3):
            call(stream, by)
        call(5)
        for stream in (6, 5, 6):
            assert call(stream) == (True, [f"wait {stream}", f"launch {stream}", f"record {stream}"])
        assert call(6) == (True, ["launch 6"])
        assert call(6, other) == (True, ["launch 6"]), "of all communicators"
        assert call(5, other) == (True, ["record 6", "wait 5", "launch 5", "record 5"]), "it was not recorded there"
        assert call(6) == (True, ["wait 6", "launch 6", "record 6"])
        for _ in range(2):  # threads have one of this name each
            assert call(PER_THREAD) == (True, ["wait 2", "launch 2", "record 2"])
        driver["captured"], driver["only"] = 1, PER_THREAD
        assert call(5) == (True, ["wait 5", "launch 5", "record 5"]), "which is captured meanwhile"
        driver["captured"] = 0
        for _ in range(2):
            call(6)
        driver["captured"], driver["only"] = 1, 6
        assert call(5) == (True, ["launch 5", "record 5"]), "a graph has what comes there now"
        driver["captured"] = 0
        for _ in range(2):
            call(6)
        driver["capturing_error"] = IMPLICIT
        assert not call(5)[0], "a capture that the stream itself would spoil"
        driver["capturing_error"] = 0
        assert call(5) == (True, ["launch 5"])
        assert ours.Allreduce(MPI.IN_PLACE, x, stream=7) is None  # by Python
        assert call(5) == (True, ["wait 5", "launch 5", "record 5"])
        told = driver["did"]
        for stream in (6, 5, 7):
            ours.Allreduce(MPI.IN_PLACE, x, stream=stream, timeout=9)
        assert in_short(driver, told) == [f"{what} {s}" for s in (6, 5, 7) for what in ("wait", "launch", "record")]
        assert {event for *_, event in driver.told(told)} == {0, EVENT}
        other.Free()


@mpi(ranks=(2,), timeout=60)
def test_what_a_graph_has_is_not_the_last_call(comm: MPI.Intracomm) -> None:
    """The event stands for the call before the capture, which others follow while that goes on."""
    with gpu_job(comm) as (ours, driver):
        transport_of(ours).mixes = False
        (x,) = tensors(1)
        call = partial(ours.Allreduce, MPI.IN_PLACE, x)
        for stream in (5, 6) * 3 + (5,):
            call(stream=stream)
        driver["captured"], driver["only"] = 1, 5
        assert made_by_c(ours, partial(call, stream=5))
        told = driver["did"]
        assert made_by_c(ours, partial(call, stream=6))
        assert in_short(driver, told) == ["wait 6", "launch 6", "record 6"]
        driver["captured"] = 0


@mpi(ranks=(2,), timeout=60)
def test_a_stream_lives_while_its_call_is_the_last(comm: MPI.Intracomm) -> None:
    """The next call on another stream still needs it; then it may go."""

    class Stream:
        def __init__(self, address: int) -> None:
            self.cuda_stream = address

    with gpu_job(comm) as (ours, _):
        (x,) = tensors(1)
        streams = [Stream(5), Stream(6)]
        for stream in streams * 3:
            ours.Allreduce(MPI.IN_PLACE, x, stream=stream)
        assert made_by_c(ours, partial(ours.Allreduce, MPI.IN_PLACE, x, stream=streams[0]))
        assert ORDER.holders == [streams[0]]
        assert made_by_c(ours, partial(ours.Allreduce, MPI.IN_PLACE, x, stream=streams[1]))
        assert ORDER.holders == [streams[1]]
        assert ORDER.last == 6


@mpi(ranks=(2,), timeout=60)
def test_calls_in_drawn_orders_follow_one_another(comm: MPI.Intracomm) -> None:
    """As the driver saw it, on four streams, by two communicators, by C and by Python."""
    with gpu_job(comm) as (ours, driver):
        other, draw = blinkmpi.Communicator(comm), random.Random(3)
        (x,) = tensors(1)
        streams = (5, 6, PER_THREAD, 0)
        made = ends = 0
        behind: dict[int, set[int]] = {}  # of each stream: the launches that later work follows
        events: dict[int, set[int]] = {}
        for i in range(200):
            by, stream = draw.choice((ours, other)), draw.choice(streams)
            told, timeout = driver["did"], draw.choice((None, None, None, 9))
            made += made_by_c(by, partial(by.Allreduce, MPI.IN_PLACE, x, stream=stream, timeout=timeout))
            for what, on, event in driver.told(told):
                if what == "wait":
                    behind[on] = behind.get(on, set()) | events[event]
                elif what == "record":
                    events[event] = set(behind.get(on, set()))
                else:
                    assert not ends or ends in behind.get(on, set()), f"call {i} on {on}"
                    ends += 1
                    behind[on] = behind.get(on, set()) | {ends}
        assert made > 80
        other.Free()


@mpi(ranks=(2,), timeout=60)
def test_a_stream_that_cannot_follow_the_last_one(comm: MPI.Intracomm) -> None:
    """What the driver says is raised, and nothing is launched; so it is with an interrupt."""
    for error in DeviceError, KeyboardInterrupt:
        with gpu_job(comm) as (ours, driver):
            (x,) = tensors(1)
            for stream in (STREAM, 6, STREAM, 6):
                ours.Allreduce(MPI.IN_PLACE, x, stream=stream)
            launches, driver["event_error"] = driver["launches"], 719
            interrupt = mock.patch.object(FakeGpu, "wait", side_effect=error) if error is KeyboardInterrupt else None
            with interrupt or contextlib.nullcontext(), pytest.raises(error):
                ours.Allreduce(MPI.IN_PLACE, x, stream=STREAM)
            driver["event_error"] = 0
            assert driver["launches"] == launches
            assert not ORDER.lock.locked()
            with pytest.raises(PeerLost, match="died earlier"):
                ours.Allreduce(MPI.IN_PLACE, x, stream=STREAM)
            ours.free()


@mpi(ranks=(2,), timeout=60)
def test_registered_buffers_stay_in_their_regions(comm: MPI.Intracomm) -> None:
    """Anywhere in one, without asking the driver; not on its edge; and no longer when it is deregistered."""
    with gpu_job(comm) as (ours, driver):
        slab, plain = torch.zeros(10 * COUNT), torch.zeros(COUNT)
        part = slab[: 5 * COUNT]
        ours.register(part)
        allreduce = partial(ours.Allreduce, MPI.IN_PLACE, stream=STREAM)
        for _ in range(2):
            assert not made_by_c(ours, partial(allreduce, part[:COUNT]))
        asked = driver["asked"]
        for i in range(1, 4):
            assert made_by_c(ours, partial(allreduce, part[i * COUNT : (i + 1) * COUNT]))
        assert driver["asked"] == asked
        for _ in range(2):
            allreduce(plain)
        assert made_by_c(ours, partial(allreduce, plain))
        assert made_by_c(ours, partial(allreduce, part[:COUNT])), "both kinds are known beside each other"
        assert not made_by_c(ours, partial(allreduce, slab[4 * COUNT + 8 : 5 * COUNT + 8])), "half of it is registered"
        ours.deregister(part)
        for _ in range(2):
            assert not made_by_c(ours, partial(allreduce, part[:COUNT]))
        assert made_by_c(ours, partial(allreduce, slab[4 * COUNT + 8 : 5 * COUNT + 8]))


@mpi(ranks=(2,), timeout=60)
def test_streams_threads_and_peers(comm: MPI.Intracomm) -> None:
    """The current stream, where calls are enqueued; one lock of all launches; records that a peer may still read."""
    with gpu_job(comm, stream="current") as (ours, driver):
        x, y = tensors(2)
        group = partial(ours.Allreduce, MPI.IN_PLACE, [x, y], stream=STREAM)
        assert [made_by_c(ours, group) for _ in range(3)] == [False, True, True], "a group that comes first"
        for stream in (3, 4):
            driver["current_stream"] = stream
            for _ in range(2):
                assert not made_by_c(ours, partial(ours.Allreduce, x, y))
            for a, b in ((x, y), (y, x)):
                assert made_by_c(ours, partial(ours.Allreduce, a, b))
                assert driver.last()[3] == stream
    with gpu_job(comm) as (ours, driver):
        (x,) = tensors(1)
        call = partial(ours.Allreduce, MPI.IN_PLACE, x, stream=STREAM)
        for _ in range(3):
            call()
        before = driver["launches"]
        with ORDER.lock:
            thread = threading.Thread(target=call)
            thread.start()
            time.sleep(0.1)
            assert driver["launches"] == before
        thread.join()
        assert driver["launches"] == before + 1
        assert made_by_c(ours, call)
        assert not ORDER.lock.locked()
    with gpu_job(comm) as (ours, _):
        (x,) = tensors(1)
        call = partial(ours.Allreduce, MPI.IN_PLACE, x, stream=STREAM)
        for _ in range(3):
            call()
        ours.Barrier()
        call()
        comm.Barrier()
        if comm.rank == 0:
            pages, seq = ours._dispatcher().sequence.host.pages, ours._dispatcher().sequence.seq
            entered, finished = int(pages.announced[1]), int(pages.finished[1])
            pages.announced[1], pages.finished[1] = seq - 1, seq - 2  # in the Barrier, which it has not completed

            def complete() -> None:
                time.sleep(0.2)
                pages.announced[1], pages.finished[1] = entered, finished

            thread = threading.Thread(target=complete)
            began = time.monotonic()
            thread.start()
            assert not by_c(ours, call)
            assert time.monotonic() - began > 0.15
            thread.join()
        comm.Barrier()
        if comm.rank == 1:
            call()
        assert made_by_c(ours, call)


@mpi(ranks=(2,), timeout=60)
def test_what_goes_wrong_is_raised_for_good(comm: MPI.Intracomm) -> None:
    for how in ("freed", "reported", "driver"):
        with fake_gpus() as driver:
            ours = blinkmpi.Communicator(comm)
            (x,) = tensors(1)
            call = partial(ours.Allreduce, MPI.IN_PLACE, x, stream=STREAM)
            for _ in range(3):
                call()
            ours.check()
            comm.Barrier()
            if how == "freed":
                ours.Free()
                with pytest.raises(ArgumentError, match="freed"):
                    call()
                continue
            if how == "reported":
                transport_of(ours).report[1] = 1
                with pytest.raises(BlinkError):
                    call()
            else:
                driver["error"] = 719
                with pytest.raises(DeviceError, match=r"launch of allreduce.*CUDA error 719"):
                    call()
                driver["error"] = 0
            launches = driver["launches"]
            for _ in range(2):
                with pytest.raises(PeerLost):
                    call()
            assert driver["launches"] == launches
            assert not ORDER.lock.locked()
            comm.Barrier()
            ours.free()


@mpi(ranks=(1,), timeout=60)
def test_nothing_is_kept_that_should_not_be(comm: MPI.Intracomm) -> None:
    """No reference more after a thousand calls; operands while they may be in use; calls until they are forgotten."""

    class Stream:
        def __init__(self) -> None:
            self.cuda_stream = STREAM

    with gpu_job(comm) as (ours, _):
        x, y = tensors(2)
        stream, op, operands = Stream(), MPI.SUM, operands_of(ours)
        watched = (x, y, stream, op, Stream, torch.float32, torch.Tensor, None, ORDER.lock, MPI.IN_PLACE)

        def many() -> list[int]:
            for _ in range(500):
                ours.Allreduce(x, y, op, stream=stream)
                ours.Allreduce(MPI.IN_PLACE, y, op, stream=stream)
            operands.newest.clear()
            gc.collect()
            return [sys.getrefcount(each) for each in watched]

        many()
        assert made_by_c(ours, partial(ours.Allreduce, x, y, op, stream=stream))
        before = many()
        after = many()
        assert max(abs(a - b) for a, b in zip(after, before, strict=True)) < 50, "of None a few come and go"
        assert after[:4] == before[:4]
        fresh = tensors(1)
        ours.Allreduce(MPI.IN_PLACE, fresh[0], stream=STREAM)
        ours.Allreduce(MPI.IN_PLACE, x, stream=STREAM)
        ref = weakref.ref(fresh.pop())
        gc.collect()
        assert ref() is not None, "the kernel may not have run"
        operands.newest.clear()
        gc.collect()
        assert ref() is None
        launch = weakref.ref(last_of(ours))
        assert launch() is not None
    gc.collect()
    assert launch() is None, "freed"
    why_python(comm)


def why_python(comm: MPI.Intracomm) -> None:
    """Why calls are looked up in Python is said."""
    (x,) = tensors(1)
    for executor, missing, said in (
        ("numpy", False, "NumPy executor, as asked"),
        ("c", True, "has no __dlpack_c_exchange_api__"),
    ):
        with gpu_job(comm, executor=executor) as (ours, driver), mock.patch.object(ours.context, "log_once") as log:
            patched = (
                mock.patch.object(torch.Tensor, "__dlpack_c_exchange_api__", None) if missing else mock.MagicMock()
            )
            with patched:
                for _ in range(3):
                    assert not made_by_c(ours, partial(ours.Allreduce, MPI.IN_PLACE, x, stream=STREAM))
            assert said in log.call_args.args[0]
            assert driver["launches"] == 3


@mpi(ranks=(2,), timeout=60)
def test_what_a_call_costs_the_host(comm: MPI.Intracomm) -> None:
    """Three functions of Python lead to C, and a tensor that no call has seen is kept; the rest is C's.

    ``benchmarks/launch_cost.py`` has the times.
    """
    with gpu_job(comm) as (ours, _):
        x, calls = torch.zeros(256), 1000
        for most, each in ((3, [x] * calls), (5, tensors(calls, 256))):
            for tensor in (x, x, x):
                ours.Allreduce(MPI.IN_PLACE, tensor, stream=STREAM)
            comm.Barrier()
            with Effort() as effort:
                for tensor in each:
                    ours.Allreduce(MPI.IN_PLACE, tensor, stream=STREAM)
            assert effort.ours <= most * calls
