"""torch's collectives on GPUs that are none, from the group's method down to the driver: what is launched, and where."""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from mpi4py import MPI

import blinkmpi
from benchmarks.fake.gpu import FakeDriver, fake_gpus
from benchmarks.fake.torch_group import APART, TorchGroup, torch_group
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
        self.row, self.parts = [*torch.zeros(n, COUNT)], [torch.zeros(COUNT) for _ in range(n)]
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
def job(comm: MPI.Intracomm) -> Iterator[tuple[TorchGroup, FakeDriver, Any]]:
    """A group, the driver, and the dispatcher of its Communicator."""
    with (
        fake_gpus() as driver, blinkmpi.Communicator(comm, stream="current") as ours, torch_group(ours) as found,
    ):  # fmt: skip
        driver["words"] = WORDS
        yield found, driver, ours._dispatcher()


@mpi(ranks=(2, 3), timeout=300)
def test_cpp_launches_what_python_launches(comm: MPI.Intracomm) -> None:
    """Kernels, arguments, streams and fingerprints are the same, word by word; and C makes nearly all of them."""
    buffers, found, made = Buffers(comm.rank, comm.size), [], 0
    for quick in (False, True):
        buffers.turn, rows = 0, []
        with job(comm) as (group, driver, dispatcher):
            none = mock.patch.object(fast_path, "extension", return_value=None)
            with mock.MagicMock() if quick else none:
                for name, call in buffers.calls().items():
                    for _, asynchronous, stream in itertools.product(range(5), (False, True), (8, 9)):
                        comm.Barrier()
                        group.go_on(stream)
                        before = driver["launches"]
                        driver["words"] = words_of(comm.size) if "splits" in name else WORDS
                        assert call(group.group, asynchronous), name
                        last = dispatcher.repeated.last_launch
                        made += quick and last is not None and last[1] == dispatcher.sequence.seq
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
    with job(comm) as (group, _, _):
        for name, call in Buffers(comm.rank, comm.size).calls().items():
            for asynchronous, streams in itertools.product((False, True), ((8, 8), (8, 9))):
                for stream in streams * 4:
                    group.go_on(stream)
                    call(group.group, asynchronous)
                comm.Barrier()
                with Effort() as effort:
                    for stream in streams:
                        group.go_on(stream)
                        call(group.group, asynchronous)
                assert effort.ours <= 2 * 12, (name, asynchronous, streams, effort.calls)


@mpi(ranks=(2,), timeout=300)
def test_two_streams_in_turn_as_fsdp_has_them(comm: MPI.Intracomm) -> None:
    """All-gathers on one, reduce-scatters on the other: each waits for the one before, and for nothing behind that."""
    calls = Buffers(comm.rank, comm.size).calls()
    with job(comm) as (group, driver, _):
        for _ in range(4):
            for stream, name in (8, "all_gather_into_tensor"), (9, "reduce_scatter_tensor"):
                group.go_on(stream)
                told = driver["did"]
                calls[name](group.group, False)
                comm.Barrier()
        for stream, name in (8, "all_gather_into_tensor"), (9, "reduce_scatter_tensor"):
            group.go_on(stream)
            told = driver["did"]
            calls[name](group.group, False)
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
        with job(comm) as (group, driver, dispatcher):
            for i in range(4):
                comm.Barrier()
                work = group.group.allgather(
                    [parts], [torch.zeros(4, 2, dtype=kind)], opts(c10d.AllgatherOptions, True)
                )
                if i > 2:
                    assert dispatcher.repeated.last_launch[1] == dispatcher.sequence.seq
                    at = driver.last()[4][buffers_at(n) + 1]
                    nbytes = parts[0].nbytes
                    for r, part in enumerate(parts):
                        assert ctypes.string_at(at + r * nbytes, nbytes) == ctypes.string_at(part.data_ptr(), nbytes)
                assert work.result()[0] is parts[0]
            for _ in range(4):
                comm.Barrier()
                group.group.allgather([buffers.row], [buffers.block], opts(c10d.AllgatherOptions, False))
            assert driver.last()[4][buffers_at(n) + 1] == buffers.row[0].data_ptr()
            unlike = [torch.zeros(r + 1) for r in range(n)]
            comm.Barrier()
            assert group.group.allgather([unlike], [torch.zeros(rank + 1)], opts(c10d.AllgatherOptions, False))


@mpi(ranks=(2,), timeout=300)
def test_the_end_of_a_coalesced_group_waits_for_what_was_begun_within(comm: MPI.Intracomm) -> None:
    """torch's manager of a device makes its list of calls before the group's end, whose Work is what it gives."""
    buffers = Buffers(comm.rank, comm.size)
    with job(comm) as (group, _, _):
        for i in range(5):
            group.group._start_coalescing(torch.device("cpu"))
            made = buffers.calls()["all_reduce_coalesced"](group.group, True)
            noted = buffers.calls()["broadcast"](group.group, True) if i % 2 else None
            work = group.group._end_coalescing(torch.device("cpu"))
            assert {x.data_ptr() for x in made.result()} == {x.data_ptr() for x in buffers.blocks}
            assert (work is made) == (noted is None)
            _, blocked = group.device.counts()
            work.wait()
            assert group.device.counts()[1] == blocked + (2 if noted else 1)
            comm.Barrier()


@mpi(ranks=(2,), timeout=300)
def test_one_event_leads_to_all_calls_apart(comm: MPI.Intracomm) -> None:
    """That behind a call is its Work's."""
    calls = Buffers(comm.rank, comm.size).calls()
    with job(comm) as (group, _, _):
        for i in range(12):
            comm.Barrier()
            created = group.device.created()
            calls["all_reduce"](group.group, True)
            assert i < 4 or group.device.created() == created + 1
