"""A DGX-1V that loses GPUs: ``python benchmarks/losses.py`` simulates what is left of its collectives.

For each set of 8, 7, 6 and 5 GPUs that can be left, simulates packed trees beside NCCL's rings on the same GPUs; where
no ring of NVLinks joins them, rings go over PCIe. Writes ``results/losses-dgx-1v.json``, of which docs/elastic.md has a
table (``pages/made.py``). Nothing is measured: times are the cost model's (``benchmarks/paper/simulated.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks.paper.simulated import nccl_rings, result, seconds_of, sets_of  # noqa: E402
from blinkmpi.planning.subsets import PCIE_MBPS  # noqa: E402
from blinkmpi.topology.model import Topology  # noqa: E402
from blinkmpi.trees.packing import pack  # noqa: E402

NAME = "losses"
MACHINE = "dgx-1v"
LEFT = (8, 7, 6, 5)  # GPUs
SIZES = (1 << 20, 64 << 20)  # bytes of a vector
COLLECTIVES = ("allreduce", "broadcast")
RESULT = ROOT / "benchmarks" / "results" / f"{NAME}-{MACHINE}.json"
Row = dict[str, Any]


def row_of(part: Topology, collective: str) -> Row:
    """Seconds of trees and of rings on one set of GPUs, for each size."""
    trees, rings = pack(part, collective), nccl_rings(part, collective)
    return {
        "rings_on": rings.links,
        "trees": [seconds_of(trees, part, nbytes) for nbytes in SIZES],
        "rings": [rings.seconds(nbytes) for nbytes in SIZES],
    }


def run() -> Row:
    """A row for each unique set of GPUs, and how many sets look the same."""
    rows = [
        {"gpus": ranks, "alike": alike, **{c: row_of(part, c) for c in COLLECTIVES}}
        for part, ranks, alike in sets_of(MACHINE)
        if len(ranks) in LEFT
    ]
    found = result(NAME, machine=MACHINE, sizes=SIZES, pcie_mbps=PCIE_MBPS, rows=rows)
    return {**found, "format": f"blinkmpi.{NAME}"}


def table(found: Row) -> str:
    """A row for each number of GPUs, collective and size; a mean is geometric, over all sets that can be left."""
    lines = [
        "| GPUs left | sets, without a ring | call | trees: best, mean, worst | rings: best, mean, worst | rings' time "
        "over ours: least, mean, most |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    for left in LEFT:
        rows = [row for row in found["rows"] if len(row["gpus"]) == left]
        weights = [row["alike"] for row in rows]
        sets = f"{sum(weights)}, {sum(r['alike'] for r in rows if r[COLLECTIVES[0]]['rings_on'] == 'PCIe')}"
        for collective in COLLECTIVES:
            for at, nbytes in enumerate(found["sizes"]):
                ours, theirs = ([row[collective][side][at] for row in rows] for side in ("trees", "rings"))
                ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
                times = " | ".join(", ".join(map(time_of, three(some, weights))) for some in (ours, theirs))
                gain = ", ".join(f"{ratio:.2f}" for ratio in three(ratios, weights))
                lines.append(f"| {left} | {sets} | {collective}, {nbytes >> 20} MiB | {times} | {gain} |")
    return "\n".join(lines) + "\n"


def three(values: list[float], weights: list[int]) -> tuple[float, float, float]:
    """The least, the geometric mean and the greatest of positive numbers."""
    mean = exp(sum(w * log(v) for v, w in zip(values, weights, strict=True)) / sum(weights))
    return min(values), mean, max(values)


def time_of(seconds: float) -> str:
    """Three digits, in a unit that fits."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def tables() -> dict[str, str]:
    """The tables of the page, from the result file."""
    return {MACHINE: table(json.loads(RESULT.read_text(encoding="utf-8")))}


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, and write the file."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args(argv)
    RESULT.write_text(json.dumps(run(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
