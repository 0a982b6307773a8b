"""How a process ends that has outlived another: in time, whatever MPI_Finalize does."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from blinkmpi.runtime import process_exit as ending
from tests.harness import NEVER_S, PATIENCE_S

RANK = """
import os, sys, time
from blinkmpi.runtime import process_exit as ending
print(os.getpid(), flush=True)
sys.stdin.readline()
if sys.argv[1] == "late": time.sleep(1.0)
if sys.argv[1] != "before": ending.FINALIZE_SECONDS = float(sys.argv[2])
ending.LOST.set()
ending.bound_finalize()
print("bound", flush=True)
time.sleep(60)  # an MPI_Finalize that does not return
"""
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=subprocess.PIPE, text=True)
for line in sys.stdin:
    if line == "end": break
    rank.stdin.write(line)
    rank.stdin.flush()
    if sys.argv[2] == "late": break
"""
# It says who it is as soon as its thread follows the launcher, or does not.
FOLLOWER = """
import ctypes, os, sys, threading
from blinkmpi.runtime import process_exit as ending
def told(pid, real=os.pidfd_open):
    descriptor = real(pid)
    print(os.getpid(), flush=True)
    return descriptor
os.pidfd_open = told
thread = threading.Thread(target=ending.end_with_launcher, daemon=True)
thread.start()
if sys.argv[1] == "sh":
    thread.join()
    print(os.getpid(), flush=True)
ctypes.CDLL(None).sleep(60)  # outside of Python, as in MPI
"""


@pytest.mark.parametrize(("when", "seconds"), [("before", ending.FINALIZE_SECONDS), ("during", 0.0), ("late", 1.2)])
def test_a_process_that_outlives_another_ends_in_time(when: str, seconds: float) -> None:
    """With its launcher alive, by the bound; with one that ends meanwhile, or has ended before, at once."""
    argv = [sys.executable, "-c", LAUNCHER, RANK, when, str(NEVER_S)]
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
        assert select.select([rank], [], [], seconds + PATIENCE_S)[0], "it has not ended"
        took = time.monotonic() - since
        os.close(rank)
        launcher.kill()
    assert took >= seconds - 0.5


@pytest.mark.parametrize(("name", "ends"), [("prted", True), ("sh", False)])
def test_a_rank_ends_with_its_launcher_whatever_it_is_doing(name: str, ends: bool) -> None:
    """Only with a launcher of MPI: a shell may end before what it has started."""
    launcher = (
        f"import ctypes, subprocess, sys, time; ctypes.CDLL(None).prctl(15, b'{name}')\n"
        "subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])\n"
        "time.sleep(60)"
    )
    argv = [sys.executable, "-c", launcher, FOLLOWER, name]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        fd = os.pidfd_open(pid)
        started.kill()
        assert bool(select.select([fd], [], [], ending.LEFT_SECONDS + (PATIENCE_S if ends else 1))[0]) == ends
        os.close(fd)
        if not ends:
            os.kill(pid, signal.SIGKILL)
