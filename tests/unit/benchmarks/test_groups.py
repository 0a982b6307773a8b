"""Groups of small tensors, beside NCCL's: on arrays of the host that pass for a GPU's."""

import argparse
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blinkmpi.transport.cuda import device
from tests.unit.benchmarks.scripts import script

SIZE = 2


class World:
    """The first of two ranks that do alike."""

    rank, size = 0, SIZE

    def Barrier(self) -> None:
        """The other is there."""

    def allgather(self, mine: Any) -> list[Any]:
        return [mine, mine]

    def allgather_bytes(self, body: bytes) -> list[bytes]:
        return [body, body]

    def allreduce(self, mine: int) -> int:
        return SIZE * mine


class Array(np.ndarray[Any, Any]):
    """An array with an address, as CuPy has it."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])

    @data.setter
    def data(self, value: Any) -> None:
        raise AttributeError


class Stream:
    """A stream that runs what is put on it at once, or keeps it in a graph."""

    ptr = 5

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking
        self.captured: list[Any] | None = None

    def put(self, work: Any) -> None:
        work() if self.captured is None else self.captured.append(work)

    def synchronize(self) -> None:
        """All is done."""

    def begin_capture(self) -> None:
        self.captured = []

    def end_capture(self) -> Any:
        works, self.captured = self.captured or [], None
        return SimpleNamespace(launch=lambda: [work() for work in works])

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Machine:
    """Ours and NCCL, which add up what two ranks alike have; ``calls`` counts the sums of each."""

    gpu = SimpleNamespace(name="a GPU")

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}
        self.stream: Any = None
        self.calls = {"ours": 0, "nccl": 0}
        self.right = True

    def cupy(self) -> Any:
        runtime = SimpleNamespace(deviceSynchronize=lambda: None)
        return SimpleNamespace(zeros=self.zeros, cuda=SimpleNamespace(Stream=self.new_stream, runtime=runtime))

    def new_stream(self, **how: Any) -> Stream:
        self.stream = Stream(**how)
        return self.stream  # type: ignore[no-any-return]

    def zeros(self, count: int, dtype: str) -> Array:
        made = np.zeros(count, dtype).view(Array)
        self.known[made.data.ptr] = made
        return made

    def add(self, who: str, array: Any) -> None:
        self.calls[who] += 1
        array *= SIZE + (not self.right)

    def Allreduce(self, place: Any, what: Any, *, stream: Any) -> None:
        for array in what if isinstance(what, list) else [what]:
            stream.put(lambda array=array: self.add("ours", array))

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        assert (source, stream, self.known[source].size) == (target, Stream.ptr, count)
        self.stream.put(lambda: self.add("nccl", self.known[source]))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(device, "cupy", made.cupy)
    return made


def measured(machine: Machine, monkeypatch: pytest.MonkeyPatch, gpus: int) -> tuple[list[dict[str, Any]], str]:
    module = script("groups")
    monkeypatch.setattr(device, "device_count", lambda: gpus)
    nccl = SimpleNamespace(NCCL_FLOAT32=7, NCCL_SUM=0, groupStart=lambda: None, groupEnd=lambda: None)
    monkeypatch.setattr(module, "nccl_communicator", lambda world: (nccl, machine))
    args = argparse.Namespace(gpu=True, counts=[3, 5], sizes=[1024])
    found: tuple[list[dict[str, Any]], str] = module.measured(World(), machine, args)
    return found


def test_all_ways_are_measured_on_a_stream_and_in_a_graph_and_are_right(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, why = measured(machine, monkeypatch, SIZE)
    assert why == ""
    for row, count in zip(rows, (3, 5), strict=True):
        assert (row["tensors"], row["bytes"]) == (count, 1024)
        assert list(row["us"]) == list(row["graph_us"]) == ["group", "vector", "each", "nccl"]
        assert row["wrong"] == dict.fromkeys(row["us"], 0)
        assert min(*row["us"].values(), *row["graph_us"].values()) > 0
    calls = script("groups")
    of_each_way = (calls.WARMUP + calls.ROUNDS) * (1 + calls.REPLAYS) + 1
    assert machine.calls == {"ours": of_each_way * (3 + 1 + 3 + 5 + 1 + 5), "nccl": of_each_way * (3 + 5)}
    assert capsys.readouterr().out.count("in graphs") == 2


def test_wrong_sums_are_counted_and_ranks_that_share_a_gpu_have_no_nccl(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.right = False
    rows, why = measured(machine, monkeypatch, 1)
    assert why == "ranks share a GPU"
    assert rows[0]["wrong"] == dict.fromkeys(("group", "vector", "each"), SIZE * 3 * 256)
