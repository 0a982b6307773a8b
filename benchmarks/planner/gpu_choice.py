"""Would a choice by what kernels cost be the fastest one? ``python benchmarks/planner/gpu_choice.py [--page]``.

The files of calls between GPUs were measured several times, with other protocols each time. Git has them all: this
collects, for each collective, type and size, the least time of each protocol and scheme that was measured, in graphs
and out of place, and judges two choices: of what was measured, that with the least prediction
(``planning/gpus/kernel_times.py``), and what the selection table takes. Writes ``results/choice-gpu.json``; ``--page``
prints its table.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks.gpu_certainty import (  # noqa: E402
    COLLECTIVES,
    Measurement,
    machine_of,
    of_document,
    plan_of,
    predicted_us,
)
from blinkmpi.planning.gpus.kernel_times import WORTH  # noqa: E402
from blinkmpi.planning.selection import choose  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "choice-gpu.json"
FOLDER = "benchmarks/results"
NEAR = 1.1


def git(*words: str) -> str:
    """What a git command says."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def versions() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(file, commit, document) of all versions of the files."""
    seen = set()
    for commit in git("log", "--format=%h", "--", f"{FOLDER}/*-gpu-graph-*.json").split():
        for line in git("ls-tree", commit, f"{FOLDER}/").splitlines():
            facts, _, path = line.partition("\t")
            name = Path(path).name
            if name.startswith(COLLECTIVES) and "-gpu-graph-" in name and (facts, name) not in seen:
                seen.add((facts, name))
                yield Path(path).stem, commit, json.loads(git("cat-file", "-p", facts.split()[2]))


def judged() -> list[dict[str, Any]]:
    """A row for each call of which more than one way was measured."""
    groups: dict[tuple[str, int, str, int], dict[tuple[str, str], list[Measurement]]] = defaultdict(dict)
    for name, _, document in versions():
        for row in of_document(name, document):
            if row.place == "out_of_place":
                key = row.collective, row.call.n, row.call.dtype, row.call.nbytes
                groups[key].setdefault((row.rule.protocol, row.rule.scheme), []).append(row)
    found = []
    for (collective, n, dtype, nbytes), ways in sorted(groups.items()):
        if len(ways) < 2:
            continue
        fastest = {way: min(rows, key=lambda row: row.measured_us) for way, rows in ways.items()}
        plan, call = plan_of(n), next(iter(fastest.values())).call
        known = {p.scheme for p in plan.packings if p.collective == call.collective}
        predicted = {way: predicted_us(row) for way, row in fastest.items() if way[1] in known}
        taken = choose(plan, call, registered=True)
        found.append({
            "machine": machine_of(n).name, "collective": collective, "ranks": n, "dtype": dtype, "bytes": nbytes,
            "measured_us": {" ".join(way): row.measured_us for way, row in fastest.items()},
            "predicted_us": {" ".join(way): us for way, us in predicted.items()},
            "by_model": " ".join(least(predicted)), "by_table": f"{taken.protocol} {taken.scheme}",
        })  # fmt: skip
    return found


def least(predicted: dict[tuple[str, str], float]) -> tuple[str, str]:
    """The way with the least prediction; packets of 16 bytes where lines of 128 are hardly faster."""
    best = min(predicted, key=lambda way: predicted[way])
    plain = "ll16_one_shot", "onehop"
    return plain if best[0] == "ll128_one_shot" and predicted.get(plain, 1e9) <= WORTH * predicted[best] else best


def longer(row: dict[str, Any], choice: str) -> float | None:
    """How many times as long as the fastest way a choice took, if that was measured."""
    measured = row["measured_us"]
    return measured[row[choice]] / min(measured.values()) if row[choice] in measured else None


def table(rows: list[dict[str, Any]]) -> str:
    """How the two choices did, and where one took more than a tenth longer."""
    lines = [
        "| choice | calls | the fastest | within 10 % | the most above the fastest |",
        "|---|---:|---:|---:|---:|",
    ]
    for choice, name in (("by_model", "the least prediction"), ("by_table", "the selection table")):
        times = [x for row in rows if (x := longer(row, choice)) is not None]
        most = 100 * max(times) - 100
        lines.append(
            f"| {name} | {len(times)} | {sum(x == 1 for x in times)} | {sum(x <= NEAR for x in times)} | {most:.0f} % |"
        )
    far = [row for row in rows if (longer(row, "by_model") or 1) > NEAR]
    lines += ["", "| far from the fastest | size | by prediction | the fastest |", "|---|---:|---|---|"]
    for row in far:
        best = min(row["measured_us"], key=lambda way: row["measured_us"][way])
        size = f"{row['bytes'] >> 20} MiB" if row["bytes"] >> 20 else f"{row['bytes'] >> 10} KiB"
        own, least_us = row["measured_us"][row["by_model"]], row["measured_us"][best]
        lines.append(
            f"| {row['collective']}, {row['ranks']} GPUs, {row['dtype']} | {size} | "
            f"{row['by_model']}, {own:.1f} us | {best}, {least_us:.1f} us |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Judge and write the file, or print what it says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print the table of the file that is there")
    args = parser.parse_args(argv)
    if args.table:
        print(table(json.loads(RESULT.read_text(encoding="utf-8"))["rows"]))
        return 0
    commits = sorted({commit for _, commit, _ in versions()})
    found = {"format": "blinkmpi.choice-gpu", "version": 1, "commits": commits, "rows": judged()}
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found["rows"]))  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main())
