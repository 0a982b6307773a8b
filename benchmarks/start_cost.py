"""What a start costs: ``python benchmarks/start_cost.py -o FILE [--against CHECKOUT]``.

CPU seconds, of a process and the children that it waited for, and modules: of a Python that imports mpi4py and NumPy,
of ``import blinkmpi``, of the commands ``--version``, ``-h`` and ``topo dgx-1v``, and of each rank that opens a
Communicator of CPU ranks, from the end of ``import mpi4py, numpy`` on (so with MPI_Init). A number is the median over
the repetitions, which go through all of these in turn, checkout by checkout, so that what changes on the machine in the
meantime changes all of them.

Each is measured with the bytecode of our modules kept, as ``pip`` and a first start leave it, and with none, which is
what a checkout has where ``PYTHONDONTWRITEBYTECODE`` is set: then each process compiles the modules that it loads.
Bytecode is kept in a folder of its own, not in the checkouts. With ``--against`` another checkout is measured, too, by
the Python and the mpirun of its own ``.venv``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks.jobs import LAUNCHER, SETTINGS, document, write  # noqa: E402
from blinkmpi.bench.environment import environment, versions  # noqa: E402
from blinkmpi.util.launcher import library_name, run_limited  # noqa: E402

BARE, PACKAGE, RANKS = "import mpi4py, numpy", "import blinkmpi", "opening a Communicator"
COMMANDS = ("--version", "-h", "topo dgx-1v")
PACKAGES = ("blinkmpi", "topology", "trees", "launch")
KEPT, NONE = "kept", "none"

# What a process runs: it writes modules, ours among them, and (as a rank) CPU seconds to a file.
COUNTED = """
import sys
{statement}
with open({file!r}, "w") as file:
    file.write(f"{{len(sys.modules)}} {{sum(name.partition('.')[0] == 'blinkmpi' for name in sys.modules)}} 0")
