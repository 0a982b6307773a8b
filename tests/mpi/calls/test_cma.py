"""The protocol ``cma`` on real ranks: what it moves is right; where it cannot run, slots are taken and it is said."""

import ctypes
import io
import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI
from msgspec.structs import replace

import blinkmpi
from blinkmpi.errors import FallbackError
from blinkmpi.planning.plan import Plan
from blinkmpi.transport.host import capabilities as agree
from blinkmpi.transport.host import native
from blinkmpi.transport.host.host_program import HostProgram
from blinkmpi.transport.host.native import Native
from blinkmpi.transport.host.single_copy import ExportedChunks, Helper
from tests.conformance import Array, cases
from tests.harness import mpi, wait_until
from tests.mpi.test_conformance import OURS, run_all

COLLECTIVES = ("broadcast", "allgather", "gather", "scatter", "allreduce", "reduce", "reduce_scatter")


def by_cma(comm: blinkmpi.Communicator) -> blinkmpi.Communicator:
    """Make every call take the protocol ``cma``, at any size."""

    def changed(plan: Plan) -> Plan:
        rules = {r.collective: replace(r, protocol="cma", min_bytes=0) for r in plan.rules if r.scheme == "direct"}
        return replace(plan, rules=tuple(rules.values()))

    comm.context.planned.change(changed)
    return comm


def programs(comm: blinkmpi.Communicator) -> list[HostProgram]:
    """The programs that were loaded."""
    return [program for _, program in comm._dispatcher().binder.programs.values() if program is not None]


def protocols(comm: blinkmpi.Communicator) -> set[bool]:
    """Whether the programs that were loaded read from their writers' buffers."""
    return {program.cma for program in programs(comm)}


@mpi(ranks=(2, 3), long=(4,), timeout=120)
def test_both_protocols_are_right(comm: MPI.Intracomm) -> None:
    for collective in COLLECTIVES:
        some = list(cases(collective, comm.size, full=False))
        with by_cma(blinkmpi.Communicator(comm, algo=OURS, executor="c")) as ours:
            run_all(ours, some)
            assert protocols(ours) == {True}
        with mock.patch.dict(os.environ, BLINKMPI_CMA_DISABLE="1"), blinkmpi.Communicator(comm, algo=OURS) as ours:
            assert "no cma: BLINKMPI_CMA_DISABLE" in ours.executor
            run_all(ours, some)
            assert protocols(ours) == {False}


@mpi(ranks=(2, 4), timeout=60)
def test_long_vectors_with_buffers_that_change_from_call_to_call(comm: MPI.Intracomm) -> None:
    """Each call's addresses are its own; nobody leaves, and reuses its buffer, before all have read it."""
    with by_cma(blinkmpi.Communicator(comm, algo=OURS, executor="c")) as ours:
        count = 300_001
        a, b = np.empty((2, count)), np.empty((2, comm.size * count))
        for i in range(12):
            send, recv = a[i % 2], b[i % 2]
            send[:] = 100 * i + comm.rank
            ours.Allgather(send, recv)
            send[:] = -1
            assert (recv.reshape(comm.size, count) == 100 * i + np.arange(comm.size)[:, None]).all(), i
            send[:] = i
            ours.Bcast(send, root=i % comm.size)
            assert (send == i).all()
        assert protocols(ours) == {True}


