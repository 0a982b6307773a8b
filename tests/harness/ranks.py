"""Ranks that carry out functions: :class:`Ranks` any number, :func:`run_ranks` one, :class:`Pools` those of a session.

The ranks of a job connect to a socket of the outer process (``__main__.py`` is their program). It sends each of them
the same order, a function with its arguments, and each answers with its verdict. Between two orders they sleep.
"""

import contextlib
import inspect
import os
import pickle
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.harness.jobs import GRACE_S, ROOT, Closing, Job, Outcome
from tests.harness.reports import Report, Verdict

Environment = Mapping[str, str | None]  # variables to add; None removes one

PROGRAM = Path(__file__).parent  # of a rank
START_S = 60.0  # for the ranks to start and import MPI; a busy machine takes some of it
SESSION_S = 6 * 3600.0  # then mpirun ends the ranks of a session, should nobody else have done so
TOGETHER_S = 0.5  # for the verdicts of ranks that fail at the same moment


class Ranks(Closing):
    """``n`` ranks under one mpirun that carry out functions until one of them fails.

    Args:
        env: variables to add to their environment; None as a value removes one.
        seconds: after which mpirun ends them whatever happens.
    """

    def __init__(self, n: int, *, env: Environment | None = None, seconds: float = SESSION_S) -> None:
        self.n = n
        self._folder = tempfile.TemporaryDirectory(prefix="blinkmpi-")
        self._lines: dict[int, Connection] = {}
        self._shown = 0  # characters of the output that earlier reports have
        address = f"{self._folder.name}/orders"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(address)
            door.listen(n)
            # Unbuffered, print() writes its newline apart and the ranks' lines mix.
            variables = {"PYTHONUNBUFFERED": None, **(env or {})}
            self._job = Job(n, [sys.executable, str(PROGRAM), address], timeout=seconds, env=variables)
            self._meet(door)

    def _meet(self, door: socket.socket) -> None:
        """Wait for the ranks to connect; one that does not is silent in the first report."""
        end = time.monotonic() + START_S
        while len(self._lines) < self.n and self._job.running and time.monotonic() < end:
            if select.select([door], [], [], 0.2)[0]:
                line = Connection(door.accept()[0].detach())
                with contextlib.suppress(EOFError):  # it died at once
                    self._lines[line.recv()] = line

    def call(
        self,
        target: Callable[..., object],
        timeout: float,
        *,
        env: Environment | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Report:
        """Call ``target(comm, *args, **kwargs)`` on all ranks; ``comm`` is a copy of COMM_WORLD.

        ``target`` is a function at the top of a module; the arguments must pickle. Where a rank fails, hangs or dies,
        the job ends with it, and :attr:`Report.problem` says so.
        """
        order = {
            "module": target.__module__,
            "file": inspect.getfile(target),
            "function": target.__name__,
            "path": [str(ROOT), *(p for p in sys.path if p)],
            "timeout": timeout,
            "env": dict(env or {}),
            "arguments": pickle.dumps((tuple(args), dict(kwargs or {}))),
        }
        since = time.monotonic()
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # it has ended, which its verdict will say
                line.send(order)
        verdicts, timed_out = self._verdicts(since + timeout + GRACE_S)
        if {verdict.outcome for verdict in verdicts} in ({"passed"}, {"skipped"}):
            return Report(verdicts, Outcome(0, self._output(), time.monotonic() - since, False, ()))
        outcome = self._give_up(timed_out=timed_out)
        told = tuple(v if v.outcome != "silent" else replace(v, detail=self._stacks(r)) for r, v in enumerate(verdicts))
        self._folder.cleanup()
        return Report(told, replace(outcome, seconds=time.monotonic() - since))

    def _verdicts(self, end: float) -> tuple[tuple[Verdict, ...], bool]:
        """The verdict of each rank, and whether time ran out. A failure leaves the others a moment for theirs."""
        found = dict.fromkeys(range(self.n), Verdict("silent"))
        waiting, failed = dict(self._lines), len(self._lines) < self.n
        while waiting and (left := end - time.monotonic()) > 0:
            ready = wait(list(waiting.values()), left)
            for rank in [rank for rank, line in waiting.items() if line in ready]:
                line = waiting.pop(rank)
                with contextlib.suppress(EOFError, OSError):  # it has ended
                    found[rank] = Verdict(*line.recv())
                if found[rank].outcome in ("failed", "silent") and not failed:
                    failed, end = True, min(end, time.monotonic() + TOGETHER_S)
        return tuple(found.values()), bool(waiting) and not failed

    def _give_up(self, *, timed_out: bool) -> Outcome:
        """End the job; where a rank has died, mpirun is about to do so by itself."""
        self._job.timeout = self._job.seconds + (0.0 if timed_out else TOGETHER_S)
        outcome = replace(self._job.wait(), timed_out=timed_out)
        self._hang_up()
        return replace(outcome, output=outcome.output[self._shown :])

    def _stacks(self, rank: int) -> str:
        """What the watchdog of a rank, or the signal that ended it, has left."""
        file = Path(self._folder.name) / f"{rank}.stacks"
        return file.read_text(errors="replace") if file.exists() else ""

    def _output(self) -> str:
        """What the ranks have printed since the last report."""
        text = self._job.output[self._shown :]
        self._shown += len(text)
        return text

    def end(self) -> Outcome:
        """Let the ranks finalize MPI and leave, and wait for it; each has a watchdog for this, too."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # it has ended, which the exit status will say
                line.send(None)
        self._job.timeout = self._job.seconds + 2 * GRACE_S
        outcome = self._job.wait()
        self.close()
        return outcome

    def close(self) -> None:
        """End the job now if it still runs; a second call does nothing."""
        self._job.close()
        self._hang_up()
        self._folder.cleanup()

    def _hang_up(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()


def run_ranks(
    n: int,
    target: Callable[..., object],
    timeout: float,
    *,
    env: Environment | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> Report:
    """Call a function on ``n`` ranks of a job of its own, as :meth:`Ranks.call` does; the report tells how it ended."""
    with Ranks(n, env=env, seconds=START_S + timeout + 3 * GRACE_S) as ranks:
        report = ranks.call(target, timeout, args=args, kwargs=kwargs)
        return report if report.problem is not None else Report(report.verdicts, ranks.end())


class Pools(Closing):
    """The ranks on which the tests of a session run: one job for each number of ranks, made when it is asked for.

    A test that fails, hangs or dies takes its job along, and the next test gets a new one.
    """

    def __init__(self) -> None:
        self._environment = own_environment()
        self._pools: dict[int, Ranks] = {}

    def run(
        self,
        n: int,
        target: Callable[..., object],
        timeout: float,
        *,
        env: Environment | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> Report:
        """Call a function on the ``n`` ranks there are.

        Settings of ours are read when a communicator is made, so they may change from call to call. Where ``env`` or
        this process's environment has changed in anything else, the ranks are of a job of their own.
        """
        before, now = self._environment, own_environment() | dict(env or {})
        changed = {name: now.get(name) for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
        if any(not name.startswith("BLINKMPI_") for name in changed):
            return run_ranks(n, target, timeout, env=env, kwargs=kwargs)
        if n not in self._pools:
            self._pools[n] = Ranks(n)
        report = self._pools[n].call(target, timeout, env=changed, kwargs=kwargs)
        if report.problem is not None:
            self._pools.pop(n).close()
        return report

    def end(self) -> str:
        """Let all ranks leave; what was wrong with how they ended, or an empty text."""
        ends = {n: ranks.end() for n, ranks in self._pools.items()}
        self._pools.clear()
        wrong = {n: outcome for n, outcome in ends.items() if outcome.rc or outcome.timed_out or outcome.leftovers}
        return "\n".join(f"the {n} ranks of this session ended badly: {outcome}" for n, outcome in wrong.items())

    def close(self) -> None:
        """End all ranks now; a second call does nothing."""
        for ranks in self._pools.values():
            ranks.close()
        self._pools.clear()


def own_environment() -> dict[str, str | None]:
    """The environment of this process but for what pytest writes there for each test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
