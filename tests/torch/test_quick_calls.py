"""torch's collectives on GPUs that are none, from the group's methods to the driver: what is launched, and where."""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from mpi4py import MPI

import blinkmpi
from benchmarks import torch_host_time
from benchmarks.fake.gpu import FakeDriver, fake_gpus
from benchmarks.fake.torch_group import APART, Streams, group_of, streams_of_nothing
from blinkmpi.transport.cuda.blocks import ends_at
from blinkmpi.transport.cuda.kernel_layout import BLOCK_END, buffers_at
from tests.effort import Effort
from tests.harness import mpi

torch = pytest.importorskip("torch")
fast_path = pytest.importorskip("blinkmpi.torch.fast_path")
c10d = torch.distributed.distributed_c10d
pytestmark = [
    pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="no DLPack exchange API"),
    pytest.mark.timeout(900),  # the first one may wait for a compiler
]
COUNT, WORDS = 64, 16  # of a kernel's arguments; calls of blocks have more
Call = Callable[[Any, bool], Any]  # of a group, and whether it is asynchronous


class Buffers:
    """Tensors of rank ``rank`` of ``n``, and each collective on them."""

    def __init__(self, rank: int, n: int) -> None:
        self.rank, self.n, self.turn = rank, n, 0
        self.block, self.other, self.whole = torch.zeros(COUNT), torch.zeros(COUNT), torch.zeros(n * COUNT)
        self.sent, self.got = torch.zeros(n * COUNT), torch.zeros(n * COUNT)
        self.row, self.second = ([*torch.zeros(n, COUNT)] for _ in range(2))
        self.wholes, self.blocks = ([torch.zeros(k * COUNT) for _ in range(3)] for k in (n, 1))

    def calls(self) -> dict[str, Call]:
        """By torch's names."""
        b = self
        return {
            "all_reduce": lambda g, a: g.allreduce([b.block], opts(c10d.AllreduceOptions, a)),
            "broadcast": lambda g, a: g.broadcast([b.block], opts(c10d.BroadcastOptions, a)),
            "reduce": lambda g, a: g.reduce([b.block], opts(c10d.ReduceOptions, a)),
            "all_gather_into_tensor": lambda g, a: g.all_gather_single(
                b.whole, b.block, opts(c10d.AllgatherOptions, a)
            ),
            "reduce_scatter_tensor": lambda g, a: g.reduce_scatter_single(
                b.block, b.whole, opts(c10d.ReduceScatterOptions, a)
            ),
            "all_gather, in a row": lambda g, a: g.allgather([b.row], [b.block], opts(c10d.AllgatherOptions, a)),
            "reduce_scatter, in a row": lambda g, a: g.reduce_scatter(
                [b.block], [b.row], opts(c10d.ReduceScatterOptions, a)
            ),
            "all_to_all, in a row, of splits": lambda g, a: g.alltoall(b.row, b.second, opts(c10d.AllToAllOptions, a)),
            "all_to_all_single": lambda g, a: g.all_to_all_single(b.got, b.sent, [], [], opts(c10d.AllToAllOptions, a)),
            "all_to_all_single, splits": self.exchange,
            "all_reduce_coalesced": lambda g, a: g.allreduce_coalesced(
                b.blocks, opts(c10d.AllreduceCoalescedOptions, a)
            ),
            "all_gather_coalesced": lambda g, a: g.all_gather_single_coalesced(
                b.wholes, b.blocks, opts(c10d.AllgatherOptions, a)
            ),
            "reduce_scatter_coalesced": lambda g, a: g.reduce_scatter_single_coalesced(
                b.blocks, b.wholes, opts(c10d.ReduceScatterOptions, a)
            ),
            "one, coalesced": lambda g, a: g.all_gather_single_coalesced(
                [b.whole], [b.block], opts(c10d.AllgatherOptions, a)
            ),
        }

    def exchange(self, group: Any, asynchronous: bool) -> Any:
        """Of other lengths each time, and to or from one rank of none at times."""
        self.turn += 1
        less = self.turn * 7 % (COUNT + 1)
        splits = [COUNT - less, *[COUNT] * (self.n - 2), less]
        got = [splits[self.rank]] * self.n
        out, into = self.got[: sum(got)], self.sent[: sum(splits)]
        return group.all_to_all_single(out, into, got, splits, opts(c10d.AllToAllOptions, asynchronous))


