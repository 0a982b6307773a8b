"""How far predictions on CPU ranks are from measurements: ``python benchmarks/certainty.py -np 2 -o FILE``.

Jobs of ``blinkmpi bench --predict`` for the collectives take turns, several rounds of them. In each, the steps of calls
are timed first, in vectors of other lengths, and predict the calls that are measured then. A row has the medians over
the rounds, each with its quartiles: of the measured time, of the predicted one, and of the error in a job.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402

COLLECTIVES = ("all_reduce", "broadcast", "all_gather")
WITHIN = 0.1  # of the measurement: what a prediction should be

Key = tuple[str, int, str]


def rows(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each collective, size and place, from the documents of all rounds."""
    found: dict[Key, dict[str, Any]] = {}
    samples: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for document in documents:
        for row in document["results"]:
            for place in jobs.PLACES:
                own, collective = row["blinkmpi"], document["blinkmpi"]["collective"]
                key = collective, row["size"], place
                one = found.setdefault(key, {"collective": collective, "size": row["size"], "place": place, "wrong": 0})
                one |= {"scheme": own["scheme"], "protocol": own.get("protocol", ""), "bounds": one.get("bounds", [])}
                one["bounds"].append(own[place]["bound_us"])
                one["wrong"] += row[place]["nwrong"]
                samples[key].append((own[place]["predicted_us"], row[place]["time"]))
    for key, one in found.items():
        predicted, measured = zip(*samples[key], strict=True)
        errors = [p / m - 1 for p, m in samples[key]]
        one["bound_us"] = median(one.pop("bounds"))
        for name, values in (("predicted_us", predicted), ("measured_us", measured), ("error_of_a_job", errors)):
            low, mid, high = np.percentile(values, (25, 50, 75)).tolist()
            one[name] = mid
            one[f"{name}_quartiles"] = [low, high]
        one["error"] = one["predicted_us"] / one["measured_us"] - 1
        one["within"] = abs(one["error"]) <= WITHIN
    return list(found.values())


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The rows for a terminal."""
    lines = ["collective  MiB  place         bound us  predicted us  measured us (quartiles)   error %"]
    for row in found:
        low, high = row["measured_us_quartiles"]
        lines.append(
            f"{row['collective']:10} {row['size'] >> 20:4}  {row['place']:12} {row['bound_us']:9.1f} "
            f"{row['predicted_us']:13.1f} {row['measured_us']:12.1f} ({low:.0f} to {high:.0f}) "
            f"{100 * row['error']:+8.1f}{'' if row['within'] else '  *'}"
        )
    return "\n".join([*lines, f"{sum(row['within'] for row in found)} of {len(found)} within {WITHIN:.0%}"])


def job(args: argparse.Namespace, collective: str, folder: str) -> dict[str, Any]:
    """Run one job; its document."""
    file = Path(folder) / "result.json"
    file.unlink(missing_ok=True)
    words = f"-b {args.begin} -e {args.end} -f {args.factor} --predict --executor c -J {file}".split()
    argv = [*jobs.mpirun(args.n), sys.executable, "-m", "blinkmpi", "bench", collective, *words]
    why, said = jobs.run_job(argv, {**jobs.SETTINGS, "PYTHONPATH": jobs.python_path()}, args.limit)
    found = jobs.load(file)
    if why or found is None:
        raise SystemExit(f"{said}\n{why or 'no result'}")
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How far predictions on CPU ranks are from measurements.")
    add = parser.add_argument
    add("-np", type=int, default=2, dest="n", metavar="N", help="ranks (default 2)")
    add("-b", default="1M", dest="begin", metavar="SIZE", help="smallest vector (default 1M)")
    add("-e", default="64M", dest="end", metavar="SIZE", help="largest vector (default 64M)")
    add("-f", default=4, type=int, dest="factor", metavar="N", help="factor between two (default 4)")
    add("--collectives", default=",".join(COLLECTIVES), metavar="LIST", help="by nccl-tests' names")
    add("--rounds", type=int, default=5, metavar="N", help="jobs of each collective (default 5)")
    add("--limit", type=float, default=100, metavar="SECONDS", help="for a job (default 100)")
    add("-o", dest="output", metavar="FILE", help="write the JSON; an existing file is kept")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the file if one is named; 1 if a result was wrong."""
    args = arguments(argv)
    began, documents = datetime.now().astimezone(), []
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        for turn in range(args.rounds):
            names = args.collectives.split(",")
            documents += [job(args, name, folder) for name in names[:: 1 - 2 * (turn % 2)]]
    found, first = rows(documents), documents[0]
    print(table(found))
    steps = [one["blinkmpi"]["steps"] for one in documents]
    head = {"certainty": {"rounds": args.rounds, "within": WITHIN, "calibration_s": [one["seconds"] for one in steps]}}
    ours = {key: first["blinkmpi"][key] for key in ("machine", "versions", "ranks", "statistic")}
    if args.output:
        made = jobs.document(head, found, [], began, **ours)
        made["env"], made["steps"] = first["env"], steps
        jobs.write(args.output, made)
    return int(any(row["wrong"] for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
