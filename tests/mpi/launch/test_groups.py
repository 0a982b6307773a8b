"""Groups that C puts on streams, on a GPU that is none: they are what Python would launch."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.runtime.cuda.copies import Buckets
from blinkmpi.transport.cuda.kernel_layout import SEGMENT_ROOMS, SEGMENTS
from tests.harness import mpi
from tests.mpi.launch.test_launches import STREAM, gpu_job, made_by_c, operands_of, tensors, transport_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no DLPack exchange API"
)
BUCKET = 1 << 44
WORDS, WITH_SEGMENTS = 16, 80  # of the arguments of any kernel, and of one that reads a group's tensors itself
NEW_LISTS = 2000  # more than C has places for groups: one found by its arrays must not take that by their addresses


def bucket(_: Buckets, size: int) -> tuple[int, None]:
    return BUCKET, None


@mpi(ranks=(2,), timeout=60)
def test_c_launches_the_groups_that_python_launches(comm: MPI.Intracomm) -> None:
    few, others, mixed = tensors(5, 100), tensors(5, 100), tensors(2)
    some_more, many = tensors(SEGMENT_ROOMS[-1] + 1, 3), tensors(SEGMENTS + 1, 3)
    mixed[1] = mixed[1].to(torch.int32)

    def noted(ours: blinkmpi.Communicator, some: list[Any]) -> None:
        with ours.grouped(stream=STREAM):
            for x in some:
                ours.Allreduce(MPI.IN_PLACE, x)

    def calls(ours: blinkmpi.Communicator) -> Iterator[tuple[Callable[[], None], bool, int, int]]:
        """Each twice: whether C makes the second one, how many kernels it is, and words that each of them has."""
        for some, by_c, kernels, words in (
            (few, True, 1, WITH_SEGMENTS), (some_more, True, 3, WORDS), (many, False, 5, WORDS),
            (mixed, False, 2, WORDS), (few[:1], True, 1, WORDS),
        ):  # fmt: skip
            yield partial(ours.Allreduce, MPI.IN_PLACE, some, stream=STREAM), by_c, kernels, words
            yield partial(noted, ours, some), by_c, kernels, words
        yield partial(ours.Allreduce, few, others, stream=STREAM), True, 1, WITH_SEGMENTS
        yield partial(ours.Allreduce, others, few, stream=STREAM), True, 1, WITH_SEGMENTS
        yield partial(ours.Allreduce, MPI.IN_PLACE, few), False, 1, WITH_SEGMENTS  # the host waits

    def log(executor: str) -> list[Any]:
        with gpu_job(comm, executor=executor) as (ours, driver):
            found: list[Any] = []
            report = transport_of(ours).n  # the word with the address of the report, which is real memory
            for call, by_c, kernels, words in calls(ours):
                driver["words"] = words
                for again in (False, True):
                    before = driver["launches"]
                    made = made_by_c(ours, call)
                    assert made == (executor == "c" and again and by_c), (call, again, made)
                    assert driver["launches"] - before == kernels, call
                    for back in range(driver["launches"] - before):
                        *shape, arguments = driver.last(back)
                        arguments[report] = 0
                        found.append((*shape, arguments))
                    found.append((ours._dispatcher().sequence.seq, transport_of(ours).kernels_started.value))
            return found

    with mock.patch.object(Buckets, "_make", bucket):
        assert log("c") == log("numpy")


class CupyArray:
    """What is asked of an array of CuPy's."""

    _c_contiguous, dtype, shape, size, nbytes, reads = True, np.dtype("float32"), (4,), 4, 16, 0

    def __init__(self, at: int) -> None:
        self.at = at
        interface = {"shape": self.shape, "typestr": "<f4", "data": (at, False), "version": 3, "stream": STREAM}
        self.__cuda_array_interface__ = interface

    @property
    def data(self) -> Any:
        CupyArray.reads += 1
        return SimpleNamespace(ptr=self.at, device_id=0)


@mpi(ranks=(2,), timeout=60)
def test_arrays_of_cupy_are_read_once(comm: MPI.Intracomm) -> None:
    """As long as they are the same objects; others at the same addresses are found by these."""
    cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=STREAM))
    cupy = SimpleNamespace(ndarray=CupyArray, cuda=cuda)

    def arrays(skew: int = 0) -> list[CupyArray]:
        return [CupyArray((1 << 42) + 4096 * i + skew) for i in range(5)]

    with (
        mock.patch.object(Buckets, "_make", bucket),
        gpu_job(comm) as (ours, driver),
        mock.patch.dict(sys.modules, cupy=cupy),
    ):

        def reads(some: list[CupyArray]) -> tuple[bool, int]:
            before = CupyArray.reads
            by_c = made_by_c(ours, partial(ours.Allreduce, MPI.IN_PLACE, some, stream=STREAM))
            return by_c, CupyArray.reads - before

        driver["words"] = WITH_SEGMENTS
        some = arrays()
        assert not reads(some)[0]
        assert reads(some) == (True, 5)
        for _ in range(3):
            assert reads(some) == (True, 0)
        for _ in range(NEW_LISTS):  # whose memory the objects before them had, too, perhaps
            some = arrays()
            assert reads(some) == (True, 5)
            assert reads(some) == (True, 0)
        some[2] = CupyArray(1 << 43)
        for by_c in (False, True, True):
            assert reads(some)[0] == by_c
            assert driver.last()[4].count(1 << 43) == 2, "it is sent and received"
        assert not reads(some[:4])[0]


@mpi(ranks=(2,), timeout=60)
def test_what_a_group_reads_lives_on_and_what_changes_is_seen(comm: MPI.Intracomm) -> None:
    with mock.patch.object(Buckets, "_make", bucket), gpu_job(comm) as (ours, _):
        some = tensors(4)
        call = partial(ours.Allreduce, MPI.IN_PLACE, some, stream=STREAM)
        assert not made_by_c(ours, call)
        assert made_by_c(ours, call)
        first = some[0]
        some[0] = torch.zeros_like(first)
        kept = operands_of(ours).newest[-1]
        assert any(one is first for arg in kept if isinstance(arg, tuple) for one in arg), "the list is another one now"
        assert not made_by_c(ours, call), "another tensor is another group"
        some.append(torch.zeros(3))
        assert not made_by_c(ours, call)
        assert made_by_c(ours, call)
        transport_of(ours).report[1] = 1  # a kernel gave up
        with pytest.raises(blinkmpi.BlinkError):
            call()
        transport_of(ours).report[1] = 0
