"""Every wait has its deadline, and is warned of long before: as a communicator is made, changed, freed, and in calls.

This file is also the program of a rank: ``python tests/mpi/test_deadlines.py CASE [ARGUMENT...]``.
"""

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import BufferTypeError, CollectiveTimeout, PeerLost, RemoteError
from blinkmpi.runtime import context
from blinkmpi.runtime.entering import enter
from blinkmpi.transport.network import exchanges
from blinkmpi.transport.network.bounded import REMEMBERED, Rendezvous
from blinkmpi.transport.network.exchanges import BoundedComm, Members
from blinkmpi.transport.processes import VISIBLE
from blinkmpi.transport.python_stacks import CAME_TO
from blinkmpi.transport.slow_waits import SlowWaits
from blinkmpi.util.together import allgather, bcast
from tests.harness import NEVER_S, PATIENCE_S, Job, Outcome, long_but, mpi
from tests.mpi.faults import VICTIM, N, attempt, fault_tolerance, finish, in_time, meet, run_case, said, say, start_case

start = partial(start_case, __file__)
OTHERS = [r for r in range(N) if r != VICTIM]
QUIET_S = 4.5  # in which a wait would be warned of after one second and after three
WARNING = re.compile(r"BLINKMPI WARN (?:(?!BLINKMPI_WARN_AFTER=0).)*(?=BLINKMPI_WARN_AFTER=0)", re.DOTALL)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    """A pipe at which a rank waits, and what lets it go on."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    yield str(path), lambda: os.write(descriptor, b".")
    os.close(descriptor)


def warnings_in(output: str) -> list[str]:
    """The whole warnings, but of a rank that frees: it is outside of the group that waits."""
    return [text for text in WARNING.findall(output) if "free()" not in text]


def wait_for_two_warnings(job: Job) -> None:
    until = time.monotonic() + job.timeout - PATIENCE_S
    while len(warnings_in(job.output)) < 2:
        assert time.monotonic() < until, job.output
        time.sleep(0.05)


def assert_ever_rarer(warnings: list[str]) -> None:
    """One rank's after one second, three, seven: no other rank warns beside it."""
    for number, text in enumerate(warnings, 1):
        waited = re.search(r"waited (\d+) s", text)
        assert waited, text
        assert int(waited[1]) >= 2**number - 1, warnings
    assert len(warnings) >= 2


def all_time_out(outcome: Outcome, deadline: float) -> None:
    """All but the victim, and they name it."""
    errors, texts = (said(outcome, key) for key in ("error", "text"))
    assert {r: errors.get(r) for r in OTHERS} == dict.fromkeys(OTHERS, "CollectiveTimeout"), outcome.output
    in_time(outcome, OTHERS, deadline)
    for rank in OTHERS:
        assert re.search(rf"rank {VICTIM} \((host \S+, )?process {said(outcome, 'pid')[VICTIM]}\)", texts[rank]), texts
        assert not [r for r in OTHERS if f"rank {r} (" in texts[rank]], texts
        assert "BLINKMPI_TIMEOUT" in texts[rank]
    assert outcome.rc != 0  # MPI_Finalize would have waited for ever


# ---------------------------------------------------------------- a rank that does not come


@pytest.mark.parametrize("how", ["sleeps", "stops"])
def test_a_constructor_without_a_rank_is_an_error_at_the_deadline(how: str) -> None:
    with start("constructor", how) as job:
        outcome = finish(job)
    all_time_out(outcome, 1)
    state = "is stopped" if how == "stops" else "runs"
    assert all(f"{state}" in said(outcome, "text")[r] for r in OTHERS)
    assert "ends the job, or MPI_Finalize would wait for ever" in outcome.output


def case_constructor(how: str) -> None:
    MPI.COMM_WORLD.Barrier()
    say(pid=os.getpid())
    if MPI.COMM_WORLD.rank == VICTIM:
        stay_away(how)
    attempt(lambda: blinkmpi.Communicator(MPI.COMM_WORLD, timeout=1))
    meet(*OTHERS)


def stay_away(how: str) -> None:
    if how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(NEVER_S)


def half(comm: blinkmpi.Communicator) -> MPI.Group:
    group = comm.Get_group()
    part = group.Incl([1, VICTIM, 3])
    group.Free()
    return part


