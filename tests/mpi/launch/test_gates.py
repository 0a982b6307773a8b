"""Gates before long calls, on a GPU that is none: which calls have one, where it is launched, on which arguments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
from mpi4py import MPI

import blinkmpi
from benchmarks.fake.gpu import FakeDriver, fake_gpus
from blinkmpi.runtime.cuda.copies import Buckets
from blinkmpi.transport.cuda.kernel_layout import common_words
from tests.harness import mpi
from tests.mpi.launch.test_groups import bucket
from tests.mpi.launch.test_launches import STREAM, made_by_c, transport_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no DLPack exchange API"
)
COUNT = 100_000
ITEM = 4
GATE = 1  # the handle of the first kernel that is compiled
EXECUTORS = ("numpy", "c")


class Made(NamedTuple):
    """A call: whether C made it, and its launches: each a kernel, CTAs, threads, stream and common arguments."""

    by_c: bool
    launches: list[tuple[int, int, int, int, list[int]]]

    @property
    def gates(self) -> list[int]:
        """Which launches are gates."""
        return [i for i, launch in enumerate(self.launches) if launch[:3] == (GATE, 1, 32)]


@contextmanager
def job(
    comm: MPI.Intracomm, algo: str, gate_from: int | None, **options: Any
) -> Iterator[tuple[blinkmpi.Communicator, Callable[[Callable[[], object]], Made]]]:
    """A communicator whose calls have a gate from so many bytes on, and what makes a call and looks at it."""
    with fake_gpus(algo, gate_from) as driver, blinkmpi.Communicator(comm, **options) as ours:
        driver["words"] = common_words(comm.size)
        yield ours, partial(made, ours, driver)


def made(ours: blinkmpi.Communicator, driver: FakeDriver, call: Callable[[], object]) -> Made:
    before = driver["launches"]
    by_c = made_by_c(ours, call)
    launches = [driver.last(back) for back in reversed(range(driver["launches"] - before))]
    return Made(by_c, [(*shape, words) for *shape, words in launches])


def check(found: Made, kernels: int, *, first: int = 0) -> None:
    """A gate, in front of so many kernels of the call, on the first one's arguments; ``first``: behind what copies."""
    assert found.gates == [first]
    gate, kernel = found.launches[first : first + 2]
    assert gate[3:] == kernel[3:], "the same stream and arguments, word by word"
    assert len(found.launches) >= first + 1 + kernels


@mpi(ranks=(2,), timeout=60)
@pytest.mark.parametrize("algo", ["trees", "onehop/direct", "chain/rs_ag"])
def test_a_gate_comes_before_the_kernel(comm: MPI.Intracomm, algo: str) -> None:
    """By Python and by C: of plain buffers, of registered ones, and in place."""
    slab = torch.zeros(4 * COUNT)
    x, y, z = (slab[i * COUNT : (i + 1) * COUNT] for i in range(3))
    for executor in EXECUTORS:
        with job(comm, f"allreduce:{algo}", 0, executor=executor) as (ours, of):
            if algo != "trees":
                ours.register(slab)
            for a, b in ((x, y), (MPI.IN_PLACE, z)):
                for turn in range(3):
                    found = of(partial(ours.Allreduce, a, b, stream=STREAM))
                    assert found.by_c == (executor == "c" and turn == 2)
                    kernels = 2 if algo == "chain/rs_ag" else 1
                    check(found, kernels)
                    assert len(found.launches) == 1 + kernels, "the second kernel has none"
            counted = transport_of(ours).kernels_started.value
            assert counted == 6 * kernels, "a gate counts no call"


@mpi(ranks=(2,), timeout=60)
@pytest.mark.parametrize("algo", ["ll16_one_shot", "ll128_two_shot"])
def test_packets_have_none(comm: MPI.Intracomm, algo: str) -> None:
    x = torch.zeros(1000)
    with job(comm, f"allreduce:onehop/{algo}", 0) as (ours, of):
        for turn in range(3):
            found = of(partial(ours.Allreduce, MPI.IN_PLACE, x, stream=STREAM))
            assert found.by_c == (turn == 2)
            assert len(found.launches) == 1
            assert found.launches[0][0] != GATE


@mpi(ranks=(2,), timeout=60)
def test_blocks_have_none(comm: MPI.Intracomm) -> None:
    """Each rank knows its own bytes alone, so the ranks could not decide alike."""
    n, rank, x, y = comm.size, comm.rank, torch.zeros(COUNT), torch.zeros(COUNT)
    sent, got = [1000 * rank + r for r in range(n)], [1000 * r + rank for r in range(n)]
    with job(comm, "", 0) as (ours, of):
        for turn in range(3):
            found = of(partial(ours.Alltoallv, [x, sent], [y, got], stream=STREAM))
            assert found.by_c == (turn > 0)
            assert len(found.launches) == 1
            assert [p.protocol for p in ours.stats().protocols] == ["blocks"]
            assert found.launches[0][0] != GATE


@mpi(ranks=(2,), timeout=60)
@pytest.mark.parametrize("gate_from", [None, 1 << 40])
def test_without_a_gate_a_call_is_one_kernel(comm: MPI.Intracomm, gate_from: int | None) -> None:
    x = torch.zeros(COUNT)
    with job(comm, "allreduce:trees", gate_from) as (ours, of):
        compiled = transport_of(ours).gpu.compiled
        assert compiled == (gate_from is not None), "it is loaded at the start, while the GPU is idle, or never"
        assert transport_of(ours).gated == (gate_from is not None)
        for _ in range(3):
            assert len(of(partial(ours.Allreduce, MPI.IN_PLACE, x, stream=STREAM)).launches) == 1


