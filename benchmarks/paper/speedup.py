"""Theoretical speed-up of packed trees over NCCL's rings on every unique set of GPUs (the paper's section 2 and 5).

Rates follow from the links alone, by exact planning; nothing is timed, and nothing is simulated either.
"""

from fractions import Fraction
from pathlib import Path
from typing import Any

from blinkmpi.cli.subsets import subsets_report
from blinkmpi.planning.subsets import PCIE_MBPS, Subset, survey
from blinkmpi.plot.trees import draw_subsets
from blinkmpi.topology.machines import machine

from .simulated import DGX_1, NAMES, result

NAME = "speedup"


def run() -> dict[str, Any]:
    """All unique connected sets of both machines."""
    found = {name: survey(machine(name)) for name in DGX_1}
    reports = {name: subsets_report(machine(name), some, PCIE_MBPS) for name, some in found.items()}
    return {**result(NAME, pcie_mbps=PCIE_MBPS, machines=reports), "simulated": False}


def draw(found: dict[str, Any], folder: Path) -> None:
    """A picture for each machine, as ``blinkmpi subsets --plot`` draws it."""
    for name, report in found["machines"].items():
        some = [subset_of(row) for row in report["subsets"]]
        draw_subsets(some, machine(name), found["pcie_mbps"], str(folder / f"paper-{NAME}-{name}.svg"))


def subset_of(row: dict[str, Any]) -> Subset:
    """A subset as the file has it."""
    rates, baseline = (
        tuple(Fraction(gbps * 1000).limit_denominator(1000) for gbps in row[key].values())
        for key in ("rate_gbps", "baseline_gbps")
    )
    return Subset(tuple(row["gpus"]), row["allocations"], rates, row["rings"], baseline, row["broadcast_trees"],
                  row["fewest"])  # fmt: skip


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Sums over the sets of 3 GPUs and more."""
    lines = ["| machine | unique sets | without a ring of NVLinks | collective | least | geometric mean | most |",
             "|---|---:|---:|---|---:|---:|---:|"]  # fmt: skip
    for name, report in found["machines"].items():
        sums = report["from_3"]
        for collective in ("broadcast", "allreduce"):
            s = sums["speedups"][collective]
            lines.append(f"| {NAMES[name]} | {sums['unique']} | {sums['without_ring']} | {collective} | "
                         f"{s['least']:.2f} | {s['mean']:.2f} | {s['most']:.2f} |")  # fmt: skip
    return {"paper-speedup": "\n".join(lines) + "\n"}