COLLECTIVES: dict[str, Callable[[blinkmpi.Communicator], object]] = {
    "Dup": lambda comm: comm.Dup(),
    "Idup": lambda comm: comm.Idup(),
    "Clone": lambda comm: comm.Clone(),
    "Split": lambda comm: comm.Split(comm.rank % 2),
    "Split_type": lambda comm: comm.Split_type(MPI.COMM_TYPE_SHARED),
    "Create": lambda comm: comm.Create(comm.Get_group()),
    "Create_group": lambda comm: comm.Create_group(half(comm)),
    "replan": lambda comm: comm.replan(),
    "Free": lambda comm: comm.Free(),
    "Communicator": lambda comm: blinkmpi.Communicator(comm, timeout=1),
}


@pytest.mark.parametrize("what", COLLECTIVES)
def test_what_all_ranks_must_do_has_the_deadline(what: str) -> None:
    with start("collective", what) as job:
        outcome = finish(job)
    if what == "Create_group":  # rank 0 takes no part
        assert said(outcome, "error").pop(0) == "NoneType"
        assert {r: said(outcome, "error").get(r) for r in (1, 3)} == dict.fromkeys((1, 3), "CollectiveTimeout")
        assert all(f"rank {VICTIM} (" in said(outcome, "text")[r] for r in (1, 3))
        in_time(outcome, (1, 3), 1.5)
        return
    all_time_out(outcome, 1.0 if what == "Communicator" else 1.5)


def case_collective(what: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=1.5)
    comm.Barrier()
    say(pid=os.getpid())
    if comm.rank == VICTIM:
        time.sleep(NEVER_S)
    attempt(lambda: (what == "Create_group" and comm.rank == 0) or COLLECTIVES[what](comm))
    meet(*OTHERS)


@pytest.mark.parametrize("how", ["blocks", "does not block"])
def test_the_first_call_on_a_communicator_from_another_one_has_the_deadline(how: str) -> None:
    with start("first", how) as job:
        outcome = finish(job)
    all_time_out(outcome, 1)
    assert all("the first call on a communicator of Split()" in said(outcome, "text")[r] for r in OTHERS)


def case_first(how: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=20)
    child = comm.Split()
    assert isinstance(child, blinkmpi.Communicator)
    comm.Barrier()
    say(pid=os.getpid())
    if comm.rank == VICTIM:
        time.sleep(NEVER_S)
    x = np.ones(3)
    attempt(lambda: child.Bcast(x, timeout=1) if how == "blocks" else child.Ibcast(x, timeout=1).Wait())
    with pytest.raises(PeerLost, match="died earlier"):
        child.Barrier()
    meet(*OTHERS)


@pytest.mark.parametrize("exchanges", long_but((2,), range(1, 5)))
def test_a_rank_that_stops_as_a_communicator_of_several_nodes_opens_is_heard_of(
    exchanges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLINKMPI_NODES", f"{N - 2}+2")
    with start("opens", str(exchanges)) as job:
        outcome = finish(job)
    all_time_out(outcome, 1)
    texts = said(outcome, "text")
    assert all(texts[r].startswith(f"the first call on a communicator of Split(): rank {r} waited") for r in OTHERS)


def case_opens(exchanges: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=20)
    child = comm.Split()
    say(pid=os.getpid())
    if comm.rank == VICTIM:
        stop_after(int(exchanges))
    attempt(lambda: child.Bcast(np.ones(3), timeout=1))
    meet(*OTHERS)


def stop_after(number: int) -> None:
    """Stop as soon as so many exchanges have been done."""
    wait = BoundedComm.wait
    left = [number]

    def then(self: BoundedComm, *args: Any, **named: Any) -> None:
        wait(self, *args, **named)
        left[0] -= 1
        if not left[0]:
            stay_away("stops")

    BoundedComm.wait = then  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["stops", "works"])
def test_a_rank_amid_the_bootstrap_may_work_but_not_stop(how: str) -> None:
    with start("amid", how) as job:
        outcome = finish(job)
    if how == "stops":
        all_time_out(outcome, 1)
        return
    assert said(outcome, "error") == dict.fromkeys(range(N), "NoneType"), outcome.output
    assert outcome.rc == 0, outcome.output


def case_amid(how: str) -> None:
    comm = MPI.COMM_WORLD
    comm.Barrier()
    say(pid=os.getpid())
    if comm.rank == VICTIM:
        at_the_machine(lambda: stay_away(how) if how == "stops" else time.sleep(3))
    attempt(lambda: blinkmpi.Communicator(comm, timeout=1))
    if comm.rank != VICTIM:
        meet(*OTHERS)


def at_the_machine(work: Callable[[], object]) -> None:
    """Do something in the middle of the constructor."""
    gather = vars(context)["gather"]

    def late(*args: Any, **named: Any) -> Any:
        work()
        return gather(*args, **named)

    vars(context)["gather"] = late


