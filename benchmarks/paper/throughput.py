"""Broadcast and AllReduce on every unique set of GPUs of a DGX-1, simulated: our trees beside NCCL's rings."""

from pathlib import Path
from statistics import geometric_mean
from typing import Any

from blinkmpi.planning.subsets import PCIE_MBPS
from blinkmpi.topology.model import Topology
from blinkmpi.trees.packing import pack
from blinkmpi.util.figure import COLOURS, bare, new_figure, save

from .simulated import DGX_1, GREY, MIB, NAMES, names_of, nccl_rings, result, seconds_of, sets_of

NAME = "throughput"
NBYTES = 64 * MIB
COLLECTIVES = ("broadcast", "allreduce")


def run() -> dict[str, Any]:
    """A row for each machine and set."""
    rows = [{"machine": name, "gpus": ranks, "alike": alike, **{c: row_of(part, c) for c in COLLECTIVES}}
            for name in DGX_1 for part, ranks, alike in sets_of(name)]  # fmt: skip
    return result(NAME, nbytes=NBYTES, pcie_mbps=PCIE_MBPS, rows=rows)


def row_of(part: Topology, collective: str) -> dict[str, Any]:
    """GB/s of the vector: simulated, and the rate that the links allow."""
    trees, rings = pack(part, collective), nccl_rings(part, collective)
    ours, theirs = (NBYTES / 1e9 / s for s in (seconds_of(trees, part, NBYTES), rings.seconds(NBYTES)))
    return {"trees_gbps": ours, "trees_rate_gbps": float(trees.rate) / 1000, "rings_gbps": theirs,
            "rings_rate_gbps": rings.gbps, "rings_on": rings.links, "speedup": ours / theirs}  # fmt: skip


def draw(found: dict[str, Any], folder: Path) -> None:
    """For each machine, both collectives, two bars a set."""
    for name in DGX_1:
        rows = [row for row in found["rows"] if row["machine"] == name]
        figure = new_figure(max(6.5, 0.24 * len(rows) + 1.2), 6.4)
        panels = figure.subplots(len(COLLECTIVES), 1, sharex=True)
        places = list(range(len(rows)))
        for axes, collective in zip(panels, COLLECTIVES, strict=True):
            cells = [row[collective] for row in rows]
            bars = axes.bar([x - 0.2 for x in places], [c["rings_gbps"] for c in cells], 0.4, color=GREY, zorder=2,
                            label="NCCL's rings (over PCIe: hatched)")  # fmt: skip
            for bar, cell in zip(bars, cells, strict=True):
                if cell["rings_on"] == "PCIe":
                    bar.set_hatch("////")
                    bar.set_edgecolor("white")
            axes.bar([x + 0.2 for x in places], [c["trees_gbps"] for c in cells], 0.4, color=COLOURS[0], zorder=2,
                     label="packed trees")  # fmt: skip
            axes.set_ylabel(f"{collective}\nGB/s, simulated")
            axes.margins(x=0.01)
            bare(axes, "y")
        panels[0].legend(fontsize=8, frameon=False, loc="upper left")
        panels[0].set_title(f"{NAMES[name]}: {found['nbytes'] // MIB} MiB on every unique set of GPUs, simulated",
                            fontsize=11, loc="left")  # fmt: skip
        panels[1].set_xticks(places, names_of(rows), rotation=90, fontsize=7)
        figure.tight_layout()
        save(figure, str(folder / f"paper-{NAME}-{name}.svg"))


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Sums by machine and collective."""
    lines = ["| machine | collective | trees, GB/s: least to most | rings, GB/s: least to most | "
             "speed-up: geometric mean | most | trees reach of their rate, at least |",
             "|---|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for name in DGX_1:
        for collective in COLLECTIVES:
            cells = [row[collective] for row in found["rows"] if row["machine"] == name]
            trees, rings = ([c[key] for c in cells] for key in ("trees_gbps", "rings_gbps"))
            times = [c["speedup"] for c in cells]
            part = min(c["trees_gbps"] / c["trees_rate_gbps"] for c in cells)
            ranges = " | ".join(f"{min(some):.1f} to {max(some):.1f}" for some in (trees, rings))
            lines.append(f"| {NAMES[name]} | {collective} | {ranges} | {geometric_mean(times):.2f} | "
                         f"{max(times):.2f} | {part:.0%} |")  # fmt: skip
    return {"paper-throughput": "\n".join(lines) + "\n"}
