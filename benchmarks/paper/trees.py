"""Number of trees with and without the integer program (the paper's section 3.2): broadcast on every set of a DGX-1.

Three planners: multiplicative weights alone, the same thinned out by an integer program, and the least number of trees
of any packing at the best rate, with its proof. Counts and rates are exact results of planning; nothing is simulated.
"""

import time
from fractions import Fraction
from pathlib import Path
from typing import Any

from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees import MethodOptions, fewest, pack
from blinkmpi.util.figure import COLOURS, bare, new_figure, save

from .simulated import DGX_1, GREY, NAMES, names_of, result, sets_of

NAME = "trees"
EPSILON = Fraction(1, 20)
EPSILONS = (Fraction(1, 5), Fraction(1, 10), EPSILON, Fraction(1, 50), Fraction(1, 100))
METHODS = ("mwu", "mwu+ilp")


def run() -> dict[str, Any]:
    """A row for each set, and one for each epsilon on the whole DGX-1V."""
    rows = [{"machine": name, "gpus": ranks, **row_of(part)} for name in DGX_1 for part, ranks, _ in sets_of(name)]
    whole = machine("dgx-1v")
    steps = [{"epsilon": str(e), **{m: count_of(whole, m, e) for m in METHODS}} for e in EPSILONS]
    return {**result(NAME, epsilon=str(EPSILON), rows=rows, epsilons=steps), "simulated": False}


def row_of(part: Topology) -> dict[str, Any]:
    """Trees of the three planners on one set."""
    best, proof = fewest(part, "broadcast")
    least = {"trees": len(best.trees), "proved": proof.minimal, "of_bound": float(best.rate / best.bound)}
    return {**{m: count_of(part, m, EPSILON) for m in METHODS}, "fewest": least}


def count_of(part: Topology, method: str, epsilon: Fraction) -> dict[str, Any]:
    """Trees, the part of the bound that they reach, and seconds of planning."""
    start = time.perf_counter()
    packing = pack(part, "broadcast", method=method, options=MethodOptions(epsilon=epsilon))
    seconds = time.perf_counter() - start
    return {"trees": len(packing.trees), "of_bound": float(packing.rate / packing.bound), "seconds": seconds}


def draw(found: dict[str, Any], folder: Path) -> None:
    """Three bars for each set of a DGX-1V."""
    rows = [row for row in found["rows"] if row["machine"] == "dgx-1v"]
    figure = new_figure(12, 4.2)
    axes = figure.subplots()
    kinds = (("mwu", "multiplicative weights", GREY), ("mwu+ilp", "thinned out by the integer program", COLOURS[0]),
             ("fewest", "fewest of any packing at the best rate", COLOURS[2]))  # fmt: skip
    places = range(len(rows))
    for i, (kind, label, colour) in enumerate(kinds):
        heights = [row[kind]["trees"] for row in rows]
        axes.bar([x + 0.28 * (i - 1) for x in places], heights, 0.28, color=colour, label=label, zorder=2)
    axes.set_xticks(list(places), names_of(rows), rotation=90, fontsize=7)
    axes.set_ylabel("trees")
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.7, None)
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:g}")
    axes.margins(x=0.01)
    bare(axes, "y")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.set_title("DGX-1V: trees of a broadcast on every unique set of GPUs", fontsize=11, loc="left")
    figure.tight_layout()
    save(figure, str(folder / f"paper-{NAME}.svg"))


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The whole machines at each precision, and the sums over all sets."""
    lines = ["| DGX-1V, 8 GPUs, epsilon | first stage: trees | of the bound | ms | and the integer program: trees | "
             "of the bound | ms |", "|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in found["epsilons"]:
        cells = [f"{row[m]['trees']} | {row[m]['of_bound']:.1%} | {row[m]['seconds'] * 1e3:.0f}" for m in METHODS]
        lines.append(f"| {row['epsilon']} | {' | '.join(cells)} |")
    more = ["| machine | sets | first stage, trees: mean, most | after the integer program: mean, most | "
            "fewest: mean, most | proved fewest | the program reaches the bound |",
            "|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for name in DGX_1:
        rows = [row for row in found["rows"] if row["machine"] == name]
        cells = []
        for kind in (*METHODS, "fewest"):
            counts = [row[kind]["trees"] for row in rows]
            cells.append(f"{sum(counts) / len(counts):.1f}, {max(counts)}")
        proved = sum(row["fewest"]["proved"] for row in rows)
        full = sum(row["mwu+ilp"]["of_bound"] == 1 for row in rows)
        lines_of = f"| {NAMES[name]} | {len(rows)} | {' | '.join(cells)} | {proved} | {full} |"
        more.append(lines_of)
    return {"paper-trees": "\n".join([*lines, "", *more]) + "\n"}