def test_under_fault_tolerance_a_rank_that_dies_amid_the_bootstrap_is_heard_of() -> None:
    with start("dies", options=fault_tolerance()) as job:
        outcome = finish(job)
    assert {r: said(outcome, "error").get(r) for r in OTHERS} == dict.fromkeys(OTHERS, "PeerLost"), outcome.output
    in_time(outcome, OTHERS)


def case_dies() -> None:
    comm = MPI.COMM_WORLD
    comm.Barrier()
    if comm.rank == VICTIM:
        at_the_machine(lambda: os.kill(os.getpid(), signal.SIGKILL))
    attempt(lambda: blinkmpi.Communicator(comm))
    meet(*OTHERS)


# ---------------------------------------------------------------- warnings


CALLS: dict[str, Callable[[blinkmpi.Communicator], object]] = {
    "barrier": lambda comm: comm.Barrier(),
    "c": lambda comm: comm.Allreduce(np.ones(4096), np.empty(4096)),
    "numpy": lambda comm: comm.Allreduce(np.ones(4096), np.empty(4096)),
    "mpi": lambda comm: comm.Allreduce(np.ones(4096), np.empty(4096)),
    "Dup": lambda comm: comm.Dup(),
    "Create_group": lambda comm: comm.rank and comm.Create_group(half(comm)),
}
ALGO = {"mpi": "allreduce:mpi", "c": "allreduce:^mpi", "numpy": "allreduce:^mpi"}