def words_of(n: int) -> int:
    """Words of the arguments of a call of blocks."""
    return ends_at(n) + 2 * (n - 1) * len(BLOCK_END)


def opts(kind: Any, asynchronous: bool) -> Any:
    made = kind()
    made.asyncOp = asynchronous
    return made


@contextmanager
def job(comm: MPI.Intracomm) -> Iterator[tuple[Any, Streams, FakeDriver]]:
    """A group, its streams, and the driver."""
    with (
        fake_gpus() as driver, blinkmpi.Communicator(comm, stream="current") as ours, streams_of_nothing() as streams,
    ):  # fmt: skip
        driver["words"] = WORDS
        yield group_of(ours), streams, driver


def by_c(group: Any) -> bool:
    """Whether C has made the last call."""
    dispatcher = group.comm._dispatcher()
    last = dispatcher.repeated.last_launch
    return last is not None and last[1] == dispatcher.sequence.seq


@mpi(ranks=(2, 3), timeout=300)
def test_cpp_launches_what_python_launches(comm: MPI.Intracomm) -> None:
    """Kernels, arguments, streams and fingerprints are the same, word by word; and C makes nearly all of them."""
    buffers, found, made = Buffers(comm.rank, comm.size), [], 0
    for quick in (False, True):
        buffers.turn, rows = 0, []
        with job(comm) as (group, streams, driver):
            none = mock.patch.object(fast_path, "extension", return_value=None)
            with mock.MagicMock() if quick else none:
                for name, call in buffers.calls().items():
                    for _, asynchronous, stream in itertools.product(range(5), (False, True), (8, 9)):
                        comm.Barrier()
                        streams.go_on(stream)
                        before = driver["launches"]
                        driver["words"] = words_of(comm.size) if "splits" in name else WORDS
                        assert call(group, asynchronous), name
                        made += quick and by_c(group)
                        for back in range(driver["launches"] - before):
                            *shape, words = driver.last(back)
                            assert shape[-1] == (APART if asynchronous else stream)
                            words[comm.size] = 0  # the address of the report
                            rows.append((name, shape, words))
        found.append(rows)
    for one, other in zip(*found, strict=True):
        assert one == other
    assert made >= 0.7 * len(found[0]), (made, len(found[0]))


@mpi(ranks=(2,), timeout=300)
def test_few_python_functions_lead_to_c(comm: MPI.Intracomm) -> None:
    """Also where streams alternate, and where lengths are new: all that is left of Python is the way from torch."""
    with job(comm) as (group, streams, _):
        for name, call in Buffers(comm.rank, comm.size).calls().items():
            for asynchronous, turn in itertools.product((False, True), ((8, 8), (8, 9))):
                for stream in turn * 4:
                    streams.go_on(stream)
                    call(group, asynchronous)
                comm.Barrier()
                with Effort() as effort:
                    for stream in turn:
                        streams.go_on(stream)
                        call(group, asynchronous)
                assert effort.ours <= 2 * 12, (name, asynchronous, turn, effort.calls)


@mpi(ranks=(2,), timeout=300)
def test_two_streams_in_turn_as_fsdp_has_them(comm: MPI.Intracomm) -> None:
    """All-gathers on one, reduce-scatters on the other: each waits for the one before, and for nothing behind that."""
    calls = Buffers(comm.rank, comm.size).calls()
    with job(comm) as (group, streams, driver):
        for _ in range(4):
            for stream, name in (8, "all_gather_into_tensor"), (9, "reduce_scatter_tensor"):
                streams.go_on(stream)
                told = driver["did"]
                calls[name](group, False)
                comm.Barrier()
        for stream, name in (8, "all_gather_into_tensor"), (9, "reduce_scatter_tensor"):
            streams.go_on(stream)
            told = driver["did"]
            calls[name](group, False)
            said = [(what, on) for what, on, _ in driver.told(told)]
            assert said == [("wait", stream), ("launch", stream), ("record", stream)]


