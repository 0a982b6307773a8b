"""What a mechanism gains: ``python benchmarks/ablation.py --variable BLINKMPI_ABLATE --values ,style,helper``.

Collectives on CPU ranks are measured by ``blinkmpi bench`` with an environment variable at each of some values; an
empty value leaves it unset. Each value has jobs of its own, and the values take turns, round by round, so that what
changes on the machine in the meantime changes all of them. A time is the median over the rounds of a job's median.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks.jobs import SETTINGS, mpirun, python_path, run_job  # noqa: E402
from blinkmpi.bench import environment as meta  # noqa: E402
from blinkmpi.bench.document import write_new  # noqa: E402

PLACES = ("out_of_place", "in_place")
STATISTIC = "median over rounds of the median over iterations of the slowest rank's time"


def values_of(text: str) -> list[str]:
    """The values of a list that commas separate, or semicolons where values have commas of their own."""
    return [value.strip() for value in text.split(";" if ";" in text else ",")]


def command(n: int, collective: str, sizes: str, iterations: int, file: Path) -> list[str]:
    """The mpirun of one job; ``sizes`` is MIN:MAX:FACTOR."""
    low, high, factor = sizes.split(":")
    words = [
        collective,
        "-b",
        low,
        "-e",
        high,
        "-f",
        factor,
        "-n",
        str(iterations),
        "--memory",
        "host",
        "-J",
        str(file),
    ]
    return [*mpirun(n), sys.executable, "-m", "blinkmpi", "bench", *words]


def rows_of(jobs: Sequence[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each collective, size and place, from (value, collective, what bench wrote) of every job."""
    times: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    wrong: dict[tuple[str, int, str], int] = {}
    for value, collective, found in jobs:
        for row in found["results"]:
            for place in PLACES:
                key = (collective, row["size"], place)
                times.setdefault(key, {}).setdefault(value, []).append(row[place]["time"])
                wrong[key] = wrong.get(key, 0) + (row[place]["nwrong"] or 0)
    made = []
    for (collective, size, place), by_value in times.items():
        medians = {value: median(us) for value, us in by_value.items()}
        first = next(iter(medians.values()))
        made.append({
            "collective": collective, "size": size, "place": place, "wrong": wrong[collective, size, place],
            "values": {
                value: {"us": medians[value], "spread_us": [min(us), medians[value], max(us)],
                        "ratio": medians[value] / first}
                for value, us in by_value.items()
            },
        })  # fmt: skip
    return made


def document(
    args: argparse.Namespace, jobs: Sequence[tuple[str, str, dict[str, Any]]], failed: Sequence[str], began: datetime
) -> dict[str, Any]:
    """The file."""
    last = jobs[-1][2]["blinkmpi"]
    ours = {**meta.commit(), "date": began.isoformat(timespec="seconds"), "ranks": args.n, "memory": "host"}
    ours |= {"statistic": STATISTIC, "hardware": meta.hardware(), "versions": last["versions"]}
    return {
        "ablation": {"variable": args.variable, "values": values_of(args.values), "rounds": args.rounds},
        "args": [meta.without_folders(word) for word in sys.argv],
        "env": meta.environment(),
        "results": rows_of(jobs),
        "failed": list(failed),
        "blinkmpi": {**ours, "machine": last["machine"]},
    }


def table(found: dict[str, Any]) -> str:
    """A line for each row: the time with each value, and the ratio to the first one's."""
    values = found["ablation"]["values"]
    head = [f"{'us, and times the first':>40}", *(f"{value or '(unset)':>16}" for value in values)]
    lines = ["".join(head)]
    for row in found["results"]:
        cells = [f"{row['collective']:>16} {row['size']:>11} {row['place']:>12}"]
        for value in values:
            one = row["values"].get(value)
            cells.append(f"{'-':>16}" if one is None else f"{one['us']:10.1f} {one['ratio']:5.2f}")
        lines.append("".join(cells) + (f"  {row['wrong']} WRONG" if row["wrong"] else ""))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all jobs, print the table, write the file if one is named; 0 if all ended well and nothing was wrong."""
    parser = argparse.ArgumentParser(description="Time collectives with a variable of the environment at some values.")
    parser.add_argument("--variable", required=True, metavar="NAME", help="the variable")
    parser.add_argument("--values", required=True, metavar="LIST", help="a,b (or a;b,c): its values; empty: unset")
    parser.add_argument("--collectives", default="all_reduce,broadcast", metavar="LIST", help="default %(default)s")
    parser.add_argument("--sizes", default="64K:16M:4", metavar="MIN:MAX:FACTOR", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="jobs of each value (default 5)")
    parser.add_argument("--iters", type=int, default=20, metavar="N", help="timed calls of a row (default 20)")
    parser.add_argument("-np", type=int, default=2, dest="n", metavar="N", help="ranks (default 2)")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="for a job (default 120)")
    parser.add_argument("-o", dest="output", metavar="FILE", help="write the JSON; an existing file is kept")
    args = parser.parse_args(argv)
    if args.variable in os.environ:
        parser.error(f"{args.variable} is set already; unset it, so that an empty value can mean that")
    if len(args.sizes.split(":")) != 3:
        parser.error(f"--sizes {args.sizes}: expected MIN:MAX:FACTOR, such as 64K:16M:4")
    began = datetime.now().astimezone()
    jobs: list[tuple[str, str, dict[str, Any]]] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        for turn in range(args.rounds):
            for collective in args.collectives.split(","):
                for value in values_of(args.values):
                    file = Path(folder) / f"{len(jobs) + len(failed)}.json"
                    settings = {**SETTINGS, "PYTHONPATH": python_path(), **({args.variable: value} if value else {})}
                    why, said = run_job(command(args.n, collective, args.sizes, args.iters, file), settings, args.limit)
                    if why:
                        failed.append(f"round {turn}, {collective}, {value or '(unset)'}: {why}")
                        print(f"{said}\n{failed[-1]}", file=sys.stderr, flush=True)
                    else:
                        jobs.append((value, collective, json.loads(file.read_text(encoding="utf-8"))))
    if not jobs:
        return 2
    found = document(args, jobs, failed, began)
    print(table(found))
    if args.output:
        print(f"wrote {write_new(args.output, json.dumps(found, indent=1))}")
    return int(bool(failed) or any(row["wrong"] for row in found["results"]))


if __name__ == "__main__":
    sys.exit(main())