@pytest.mark.parametrize("what", long_but(("c", "numpy", "Dup"), CALLS))
def test_a_long_wait_is_warned_of_by_one_rank_and_goes_on(
    what: str, gate: tuple[str, Callable[[], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLINKMPI_WARN_AFTER", "1")
    path, go_on = gate
    with start("late", what, path) as job:
        wait_for_two_warnings(job)
        go_on()
        outcome = finish(job)
    assert outcome.rc == 0, outcome.output
    assert said(outcome, "error") == dict.fromkeys(range(N), "NoneType"), outcome.output
    pid = said(outcome, "pid")[VICTIM]
    warnings = warnings_in(outcome.output)
    assert_ever_rarer(warnings)
    for text in warnings:
        assert re.search(rf"rank {VICTIM} \((host \S+, )?process {pid}\) runs", text), text
        assert f"Python stack of rank {VICTIM}" in text
        assert re.search(r"test_deadlines\.py:\d+ in writes_a_checkpoint", text), text
        assert "This is an error after 1800 s" in text
        assert not [r for r in OTHERS if f"stack of rank {r}" in text]


def case_late(what: str, gate: str) -> None:
    executor = what if what in ("c", "numpy") else None
    with blinkmpi.Communicator(MPI.COMM_WORLD, algo=ALGO.get(what), executor=executor) as comm:
        assert comm.context.timeout_s == 1800
        comm.Barrier()
        say(pid=os.getpid())
        if comm.rank == VICTIM:
            writes_a_checkpoint(gate)
        attempt(lambda: CALLS[what](comm))


def writes_a_checkpoint(gate: str) -> None:
    os.read(os.open(gate, os.O_RDONLY), 1)


@pytest.mark.parametrize("how", long_but(("lock", "stopped"), ("lock", "stopped", "elsewhere", "never", "constructor")))
def test_a_warning_says_why_a_rank_does_not_answer(
    how: str, gate: tuple[str, Callable[[], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLINKMPI_WARN_AFTER", "0" if how == "never" else "1")
    path, go_on = gate
    with start("unasked", how, path) as job:
        if how == "never":
            job.wait_for('"stops"')
            time.sleep(QUIET_S)
        else:
            wait_for_two_warnings(job)
        if how == "stopped":
            job.signal(VICTIM, signal.SIGCONT)
        go_on()
        outcome = finish(job)
    assert outcome.rc == 0, outcome.output
    warnings = warnings_in(outcome.output)
    if how == "never":
        assert not warnings
        return
    words = {
        "lock": f"rank {VICTIM} does not answer within 1 s (it holds Python's lock",
        "stopped": f"rank {VICTIM} (process {said(outcome, 'pid')[VICTIM]}) is stopped",
        "elsewhere": f"rank {VICTIM} is on another machine, and was not asked",
        "constructor": f"process {said(outcome, 'pid')[VICTIM]}) runs, and has not come; it goes on waiting\n"
        f"  rank {VICTIM} cannot be asked (it has no communicator of blinkmpi yet)",
    }
    assert_ever_rarer(warnings)
    assert all(words[how] in text for text in warnings), outcome.output


def case_unasked(how: str, gate: str) -> None:
    say(pid=os.getpid())
    MPI.COMM_WORLD.Barrier()
    if how == "constructor" and MPI.COMM_WORLD.rank == VICTIM:
        writes_a_checkpoint(gate)
    with blinkmpi.Communicator(MPI.COMM_WORLD) as comm:
        comm.Barrier()
        if how == "elsewhere":
            VISIBLE.clear()
        if comm.rank == VICTIM and how != "constructor":
            say(stops=True)
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "lock":
                byte = ctypes.create_string_buffer(1)
                ctypes.PyDLL(None).read(os.open(gate, os.O_RDONLY), byte, 1)  # without giving up Python's lock
            else:
                writes_a_checkpoint(gate)
        comm.Barrier()


# ---------------------------------------------------------------- the exchanges themselves


@mpi(ranks=(1, 2, 4), timeout=60)
def test_exchanges_bring_what_mpis_own_bring(comm: MPI.Intracomm) -> None:
    ours = BoundedComm(comm, Rendezvous("a test", 20, SlowWaits()))
    exchanges_bring(comm, ours)
    part = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
    some, theirs = comm.Split(comm.rank % 2, -comm.rank), Members(comm, Rendezvous("a test", 20, SlowWaits()), part, 7)
    exchanges_bring(some, theirs)
    other = theirs.Dup()
    assert MPI.Comm.Compare(some, other) == MPI.CONGRUENT
    other.Free()
    some.Free()
    for _ in range(REMEMBERED + 9):
        BoundedComm(comm, Rendezvous("a test", 20, SlowWaits())).Barrier()
    assert len(CAME_TO) == REMEMBERED
    ours.Barrier()
    other = ours.Dup()
    assert MPI.Comm.Compare(comm, other) == MPI.CONGRUENT
    other.Free()


def exchanges_bring(comm: MPI.Intracomm, ours: BoundedComm) -> None:
    assert (ours.rank, ours.size) == (comm.rank, comm.size)
    for mine in (comm.rank, None, {"a": [comm.rank] * 1000}, "x" * 100_000 * comm.rank):
        assert allgather(ours, mine, Any) == comm.allgather(mine)
        for root in range(comm.size):
            assert bcast(ours, mine, Any, root) == comm.bcast(mine, root)
    sent, found = np.full(3, comm.rank), np.empty(3, int)
    ours.Sendrecv(sent, (comm.rank + 1) % comm.size, 3, found, (comm.rank - 1) % comm.size, 3)
    assert (found == (comm.rank - 1) % comm.size).all()
    ours.Barrier()


@mpi(ranks=(4,), timeout=60)
def test_groups_meet_side_by_side(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        for _ in range(3):
            group = ours.Get_group()
            part = group.Incl([0, 3] if comm.rank in (0, 3) else [2, 1])
            child = ours.Create_group(part, tag=5)
            assert isinstance(child, blinkmpi.Communicator)
            assert child.allreduce(1) == 2
            child.Free()
            part.Free()
            group.Free()


@mpi(ranks=(3,), timeout=60)
def test_ranks_that_make_different_communicators_are_told(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, timeout=20) as ours:
        with pytest.raises(blinkmpi.MismatchError, match=r"Split\(\)"):
            (ours.Dup if comm.rank == 1 else ours.Split)()
        ours.Barrier()
        with pytest.raises(BufferTypeError if comm.rank == 1 else RemoteError):
            enter(ours._dispatcher().sequence, "register()", fails if comm.rank == 1 else lambda: None)
        ours.Barrier()


def fails() -> None:
    raise BufferTypeError("not an array; pass one")


@mpi(ranks=(3,), timeout=60)
def test_an_exchange_that_fails_amid_a_call_leaves_the_communicator_dead(comm: MPI.Intracomm) -> None:
    """As when a rank stops while a buffer is registered; its memory is not given back under MPI's hands."""
    ours = blinkmpi.Communicator(comm, timeout=0.5)
    ours.context.rendezvous.met = False  # or a rank may work for longer
    if comm.rank != 1:
        ours.context.rendezvous.what = "register()"
        with pytest.raises(CollectiveTimeout, match=r"register\(\): rank \d waited .* rank 1 \("):
            ours.context.together.Barrier()
        with pytest.raises(PeerLost, match="died earlier"):
            ours.Barrier()
        assert exchanges.ABANDONED
    comm.Barrier()
    if comm.rank == 1:
        ours.context.together.Barrier()  # so that MPI can end in peace
    comm.Barrier()


if __name__ == "__main__":
    run_case(globals())
