"""What the benchmarks that start jobs share: one job, with a limit, that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

END_SECONDS = 10.0  # that a launcher has to end its ranks


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
