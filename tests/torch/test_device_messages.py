"""Messages of GPU tensors: which go from GPU to GPU, and that C++ puts them on a stream as Python does."""

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import blinkmpi
from benchmarks.fake.gpu import FakeDriver, FakeGpu, fake_gpus
from blinkmpi.errors import ArgumentError
from blinkmpi.transport.cuda import device
from blinkmpi.transport.cuda.kernel_layout import MESSAGE, common_arguments
from blinkmpi.transport.cuda.messages import Messages
from tests.harness import mpi

torch = pytest.importorskip("torch")
device_messages = pytest.importorskip("blinkmpi.torch.device_messages")
group_module = pytest.importorskip("blinkmpi.torch.group")
STREAM, N = 5, 3


class Opened:
    """The Communicators of some ranks: what each tells the others is collected first."""

    def __init__(self, ends: list[Any]) -> None:
        self.told = [[*end._begun[0], *end._begun[1]] for end in ends]

    def comm(self, rank: int) -> Any:
        def numbers_of_all(numbers: list[int], _timeout_s: float) -> list[list[int]]:
            assert numbers == self.told[rank]
            return self.told

        gpus = SimpleNamespace(here=(), transport=SimpleNamespace(load_messages=lambda: None))
        context = SimpleNamespace(gpus=gpus, timeout_s=1.0, why_no_gpus="")
        return SimpleNamespace(_dispatcher=lambda: SimpleNamespace(sequence=SimpleNamespace(
            context=context, numbers_of_all=numbers_of_all)))  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, N - 1)).filter(lambda p: p[0] != p[1])), st.data())
