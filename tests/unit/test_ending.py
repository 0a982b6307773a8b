"""How a process ends that has outlived another: in time, whatever MPI_Finalize does."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest

from blinkmpi import ending

RANK = """
import os, sys, time
from blinkmpi import ending
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