@mpi(ranks=(2,), timeout=300)
def test_a_list_gets_its_parts(comm: MPI.Intracomm) -> None:
    """By copies behind the call, out of memory that lives as long as they may need it; none where it lies in a row."""
    n, rank = comm.size, comm.rank
    buffers = Buffers(rank, n)
    for kind in (torch.float32, torch.bool, torch.complex64):
        parts = [torch.zeros(4, 2, dtype=kind) for _ in range(n)]
        with torch.inference_mode():
            parts[0] = torch.zeros(4, 2, dtype=kind)
        with job(comm) as (group, _, driver):
            for i in range(4):
                comm.Barrier()
                work = group.allgather([parts], [torch.zeros(4, 2, dtype=kind)], opts(c10d.AllgatherOptions, True))
                if i > 2:
                    assert by_c(group)
                    at = driver.last()[4][buffers_at(n) + 1]
                    nbytes = parts[0].nbytes
                    for r, part in enumerate(parts):
                        assert ctypes.string_at(at + r * nbytes, nbytes) == ctypes.string_at(part.data_ptr(), nbytes)
                assert work.result()[0] is parts[0]
            for _ in range(4):
                comm.Barrier()
                group.allgather([buffers.row], [buffers.block], opts(c10d.AllgatherOptions, False))
            assert driver.last()[4][buffers_at(n) + 1] == buffers.row[0].data_ptr()
            unlike = [torch.zeros(r + 1) for r in range(n)]
            comm.Barrier()
            assert group.allgather([unlike], [torch.zeros(rank + 1)], opts(c10d.AllgatherOptions, False))


@mpi(ranks=(2,), timeout=300)
def test_the_end_of_a_coalesced_group_waits_for_what_was_begun_within(comm: MPI.Intracomm) -> None:
    """torch's manager of a device makes its list of calls before the group's end, whose Work is what it gives."""
    buffers = Buffers(comm.rank, comm.size)
    with job(comm) as (group, streams, _):
        for i in range(5):
            group._start_coalescing(torch.device("cpu"))
            made = buffers.calls()["all_reduce_coalesced"](group, True)
            noted = buffers.calls()["broadcast"](group, True) if i % 2 else None
            work = group._end_coalescing(torch.device("cpu"))
            assert {x.data_ptr() for x in made.result()} == {x.data_ptr() for x in buffers.blocks}
            _, blocked = streams.device.counts()
            work.wait()
            assert streams.device.counts()[1] == blocked + (2 if noted else 1)
            comm.Barrier()


@mpi(ranks=(2,), timeout=300)
def test_one_event_leads_to_all_calls_apart(comm: MPI.Intracomm) -> None:
    """That behind a call is its Work's."""
    calls = Buffers(comm.rank, comm.size).calls()
    with job(comm) as (group, streams, _):
        for i in range(12):
            comm.Barrier()
            created = streams.device.created()
            calls["all_reduce"](group, True)
            assert i < 4 or streams.device.created() == created + 1


@mpi(ranks=(2,), timeout=300)
def test_the_benchmark_of_the_hosts_time(comm: MPI.Intracomm) -> None:
    """It has a row for each call, way to wait and way of streams, and its buffers fit."""
    ways = {"CALLS": 2, "REPEATS": 1, "WARMUP": 4}
    with mock.patch.multiple(torch_host_time, **ways), torch_host_time.on_nothing(torch) as (groups, device, on, _):
        rows = torch_host_time.rows_of(comm, torch, groups, device, on, lambda: None, [1024, 4], checks=False)
    calls = {row["call"] for row in rows}
    assert len(calls) == 10
    assert len(rows) == 2 * 2 * 2 * len(calls)
    assert all(row["us"]["blink"] > 0 for row in rows)
    blinkmpi.Communicator(comm).Free()


def test_the_benchmarks_results_are_what_it_says() -> None:
    """Its splits fit together, and a wrong result is seen."""
    for n in (2, 3, 4):
        every = [torch_host_time.cases(torch, rank, n, 64, torch.device("cpu")) for rank in range(n)]
        assert len({tuple(case.name for case in cases) for cases in every}) == 1
        for of_call in zip(*every, strict=True):
            assert of_call[0].result in (1, n)
    x = torch.zeros(4)
    for add, right in ((0, True), (1, False)):
        case = torch_host_time.Case("none", lambda _, a, add=add: x.add_(add), [x], [x], 1)
        assert torch_host_time.is_right(case, None, lambda: None) is right
