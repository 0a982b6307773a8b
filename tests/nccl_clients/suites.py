"""torch's own tests of NCCL, with the door and without: what ends otherwise is a difference.

``test_c10d_nccl.py`` and ``test_c10d_ops_nccl.py`` of the installed torch's version lie in a folder (``make
nccl-programs`` fetches them) and are run by pytest as they are. A line says when a test begins and another how it
ended, so one that hangs or takes its process with it costs itself alone: the rest goes on in a new process. What fails
or hangs with plain NCCL is not run with the door, and named.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.jobs import meta
from tests.nccl_clients import ways
from tests.nccl_clients.suite_rank import TEST_S, WAITING
from tests.nccl_clients.ways import DOOR, PLAIN

FILES = ("test_c10d_nccl.py", "test_c10d_ops_nccl.py")
START_S = 60  # to import torch and collect
BEGAN, LOST = "began", "lost"  # a test whose process has ended before it, or was ended
NOT_RUN = "not run"  # the time was over
BAD = ("failed", LOST)
Outcomes = dict[str, dict[str, Any]]


def share(by: str, path: Path, told: dict[str, Any], until: float) -> tuple[Outcomes, Counter[str]]:
    """Run a share of a file's tests one way, in as many processes as it takes; outcomes, and calls ours and NCCL's."""
    outcomes: Outcomes = {}
    calls = Counter[str]()
    while (left := until - time.monotonic()) > START_S:
        with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
            words = json.dumps({**told, "leave_out": [*told["leave_out"], *outcomes]})
            argv = [sys.executable, "-m", "tests.nccl_clients.suite_rank", str(path), folder, words]
            settings = {"TEMP_DIR": folder, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_S - 20)}
            ran = ways.run(by, argv, left, settings)
            found = read(Path(folder, f"{told['first']}.jsonl"))
        calls.update({name: ran.counts[name] for name in ("ours", "nccls")})
        if time.monotonic() >= until:  # what had begun was given no time to end
            found = {
                name: {**one, "outcome": NOT_RUN} if one["outcome"] == LOST else one for name, one in found.items()
            }
        lost = {"error": meta.without_folders(ran.output[-1500:])}
        found = {name: {**one, **lost} if one["outcome"] == LOST else one for name, one in found.items()}
        waiting = [name for name, one in found.items() if one["outcome"] == WAITING]
        outcomes |= {name: one for name, one in found.items() if name not in waiting}
        if not found and not outcomes and ran.wrong:  # not one test was collected
            outcomes[path.name] = {"outcome": "failed", **lost}
        if not waiting:
            break
        if len(waiting) == len(found):
            outcomes[waiting[0]] = {"outcome": LOST, **lost}
    return outcomes, calls


def read(path: Path) -> Outcomes:
    """What a process has written down."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found: Outcomes = {}
    for one in map(json.loads, lines):
        found[one.pop("test")] = {**one, "outcome": LOST if one["outcome"] == BEGAN else one["outcome"]}
    return found


def suite(by: str, path: Path, beside: int, pattern: str, leave_out: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a file's tests one way, in shares beside each other."""
    until = time.monotonic() + seconds
    told = {"step": beside, "pattern": pattern, "leave_out": list(leave_out)}
    with ThreadPoolExecutor(beside) as pool:
        every = list(pool.map(lambda first: share(by, path, {**told, "first": first}, until), range(beside)))
    outcomes: Outcomes = {}
    calls = Counter[str]()
    for some, made in every:
        outcomes |= some
        calls.update(made)
    return {"tests": outcomes, "calls": {name: calls[name] for name in ("ours", "nccls")}}


def compared(path: Path, beside: int, pattern: str, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Run a file's tests both ways; the row of it, and the differences.

    Args:
        beside: so many tests at the same time.
        pattern: a part of the names of the tests to run.
        seconds: for each way.
    """
    plain = suite(PLAIN, path, beside, pattern, (), seconds)
    bad = {name: one for name, one in plain["tests"].items() if one["outcome"] in BAD}
    door = suite(DOOR, path, beside, pattern, tuple(bad), seconds)
    found = differences(plain["tests"], door["tests"])
    ended = {PLAIN: plain["tests"], DOOR: door["tests"]}
    row = {
        "part": "suites", "name": path.name, "counts": {by: tally(tests) for by, tests in ended.items()},
        "calls": door["calls"], "differences": found, "tests": ended,
        "left_out": {name: one["outcome"] for name, one in sorted(bad.items())},
    }  # fmt: skip
    failed = [f"{path.name}: {one['test']}: {one[PLAIN]} by NCCL, {one[DOOR]} with the door" for one in found]
    if not plain["tests"] or not any(one["outcome"] == "passed" for one in plain["tests"].values()):
        failed.append(f"{path.name}: no test passed with plain NCCL")
    return row, failed


def differences(plain: Outcomes, door: Outcomes) -> list[dict[str, Any]]:
    """Tests that did not end with the door as with plain NCCL, of those that ran both ways."""
    found = []
    for name in sorted(plain.keys() & door.keys()):
        here, there = door[name], plain[name]
        if NOT_RUN not in (here["outcome"], there["outcome"]) and here["outcome"] != there["outcome"]:
            found.append({"test": name, PLAIN: there["outcome"], DOOR: here["outcome"], "error": here.get("error", "")})
    return found


def tally(tests: Outcomes) -> dict[str, int]:
    """How many tests ended how."""
    return dict(Counter(one["outcome"] for one in tests.values()))


def line(row: dict[str, Any]) -> str:
    """A row for people."""

    def words(by: str) -> str:
        return ", ".join(f"{n} {outcome}" for outcome, n in sorted(row["counts"][by].items())) or "nothing ran"

    return (f"{row['name']}: {words(PLAIN)} with plain NCCL; {words(DOOR)} with the door; {ways.told(row['calls'])}; "
            f"{len(row['differences'])} differences")  # fmt: skip
