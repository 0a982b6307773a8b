"""``blinkmpi bench --sweep FILE``: many jobs of ``bench`` one after another, from one process outside ``mpirun``.

:mod:`.file` decides what to run, :mod:`.jobs` starts one run, :mod:`.results` keeps the results. Here they are put
together, with progress on stderr and the tables on stdout.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ...errors import ArgumentError
from ...launch.allocation import scheduler_of
from ...util.launcher import launched_rank, launched_size
from ...util.progress import StderrBar
from ...util.screen import console
from ...util.text import size_text
from ..options import add_flags
from .file import Run, expand, load
from .jobs import RunOutcome, clear, line, machines, start
from .results import Results, tables

JOB_IDS = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID", "lsf": "LSB_JOBID"}
TAKEN = ("sweep", "hostfile", "launcher", "dry_run", "output_file", "json")  # the flags that go with a sweep
STOPPED = 130


def run(args: argparse.Namespace, *, library: str) -> int:
    """Run what is missing of a sweep; 0 if every run of it has a good result.

    Args:
        library: what the MPI that mpi4py has says of its version.

    Raises:
        BlinkError: before anything is started, for a file, flags or machines that do not go together.
    """
    refuse_ranks(os.environ, args.sweep)
    _refuse_flags(args)
    sweeps = load(args.sweep)
    on = machines(sweeps[0], os.environ, library, hostfile=args.hostfile, launcher=args.launcher)
    runs = expand(sweeps, on.resources, source=args.sweep)
    target = args.output_file or f"{Path(args.sweep).stem}.json"
    if Path(target).resolve() == Path(args.sweep).resolve():
        raise ArgumentError(f"-J {target} is the sweep itself; name another file")
    results = Results(target, source=args.sweep, scheduler=_scheduler(), library=library)
    part = results.path.resolve().with_name(f".{results.path.name}.{os.getpid()}.run")
    jobs = [(one, *line(one, on, str(part), os.environ), seconds) for one, seconds in runs]
    if args.dry_run:
        for one, argv, _, _ in jobs:
            print(shlex.join([*_variables(one), *argv]))
        return 0
    left = [job for job in jobs if not results.good(job[0])]
    with _terminates_as_interrupts(), SweepProgress(len(jobs), done=len(jobs) - len(left)) as progress:
        progress.note(f"{args.sweep}: {len(jobs)} runs, {len(jobs) - len(left)} of them in {target} already")
        for commit in results.commits([one for one, _ in runs]):
            progress.note(f"some results are of commit {commit}: move {target} away to measure all anew")
        try:
            for one, argv, env, seconds in left:
                progress.begin(one)
                ended = start(argv, env, part, seconds, ranks=one.ranks)
                results.add(one, ended, argv)
                progress.end(one, ended)
        except KeyboardInterrupt:
            done = sum(results.good(one) for one, _ in runs)
            progress.note(f"stopped: {done} of {len(runs)} runs are in {target}; start it again to go on")
            return STOPPED
        finally:
            clear(part)
    records = [known for one, _ in runs if (known := results.find(one)) is not None]
    _show(args, results, records, target)
    return int(any(record["status"] != "ok" for record in records))


def refuse_ranks(environ: Mapping[str, str], file: str) -> None:
    """Raise ArgumentError in a process that a launcher started: it cannot start ranks itself."""
    size = launched_size(environ)  # 1 in salloc's own step, which may start others
    if size > 1 or launched_rank(environ) is not None:
        raise ArgumentError(
            f"--sweep starts mpirun or srun itself and is one process, but a launcher started {size} of it; call it "
            f"without one: blinkmpi bench --sweep {file}, in a job script too"
        )


def _refuse_flags(args: argparse.Namespace) -> None:
    """Raise ArgumentError for flags of ``bench`` beside --sweep: the file alone says what is measured."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name not in TAKEN and getattr(args, name, default) != default:
            what = "the collective" if name == "collective" else f"--{name}"
            raise ArgumentError(f"{what} {getattr(args, name)} beside --sweep: the file says what is measured; "
                                f"write it into {args.sweep}")  # fmt: skip


def _variables(one: Run) -> list[str]:
    """The ``env`` words that make a command line complete for a shell."""
    found = {**one.env, **({"BLINKMPI_NODES": one.virtual} if one.virtual else {})}
    return ["env", *(f"{name}={value}" for name, value in found.items())] if found else []


def _scheduler() -> dict[str, str]:
    kind = scheduler_of(os.environ)
    return {"kind": kind, "job": os.environ.get(JOB_IDS[kind], "")} if kind else {}


def _show(args: argparse.Namespace, results: Results, records: list[dict[str, Any]], target: str) -> None:
    if args.json:
        print(json.dumps(results.body, indent=1))
        return
    screen = console(width=max(100, shutil.get_terminal_size((120, 25)).columns))
    for table in tables(records):
        screen.print(table)
        screen.print()
    good = sum(record["status"] == "ok" for record in records)
    screen.print(f"{good} of {len(records)} runs are good; JSON in {target}", soft_wrap=True)
    if good:
        picture = Path(target).with_suffix(".svg")
        screen.print(f"a picture: blinkmpi plot {target} -o {picture}", soft_wrap=True)


@contextmanager
def _terminates_as_interrupts() -> Iterator[None]:
    """A scheduler ends a job by SIGTERM: stop as for an interrupt, so that the ranks are ended too."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


class SweepProgress(StderrBar):
    """On a terminal a bar, elsewhere a line for each run; on stderr."""

    def note(self, text: str) -> None:
        """Print a line beside the progress."""
        if self.bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self.bar.screen.print(text, soft_wrap=True, markup=False)

    def begin(self, one: Run) -> None:
        """A run starts."""
        self.update(description=one.label())

    def end(self, one: Run, ended: RunOutcome) -> None:
        """A run ended."""
        self.done += 1
        self.note(f"[{self.done}/{self.total}] {one.label()}: {outcome_text(ended)}")
        self.update(completed=self.done)


def outcome_text(ended: RunOutcome) -> str:
    """``4.2 s, busbw 3.1 GB/s at 64 MiB``, or why there is none."""
    if ended.error is not None or ended.document is None:
        return f"failed after {ended.seconds:.1f} s: {ended.error}"
    timed = [row for row in ended.document["results"] if "bus_bw" in row["out_of_place"]]
    if not timed:
        return f"{ended.seconds:.1f} s"
    best = max(timed, key=lambda row: row["out_of_place"]["bus_bw"])
    return f"{ended.seconds:.1f} s, busbw {best['out_of_place']['bus_bw']:.3g} GB/s at {size_text(best['size'])}"
