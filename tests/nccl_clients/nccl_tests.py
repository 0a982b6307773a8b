"""NVIDIA's nccl-tests: every program, type and operation, with the door and without; the tables must say 0 wrong.

Ranks are processes of mpirun, a GPU each, with Python in them (``rank.py``), for the door makes calls of nobody else:
one process with two GPUs and one without Python run as well, and all their calls must stay NCCL's.
"""

import os
import re
import statistics
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.jobs import meta, mpirun
from blinkmpi.nccl.library import find_nccl
from tests.nccl_clients import ways
from tests.nccl_clients.ways import DOOR, PLAIN, Ran

RANK = Path(__file__).with_name("rank.py")
OURS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall")  # collectives of the door
ALL = ("-d", "all", "-o", "all")
SIZES = ("-b", "8", "-e", "16M", "-f", "8", "-w", "0", "-n", "20", "-c", "1")  # 8 classes of sizes of a kind each
CYCLES = 20  # of the sizes, with the door: in the first ones it prepares
HALVES = 2  # out of place and in place
ROW = re.compile(r"^ *(\d+) +(\d+) +(\w+) +(?:([a-z]+) +)?(-?\d+) +(\S.*)$")  # hypercube names no operation
TAIL = 3000


class Job(NamedTuple):
    """One program with some options.

    Attributes:
        alone: one process with all GPUs, instead of a process for each.
        python: whether Python is in the processes.
        ours: whether some calls must be the door's; None: all must be NCCL's.
    """

    what: str
    program: str
    options: tuple[str, ...]
    alone: bool = False
    python: bool = True
    ours: bool | None = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.program} {self.what}"


class Row(NamedTuple):
    """A line of a table; times in microseconds and wrong elements, out of place and in place. None: not given."""

    nbytes: int
    dtype: str
    op: str
    root: int
    us: tuple[float | None, ...]
    wrong: tuple[int | None, ...]


def jobs(programs: Sequence[str]) -> Iterator[Job]:
    """What is run, of the programs that are there."""
    for program in programs:
        yield Job("of all types and operations", program, ALL, ours=program in OURS)
    for program in programs:
        yield Job("in graphs", program, (*ALL, "-G", "2"), ours=program in OURS)
    for program in (name for name in OURS if name in programs):
        yield Job("misaligned", program, (*ALL, "-u", "1"), ours=True)
    for program in (name for name in OURS[:3] if name in programs):
        yield Job("in groups of 4", program, ("-d", "all", "-m", "4"))
        yield Job("with registered buffers", program, ("-d", "all", "-R", "1"), ours=True)
        yield Job("with buffers in windows", program, ("-d", "all", "-R", "2"), ours=None)
        yield Job("in one process", program, ("-d", "all"), alone=True, ours=None)
        yield Job("without Python", program, ("-d", "all"), python=False, ours=None)
    for program in (name for name in ("broadcast", "reduce") if name in programs):
        yield Job("to and from rank 1", program, ("-d", "all", "-r", "1"), ours=True)


def there(folder: Path) -> list[str]:
    """The programs that ``build.py`` has put into a folder: those of the door's collectives first."""
    found = [path.name.removesuffix("_perf.so") for path in sorted(folder.glob("*_perf.so"))]
    return sorted(found, key=lambda name: OURS.index(name) if name in OURS else len(OURS))


def words(job: Job, folder: Path, n: int, cycles: int) -> list[str]:
    """The command line of a job."""
    program = folder / f"{job.program}_perf"
    own = [sys.executable, str(RANK), f"{program}.so"] if job.python else [str(program)]
    start = own if job.alone else [*mpirun(n), *own]
    return [*start, "-g", str(n if job.alone else 1), *SIZES, "-N", str(cycles), *job.options]


def variables(job: Job) -> dict[str, str]:
    """Where the loader finds the libraries of an executable; a process with Python has loaded them."""
    nccl = find_nccl()
    folders = [] if job.python or nccl is None else [str(nccl.parent), f"{sysconfig.get_path('data')}/lib"]
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return {"LD_LIBRARY_PATH": path} if folders else {}


