"""Calls on streams that differ in their counts alone: C has them fit, and they are what Python would launch."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import PeerLost
from blinkmpi.runtime.cuda.repeating import CountedLaunch
from tests.effort import Effort
from tests.harness import mpi
from tests.mpi.launch.test_launches import STREAM, gpu_job, made_alike, made_by_c, torch

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no DLPack exchange API"
)

LONGEST = 20_000
COUNTS = [*range(5000, 5600, 100), 4097, 8192, 8193, 4096, *range(16, 20), 5001, 5000, 16_384, 12_345, 12_346]
WORDS = 24  # of a kernel's arguments: all have as many
ALGOS = {  # and whether all buffers are registered
    "onehop/ll16_one_shot": False, "onehop/ll128_two_shot": False, "onehop/direct": True, "trees": False,
    "chain": False, "chain/rs_ag": True,
}  # fmt: skip


@mpi(ranks=(2,), timeout=120)
def test_c_launches_what_python_launches(comm: MPI.Intracomm) -> None:
    """Counts of one row and of others, in turn, at other addresses: word by word, and as the statistics have it."""
    n, sent, got = comm.size, torch.zeros(LONGEST), torch.zeros(2 * LONGEST)

    def calls(ours: blinkmpi.Communicator) -> Iterator[Callable[[], None]]:
        for i, count in enumerate(COUNTS):
            x, y = sent[i : i + count], got[i : i + count]
            yield partial(ours.Allreduce, x, y, stream=STREAM)
            yield partial(ours.Allreduce, MPI.IN_PLACE, y, MPI.MAX, stream=STREAM)
            yield partial(ours.Bcast, y, root=n - 1, stream=STREAM)
            yield partial(ours.Reduce, x, y if comm.rank == 0 else None, stream=STREAM)
            yield partial(ours.Allgather, x, got[i : i + n * count], stream=STREAM)
            yield partial(ours.Reduce_scatter_block, got[: n * count], sent[:count], stream=STREAM)

    for algo, register in ALGOS.items():
        some = made_alike(comm, algo, calls, [sent, got] if register else [], WORDS)
        assert some >= (2 if "rs_ag" in algo else 3) * len(COUNTS), algo  # whose new counts Python binds


@pytest.mark.parametrize("algo", ["", "chain/rs_ag", "trees"])
@mpi(ranks=(2,), timeout=120)
def test_calls_by_chance(comm: MPI.Intracomm, algo: str) -> None:
    """Types, counts, places, streams and forms of calls as they come."""
    rank, n, draw = comm.rank, comm.size, random.Random(7)
    buffers = [
        (torch.zeros(LONGEST, dtype=d), torch.zeros(n * LONGEST, dtype=d)) for d in (torch.float32, torch.bfloat16)
    ]

    def calls(ours: blinkmpi.Communicator) -> Iterator[Callable[[], None]]:
        draw.seed(7)
        for _ in range(400):
            sent, got = draw.choice(buffers)
            count = draw.choice([draw.randrange(4097, 8193), draw.randrange(1, 64), 5000, 6000])
            at = draw.randrange(2000)
            x, y, whole = sent[at : at + count], got[at : at + count], got[at : at + n * count]
            op, root, less = draw.choice([MPI.SUM, MPI.MAX, "sum"]), draw.choice([0, np.int64(1)]), max(1, count // 2)
            yield partial(
                *draw.choice([
                    (ours.Allreduce, x, y, op), (ours.Allreduce, MPI.IN_PLACE, y, op), (ours.Bcast, y, root),
                    (ours.Reduce, x, y if rank == root else None, op, root), (ours.Allgather, x, whole),
                    (ours.Reduce_scatter_block, whole, x, op), (ours.Gather, x, whole if rank == root else None, root),
                    (ours.Allreduce, [x, less], [y, less], op),
                ]),
                stream=STREAM + (draw.random() < 0.01),
                timeout=20 if draw.random() < 0.02 else None,
            )  # fmt: skip

    for registered in ([], [buffer for pair in buffers for buffer in pair]):
        assert made_alike(comm, algo, calls, registered, WORDS) > 40


@mpi(ranks=(2,), timeout=60)
def test_few_python_functions(comm: MPI.Intracomm) -> None:
    """Time differs from machine to machine; this number does not."""
    x, y = torch.zeros(LONGEST), torch.zeros(LONGEST)
    for algo in ("onehop/ll16_one_shot", "trees"):
        with gpu_job(comm, f"allreduce:{algo}") as (ours, _):
            for count in (5000, 5001, 5002):
                ours.Allreduce(x[:count], y[:count], stream=STREAM)
            comm.Barrier()
            here, there = x[:6000], y[:6000]
            with Effort() as effort:
                ours.Allreduce(here, there, stream=STREAM)
            found = ours._dispatcher().repeated.last_launch
            assert found is not None
            assert found[1] == ours._dispatcher().sequence.seq
            assert found[0].text == "allreduce(6000 x float32, op sum) in GPU memory"
            assert effort.entered <= 20
            comm.Barrier()


@mpi(ranks=(2,), timeout=60)
def test_each_form_of_a_call_is_known(comm: MPI.Intracomm) -> None:
    """The same collective of the same type, to C other calls: in place, and from one buffer to another."""
    x, y = torch.zeros(LONGEST), torch.zeros(LONGEST)
    with gpu_job(comm, "allreduce:onehop/ll16_one_shot") as (ours, _):
        call = partial(ours.Allreduce, stream=STREAM)
        for count in range(5000, 5003):
            call(MPI.IN_PLACE, x[:count])
            call(x[:count], y[:count])
        for count in range(6000, 6003):
            assert made_by_c(ours, partial(call, MPI.IN_PLACE, x[:count]))
            assert made_by_c(ours, partial(call, x[:count], y[:count]))


@mpi(ranks=(2,), timeout=60)
def test_counts_that_come_again_are_calls_of_their_own(comm: MPI.Intracomm) -> None:
    """A few in turn cost no more than one again and again."""
    x, fit = torch.zeros(LONGEST), CountedLaunch.fit
    fitted, number = list[bool](), 0
    with gpu_job(comm) as (ours, _):
        call = partial(ours.Allreduce, MPI.IN_PLACE, stream=STREAM)
        counting = mock.patch.object(CountedLaunch, "fit", lambda *given: fitted.append(fit(*given)) or fitted[-1])
        with counting:
            for cycle in range(6):
                some = [made_by_c(ours, partial(call, x[:count])) for count in range(5000, 5600, 100)]
                assert cycle < 4 or (all(some) and len(fitted) == number), (cycle, some)
                number = len(fitted)
        assert True in fitted
        assert False in fitted


@mpi(ranks=(2,), timeout=60)
def test_an_interrupt_while_a_kernel_is_fit(comm: MPI.Intracomm) -> None:
    """It is raised, no call is made, and the communicator is dead for all."""
    x = torch.zeros(LONGEST)
    with gpu_job(comm, "allreduce:onehop/ll16_one_shot") as (ours, driver):
        call = partial(ours.Allreduce, MPI.IN_PLACE, stream=STREAM)
        for count in (5000, 5001, 5002):
            call(x[:count])
        comm.Barrier()
        launches = driver["launches"]
        if comm.rank == 0:
            stopped = mock.patch.object(CountedLaunch, "fit", side_effect=KeyboardInterrupt)
            with stopped, pytest.raises(KeyboardInterrupt):
                call(x[:6000])
        with pytest.raises(PeerLost):
            ours.Barrier()
        assert driver["launches"] == launches
        ours.free()


@mpi(ranks=(2,), timeout=60)
def test_the_table_may_be_forgotten_meanwhile(comm: MPI.Intracomm) -> None:
    """By another thread, while Python fits the kernel: then Python makes the call."""
    x, fit = torch.zeros(LONGEST), CountedLaunch.fit
    with gpu_job(comm) as (ours, _):
        call = partial(ours.Allreduce, MPI.IN_PLACE, stream=STREAM)
        for count in (5000, 5001, 5002):
            call(x[:count])

        def forgetting(launch: CountedLaunch, count: int) -> bool:
            ours._dispatcher().binder.forget()
            return fit(launch, count)

        with mock.patch.object(CountedLaunch, "fit", forgetting):
            assert not made_by_c(ours, partial(call, x[:6000]))
        assert not made_by_c(ours, partial(call, x[:6001]))
        assert made_by_c(ours, partial(call, x[:6002]))