"""
COMMAND = """
from blinkmpi.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
"""
RANK = """
import sys
import mpi4py, numpy
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
def cpu():
    return sum(sum(getrusage(who)[:2]) for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
began = cpu()
from mpi4py import MPI
import blinkmpi
comm = blinkmpi.Communicator(MPI.COMM_WORLD)
spent = cpu() - began
with open(f"{sys.argv[1]}.{comm.rank}", "w") as file:
    ours = sum(name.partition(".")[0] == "blinkmpi" for name in sys.modules)
    file.write(f"{len(sys.modules)} {ours} {spent} {MPI.Get_library_version()}")
comm.Free()
"""


class Cost(NamedTuple):
    """CPU seconds of a process, the modules that it had loaded, and how many of them are ours."""

    cpu_s: float
    modules: int
    ours: int


class Place(NamedTuple):
    """A checkout, and whether bytecode of its modules is kept."""

    name: str
    checkout: Path
    bytecode: str

    @property
    def python(self) -> str:
        """Its Python."""
        return sys.executable if self.checkout == ROOT else str(self.checkout / ".venv" / "bin" / "python")

    @property
    def mpirun(self) -> str:
        """Its launcher, beside its Python if there is one."""
        beside = Path(self.python).with_name(LAUNCHER[0])
        return str(beside) if beside.exists() else LAUNCHER[0]

    def kept_in(self, folder: Path) -> Path:
        """Where bytecode is kept: all, or that of other packages than ours."""
        return folder / f"bytecode-{self.name}-{self.bytecode}"

    def variables(self, folder: Path) -> dict[str, str]:
        """The environment of its processes."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        kept |= {**SETTINGS, "PYTHONPATH": str(self.checkout), "BLINKMPI_GPU_DISABLE": "1"}
        kept["PYTHONPYCACHEPREFIX"] = str(self.kept_in(folder))
        return kept | ({"PYTHONDONTWRITEBYTECODE": "1"} if self.bytecode == NONE else {})

    def prepare(self, folder: Path) -> None:
        """See to it that bytecode of our modules alone is missing, if it is to be."""
        own = self.kept_in(folder)
        if self.bytecode == NONE and not own.exists():
            shutil.copytree(self._replace(bytecode=KEPT).kept_in(folder), own)
            for package in PACKAGES:
                shutil.rmtree(own / self.checkout.relative_to("/") / package, ignore_errors=True)


def of_process(place: Place, folder: Path, statement: str, words: Sequence[str] = ()) -> Cost:
    """The cost of a process that runs a statement, or (then modules alone are the statement's) a command line."""
    file = folder / "cost"
    argv = ["-m", "blinkmpi", *words] if words else ["-c", statement]
    child = subprocess.Popen([place.python, *argv], env=place.variables(folder), cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{place.name}: exit status {child.returncode} of {argv}")
    if words:
        statement = COMMAND.format(words=list(words))
    counted = COUNTED.format(statement=statement, file=str(file))
    subprocess.run([place.python, "-c", counted], env=place.variables(folder), cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    modules, ours, _ = file.read_text(encoding="utf-8").split()
    return Cost(usage.ru_utime + usage.ru_stime, int(modules), int(ours))


def of_ranks(place: Place, folder: Path, n: int, seconds: float) -> tuple[list[Cost], str]:
    """The cost of each of ``n`` ranks, and what their MPI says of itself."""
    argv = [place.mpirun, *LAUNCHER[1:], "-np", str(n), place.python, "-P", "-c", RANK, str(folder / "rank")]
    code, said = run_limited(argv, place.variables(folder), seconds)
    if code != 0:
        raise SystemExit(f"{said}\n{place.name}: {n} ranks ended with {code}")
    found, mpi = [], ""
    for rank in range(n):
        modules, ours, cpu_s, mpi = (folder / f"rank.{rank}").read_text(encoding="utf-8").split(" ", 3)
        found.append(Cost(float(cpu_s), int(modules), int(ours)))
    return found, mpi


def measured(places: Sequence[Place], sizes: Sequence[int], repeats: int, limit: float, folder: Path) -> tuple[
    dict[tuple[str, int, Place], list[list[Cost]]], str
]:  # fmt: skip
    """The costs of all that is measured, by what it is, its ranks (0: one process) and place; and the MPI's name."""
    found: dict[tuple[str, int, Place], list[list[Cost]]] = {}
    mpi = ""
    for turn in range(repeats + 1):  # the first one leaves bytecode, compiled checks and files in memory
        for place in places[:: 1 - 2 * (turn % 2)]:
            place.prepare(folder)
            costs: dict[tuple[str, int], list[Cost]] = {}
            for statement in (BARE, PACKAGE):
                costs[statement, 0] = [of_process(place, folder, statement)]
            for words in COMMANDS:
                costs[f"blinkmpi {words}", 0] = [of_process(place, folder, "", words.split())]
            for n in sizes:
                costs[RANKS, n], mpi = of_ranks(place, folder, n, limit)
            for key, cost in costs.items() if turn else ():
                found.setdefault((*key, place), []).append(cost)
    return found, mpi


def rows_of(found: dict[tuple[str, int, Place], list[list[Cost]]]) -> list[dict[str, Any]]:
    """A row for each of them: medians of CPU seconds with their spread, and modules, a number for each rank."""
    rows = []
    for (what, n, place), repeats in found.items():
        times = [[cost.cpu_s for cost in rank] for rank in zip(*repeats, strict=True)]
        rows.append({
            "what": what, "ranks": n, "checkout": place.name, "bytecode": place.bytecode,
            "cpu_s": [median(rank) for rank in times],
            "spread_s": [[min(rank), median(rank), max(rank)] for rank in times],
            "modules": [cost.modules for cost in repeats[-1]], "ours": [cost.ours for cost in repeats[-1]],
        })  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each thing that was measured."""
    yield f"{'':38} {'checkout':>9} {'bytecode':>8} {'modules':>13}  CPU s, of each rank"
    for row in rows:
        what = f"{row['what']}, {row['ranks']} ranks" if row["ranks"] else row["what"]
        modules = "/".join(dict.fromkeys(map(str, row["modules"])))
        seconds = " ".join(f"{s:.3f}" for s in row["cpu_s"])
        yield f"{what:38} {row['checkout']:>9} {row['bytecode']:>8} {modules:>13}  {seconds}"


def commit_of(checkout: Path) -> str | None:
    """The commit of a checkout."""
    argv = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a start costs: CPU seconds and modules.")
    add = parser.add_argument
    add("-np", default="1,2,4", dest="sizes", metavar="LIST", help="ranks (default 1,2,4)")
    add("--against", type=Path, metavar="CHECKOUT", help="also measure this checkout, by its own .venv")
    add("--repeats", type=int, default=7, metavar="N", help="of each, after one that is not counted (default 7)")
    add("--limit", type=float, default=120, metavar="SECONDS", help="for a job (default 120)")
    add("-o", dest="output", metavar="FILE", help="write the JSON; an existing file is kept")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the file if one is named."""
    args = arguments(argv)
    began, sizes = datetime.now().astimezone(), [int(n) for n in args.sizes.split(",")]
    checkouts = {"here": ROOT, **({"before": args.against.resolve()} if args.against else {})}
    places = [Place(name, path, bytecode) for bytecode in (KEPT, NONE) for name, path in checkouts.items()]
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        found, mpi = measured(places, sizes, args.repeats, args.limit, Path(folder))
    rows = rows_of(found)
    print("\n".join(table(rows)))
    head = {"start_cost": {"repeats": args.repeats, "from": BARE, "commits": {
        name: commit_of(path) for name, path in checkouts.items()}}, "env": environment()}  # fmt: skip
    statistic = "median over repetitions of the CPU seconds of a process and its children"
    made = document(head, rows, [], began, ranks=max(sizes), memory="host", statistic=statistic,
                    versions=versions(library_name(mpi), None))  # fmt: skip
    if args.output:
        write(args.output, json.loads(json.dumps(made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
