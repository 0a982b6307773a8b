"""What the tests of faults share: a job whose ranks fail, what a rank says of it, and how it is read."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import BlinkError, PeerLost
from tests.harness import PATIENCE_S, ROOT, Job, Outcome, mpirun

N = 4
JOB_S = 4 * PATIENCE_S  # that a job may take: its start, some deadlines of a few seconds, its end
VICTIM = 2
EXECUTORS = ("c", "numpy")
MEET = 4711  # a tag


# ---------------------------------------------------------------- jobs


def start_case(
    program: str, case: str, *arguments: str, timeout: float = JOB_S, options: tuple[str, ...] = (), n: int = N
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


def finish(job: Job) -> Outcome:
    """Wait for the end of a job, which must come by itself before the job's time is over, and leave no process."""
    outcome = job.wait()
    assert not outcome.timed_out, outcome.output
    assert outcome.leftovers == (), outcome.output
    return outcome


def meet(*ranks: int) -> None:
    """Wait until these ranks, of which this is one, have all come here: the first that ends may end the job."""
    world = MPI.COMM_WORLD
    others = [r for r in ranks if r != world.rank]
    sent = [world.isend(None, r, MEET) for r in others]
    for rank in others:
        world.recv(source=rank, tag=MEET)
    MPI.Request.Waitall(sent)


# ---------------------------------------------------------------- what a rank says, and how we read it


def say(**facts: object) -> None:
    """Print one line that :func:`said` finds in the output of the job."""
    os.write(1, f"@{json.dumps({'rank': MPI.COMM_WORLD.rank, **facts})}\n".encode())


def said(outcome: Outcome, key: str) -> dict[int, Any]:
    """What each rank has said under a key."""
    facts = [json.loads(text) for text in re.findall(r"@(\{.*?\})$", outcome.output, re.MULTILINE)]
    return {f["rank"]: f[key] for f in facts if key in f}


def stop_until(files: Iterable[Path]) -> None:
    """Stop this process until these files are there, which a child of it waits for."""
    pid = os.getpid()
    script = f'for file; do until [ -e "$file" ]; do sleep 0.02; done; done; kill -CONT {pid}'
    subprocess.Popen(["sh", "-c", script, "sh", *map(str, files)], start_new_session=True)
    os.kill(pid, signal.SIGSTOP)


def in_time(outcome: Outcome, ranks: Iterable[int], deadline: float = 0.0) -> None:
    """These ranks have said that they waited for the deadline, or for one that did, and not much longer."""
    seconds = said(outcome, "seconds")
    longest = max(seconds[r] for r in ranks)
    assert 0.9 * deadline <= longest < deadline + PATIENCE_S, outcome.output


def when_it_enters(comm: blinkmpi.Communicator, then: Callable[[], object]) -> None:
    """Do something in a thread as soon as this rank has entered its next call."""
    announced = comm.context.host.pages.announced
    before = int(announced[comm.rank])

    def watch() -> None:
        while int(announced[comm.rank]) == before:
            time.sleep(0.001)
        then()

    threading.Thread(target=watch, daemon=True).start()


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
    """Call (an Allreduce) until it fails; then the communicator is dead, and says so: it waits for nobody."""
    call = call or (lambda: comm.Allreduce(MPI.IN_PLACE, vector))
    since = time.monotonic()
    try:
        while True:
            since = time.monotonic()
            call()
    except BlinkError as error:
        say(error=type(error).__name__, text=str(error), seconds=time.monotonic() - since)
    with pytest.raises(PeerLost, match="died earlier"):
        comm.Barrier()
    with pytest.raises(PeerLost, match="died earlier"):
        comm.Iallreduce(MPI.IN_PLACE, vector).Wait()
    say(again="PeerLost")
