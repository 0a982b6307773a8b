"""What calls on CPU ranks cost, and what a mechanism gains: ``python benchmarks/call_cost.py [--variable NAME ...]``.

``tensors`` is a repeated Allreduce of tiny tensors: K of different lengths are reduced one after another, in a cycle
that repeats, as a training step reduces its gradients. K goes through sizes below and above what a communicator
remembers of its calls. Our calls and those of plain mpi4py run in the same job on the same buffers, cycle by cycle in
turn, and every result is checked. A time is microseconds per call: the median over the cycles of the slowest rank's
time, divided by K.

With ``--variable BLINKMPI_ABLATE --values ,style,helper`` this, or collectives by ``blinkmpi bench``, is measured with
an environment variable at each of some values; an empty value leaves it unset. Each value has jobs of its own, and the
values take turns, round by round, so that what changes on the machine in the meantime changes all of them. A time is
then the median over the rounds of a job's median.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402
from benchmarks.jobs import PLACES, SETTINGS, load, mpirun, python_path, run_job  # noqa: E402
from blinkmpi.bench import environment as meta  # noqa: E402
from blinkmpi.bench.timing import no_collection  # noqa: E402

DISTINCT = (10, 64, 65, 160, 1000)
SHORTEST = 64  # elements of the first tensor; each of the others has one more
CALLS = 4000  # of each library and number of tensors, at least
FEWEST_CYCLES = 9
WARMUP_CYCLES = 2
TENSORS = "tensors"
COMPARED = "all_reduce,broadcast"
Job = tuple[str, str, dict[str, Any]]  # the variable's value, what was measured, and the file of the job


def cycles_of(distinct: int) -> int:
    """How many cycles are timed."""
    return max(FEWEST_CYCLES, CALLS // distinct)


def values_of(text: str) -> list[str]:
    """The values of a list that commas separate, or semicolons where values have commas of their own."""
    return [value.strip() for value in text.split(";" if ";" in text else ",")]


# ---------------------------------------------------------------- a rank


def seconds_of_cycles(world: Any, cycles: Sequence[Callable[[], None]], count: int) -> list[list[float]]:
    """Seconds of each of ``count`` cycles of every library, of the slowest rank; the libraries take turns."""
    found: list[list[float]] = [[] for _ in cycles]
    with no_collection():
        for _ in range(count):
            for cycle, seconds in zip(cycles, found, strict=True):
                world.Barrier()
                start = time.perf_counter()
                cycle()
                seconds.append(time.perf_counter() - start)
    ranks = world.allgather(found)
    return [[max(times) for times in zip(*(of[i] for of in ranks), strict=True)] for i in range(len(cycles))]


def measured(world: Any, mpi: Any, comm: Any, distinct: int) -> dict[str, Any]:
    """The row of one number of tensors."""
    import numpy as np

    sends = [np.full(SHORTEST + i, world.rank + 1, np.float32) for i in range(distinct)]
    receives = [np.empty_like(send) for send in sends]
    pairs = list(zip(sends, receives, strict=True))
    total = sum(range(1, world.size + 1))

    def cycle_of(library: Any) -> Callable[[], None]:
        def cycle() -> None:
            for send, receive in pairs:
                library.Allreduce(send, receive)

        return cycle

    cycles, wrong = [cycle_of(comm), cycle_of(world)], []
    for cycle in cycles:
        for receive in receives:
            receive.fill(-1)
        for _ in range(WARMUP_CYCLES):
            cycle()
        wrong.append(world.allreduce(sum(int((receive != total).sum()) for receive in receives), op=mpi.SUM))
    count = cycles_of(distinct)
    sides = []
    for seconds, bad in zip(seconds_of_cycles(world, cycles, count), wrong, strict=True):
        us = [s / distinct * 1e6 for s in seconds]
        sides.append({"us": median(us), "spread_us": [min(us), median(us), max(us)], "wrong": bad})
    lengths = [SHORTEST, SHORTEST + distinct - 1]
    from blinkmpi.runtime.inspection import choice

    how = choice(comm.context, "allreduce", SHORTEST * 4)
    return {"distinct": distinct, "lengths": lengths, "cycles": count, "ours": sides[0], "mpi": sides[1],
            "ratio": sides[1]["us"] / sides[0]["us"], "how": how}  # fmt: skip


def rank(distinct: Sequence[int], file: Path) -> None:
    """Measure on all ranks; rank 0 writes ``file``."""
    from mpi4py import MPI

    from blinkmpi.communicator import Communicator

    world = MPI.COMM_WORLD
    with Communicator(world) as comm:
        found = {"rows": [measured(world, MPI, comm, k) for k in distinct], **jobs.rank_facts(MPI, comm)}
    if world.rank == 0:
        file.write_text(json.dumps(found), encoding="utf-8")


# ---------------------------------------------------------------- the driver


def command(n: int, collective: str, sizes: str, iterations: int, file: Path) -> list[str]:
    """The mpirun of one job of ``bench``; ``sizes`` is MIN:MAX:FACTOR."""
    low, high, factor = sizes.split(":")
    words = [collective, "-b", low, "-e", high, "-f", factor, "-n", str(iterations), "--memory", "host"]
    return [*mpirun(n), sys.executable, "-m", "blinkmpi", "bench", *words, "-J", str(file)]


def points(what: str, found: dict[str, Any]) -> Iterator[tuple[tuple[str, int, str], float, int]]:
    """(what, bytes and place; microseconds; wrong elements) of all that a job measured of ours."""
    for row in found["rows"] if what == TENSORS else ():
        yield (f"{row['distinct']} {TENSORS}", 4 * SHORTEST, PLACES[0]), row["ours"]["us"], row["ours"]["wrong"]
    for row in found["results"] if what != TENSORS else ():
        yield from (((what, row["size"], at), row[at]["time"], row[at]["nwrong"] or 0) for at in PLACES)


def rows_of(done: Sequence[Job]) -> list[dict[str, Any]]:
    """A row for each thing that was measured, with its times at every value of the variable."""
    times: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    wrong: dict[tuple[str, int, str], int] = {}
    for value, what, found in done:
        for key, us, bad in points(what, found):
            times.setdefault(key, {}).setdefault(value, []).append(us)
            wrong[key] = wrong.get(key, 0) + bad
    made = []
    for key, by_value in times.items():
        collective, size, place = key
        medians = {value: median(us) for value, us in by_value.items()}
        first = next(iter(medians.values()))
        values = {
            value: {"us": at, "spread_us": [min(by_value[value]), at, max(by_value[value])], "ratio": at / first}
            for value, at in medians.items()
        }
        made.append({"collective": collective, "size": size, "place": place, "wrong": wrong[key], "values": values})
    return made


def document(args: argparse.Namespace, done: Sequence[Job], failed: Sequence[str], began: datetime) -> dict[str, Any]:
    """The file."""
    last = done[-1][2]
    facts = {name: (last.get("blinkmpi") or last)[name] for name in ("versions", "machine")}
    if args.variable:
        rows, over = rows_of(done), "rounds of the median over iterations"
        head = {"ablation": {"variable": args.variable, "values": values_of(args.values), "rounds": args.rounds}}
    else:
        rows, over = last["rows"], "cycles"
        head = {"call_cost": {"shortest": SHORTEST, "warmup_cycles": WARMUP_CYCLES}}
        facts |= {"collective": "allreduce", "dtype": "float32", "op": "sum", "compare": ["mpi"]}
    statistic = f"median over {over} of the slowest rank's time, per call"
    return jobs.document({**head, "env": meta.environment()}, rows, failed, began, ranks=args.n, memory="host",
                         statistic=statistic, **facts)  # fmt: skip


def wrong_in(row: dict[str, Any]) -> int:
    """Wrong elements of a row."""
    found: int = row["wrong"] if "wrong" in row else row["ours"]["wrong"] + row["mpi"]["wrong"]
    return found


def table(found: dict[str, Any]) -> str:
    """A line for each row: beside mpi4py, or the time with each value and its ratio to the first one's."""
    if "call_cost" in found:
        lines = [f"{'tensors':>8} {'ours us':>9} {'mpi4py us':>10} {'ratio':>6} {'wrong':>6}"]
        for row in found["results"]:
            times = f"{row['ours']['us']:9.2f} {row['mpi']['us']:10.2f}"
            lines.append(f"{row['distinct']:8d} {times} {row['ratio']:6.2f} {wrong_in(row):6d}")
        return "\n".join(lines)
    values = found["ablation"]["values"]
    lines = [f"{'us, and times the first':>40}" + "".join(f"{value or '(unset)':>16}" for value in values)]
    for row in found["results"]:
        cells = [f"{row['collective']:>16} {row['size']:>11} {row['place']:>12}"]
        for value in values:
            one = row["values"].get(value)
            cells.append(f"{'-':>16}" if one is None else f"{one['us']:10.1f} {one['ratio']:5.2f}")
        lines.append("".join(cells) + (f"  {row['wrong']} WRONG" if row["wrong"] else ""))
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What calls on CPU ranks cost, also with a variable at some values.")
    add = parser.add_argument
    add("-np", type=int, default=2, dest="n", metavar="N", help="ranks (default 2)")
    add("--distinct", default=",".join(map(str, DISTINCT)), metavar="LIST", help="tensors (default %(default)s)")
    add("--variable", default="", metavar="NAME", help="measure with this variable at each of --values")
    add("--values", default="", metavar="LIST", help="a,b (or a;b,c): its values; empty: unset")
    add("--collectives", default="", metavar="LIST",
        help=f"with --variable: {TENSORS}, or collectives of bench (default {COMPARED})")  # fmt: skip
    add("--sizes", default="64K:16M:4", metavar="MIN:MAX:FACTOR", help="of the collectives (default %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="with --variable: jobs of each value (default 5)")
    add("--iters", type=int, default=20, metavar="N", help="timed calls of a row of bench (default 20)")
    add("--limit", type=float, default=300, metavar="SECONDS", help="for a job (default 300)")
    add("-o", dest="output", metavar="FILE", help="write the JSON; an existing file is kept")
    add("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if bool(args.variable) != bool(args.values) or (args.collectives and not args.variable):
        parser.error("--variable and --values go together, --collectives with them: give all, or leave them out")
    if args.variable in os.environ:
        parser.error(f"{args.variable} is set already; unset it, so that an empty value can mean that")
    if len(args.sizes.split(":")) != 3:
        parser.error(f"--sizes {args.sizes}: expected MIN:MAX:FACTOR, such as 64K:16M:4")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run all jobs, print the table, write the file if one is named; 0 if all ended well and nothing was wrong."""
    args = arguments(argv)
    if args.rank is not None:
        rank([int(k) for k in args.distinct.split(",")], args.rank)
        return 0
    began = datetime.now().astimezone()
    rounds, things = (args.rounds, args.collectives or COMPARED) if args.variable else (1, TENSORS)
    done: list[Job] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        turns = [(t, what, v) for t in range(rounds) for what in things.split(",") for v in values_of(args.values)]
        for i, (turn, what, value) in enumerate(turns):
            file = Path(folder) / f"{i}.json"
            words = command(args.n, what, args.sizes, args.iters, file)
            if what == TENSORS:
                own = [str(Path(__file__).resolve()), "--distinct", args.distinct, "--rank", str(file)]
                words = [*mpirun(args.n), sys.executable, *own]
            settings = {**SETTINGS, "PYTHONPATH": python_path(), **({args.variable: value} if value else {})}
            why, said = run_job(words, settings, args.limit)
            found = load(file)
            if why or found is None:
                failed.append(f"round {turn}, {what}, {value or '(unset)'}: {why or 'no result'}")
                print(f"{said}\n{failed[-1]}", file=sys.stderr, flush=True)
            else:
                done.append((value, what, found))
    if not done:
        return 2
    made = document(args, done, failed, began)
    print(table(made))
    if args.output:
        jobs.write(args.output, made)
    return int(bool(failed) or any(map(wrong_in, made["results"])))


if __name__ == "__main__":
    sys.exit(main())
