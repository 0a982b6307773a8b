"""Plain Python processes, without mpirun, that share a store: each calls one function, and all of them end in time.

This file is also their program: ``python tests/store/processes.py FOLDER RANK``.
"""

import contextlib
import faulthandler
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # instead of this folder

import pytest

from blinkmpi.errors import BlinkError
from tests.harness import ENVIRONMENT, GRACE_S, PATIENCE_S, ROOT, TAIL, Closing
from tests.harness.__main__ import load
from tests.harness.long import sizes
from tests.store.folder_store import FolderStore

RANK = "BLINK_TEST_RANK"
SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    rc: int
    output: str
    seconds: float
    timed_out: bool


class Processes(Closing):
    """``n`` processes, each of which calls ``target(store, rank, n, **arguments)``; ``with`` leaves none behind.

    Args:
        target: a function at the top of a module; the arguments must pickle.
        timeout: seconds from the start after which they are killed.
    """

    def __init__(
        self, n: int, target: Callable[..., object], *, timeout: float = 4 * PATIENCE_S,
        env: Mapping[str, str | None] | None = None, arguments: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        self.n, self.timeout = n, timeout
        self._scratch = tempfile.TemporaryDirectory(prefix="blinkmpi-")
        self.folder = Path(self._scratch.name)
        (self.folder / "store").mkdir()
        path = [str(ROOT), *(p for p in sys.path if p)]
        order = (path, target.__module__, inspect.getfile(target), target.__name__, timeout, n, dict(arguments or {}))
        (self.folder / "order").write_bytes(pickle.dumps(order))
        variables: dict[str, str | None] = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **(env or {})}
        self._started = time.monotonic()
        self._logs = [self.folder / f"output{rank}" for rank in range(n)]
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank, name in enumerate(self._logs):
            own = {k: v for k, v in {**variables, RANK: str(rank)}.items() if v is not None}
            with name.open("wb") as log:
                self._processes.append(subprocess.Popen(
                    [sys.executable, __file__, str(self.folder), str(rank)], env=own, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                ))  # fmt: skip

    @property
    def store(self) -> FolderStore:
        """What they share."""
        return FolderStore(self.folder / "store")

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._processes]

    def output(self, rank: int) -> str:
        """What a process has printed so far."""
        return self._logs[rank].read_text(errors="replace")

    def signal(self, rank: int, signum: signal.Signals) -> None:
        """Send a signal to a process."""
        self._processes[rank].send_signal(signum)

    def wait_for(self, text: str, ranks: Sequence[int], timeout: float = 2 * PATIENCE_S) -> None:
        """Wait until some processes have printed ``text``."""
        end = time.monotonic() + timeout
        for rank in ranks:
            while text not in self.output(rank):
                if self._processes[rank].poll() is not None or time.monotonic() > end:
                    raise TimeoutError(f"no {text!r} of process {rank}:\n{self.output(rank)[-TAIL:]}")
                time.sleep(0.01)

    def wait(self) -> list[Ended]:
        """Wait until all have ended, or kill those whose time is over."""
        found = []
        for rank, process in enumerate(self._processes):
            timed_out = False
            try:
                process.wait(max(0.01, self._started + self.timeout + GRACE_S - time.monotonic()))
            except subprocess.TimeoutExpired:
                timed_out = True
                process.kill()
                process.wait()
            seconds = time.monotonic() - self._started
            found.append(Ended(process.returncode, self.output(rank), seconds, timed_out))
        return found

    def close(self) -> None:
        """Kill what still runs; a second call does nothing."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for left in SHM.glob(f"sm_segment.*.{process.pid}*"):  # Open MPI's, of a process that was killed
                left.unlink(missing_ok=True)
        self._scratch.cleanup()


def run(n: int, target: Callable[..., object], **arguments: Any) -> list[Ended]:
    """Run processes to their end; arguments as for :class:`Processes`."""
    with Processes(n, target, **arguments) as processes:
        return processes.wait()


def report(ended: Sequence[Ended]) -> str:
    """What the processes say, for a test that has failed."""
    parts = [
        f"--- process {rank}: exit status {e.rc}{', out of time' if e.timed_out else ''}\n{e.output[-TAIL:]}"
        for rank, e in sorted(enumerate(ended), key=lambda pair: pair[1].rc == 0)
    ]
    return "\n".join(parts)


def sharing_a_store(
    processes: Sequence[int] = (2,),
    *,
    long: Sequence[int] = (),
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Turn a function of (store, rank, size) into one test for each number of processes, all of which must return.

    Those of ``long`` are long tests.

    Further parameters are fixtures or parametrised as usual; their values must pickle.
    """

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        def item(nprocesses: int, **params: object) -> None:
            ended = run(nprocesses, body, timeout=timeout, env=env, arguments=params)
            if [e.rc for e in ended] != [0] * nprocesses:
                pytest.fail(report(ended), pytrace=False)

        keyword = inspect.Parameter.KEYWORD_ONLY
        rest = [p.replace(kind=keyword) for p in list(inspect.signature(body).parameters.values())[3:]]
        own = inspect.Parameter("nprocesses", keyword)
        item.__signature__ = inspect.Signature([own, *rest])  # type: ignore[attr-defined]
        item.__name__, item.__qualname__, item.__doc__ = body.__name__, body.__qualname__, body.__doc__
        item.__module__ = body.__module__
        item.body = body  # type: ignore[attr-defined]
        item.pytestmark = [  # type: ignore[attr-defined]
            *getattr(body, "pytestmark", []),
            pytest.mark.parametrize("nprocesses", sizes(processes, long, "n")).mark,
            pytest.mark.timeout(timeout + 6 * GRACE_S).mark,
            pytest.mark.mpi_skip.mark,
        ]
        return item

    return decorate


# ---------------------------------------------------------------- what a process says, and how it is read


def say(**facts: object) -> None:
    """Print one line that :func:`said` finds."""
    os.write(1, f"@{json.dumps(facts)}\n".encode())


def said(ended: Ended) -> dict[str, Any]:
    """What a process has said; the last word counts."""
    facts: dict[str, Any] = {}
    for text in re.findall(r"^@(\{.*\})$", ended.output, re.MULTILINE):
        facts |= json.loads(text)
    return facts


def attempt(call: Callable[[], object]) -> BaseException | None:
    """Make a call; say how long it took and how it failed."""
    since, error = time.monotonic(), None
    try:
        call()
    except BlinkError as caught:
        error = caught
    say(error=type(error).__name__, text=str(error), seconds=time.monotonic() - since)
    return error


def main(folder: Path, rank: int) -> None:
    """Be one of the processes."""
    path, module, file, function, timeout, n, arguments = pickle.loads((folder / "order").read_bytes())
    sys.path[:] = list(dict.fromkeys(path + sys.path[1:]))
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout, exit=True)
    target = getattr(load(module, file), function)
    getattr(target, "body", target)(FolderStore(folder / "store"), rank, n, **arguments)
    say(returned=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
