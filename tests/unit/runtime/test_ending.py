"""How a process ends that has outlived another: in time, whatever MPI_Finalize does."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from blinkmpi.runtime import process_exit as ending

RANK = """
import os, sys, time
from blinkmpi.runtime import process_exit as ending
print(os.getpid(), flush=True)
sys.stdin.readline()
if sys.argv[1] == "late": time.sleep(1.0)
ending.LOST.set()
ending.bound_finalize()
print("bound", flush=True)
time.sleep(60)  # an MPI_Finalize that does not return
"""
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdin=subprocess.PIPE, text=True)
for line in sys.stdin:
    if line == "end": break
    rank.stdin.write(line)
    rank.stdin.flush()
    if sys.argv[2] == "late": break
"""


@pytest.mark.parametrize(("when", "seconds"), [("before", ending.FINALIZE_SECONDS), ("during", 0.0), ("late", 1.2)])
def test_a_process_that_outlives_another_ends_in_time(when: str, seconds: float) -> None:
    """With its launcher alive, by the bound; with one that ends meanwhile, or has ended before, at once."""
    argv = [sys.executable, "-c", LAUNCHER, RANK, when]
    launcher = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        rank = os.pidfd_open(int(launcher.stdout.readline()))
        since = time.monotonic()
        launcher.stdin.write("go on\n")
        launcher.stdin.flush()
        if when != "late":
            assert launcher.stdout.readline() == "bound\n"
        if when == "during":
            launcher.kill()
            since = time.monotonic()
        assert select.select([rank], [], [], 30)[0], "it has not ended"
        took = time.monotonic() - since
        os.close(rank)
        launcher.kill()
    assert seconds - 0.5 <= took <= seconds + 2.0


@pytest.mark.parametrize(("name", "ends"), [("prted", True), ("sh", False)])
def test_a_rank_ends_with_its_launcher_whatever_it_is_doing(name: str, ends: bool) -> None:
    """Only with a launcher of MPI: a shell may end before what it has started."""
    rank = (
        "import ctypes, threading; from blinkmpi.runtime import process_exit as ending\n"
        "threading.Thread(target=ending.end_with_launcher, daemon=True).start()\n"
        "import os; print(os.getpid(), flush=True)\n"
        "ctypes.CDLL(None).sleep(30)  # outside of Python, as in MPI"
    )
    launcher = (
        f"import ctypes, subprocess, sys, time; ctypes.CDLL(None).prctl(15, b'{name}')\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
        "time.sleep(30)"
    )
    with subprocess.Popen([sys.executable, "-c", launcher, rank], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        fd = os.pidfd_open(pid)
        time.sleep(0.3)  # its thread has begun
        started.kill()
        assert bool(select.select([fd], [], [], ending.LEFT_SECONDS + (10 if ends else 1))[0]) == ends
        os.close(fd)
        if not ends:
            os.kill(pid, signal.SIGKILL)
