"""Processes of the job: who they are, how they are, and which call of ours each is known to have come to.

What is known of a process comes from the first exchange of a communicator of which it was a rank. Before that, the
processes that the same launcher started on this machine can be told by the rank that it gave them in their environment.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from .control_pages import process_state, start_time

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMIX_RANK=", b"PMI_RANK=", b"SLURM_PROCID=")
WORLD_VARIABLE = "PMIX_NAMESPACE"  # differs between processes that were started together and later ones
CREDENTIALS = struct.Struct("3i")  # process, user and group, as SO_PEERCRED gives them
WORDS = {
    "running": "runs",
    "stopped": "is stopped (SIGSTOP or a debugger)",
    "blocked": "is in uninterruptible sleep (a disk or a network file system)",
    "gone": "has ended",
    "": "cannot be seen from here",
}


class JobProcess(msgspec.Struct, frozen=True):
    """A process: its machine, its number, and when it started, so that a number that is used again is noticed."""

    host: str
    boot: str
    pid: int
    start: int

    def __str__(self) -> str:
        return f"host {self.host}, process {self.pid}"


KNOWN: dict[int, JobProcess] = {}  # by number in the job
VISIBLE: set[JobProcess] = set()  # those of this machine, by the same numbers as here
LOOK_AGAIN_SECONDS = 1.0  # after which the launcher's processes are looked at again
_looked: list[float] = []


def own() -> JobProcess:
    """This process."""
    boot = BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else ""
    return JobProcess(socket.gethostname(), boot, os.getpid(), start_time(os.getpid()) or 0)


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, as the kernel knows them."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(told)
    return pid, uid


def learn(found: dict[int, JobProcess]) -> None:
    """Note which process each rank is; called while they live, so that those of this machine can be told."""
    KNOWN.update(found)
    see(found.values())


def see(found: Iterable[JobProcess]) -> None:
    """Note which of some processes, which live, are of this machine."""
    boot = own().boot
    VISIBLE.update(p for p in found if p.boot == boot and start_time(p.pid) == p.start != 0)


def state(process: JobProcess | None) -> str:
    """``running``, ``stopped``, ``blocked``, ``gone``, or ``""`` if it cannot be seen."""
    if process is None or process not in VISIBLE:
        return ""
    letter = process_state(process.pid)
    if letter is None or letter in "ZX" or start_time(process.pid) != process.start:
        return "gone"
    return "stopped" if letter in "Tt" else "blocked" if letter == "D" else "running"


def learn_from_launcher(number_of: Callable[[int], int]) -> None:
    """Note the processes that this one's launcher has started here with it, as far as no exchange has told of them.

    Args:
        number_of: the number of a process in the job, from its rank in its world.
    """
    now = time.monotonic()
    if _looked and now - _looked[-1] < LOOK_AGAIN_SECONDS:
        return
    _looked[:] = [now]
    me, found = own(), {}
    for pid in _children(os.getppid()):
        rank = _rank_of(pid)
        if rank is not None and number_of(rank) not in KNOWN:
            found[number_of(rank)] = JobProcess(me.host, me.boot, pid, start_time(pid) or 0)
    learn(found)


def _children(parent: int) -> list[int]:
    try:
        tasks = [
            task.joinpath("children").read_text(encoding="ascii") for task in Path(f"/proc/{parent}/task").iterdir()
        ]
    except OSError:  # not ours to look at, or not Linux
        return []
    return [int(pid) for text in tasks for pid in text.split()]


def _rank_of(pid: int) -> int | None:
    """The rank that the launcher gave to a process of this one's world."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return None
    if (world := os.environ.get(WORLD_VARIABLE)) and f"{WORLD_VARIABLE}={world}".encode() not in variables:
        return None  # it was started earlier or later than this one
    for name in RANK_VARIABLES:
        for variable in variables:
            if variable.startswith(name) and variable.removeprefix(name).isdigit():
                return int(variable.removeprefix(name))
    return None
