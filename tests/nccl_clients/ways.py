"""Run a program with NCCL as it is, and with the door before it, and read whose its calls were."""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.jobs import python_path, run_job
from tests.harness import ENVIRONMENT

PLAIN, DOOR = "plain", "door"
SITE = Path(__file__).with_name("site")  # sitecustomize.py
STATUS = "NCCL_CLIENTS_STATUS"  # names the folder into which it writes
DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "BLINKMPI_NCCL": "all", "OMP_NUM_THREADS": "1"}  # what the user has set stays
MOST_REASONS = 20


class Ran(NamedTuple):
    """How a program ended: what went wrong, or nothing, what it printed, how long it took, and whose its calls were."""

    wrong: str
    output: str
    seconds: float
    counts: dict[str, Any]


def run(by: str, argv: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
    """Run a command one way, ``seconds`` at most; its output is read when it has ended."""
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        began = time.monotonic()
        wrong, output = run_job(command(by, argv), environment(Path(folder), variables), seconds)
        return Ran(wrong, output, round(time.monotonic() - began, 2), counts(statuses(Path(folder))))


def command(by: str, argv: Sequence[str]) -> list[str]:
    """The command line that runs another one this way."""
    return [*([sys.executable, "-m", "blinkmpi", "nccl", "run"] if by == DOOR else []), *argv]


def environment(status: Path, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a program whose processes write their status into a folder."""
    given = {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}
    path = os.pathsep.join((str(SITE), python_path()))
    return {**ENVIRONMENT, **given, "PYTHONPATH": path, STATUS: str(status), **(variables or {})}


def statuses(folder: Path) -> Iterator[dict[str, Any]]:
    """What the processes of a program have written as they ended: ``blinkmpi nccl status --json`` of each."""
    for path in sorted(folder.glob("*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


def counts(found: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Calls of all processes that say so: ours and NCCL's, by collective, and why they were NCCL's."""
    processes, ours, nccls, kinds = 0, Counter[str](), Counter[str](), Counter[str]()
    reasons = Counter[str]()
    total = Counter[str]()
    for process in found:
        processes += 1
        reasons.update([process["why"]] if process["why"] else [])
        for comm in process["communicators"]:
            total.update({name: comm[name] for name in ("ours", "nccls")})
            reasons.update([comm["why"]] if comm["why"] else [])
            for kind in comm["kinds"]:
                ours[kind["call"]] += kind["ours"]
                nccls[kind["call"]] += kind["nccls"]
                kinds[kind["whose"]] += 1
                reasons.update([kind["why"]] if kind["why"] else [])
    calls = {name: {"ours": ours[name], "nccls": nccls[name]} for name in sorted(nccls | ours)}
    return {
        "processes": processes, "ours": total["ours"], "nccls": total["nccls"], "calls": calls, "kinds": dict(kinds),
        "why": dict(reasons.most_common(MOST_REASONS)),
    }  # fmt: skip


def told(found: Mapping[str, Any]) -> str:
    """Counts as words of a line."""
    return f"{found['ours']} calls ours, {found['nccls']} NCCL's"
