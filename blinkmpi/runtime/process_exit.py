"""How a process ends, and the job with it: after an uncaught exception, a peer's death, or the launcher's end."""

import atexit
import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpi4py import MPI, run

from ..errors import PeerLost
from ..transport.processes import JobProcess, state
from ..util.settings import log
from ..util.singleton import remove_segment_at_exit
from .bootstrap import own_settings
from .requests import ProgressThread

UNCAUGHT = threading.Event()  # an exception is about to end this process, and with it the job
ENDS = threading.Event()  # the job is ended with this process, which waited for a rank in vain
FOLLOWS = threading.Event()  # a thread waits for the launcher
LOST = threading.Event()  # a process of the job has died, and this one has outlived it
FINALIZE_SECONDS = 3.0  # time for MPI_Finalize where a rank is missing
ORPHANED_SECONDS = 0.2  # likewise, where the launcher has ended: nobody is left to finalize with
LEFT_SECONDS = 1.0  # time for a process to end by itself after its launcher has ended
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that this process gets when its parent ends
BEFORE_KILLED: set[Callable[[], object]] = set()  # what a rank that outlives its launcher does first
PROCESS = os.getpid()
_sequences: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process
LAUNCHER = os.getppid()
# processes that outlive their ranks
LAUNCHERS = ("prted", "prterun", "mpirun", "mpiexec", "orted", "hydra_pmi_proxy", "slurmstepd")


def end_job_on_error(comm: MPI.Intracomm) -> None:
    """Make an uncaught exception on one rank end the whole job, as ``python -m mpi4py`` does. Installed once."""
    if comm.size == 1 or getattr(sys.excepthook, "blinkmpi", False):
        return
    atexit.register(bound_finalize)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        if in_child():
            return
        UNCAUGHT.set()
        run.set_abort_status(error)

    hook.blinkmpi = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def end_job_at_exit(why: str) -> None:
    """End the job when this process ends: MPI_Finalize would wait for ever for missing ranks. Said once."""
    if not ENDS.is_set():
        ENDS.set()
        atexit.register(_end_job, why)


def _end_job(why: str) -> None:
    if not (UNCAUGHT.is_set() or MPI.Is_finalized() or in_child()):
        run.set_abort_status(1)
        log(own_settings(), "WARN", f"this rank ends the job, or MPI_Finalize would wait for ever: {why}")


def job_goes_on(*, lost: bool) -> None:
    """The ranks that are left have another communicator: what was lost before ends the job no more.

    Args:
        lost: whether a process has died.
    """
    ENDS.clear()
    atexit.unregister(_end_job)
    if lost:
        LOST.set()


def end_job_if_stopped(processes: Sequence[JobProcess]) -> None:
    """End the job when this process ends if one of these is stopped then: MPI_Finalize would wait for it for ever."""
    for process in processes:
        atexit.register(_end_job_of, process)


def _end_job_of(process: JobProcess) -> None:
    if state(process) == "stopped":
        _end_job(f"{process} is stopped, and was counted out by shrink()")


def end_with_failure(why: str) -> None:
    """From an exit handler: let this process, and its job, end with status 1. An uncaught exception has done so."""
    if not (UNCAUGHT.is_set() or MPI.Is_finalized() or in_child()):
        run.set_abort_status(1)
        log(own_settings(), "WARN", f"this process ends with status 1: {why}")


_of_parent: list[object] = []  # in a forked child


def end_with_process(sequence: Any) -> None:
    """Decide what becomes of a communicator's calls when its process ends or its launcher, or a child is forked."""
    remove_segment_at_exit()
    if sequence.context.settings.end_with_launcher and sequence.context.n > 1:
        follow_launcher()
    _sequences.add(sequence)


def _refuse_in_child() -> None:
    """In a forked child: its parent's communicators make no calls here, or the child would take the rank's part.

    What they had is kept: an error's frames may hold a group of torch's, whose end waits for threads that are not here.
    """
    for sequence in list(_sequences):
        _of_parent.append((sequence.thread, sequence.dead))
        sequence.thread = ProgressThread()  # the parent's thread is not here
        sequence.repeated.shut()
        rank = sequence.context.rank
        sequence.dead = PeerLost(f"process {os.getpid()} was forked by rank {rank}, which alone makes its calls")


os.register_at_fork(after_in_child=_refuse_in_child)


def in_child() -> bool:
    """Whether this is a child that a rank has forked: how it ends is no matter of the job's."""
    return os.getpid() != PROCESS


def follow_launcher() -> None:
    """End this process when its launcher has ended (``BLINKMPI_END_WITH_LAUNCHER=0`` turns it off). Begun once."""
    if not FOLLOWS.is_set():
        FOLLOWS.set()
        threading.Thread(target=end_with_launcher, name="blinkmpi-launcher", daemon=True).start()


def bound_finalize() -> None:
    """Where a process of the job has died, end this one if MPI_Finalize does not return. Runs at Python's very end.

    A job that outlives a process (``mpirun --with-ft ulfm``) hangs there now and then: Open MPI 5 waits in a fence of
    PMIx for the dead one (its issues 9434 and 11404; without blinkmpi, too). Nor does it return where the launcher has
    ended first, having lost a host: so no rank outlives its job.
    """
    if LOST.is_set() and not MPI.Is_finalized() and not in_child():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with contextlib.suppress(AttributeError):  # not Linux
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGALRM)
        orphaned = os.getppid() != LAUNCHER
        signal.setitimer(signal.ITIMER_REAL, ORPHANED_SECONDS if orphaned else FINALIZE_SECONDS)


def end_with_launcher() -> None:
    """Wait until the launcher that started this process has ended, then end the process. A thread's whole life.

    A launcher ends after its ranks, or kills them. But a launcher that loses a host may end first, and a rank inside
    MPI may then hang for ever (Open MPI 5, in a lock of its own). So a rank that has not ended by itself is killed,
    once its part of a trace is written, for which it may be waiting behind other ranks.
    """
    try:
        name = Path(f"/proc/{LAUNCHER}/comm").read_text(encoding="utf-8").strip()
        launcher = os.pidfd_open(LAUNCHER) if name in LAUNCHERS else -1
    except (OSError, AttributeError):  # it has ended, or this is not Linux
        return
    if launcher >= 0:
        select.select([launcher], [], [])
        time.sleep(LEFT_SECONDS)
        for write in BEFORE_KILLED:
            write()
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_job(told: Callable[[], str], before_finalize: Callable[[], object]) -> None:
    """End this process as soon as its job does, where no launcher of MPI's would.

    Args:
        told: waits for the job's end, and says why it ends; in a thread of its own.
        before_finalize: called at Python's end, when threads will not run any more and MPI_Finalize waits for all.
    """

    def follow() -> None:
        why = told()
        log(own_settings(), "WARN", f"this rank ends, for its job does: {why}")
        for write in BEFORE_KILLED:
            write()
        os._exit(1)

    atexit.register(lambda: None if in_child() else before_finalize())
    threading.Thread(target=follow, name="blinkmpi-job", daemon=True).start()