def test_both_ends_know_which_way_a_message_goes(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    """Whenever each rank opens the group, between whatever sends and receives."""
    calls: list[list[tuple[int, bool]]] = [[] for _ in range(N)]  # by rank: (peer, whether it sends)
    for writer, reader in pairs:
        calls[writer].append((reader, True))
        calls[reader].append((writer, False))
    before = [data.draw(st.integers(0, len(some))) for some in calls]
    ends = [device_messages.DeviceMessages(rank, N) for rank in range(N)]
    ways: dict[tuple[int, int, bool], list[bool]] = {}

    def begin(rank: int, some: list[tuple[int, bool]]) -> None:
        for peer, sends in some:
            way = ends[rank].next(peer, sends=sends) is not None
            ways.setdefault((rank, peer, True) if sends else (peer, rank, False), []).append(way)

    with mock.patch.object(device_messages, "MessageEnd"):
        for rank in range(N):
            begin(rank, calls[rank][: before[rank]])
        opened = Opened(ends)
        for rank in range(N):
            ends[rank].open(opened.comm(rank))
        for rank in range(N):
            begin(rank, calls[rank][before[rank] :])
    for writer, reader, sends in ways:
        assert ways[writer, reader, sends] == ways[writer, reader, not sends]
        assert sorted(ways[writer, reader, sends]) == ways[writer, reader, sends]  # by gloo first


def test_several_nodes_and_no_gpus_go_by_gloo() -> None:
    several, alone = SimpleNamespace(here=(0, 1)), SimpleNamespace(here=())
    for gpus, size, why in ((None, 2, "no driver"), (several, 2, "several nodes"), (alone, 1, "one rank")):
        found = device_messages.DeviceMessages(0, size)
        context = SimpleNamespace(gpus=gpus, why_no_gpus="no driver", timeout_s=1.0)
        dispatcher = SimpleNamespace(sequence=SimpleNamespace(context=context))
        found.open(SimpleNamespace(_dispatcher=lambda d=dispatcher: d))
        assert why in found.why_not
        assert found.next(size - 1, sends=True) is None
        assert why in found.explain(8)


def test_messages_from_any_source_are_counted_for_the_rank_that_has_sent_them() -> None:
    """Once, when the first ``wait`` has told who that is; at a group's opening the numbers of both ends agree."""
    found = device_messages.DeviceMessages(0, 3)
    work = SimpleNamespace(wait=lambda: None, _source_rank=lambda: 2)
    y = torch.zeros(3)
    received = group_module.Received(work, y, torch.ones(3))
    received.tell = found.count_received
    for _ in range(2):
        received.wait()
    assert found._begun == [[0, 0, 1], [0, 0, 0]]
    assert (y == 1).all()


@pytest.fixture
def driver(tmp_path: Any) -> Any:
    made = FakeDriver(str(tmp_path))
    cupy = SimpleNamespace(cuda=SimpleNamespace(driver=SimpleNamespace(launchKernel=made.launch)))
    with mock.patch.object(device, "cupy", return_value=cupy):
        yield made


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("count", [3, 5000, 300_000])
def test_cpp_puts_a_message_as_python_does(driver: Any, on_cpu: Any, device: Any, sends: bool, count: int) -> None:
    gpu: Any = FakeGpu(driver)
    gpu.device = -1  # host memory's number
    kernel, report = gpu.compile("", "messages"), (ctypes.c_int64 * 8)()
    common = common_arguments([100 + r for r in range(N)], ctypes.addressof(report), 0, 1, 0)
    fifo = Messages(gpu, kernel, N, common, 4096).fifo(2, sends=sends)
    numbers, words = fifo.for_c()
    end = on_cpu.MessageEnd(
        numbers, words, fifo.order.lock.acquire, fifo.order.lock.release, device.stream(STREAM),
        ctypes.addressof(report),
    )  # fmt: skip
    tensor = torch.arange(count)
    driver["words"] = len(words)
    fifo.put(tensor.data_ptr(), 8 * count, 9, 2.5)
    by_python, waits, records = driver.last(), driver["waits"], driver["records"]
    work = end.put(tensor, 9, 2_500_000_000)
    assert driver.last() == by_python
    assert (driver["waits"], driver["records"]) == (2 * waits, 2 * records) == (2, 2)
    assert (driver["before"], driver["behind"]) == (1, 2)  # launches before the wait, and before the record
    assert not driver["gil"]
    assert by_python[4][len(words) - len(MESSAGE) :] == [4096, 2, int(sends), 8 * count, 9]
    assert work is not None
    assert not fifo.order.lock.locked()

    for wrong in (tensor[::2], tensor.to(torch.float32).requires_grad_(), tensor.numpy()):
        assert end.put(wrong, 9, 1) is None
    with fifo.order.lock:  # which another thread has
        assert end.put(tensor, 9, 1) is None
    for name in ("captured", "error"):
        driver[name] = 7
        assert end.put(tensor, 9, 1) == (7 if name == "error" else None)
        driver[name] = 0
    assert not fifo.order.lock.locked()
    report[1] = 3  # a kernel has given up
    assert end.put(tensor, 9, 1) is None


@mpi(ranks=(2,), timeout=120)
def test_a_group_of_gpus_sends_from_gpu_to_gpu(comm: MPI.Intracomm) -> None:
    """The host's part: who sends, who receives, behind what; a group that is coalesced waits for its messages."""
    dist, rank = torch.distributed, comm.rank
    with fake_gpus() as driver:
        dist.init_process_group("blink", init_method="mpi://")
        group = dist.group.WORLD
        assert group.device_messages.why_not == ""
        told = [blinkmpi.torch.explain(group, "send", nbytes) for nbytes in (8, 64 << 20)]
        assert "8 bytes goes from GPU to GPU: in 1 of 16 lanes, 8 bytes before" in told[0]
        assert f"in 16 of 16 lanes, {8 << 20} bytes before anybody receives them" in told[1]
        ends = []

        class Noted:
            def __init__(self, _dispatcher: Any, peer: int, *, sends: bool) -> None:
                self.peer, self.sends = peer, sends

            def put(self, tensor: Any, tag: int, _timeout_s: float) -> Any:
                ends.append((self.peer, self.sends, tag, tensor.numel()))
                return group_module.Work([tensor])

        x = torch.ones(4)
        with mock.patch.object(device_messages, "MessageEnd", Noted):
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x, 1 - rank, tag=3), dist.P2POp(dist.irecv, x[:2], 1 - rank)]
            ):
                work.wait()
            with dist.distributed_c10d._coalescing_manager(group, x.device, async_ops=True) as noted:
                dist.isend(x, 1 - rank)
            assert len(noted.works[0]._works) == 1
        assert ends == [(1 - rank, True, 3, 4), (1 - rank, False, 0, 2), (1 - rank, True, 0, 4)]
        with pytest.raises(ArgumentError, match="name the source"):
            dist.recv(x)
        driver["words"] = 1
        dist.destroy_process_group()
    blinkmpi.Communicator(comm).Free()
