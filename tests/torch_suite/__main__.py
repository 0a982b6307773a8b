"""Run torch's tests, one after another, and write down how each ended.

    python -m tests.torch_suite --ranks 2,4 -o build/torch-suite.json

Each test starts its ranks as processes of its own, without mpirun. It passes, is skipped (by torch, with its reason),
is refused by a typed error of ours that EXPECTED names, or fails.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import jobs
from benchmarks.jobs import python_path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # for one test


class Expected(NamedTuple):
    """A test that cannot pass, a part of its error, and why that is meant."""

    test: str
    error: str
    why: str


EXPECTED: tuple[Expected, ...] = ()


class Recorder(unittest.TestResult):
    """Keeps how each test ended, and prints a line."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.outcome, self.text, self.began = "passed", "", 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.outcome, self.text, self.began = "passed", "", time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        name = test.id().rpartition(".")[2]
        row = {"test": name, "outcome": self.outcome, "seconds": round(time.monotonic() - self.began, 1)}
        if self.text:
            row["text"] = self.text[-2000:]
        self.rows.append(row)
        last = self.text.strip().splitlines()[-1][:150] if self.text.strip() else ""
        print(f"{name}: {self.outcome} ({row['seconds']} s) {last}", flush=True)

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self.outcome, self.text = "skipped", reason

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._add(test, err)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._add(test, err)

    def _add(self, test: Any, err: Any) -> None:
        name, text = test.id().rpartition(".")[2], f"{err[0].__name__}: {err[1]}"
        meant = any(fnmatch.fnmatchcase(name, e.test) and e.error in text for e in EXPECTED)
        self.outcome, self.text = "expected" if meant else "failed", text


def run_here(pattern: str, output: Path) -> int:
    """Run the tests with the ranks that the environment says."""
    from tests.torch_suite import cases

    loader, recorder = unittest.TestLoader(), Recorder()
    for case in cases.ALL:
        for name in loader.getTestCaseNames(case):
            if fnmatch.fnmatchcase(name, pattern):
                case(name).run(recorder)
    output.write_text(json.dumps(recorder.rows, indent=1))
    return int(any(row["outcome"] == "failed" for row in recorder.rows))


def main() -> int:
    """Run all, for each number of ranks in a process of its own; 1 if a test failed."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("-k", dest="pattern", default="*", help="names of tests, as a shell pattern")
    parser.add_argument("--backend", default="blink", help="another one, to compare")
    parser.add_argument("-o", "--output", help="write every test's outcome as JSON under this name, or one beside it")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        return run_here(args.pattern, args.here)
    began, found = datetime.now().astimezone(), list[dict[str, Any]]()
    for n in args.ranks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("barrier", "test_dir", "init_dir"):
                Path(folder, name).mkdir()
            made = Path(folder, "made.json")
            settings = {"BACKEND": args.backend, "WORLD_SIZE": n, "TEMP_DIR": folder, "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": python_path()}  # fmt: skip
            command = [sys.executable, "-m", "tests.torch_suite", "-k", args.pattern, "--here", str(made)]
            subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False)
            rows = json.loads(made.read_text()) if made.exists() else [{"test": "all", "outcome": "failed"}]
        counts = Counter(row["outcome"] for row in rows)
        print(f"{n} ranks: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()), flush=True)
        found.append({"ranks": int(n), "counts": counts, "tests": rows})
    if args.output:
        head = {"torch_suite": {"torch": torch.__version__, "backend": args.backend, "tests": args.pattern}}
        jobs.write(args.output, jobs.document(head, found, [], began))
    return int(any(one["counts"].get("failed") for one in found))


if __name__ == "__main__":
    sys.exit(main())