@mpi(ranks=(2,), timeout=60)
@pytest.mark.parametrize("algo", ["trees", "onehop/direct"])
def test_counts_on_both_sides_of_the_border(comm: MPI.Intracomm, algo: str) -> None:
    """One kind of calls, which C fits to each new count: from the border on they have a gate, by whomever they go."""
    slab, border = torch.zeros(2 * COUNT), COUNT * ITEM
    for executor in EXECUTORS:
        with job(comm, f"allreduce:{algo}", border, executor=executor) as (ours, of):
            if algo != "trees":
                ours.register(slab)
            seen = set()
            for count in (COUNT - 3, COUNT - 2, COUNT - 1, COUNT + 1, COUNT - 4, COUNT, COUNT + 2, COUNT - 5, COUNT):
                found = of(partial(ours.Allreduce, MPI.IN_PLACE, slab[:count], stream=STREAM))
                if count >= COUNT:
                    check(found, 1)
                else:
                    assert not found.gates
                    assert len(found.launches) == 1
                seen.add((found.by_c, count >= COUNT))
            assert {long for by_c, long in seen if by_c == (executor == "c")} == {False, True}


@mpi(ranks=(2,), timeout=60)
def test_a_group_has_it_behind_what_gathers(comm: MPI.Intracomm) -> None:
    some = [torch.zeros(COUNT + i) for i in range(3)]
    with mock.patch.object(Buckets, "_make", bucket):
        for executor in EXECUTORS:
            with job(comm, "allreduce:trees", 0, executor=executor) as (ours, of):
                for turn in range(3):
                    found = of(partial(ours.Allreduce, MPI.IN_PLACE, some, stream=STREAM))
                    assert found.by_c == (executor == "c" and turn > 0)
                    assert len(found.launches) == 4, "gather, gate, kernel, scatter"
                    check(found, 1, first=1)


@mpi(ranks=(2,), timeout=60)
def test_every_collective(comm: MPI.Intracomm) -> None:
    """A rank that has nothing to do in a call has a gate as well: all wait for all."""
    n, root = comm.size, comm.rank == 0
    x, y = torch.zeros(n * COUNT), torch.zeros(n * COUNT)
    part = x[:COUNT]
    names = ("broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter", "alltoall")
    with job(comm, ";".join(f"{name}:onehop/slots" for name in names), 0) as (ours, of):
        calls: list[Callable[[], object]] = [
            partial(ours.Bcast, x, stream=STREAM), partial(ours.Reduce, x, y if root else None, stream=STREAM),
            partial(ours.Allgather, part, y, stream=STREAM),
            partial(ours.Gather, part, y if root else None, stream=STREAM),
            partial(ours.Scatter, y if root else None, part, stream=STREAM),
            partial(ours.Reduce_scatter_block, y, part, stream=STREAM), partial(ours.Alltoall, x, y, stream=STREAM),
            partial(ours.Scan, x, y, stream=STREAM),
        ]  # fmt: skip
        for call in calls * 3:
            check(of(call), 1)


@mpi(ranks=(2,), timeout=60)
@pytest.mark.parametrize("mixes", [True, False])
def test_in_a_graph(comm: MPI.Intracomm, *, mixes: bool) -> None:
    """The chain of all calls waits before the gate and is recorded behind the kernel."""
    x = torch.zeros(COUNT)
    with fake_gpus("allreduce:trees", 0) as driver, blinkmpi.Communicator(comm) as ours:
        driver["words"] = common_words(comm.size)
        transport = transport_of(ours)
        transport.mixes = mixes
        call = partial(ours.Allreduce, MPI.IN_PLACE, x, stream=STREAM)
        for captured in (0, 1, 1, 2, 0, 0):
            driver["captured"] = captured
            before = driver["launches"]
            found = made(ours, driver, call)
            check(found, 1)
            assert driver["launches"] == before + 2
            if captured and mixes:
                assert not found.by_c
                assert transport.gpu.followed[captured] == (driver["launches"],), "behind both"
        if mixes:
            waits = driver["waits"]
            assert made(ours, driver, call).by_c
            assert driver["waits"] == waits + 1
            assert (driver["before"], driver["behind"]) == (driver["launches"] - 2, driver["launches"])


@mpi(ranks=(2,), timeout=60)
def test_a_gate_that_the_driver_refuses(comm: MPI.Intracomm) -> None:
    """Ends the communicator, and the kernel behind it is not launched."""
    for calls in (1, 3):  # the last one by Python, by C
        with fake_gpus("allreduce:trees", 0) as driver:
            ours = blinkmpi.Communicator(comm)
            x = torch.zeros(COUNT)
            for _ in range(calls - 1):
                ours.Allreduce(MPI.IN_PLACE, x, stream=STREAM)
            comm.Barrier()
            driver["error"], before = 719, driver["launches"]
            with pytest.raises(blinkmpi.errors.DeviceError, match=r"launch of .*allreduce.*719"):
                ours.Allreduce(MPI.IN_PLACE, x, stream=STREAM)
            assert driver["launches"] == before + 1
            driver["error"] = 0
            comm.Barrier()
            ours.free()
