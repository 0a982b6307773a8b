"""Start the jobs of the benchmarks: mpirun's command line, its settings, and one run with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from blinkmpi.util.launcher import find_mpirun

END_SECONDS = 10.0  # that a launcher has to end its ranks
ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PYTHONUNBUFFERED": "1"}  # fmt: skip


def mpirun(n: int) -> list[str]:
    """The words that start ``n`` unbound ranks on this machine."""
    return [find_mpirun() or "mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(n)]


def python_path() -> str:
    """``PYTHONPATH`` with this checkout in front."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def run_job(argv: Sequence[str], variables: Mapping[str, str], seconds: float) -> tuple[str, str]:
    """Run a job; (what went wrong, or nothing; its output)."""
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **variables},
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=seconds)
            return (f"exit status {process.returncode}" if process.returncode else ""), said
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                said, _ = process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said, _ = process.communicate()
            return f"no end after {seconds:.0f} s", said
