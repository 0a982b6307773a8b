"""Copies of the tree: pytest runs in them, on one fault at a time, and nothing of the user's is touched.

A copy comes first on ``PYTHONPATH``, so it wins over the installed package in every process that a test starts, ranks
under mpirun too. What is compiled is kept in a folder beside the copies; the C executor's file there is named after a
digest of its sources, so one that was made with a fault serves that fault alone.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.harness import ROOT
from tests.mutants.records import Mutant

LEFT_BEHIND = (
    ".git", ".venv*", Path(sys.prefix).name, "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info",
)  # fmt: skip
GRACE_S = 15.0  # that pytest takes to end its ranks when it is interrupted


@dataclass(frozen=True)
class Run:
    """What became of a run of pytest.

    Attributes:
        outcomes: passed, failed, skipped or not run, by the name of a test; empty if pytest came to no end.
        long: those that are marked so, which only ``make test-long`` runs.
        output: what pytest said.
    """

    outcomes: dict[str, str]
    long: frozenset[str]
    output: str
    seconds: float


class Copy:
    """A copy of the tree in ``folder``, whose compiled code is kept in ``cache``."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._root, self._outcomes = folder / "tree", folder / "outcomes.json"
        self._tmp = folder / "tmp"
        self._tmp.mkdir(parents=True)
        shutil.copytree(ROOT, self._root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTHONPATH": str(self._root),
            "BLINKMPI_CACHE_DIR": str(cache),
            "TMPDIR": str(self._tmp),
            "CI": "1",  # hypothesis draws the same examples in every run
        }

    @contextmanager
    def spoilt(self, mutant: Mutant) -> Iterator[None]:
        """Meanwhile the fault is there. Then the file is what it was, its time too, by which Python knows its code."""
        path = self._root / mutant.file
        text, facts = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(mutant.applied(text), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))

    def run(self, tests: Sequence[str], seconds: float) -> Run:
        """Run some tests; pytest is ended when the time is over."""
        self._outcomes.unlink(missing_ok=True)
        words = ["-p", "no:cacheprovider", "-p", "tests.mutants.outcomes", "--outcomes", str(self._outcomes)]
        since = time.monotonic()
        with tempfile.TemporaryFile(dir=self._tmp) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-m", "", *words, *tests],
                cwd=self._root, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            try:
                _end(process, seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            log.seek(0)
            output = log.read().decode(errors="replace")
        found = json.loads(self._outcomes.read_text(encoding="utf-8")) if self._outcomes.exists() else {}
        outcomes = {name: row["outcome"] for name, row in found.items()}
        long = frozenset(name for name, row in found.items() if row["long"])
        return Run(outcomes, long, output, time.monotonic() - since)


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end; when the time is over, interrupt it, so that it ends its ranks."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
