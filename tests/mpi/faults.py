"""What the tests of faults share: a job whose ranks fail, what a rank says of it, and how it is read."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import BlinkError, PeerLost
from tests.harness import ROOT, Job, Outcome, mpirun

N = 4
VICTIM = 2
EXECUTORS = ("c", "numpy")


# ---------------------------------------------------------------- jobs


def start_case(
    program: str, case: str, *arguments: str, timeout: float = 30.0, options: tuple[str, ...] = (), n: int = N
) -> Job:
    """Start the ``case`` of a file on ``n`` ranks; the file calls :func:`run_case`."""
    argv = [sys.executable, program, case, *arguments]
    return Job(n, argv, timeout=timeout, env={"PYTHONPATH": str(ROOT)}, options=options)


def run_case(names: Mapping[str, Any]) -> None:
    """Be the program of a rank: call the ``case_`` function that the command line names."""
    case, *arguments = sys.argv[1:]
    names[f"case_{case}"](*arguments)


def fault_tolerance() -> tuple[str, ...]:
    """The options of mpirun with which a job outlives a rank; skips where they are not Open MPI's."""
    version = subprocess.run([mpirun(), "--version"], capture_output=True, text=True, check=True).stdout
    return ("--with-ft", "ulfm") if "Open MPI" in version else pytest.skip("mpirun --with-ft is Open MPI's")


def finish(job: Job, within: float) -> Outcome:
    """Wait for the end of a job, which must come by itself and in time, and leave no process."""
    since = time.monotonic()
    outcome = job.wait()
    assert not outcome.timed_out, outcome.output
    assert outcome.leftovers == (), outcome.output
    assert time.monotonic() - since < within, outcome.output
    return outcome


# ---------------------------------------------------------------- what a rank says, and how we read it


def say(**facts: object) -> None:
    """Print one line that :func:`said` finds in the output of the job."""
    os.write(1, f"@{json.dumps({'rank': MPI.COMM_WORLD.rank, **facts})}\n".encode())


def said(outcome: Outcome, key: str) -> dict[int, Any]:
    """What each rank has said under a key."""
    facts = [json.loads(text) for text in re.findall(r"@(\{.*?\})$", outcome.output, re.MULTILINE)]
    return {f["rank"]: f[key] for f in facts if key in f}


def attempt(call: Callable[[], object]) -> BaseException | None:
    """Make a call; say how long it took and how it failed."""
    since = time.monotonic()
    error: BaseException | None = None
    try:
        call()
    except (BlinkError, KeyboardInterrupt) as caught:
        error = caught
    say(error=type(error).__name__, text=str(error), seconds=time.monotonic() - since)
    return error


def calls_until_death(
    comm: blinkmpi.Communicator, vector: np.ndarray[Any, Any], call: Callable[[], object] | None = None
) -> None:
    """Call (an Allreduce) until it fails; then the communicator is dead, says so at once and can be freed."""
    call = call or (lambda: comm.Allreduce(MPI.IN_PLACE, vector))
    since = time.monotonic()
    try:
        while True:
            since = time.monotonic()
            call()
    except BlinkError as error:
        say(error=type(error).__name__, text=str(error), seconds=time.monotonic() - since)
    since = time.monotonic()
    with pytest.raises(PeerLost, match="died earlier"):
        comm.Barrier()
    with pytest.raises(PeerLost, match="died earlier"):
        comm.Iallreduce(MPI.IN_PLACE, vector).Wait()
    assert time.monotonic() - since < 0.5
    say(again="PeerLost")
