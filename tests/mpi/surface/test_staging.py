"""Point-to-point of GPU memory through host memory. The GPU here is host memory at addresses that are nobody's."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, BufferTypeError, FallbackError
from blinkmpi.program.memory import DeviceArray
from blinkmpi.runtime.cuda import staging
from tests.every_method import FAR, Fake
from tests.harness import mpi, wait_until

LONG = 300_000  # floats: MPI sends so many in pieces, when they are asked for


class FakeCopies(staging.PinnedCopies):
    """Copies to and from the GPU that is no GPU."""

    def __init__(self) -> None:
        self.copied, self.broken = 0, False
        self._cupy, self._streams = MagicMock(), {}
        self._runtime = self._cupy.cuda.runtime
        self._runtime.streamIsCapturing.return_value = False

    def room(self, nbytes: int) -> np.ndarray[Any, Any]:
        return np.full(nbytes, 0xEE, np.uint8)

    def _copy(self, to: int, source: int, nbytes: int, kind: int, array: DeviceArray) -> None:
        if self.broken:
            raise RuntimeError("the GPU is gone")
        near = [at - FAR if at == array.ptr else at for at in (to, source)]
        assert near != [to, source]
        ctypes.memmove(near[0], near[1], nbytes)
        self.copied += nbytes


def floats(count: int, start: float = 0.0) -> np.ndarray[Any, Any]:
    return np.arange(start, start + count, dtype=np.float32)


def staged(comm: MPI.Intracomm, body: Callable[[blinkmpi.Communicator, FakeCopies], None], **options: Any) -> None:
    """Run a body on a Communicator whose GPU memory is the fake one."""
    fake = FakeCopies()
    kept, staging.copies = staging.copies, lambda: fake  # type: ignore[assignment]
    device_of, staging.device_of = staging.device_of, lambda at: 0 if at > FAR else None  # type: ignore[attr-defined]
    try:
        with blinkmpi.Communicator(comm, **options) as ours:
            body(ours, fake)
            ours.Barrier()
        wait_for_all()
    finally:
        staging.copies, staging.device_of = kept, device_of  # type: ignore[attr-defined]


def wait_for_all() -> None:
    """Wait until no staged call is under way."""
    wait_until(lambda: not staging.POLLER.under_way, "every staged call ends")


@mpi(ranks=(2,))
def test_every_way_to_send_meets_every_way_to_receive(comm: MPI.Intracomm) -> None:
    def body(ours: blinkmpi.Communicator, fake: FakeCopies) -> None:
        MPI.Attach_buffer(bytearray(1 << 20))
        for count in (0, 1, 1000):
            for name in ("Send", "Ssend", "Bsend", "Isend", "Issend", "Ibsend"):
                for how in ("Recv", "Irecv", "Mprobe", "Improbe", "host"):
                    if ours.rank == 0:
                        array = floats(count, 7)
                        request = getattr(ours, name)(Fake(array) if how != "Irecv" else array, 1, 5)
                        if request is not None:
                            request.Wait()
                        continue
                    got, status = floats(count + 3), MPI.Status()
                    if how == "host":
                        ours.Recv(got, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                    elif how == "Recv":
                        ours.Recv(Fake(got), status=status)
                    elif how == "Irecv":
                        ours.Irecv(Fake(got)).Wait(status)
                    elif how == "Mprobe":
                        ours.Mprobe().Recv([Fake(got), MPI.FLOAT], status)
                    else:
                        while (message := ours.Improbe()) is None:
                            pass
                        message.Irecv([Fake(got), MPI.FLOAT]).Wait(status)
                    assert got.tolist() == [*floats(count, 7), *range(count, count + 3)], (name, how)
                    assert (status.source, status.tag, status.Get_count(MPI.FLOAT)) == (0, 5, count)
                    assert not status.Is_cancelled()
        MPI.Detach_buffer()
        assert fake.copied

    staged(comm, body)


@mpi(ranks=(1, 2, 3))
def test_both_ways_at_once(comm: MPI.Intracomm) -> None:
    def body(ours: blinkmpi.Communicator, _: FakeCopies) -> None:
        right, left = (ours.rank + 1) % ours.size, (ours.rank - 1) % ours.size
        want = floats(LONG, left)
        for later in (False, True):
            for on_gpu in ((True, True), (True, False), (False, True)):
                ends = [floats(LONG, ours.rank), floats(LONG + 2)]
                sent, got = (Fake(array) if there else array for array, there in zip(ends, on_gpu, strict=True))
                status = MPI.Status()
                if later:
                    ours.Isendrecv(sent, right, 3, got, left, 3).Wait(status)
                else:
                    ours.Sendrecv(sent, right, 3, got, left, 3, status=status)
                assert (ends[1][:LONG] == want).all()
                assert ends[1][LONG:].tolist() == [LONG, LONG + 1]
                assert (status.source, status.tag, status.Get_count(MPI.FLOAT)) == (left, 3, LONG)
            array = floats(LONG, ours.rank)
            if later:
                ours.Isendrecv_replace(Fake(array), right, 3, left, 3).Wait()
            else:
                ours.Sendrecv_replace(buf=Fake(array), dest=right, sendtag=3, source=left, recvtag=3)
            assert (array == want).all()

    staged(comm, body)


@mpi(ranks=(2,))
def test_many_requests_end_in_any_order(comm: MPI.Intracomm) -> None:
    def body(ours: blinkmpi.Communicator, _: FakeCopies) -> None:
        peer, many = 1 - ours.rank, 20
        whole, sent = np.zeros((many, 100), np.float32), np.zeros((many, 100), np.float32)
        for function in ("Waitall", "Waitany", "Waitsome", "Testall", "Wait", "Test"):
            whole[:], sent[:] = 0, np.arange(many)[:, None] + 1
            receives = [ours.Irecv([Fake(whole), (100, 100 * i), MPI.FLOAT], peer, i) for i in range(many)]
            ours.Barrier()
            sends = [ours.Isend([Fake(sent), 100, 100 * i, MPI.FLOAT], peer, i) for i in reversed(range(many))]
            sent[:] = -1  # what was sent is on its way
            if function in ("Wait", "Test"):
                for request in receives:
                    while not getattr(request, function)():
                        pass
            elif function == "Testall":
                while not MPI.Request.Testall(receives):
                    pass
            elif function == "Waitall":
                statuses = [MPI.Status() for _ in receives]
                MPI.Request.Waitall(receives, statuses)
                assert [s.tag for s in statuses] == list(range(many))
                assert {s.Get_count(MPI.FLOAT) for s in statuses} == {100}
            elif function == "Waitany":
                assert sorted(MPI.Request.Waitany(receives) for _ in range(many)) == list(range(many))
            else:
                ended: list[int] = []
                while len(ended) < many:
                    ended += MPI.Request.Waitsome(receives) or []
            assert (whole == np.arange(many)[:, None] + 1).all(), function
            MPI.Request.Waitall(sends)

    staged(comm, body)


@mpi(ranks=(1,))
def test_nobody_at_the_other_end(comm: MPI.Intracomm) -> None:
    def body(ours: blinkmpi.Communicator, _: FakeCopies) -> None:
        array, status = floats(8), MPI.Status()
        gpu = Fake(array)
        ours.Send(gpu, MPI.PROC_NULL)
        ours.Isend(gpu, MPI.PROC_NULL).Wait()
        ours.Recv(gpu, MPI.PROC_NULL, status=status)
        assert (status.source, status.Get_count(MPI.FLOAT)) == (MPI.PROC_NULL, 0)
        ours.Irecv(gpu, MPI.PROC_NULL).Wait(status)
        assert (status.source, status.Get_count(MPI.FLOAT)) == (MPI.PROC_NULL, 0)
        ours.Sendrecv_replace(gpu, MPI.PROC_NULL, source=MPI.PROC_NULL)
        request = ours.Irecv(gpu, 0, 99)
        request.Cancel()
        request.Wait(status)
        assert status.Is_cancelled()
        assert array.tolist() == list(range(8))

    staged(comm, body)


@mpi(ranks=(1,))
def test_element_types_and_those_that_mpi_lacks(comm: MPI.Intracomm) -> None:
    def body(ours: blinkmpi.Communicator, _: FakeCopies) -> None:
        for name in ("bool", "int8", "uint8", "int64", "float16", "float64", "complex64", "complex128"):
            array, got = np.ones(5, name), np.zeros(5, name)
            ours.Sendrecv(Fake(array), 0, recvbuf=Fake(got), source=0)
            assert (got == 1).all(), name
            ours.Sendrecv(Fake(array), 0, recvbuf=[Fake(got), array.dtype.char], source=0)
        status = MPI.Status()
        ours.Sendrecv(Fake(np.ones(5, "int16")), 0, recvbuf=Fake(np.zeros(6, "int16")), source=0, status=status)
        assert status.Get_count(MPI.SHORT) == 5

    staged(comm, body)


@mpi(ranks=(1,))
def test_what_cannot_be_staged_is_refused_and_what_fails_changes_nothing(comm: MPI.Intracomm) -> None:
    def body(ours: blinkmpi.Communicator, fake: FakeCopies) -> None:
        array = floats(8)
        gpu = Fake(array)
        column = MPI.FLOAT.Create_vector(2, 1, 4).Commit()
        with pytest.raises(BufferTypeError, match=r"Recv\(buf\) has a derived datatype.*not staged; pass contiguous"):
            ours.Recv([gpu, 1, column], 0)
        column.Free()
        with pytest.raises(ArgumentError, match="elements 0 to 9 of an array that has 8"):
            ours.Send([gpu, 9, MPI.FLOAT], 0)
        frozen = floats(2)
        frozen.flags.writeable = False
        with pytest.raises(ArgumentError, match="read-only"):
            ours.Irecv(Fake(frozen), 0)
        with pytest.raises(TypeError):
            ours.Send(gpu)
        request = ours.Isend(floats(9, 50), 0)
        with pytest.raises(MPI.Exception, match="TRUNCATE"):
            ours.Recv(gpu, 0)
        request.Wait()
        request = ours.Irecv(gpu, 0)
        fake.broken = True
        ours.Send(floats(8, 50), 0)
        with pytest.raises(blinkmpi.BlinkError, match="the GPU is gone"):
            request.Wait()
        assert array.tolist() == list(range(8))

    staged(comm, body)


@mpi(ranks=(1,))
def test_strict_is_an_error(comm: MPI.Intracomm) -> None:
    def body(ours: blinkmpi.Communicator, _: FakeCopies) -> None:
        with pytest.raises(FallbackError, match="Send of GPU memory would go through host memory, because"):
            ours.Send(Fake(floats(1)), 0)

    staged(comm, body, strict=True)


@mpi(ranks=(2,), own_job=True)
def test_it_is_said_once(comm: MPI.Intracomm) -> None:
    said: list[tuple[str, str]] = []
    kept, staging.log = staging.log, lambda _, level, text: said.append((level, text))

    def body(ours: blinkmpi.Communicator, _: FakeCopies) -> None:
        for of in (ours, ours.Create_cart([2])):
            of.Sendrecv(Fake(floats(1)), 1 - ours.rank, recvbuf=Fake(floats(1)), source=1 - ours.rank)

    try:
        staged(comm, body)
    finally:
        staging.log = kept
    ((level, text),) = said
    assert level == ("INFO" if comm.rank else "WARN")
    assert text.startswith("point-to-point of GPU memory goes through pinned host memory, because this MPI is not")


@mpi(ranks=(1,))
def test_a_request_that_nobody_keeps_is_completed(comm: MPI.Intracomm) -> None:
    def body(ours: blinkmpi.Communicator, _: FakeCopies) -> None:
        array, got = floats(LONG), np.zeros(LONG, np.float32)
        ours.Irecv(Fake(got), 0)
        ours.Isend(Fake(array), 0)
        wait_for_all()
        assert (got == array).all()

    staged(comm, body)


ONE_THREAD = """
import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
import numpy as np
import blinkmpi
from tests.every_method import Fake
comm = blinkmpi.Communicator(MPI.COMM_WORLD)
try:
    comm.Irecv(Fake(np.zeros(1, np.float32)), 0)
except blinkmpi.errors.BufferTypeError as error:
    assert "call Recv" in str(error), error
else:
    raise AssertionError("taken")
comm.Free()
"""


def test_without_threads_non_blocking_calls_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_THREAD], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