def table(output: str) -> list[Row]:
    """The rows that a program has printed."""
    return [row_of(found) for found in map(ROW.match, output.splitlines()) if found]


def row_of(found: re.Match[str]) -> Row:
    """A row of a line; time, two bandwidths and wrong elements for each half, or what the program puts there."""
    nbytes, _, dtype, op, root, rest = found.groups()
    cells = [None if cell == "N/A" else float(cell) for cell in rest.split()]
    each = len(cells) // HALVES
    halves = [cells[i * each : (i + 1) * each] for i in range(HALVES)]
    wrong = tuple(None if half[3] is None else int(half[3]) for half in halves)
    return Row(int(nbytes), dtype, op or "", int(root), tuple(half[0] for half in halves), wrong)


def problems(job: Job, by: str, ran: Ran, rows: Sequence[Row], kinds: int) -> list[str]:
    """What is wrong with a run.

    Args:
        kinds: sizes, types, operations and roots that the rows must have; 0 if that is not known yet.
    """
    found = [ran.wrong] if ran.wrong else []
    wrong = sum(n for row in rows for n in row.wrong if n)
    unchecked = sum(row.wrong[0] is None for row in rows)
    found += [f"{wrong} elements are wrong"] if wrong else []
    found += [f"{unchecked} rows were not checked"] if unchecked else []
    if not rows or (kinds and len(keys(rows)) != kinds):
        found.append(f"{len(keys(rows))} kinds of rows, not {kinds or 'some'}")
    ours = ran.counts["ours"]
    if by == DOOR and job.ours and not ours:
        found.append("no call was ours")
    if by == DOOR and job.ours is None and ours:
        found.append(f"{ours} calls were ours, where all must be NCCL's")
    return [f"{job.name}, {by}: {text}" for text in found]


def keys(rows: Sequence[Row]) -> set[tuple[Any, ...]]:
    """What rows are of."""
    return {row[:4] for row in rows}


def ratios(plain: Sequence[Row], door: Sequence[Row]) -> dict[str, float]:
    """NCCL's time divided by the door's, by bytes: the median of all types and operations in their last cycle."""
    last = {row[:4]: row.us[0] for row in door}
    found = defaultdict[int, list[float]](list)
    for row in plain:
        ours = last.get(row[:4])
        if row.us[0] and ours:
            found[row.nbytes].append(row.us[0] / ours)
    return {str(nbytes): round(statistics.median(some), 2) for nbytes, some in sorted(found.items())}


def judged(job: Job, folder: Path, n: int, cycles: int, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Run a job both ways; its row, and what was wrong."""
    ran, rows, failed = {}, {}, []
    for by, each in ((PLAIN, 1), (DOOR, cycles)):
        ran[by] = ways.run(by, words(job, folder, n, each), seconds, variables(job))
        rows[by] = table(ran[by].output)
        bad = problems(job, by, ran[by], rows[by], len(keys(rows[PLAIN])) if by == DOOR else 0)
        failed += bad
        if bad:
            print(f"    {meta.without_folders(ran[by].output.strip()[-TAIL:])}", flush=True)
    wrong = {by: sum(n for row in rows[by] for n in row.wrong if n) for by in rows}
    row = {
        "part": "nccl-tests", "name": job.name, "processes": 1 if job.alone else n, "options": list(job.options),
        "rows": {by: len(some) for by, some in rows.items()}, "wrong": wrong, "counts": ran[DOOR].counts,
        "seconds": {by: one.seconds for by, one in ran.items()}, "ratios": ratios(rows[PLAIN], rows[DOOR]),
        "problems": failed,
    }  # fmt: skip
    return row, failed


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    rows, wrong = row["rows"], row["wrong"]
    return (f"{row['name']}: {rows[PLAIN]} and {rows[DOOR]} rows, wrong {wrong[PLAIN]} and {wrong[DOOR]}, "
            f"{ways.told(row['counts'])}")  # fmt: skip
