"""What the benchmark programs share: mpirun's command line, jobs with a time limit, steps in turn, and their files."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from blinkmpi.bench import environment as meta
from blinkmpi.bench.document import write_new
from blinkmpi.util.launcher import find_mpirun, run_limited

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ("mpirun", "--oversubscribe", "--bind-to", "none")
SETTINGS = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PYTHONUNBUFFERED": "1"}  # fmt: skip
NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH"}
START_SECONDS = 30.0
FEWEST_SECONDS = 10.0  # a job with less than this left is not started
PLACES = ("out_of_place", "in_place")

# What a step gives: its document if there is one, what went wrong, and the output to show then.
Outcome = tuple[dict[str, Any] | None, list[str], str]


def mpirun(n: int) -> list[str]:
    """The words that start ``n`` unbound ranks on this machine, by the launcher of this environment's MPI."""
    return [find_mpirun() or LAUNCHER[0], *LAUNCHER[1:], "-np", str(n)]


def python_path() -> str:
    """``PYTHONPATH`` with this checkout in front."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def run_job(argv: Sequence[str], variables: Mapping[str, str], seconds: float) -> tuple[str, str]:
    """Run a job; (what went wrong, or nothing; its output)."""
    code, said = run_limited(argv, {**os.environ, **variables}, seconds)
    return f"no end after {seconds:.0f} s" if code is None else f"exit status {code}" if code else "", said


def limits(shares: Sequence[float], left: float) -> float:
    """Seconds for the first of the steps with these shares: its part of what is left, twice if others are quick.

    And time to begin: where nothing is compiled yet and CUDA's files are not in memory, the ranks take ten seconds.
    """
    return min(left, max(START_SECONDS, 2 * left * shares[0] / sum(shares)))


def in_turn(
    names: Sequence[str], budget: float, limit: Callable[[int, float], float], run: Callable[[int, float], Outcome], *,
    tail: int, table: Callable[[Sequence[dict[str, Any]]], str], what: str = "steps",
) -> tuple[list[dict[str, Any]], list[str]]:  # fmt: skip
    """Run steps one after another, name those that fail, show a table; (their documents, what went wrong).

    Args:
        limit: the seconds of a step by its number, from those that are left of the budget.
        tail: characters of a failed step's output that are shown.
    """
    end = time.monotonic() + budget
    shown: list[dict[str, Any]] = []
    failed: list[str] = []
    for i, name in enumerate(names):
        start = time.monotonic()
        seconds = limit(i, end - start)
        if seconds < FEWEST_SECONDS:
            failed.append(f"{name}: not started, {seconds:.0f} s left")
            continue
        found, why, said = run(i, seconds)
        outcome = "; ".join(text.removeprefix(f"{name}: ") for text in why) or "ok"
        print(f"{name}: {outcome}, {time.monotonic() - start:.1f} s", flush=True)
        if why:
            failed += why
            show_tail(said, tail)
        shown += [] if found is None else [found]
    print(table(shown))
    print("\n".join(["", "failed:", *failed]) if failed else f"\nall {what} ended well")
    return shown, failed


def show_tail(said: str, characters: int) -> None:
    """Print the end of a failed job's output, indented."""
    if said:
        print("    " + "\n    ".join(said.strip()[-characters:].splitlines()), flush=True)


def load(path: Path) -> dict[str, Any] | None:
    """A JSON file, if it is there."""
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def write(path: str | Path, found: dict[str, Any]) -> None:
    """Write a document under a name that is free, in a folder that is made if there is none, and say where."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    print(f"wrote {write_new(str(path), json.dumps(found, indent=1))}", flush=True)


def rank_facts(mpi: Any, comm: Any) -> dict[str, Any]:
    """What a rank of a job says about its libraries and its machine."""
    machine = {"name": comm.machine.name, "fingerprint": comm.machine.fingerprint}
    versions = meta.versions(meta.mpi_library(mpi), comm.executor)
    return {"versions": versions, "env": meta.environment(), "machine": machine}


def document(
    head: Mapping[str, Any], rows: Sequence[Any], failed: Sequence[str], began: datetime, **ours: Any
) -> dict[str, Any]:
    """A result file: its own keys, the rows, and the facts of the run under ``blinkmpi``."""
    facts = {**meta.commit(), "date": began.isoformat(timespec="seconds"), "hardware": meta.hardware(), **ours}
    args = [meta.without_folders(word) for word in sys.argv]
    return {**head, "args": args, "results": list(rows), "failed": list(failed), "blinkmpi": facts}


Measured = tuple[
    list[dict[str, Any]], dict[str, Any]
]  # rows, with how many values of each are wrong, and the job's facts


def measure_on_ranks(
    text: str | None, kind: str, about: Any, measured: Callable[[Any, Any], Measured], **ours: Any
) -> None:
    """The program of a rank that measures with all others: rank 0 writes the rows where ``-o`` says.

    Args:
        text: the program's, of which the first line describes it.
        kind, about: the key by which its files are known, and what that has.
        measured: is given all ranks' communicator, and mpi4py's MPI.
        ours: more facts of the job.
    """
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("-o", "--output", help="write the result as JSON under this name, or one beside it if taken")
    options = parser.parse_args()
    began, world = datetime.now().astimezone(), MPI.COMM_WORLD
    rows, facts = measured(world, MPI)
    if world.rank == 0 and options.output:
        head = {kind: about, "env": facts["env"]}
        write(options.output, document(head, rows, [], began, ranks=world.size, memory="gpu", **ours, **facts))
    if any(row["wrong"] for row in rows):
        raise SystemExit("wrong values")
