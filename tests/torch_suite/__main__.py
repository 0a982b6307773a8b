"""Run torch's tests, one after another, and write down how each ended.

    python -m tests.torch_suite --ranks 2,4 -o build/torch-suite.json

Each test starts its ranks as processes of its own, without mpirun. It passes, is skipped (by torch, with its reason),
is refused, by torch or by a typed error of ours, or asserts the name of another backend, both as EXPECTED says, or
fails. Tests that torch skips because of our backend's name run again with us taken for each backend that such tests are
for. Those that fail run again by torch's own backend, and are told apart if it fails them, too.
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
TAKEN_FOR = {"cpu": ("gloo", "mpi"), "cuda": ("nccl", "gloo", "mpi")}
TORCHS_OWN = {"cpu": "gloo", "cuda": "nccl"}
FAILS_BY_BOTH = "fails by both"
LOST = {"test": "all", "outcome": "failed", "text": "the process that starts them has died", "started": True}


class Expected(NamedTuple):
    """Tests that cannot pass, as a pattern, a part of their error, and why; and how that is counted."""

    test: str
    error: str
    why: str
    outcome: str = "refused"


GLOO = "torch itself allows monitored_barrier to gloo alone"
EXPECTED = (
    Expected("test_monitored_barrier*", "monitored_barrier is only implemented for GLOO backend", GLOO),
    Expected(
        "test_sparse_all_reduce*",
        "BufferTypeError: a tensor of layout torch.sparse_coo",
        "sparse tensors are refused: pass .to_dense()",
    ),
    Expected(
        "test_ddp_profiling_execution_trace",
        "'blink' != 'nccl'",
        "asserts that the backend's name is nccl",
        "names another backend",
    ),
)


class Share(NamedTuple):
    """Every ``step``-th test from the ``first``, of those that the pattern and the names allow."""

    pattern: str
    names: list[str] | None
    first: int
    step: int


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
        started = not getattr(getattr(test, name), "__unittest_skip__", False)
        took = round(time.monotonic() - self.began, 1)
        row = {"test": name, "outcome": self.outcome, "seconds": took, "started": started}
        if self.text:
            row["text"] = self.text[-2000:]
        self.rows.append(row)
        lines = self.text.strip().splitlines()
        told = [line for line in lines if "Error" in line] or lines
        print(f"{name}: {self.outcome} ({took} s) {told[-1][:150] if told else ''}", flush=True)

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
        known = next((e for e in EXPECTED if fnmatch.fnmatchcase(name, e.test) and e.error in text), None)
        self.outcome, self.text = (known.outcome, known.why) if known else ("failed", text)


def run_share(share: Share, output: Path) -> None:
    """Run these tests with the ranks that the environment says."""
    from tests.torch_suite import cases

    recorder = Recorder()
    every = [(case, name) for case in cases.ALL for name in unittest.TestLoader().getTestCaseNames(case)]
    for case, name in every[share.first :: share.step]:
        if fnmatch.fnmatchcase(name, share.pattern) and (share.names is None or name in share.names):
            case(name).run(recorder)
    output.write_text(json.dumps(recorder.rows, indent=1))


def run(n: int, shares: list[Share], settings: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of tests on ``n`` ranks; shares run beside each other, each in a process of its own."""
    with tempfile.TemporaryDirectory() as top:
        started = []
        for share in shares:
            folder = Path(top, str(share.first))
            for name in ("barrier", "test_dir", "init_dir"):
                Path(folder, name).mkdir(parents=True)
            told, made = folder / "share.json", folder / "made.json"
            told.write_text(json.dumps(share._asdict()))
            env = {**os.environ, **settings, "WORLD_SIZE": str(n), "TEMP_DIR": str(folder), "OMP_NUM_THREADS": "1",
                   "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS), "PYTHONPATH": python_path()}  # fmt: skip
            command = [sys.executable, "-m", "tests.torch_suite", "--share", str(told), "-o", str(made)]
            started.append((subprocess.Popen(command, cwd=ROOT, env=env), made))
        for process, _ in started:
            process.wait()
        ended = [json.loads(made.read_text()) if made.exists() else [LOST] for _, made in started]
    return [row for rows in ended for row in rows]


def on_ranks(n: int, pattern: str, backend: str, device: str, jobs_beside: int) -> list[dict[str, Any]]:
    """All tests on ``n`` ranks; what torch skips before any rank starts again as if we were each backend it names.

    Of what fails, a row also has what came of it by torch's own backend, if that fails it, too.
    """

    def shares(names: list[str] | None = None) -> list[Share]:
        return [Share(pattern, names, first, jobs_beside) for first in range(jobs_beside)]

    rows = run(n, shares(), {"BACKEND": backend})
    for other in TAKEN_FOR[device]:
        left = [row["test"] for row in rows if row["outcome"] == "skipped" and not row["started"]]
        again = run(n, shares(left), {"BACKEND": backend, "TAKEN_FOR": other}) if left else []
        now = {row["test"]: {**row, "taken_for": other} for row in again if row["started"]}
        rows = [row for row in rows if row["test"] not in now] + list(now.values())  # with what was LOST
    failed = {row["test"]: row for row in rows if row["outcome"] == "failed" and row is not LOST}
    if failed and backend != (own := TORCHS_OWN[device]):
        for found in run(n, shares(list(failed)), {"BACKEND": own}):
            if found["outcome"] == "failed" and found["test"] in failed:
                failed[found["test"]].update(outcome=FAILS_BY_BOTH, by_torchs_own=found.get("text", ""))
    return sorted(rows, key=lambda row: str(row["test"]))


def main() -> int:
    """Run all, for each number of ranks in a process of its own; 1 if a test failed."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("-k", dest="pattern", default="*", help="names of tests, as a shell pattern")
    parser.add_argument("-j", dest="jobs", type=int, default=1, help="so many tests beside each other (%(default)s)")
    parser.add_argument("--backend", default="blink", help="another one, to compare")
    parser.add_argument("-o", "--output", help="write every test's outcome as JSON under this name, or one beside it")
    parser.add_argument("--share", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share:
        run_share(Share(**json.loads(args.share.read_text())), Path(args.output))
        return 0
    began, found = datetime.now().astimezone(), list[dict[str, Any]]()
    for n in map(int, args.ranks.split(",")):
        device = "cuda" if torch.cuda.device_count() >= n else "cpu"
        rows = on_ranks(n, args.pattern, args.backend, device, args.jobs)
        counts = Counter(row["outcome"] for row in rows)
        print(f"{n} ranks: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()), flush=True)
        found.append({"ranks": n, "device": device, "counts": counts, "tests": rows})
    if args.output:
        head = {"torch_suite": {"torch": torch.__version__, "backend": args.backend, "tests": args.pattern}}
        jobs.write(args.output, jobs.document(head, found, [], began))
    return int(any(one["counts"].get(outcome) for one in found for outcome in ("failed", FAILS_BY_BOTH)))


if __name__ == "__main__":
    sys.exit(main())