@mpi(ranks=(2, 4), timeout=60)
def test_a_buffer_that_others_cannot_read_goes_through_slots(comm: MPI.Intracomm) -> None:
    """Rank 1's memory cannot be read, as a device's may not be."""
    send = np.full(20_000, 10 + comm.rank, np.uint8)
    recv = np.zeros(comm.size * send.size, np.uint8)
    with by_cma(blinkmpi.Communicator(comm, algo=OURS, executor="c")) as ours:
        transport = ours._dispatcher().sequence.host
        assert transport.native is not None
        plain = transport.native.code

        def refused_run(at: int, rows: int, seq: int) -> int:
            """As if the kernel refused: by an address in no page."""
            struct = native.CallStruct.from_address(at)
            kept, struct.send = struct.send, 8
            state = int(plain.blink_begin(at, seq))
            struct.send = kept
            return state or int(plain.blink_execute(at, rows))

        heard = io.StringIO()
        with redirect_stderr(heard):
            for refused in (True, False, True):
                code: Any = mock.Mock(wraps=plain)
                code.blink_run = refused_run if refused and comm.rank == 1 else plain.blink_run
                transport.native = Native(code, transport.native.compiler)
                ours._dispatcher().binder.forget()
                recv[:] = 0
                ours.Allgather(send, recv)
                assert (recv.reshape(comm.size, -1) == 10 + np.arange(comm.size, dtype=np.uint8)[:, None]).all()
        assert heard.getvalue().count("slots, because a rank's buffer cannot be read by the others") == 1


@mpi(ranks=(2, 4), timeout=60)
def test_where_the_kernel_forbids_it_slots_are_taken_and_said(comm: MPI.Intracomm) -> None:
    real = agree._failure

    def forbidden(loaded: Native, rank: int, shown: list[tuple[int, int, int]]) -> str:
        """Rank 1 asks for process 0, which is not there to be read."""
        if rank == 1:
            shown = [(2**22 + 1, *shown[0][1:]), *shown[1:]]
        return real(loaded, rank, shown)

    heard = io.StringIO()
    with mock.patch.object(agree, "_failure", forbidden):
        with redirect_stderr(heard), blinkmpi.Communicator(comm, executor="c") as ours:
            assert "no cma: rank 1 cannot read the memory of rank 0" in ours.executor
            assert os.strerror(3) in ours.executor  # no such process
            vector = np.full(100, float(comm.rank))
            ours.Bcast(vector)
            assert (vector == 0).all()
            assert {r.protocol for r in ours.plans.rules if r.collective == "broadcast"} == {"slots", "one_shot"}
        with pytest.raises(FallbackError, match="BLINKMPI_CMA_DISABLE"):
            blinkmpi.Communicator(comm, executor="c", strict=True)
    assert ("BLINKMPI WARN" in heard.getvalue()) == (comm.rank == 0)


@mpi(ranks=(2,), timeout=60)
def test_strict_refuses_the_numpy_executor_unless_it_is_asked_for(comm: MPI.Intracomm) -> None:
    with mock.patch.object(agree.native, "build", return_value=(None, "no C compiler")):
        with pytest.raises(FallbackError, match=r"NumPy would execute programs \(.*no C compiler.*executor='numpy'"):
            blinkmpi.Communicator(comm, strict=True)
        with blinkmpi.Communicator(comm, strict=True, executor="numpy") as ours:
            ours.Barrier()


@mpi(ranks=(2,), timeout=60)
def test_explain_and_the_log_say_which_protocol_runs(comm: MPI.Intracomm) -> None:
    heard = io.StringIO()
    vector: Array = np.zeros(1 << 20, np.float32)
    with mock.patch.dict(os.environ, BLINKMPI_DEBUG="INFO"), redirect_stderr(heard):
        with blinkmpi.Communicator(comm, executor="c") as ours:
            assert "copied out of the writer's buffer (cma)" in ours.explain("broadcast", vector.nbytes)
            assert "slots a channel" in ours.explain("allreduce", 1 << 30)
            assert "one another's memory (cma)" in ours.executor
            ours.Bcast(vector)
            ours.Bcast(vector[:10])
        with blinkmpi.Communicator(comm, executor="numpy") as ours:
            assert "no cma: the NumPy executor has slots alone" in ours.executor
            assert "slots a channel" in ours.explain("broadcast", 1 << 30)
    if comm.rank == 0:
        assert "B chunks by cma, c executor" in heard.getvalue()
        assert "broadcast(10 x float32, root 0): one shot, c executor" in heard.getvalue()


def test_memory_that_is_not_there_is_an_error_and_not_a_crash() -> None:
    code = code_of()
    source, target = ctypes.c_uint64(7), ctypes.c_uint64(0)
    me = os.getpid()
    assert code.blink_read(me, ctypes.addressof(target), 8, ctypes.addressof(source)) == 0
    assert target.value == 7
    assert os.strerror(code.blink_read(me, ctypes.addressof(target), 8, 8)) == "Bad address"
    assert os.strerror(code.blink_read(2**22 + 1, ctypes.addressof(target), 8, 8)) == "No such process"


# ---------------------------------------------------------------- the helper


def threads() -> int:
    """Helpers of this process."""
    return sum(text == "blinkmpi-reader\n" for text in map(name_of, Path("/proc/self/task").glob("*/comm")))


def name_of(thread: Path) -> str:
    try:
        return thread.read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return ""


def all_ended() -> bool:
    """Whether no helper is left. Linux still lists a thread for a moment after it was joined."""
    wait_until(lambda: threads() == 0, "the helper ends")
    return True


def code_of() -> ctypes.CDLL:
    path, why = native.build()
    if path is None:
        pytest.skip(f"no C executor: {why}")
    return native.load(path, why).code


@mpi(ranks=(2, 3), timeout=60)
def test_a_reader_takes_the_core_of_a_rank_that_waits(comm: MPI.Intracomm) -> None:
    """With two ranks, each of which has a core, one of which reads; its thread ends with the communicator."""
    cores = len(os.sched_getaffinity(0))
    with by_cma(blinkmpi.Communicator(comm, algo=OURS, executor="c")) as ours:
        vector = np.empty(5_000_001, np.uint8)
        for i in range(6):
            vector[:] = i + comm.rank
            ours.Bcast(vector, root=i % 2)
            assert (vector == i + i % 2).all()
        helps = [bool(program.struct.helper) for program in programs(ours)]
        assert helps == [comm.size == 2 and cores >= 2] * 2
        assert threads() == any(helps)
        ours.Allgather(vector[:9], np.empty(9 * comm.size, np.uint8))  # in which nobody waits
        assert not programs(ours)[-1].struct.helper
    assert all_ended()
    with mock.patch.dict(os.environ, BLINKMPI_CMA_NTHREADS="1"), blinkmpi.Communicator(comm, executor="c") as ours:
        by_cma(ours).Bcast(vector)
        assert [program.struct.helper for program in programs(ours)] == [0]


def test_what_two_threads_read_is_whole_or_an_error() -> None:
    code, me = code_of(), os.getpid()
    source = np.arange(3_000_000, dtype=np.uint32)
    target = np.zeros_like(source)
    helper = code.blink_help()
    assert helper
    for _ in range(50):
        target[:] = 0
        assert code.blink_read_shared(helper, me, target.ctypes.data, target.nbytes, source.ctypes.data) == 0
        assert (target == source).all()
    assert os.strerror(code.blink_read_shared(helper, me, target.ctypes.data, target.nbytes, 8)) == "Bad address"
    gone = code.blink_read_shared(helper, 2**22 + 1, target.ctypes.data, target.nbytes, source.ctypes.data)
    assert os.strerror(gone) == "No such process"
    child = os.fork()
    if child == 0:  # has no such thread, and waits for none
        code.blink_help_no_more(helper)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert threads() == 1
    code.blink_help_no_more(helper)
    assert all_ended()


def test_that_no_second_thread_can_be_started_is_said() -> None:
    code = mock.Mock()
    code.blink_help.return_value = None
    helper = Helper(Native(code, ""), 1)
    ctypes.set_errno(11)
    program = mock.Mock(channels=[mock.Mock(writer=0, readers=(1,))], stages=[mock.Mock(rank=1, store=0, outs=())])
    assert helper.address(program, {0: ExportedChunks("send", 0)}) == 0
    assert helper.failure == os.strerror(11)
    helper.address(program, {0: ExportedChunks("send", 0)})
    helper.close()
    helper.close()
    code.blink_help.assert_called_once()
    code.blink_help_no_more.assert_not_called()
