"""Hybrid transfers (the paper's sections 3.4 and 5), simulated: PCIe beside NVLink on 3 to 8 GPUs of a DGX-1V."""

from fractions import Fraction
from pathlib import Path
from typing import Any

from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees import MethodOptions, pack
from blinkmpi.trees.tree import Packing
from blinkmpi.util.figure import COLOURS, bare, new_figure, save

from .simulated import GREY, MIB, result, seconds_of

NAME = "hybrid"
NBYTES = 512 * MIB
SWITCH_S = Fraction(1, 1000)  # until PCIe may start, where a runtime has to switch peer access first: an assumption
COLLECTIVES = ("broadcast", "allreduce")
SIZES = range(3, 9)


def run() -> dict[str, Any]:
    """A row for each number of GPUs: NVLink alone, and both, from the start or after the switching time."""
    whole = machine("dgx-1v")
    late = MethodOptions(nbytes=NBYTES, switch_seconds=SWITCH_S)
    rows = []
    for n in SIZES:
        part = whole.subset(range(n))
        for c in COLLECTIVES:
            one, both = pack(part, c), pack(part, c, method="hybrid")
            switched = pack(part, c, method="hybrid", options=late)
            rows.append({"collective": c, "gpus": list(range(n)), "nvlink": told(one, part),
                         "hybrid": told(both, part), "switched_rate_gbps": float(switched.rate) / 1000})  # fmt: skip
    return result(NAME, machine="dgx-1v", nbytes=NBYTES, switch_seconds=float(SWITCH_S), rows=rows)


def told(packing: Packing, part: Topology) -> dict[str, float]:
    """The rate that the links allow, and the simulated one."""
    return {"rate_gbps": float(packing.rate) / 1000, "gbps": NBYTES / 1e9 / seconds_of(packing, part, NBYTES)}


def draw(found: dict[str, Any], folder: Path) -> None:
    """Bars of NVLink alone and of both; the rates that the links allow as dashes."""
    figure = new_figure(9.5, 3.8)
    for axes, collective in zip(figure.subplots(1, 2), COLLECTIVES, strict=True):
        rows = [row for row in found["rows"] if row["collective"] == collective]
        for i, (kind, label, colour) in enumerate((("nvlink", "NVLink alone", GREY),
                                                   ("hybrid", "NVLink and PCIe", COLOURS[0]))):  # fmt: skip
            places = [len(row["gpus"]) + 0.38 * (i - 0.5) for row in rows]
            axes.bar(places, [row[kind]["gbps"] for row in rows], 0.38, color=colour, label=label, zorder=2)
            rates = [row[kind]["rate_gbps"] for row in rows]
            axes.hlines(rates, [x - 0.19 for x in places], [x + 0.19 for x in places], color="#333333", zorder=3,
                        label="what the links allow" if i else None)  # fmt: skip
        axes.set_xlabel("GPUs")
        axes.set_title(f"{collective}, {found['nbytes'] // MIB} MiB", fontsize=10, loc="left")
        bare(axes, "y")
    figure.axes[0].set_ylabel("GB/s, simulated")
    figure.axes[0].legend(fontsize=8, frameon=False, loc="upper left")
    figure.tight_layout()
    save(figure, str(folder / f"paper-{NAME}.svg"))


def tables(found: dict[str, Any]) -> dict[str, str]:
    """A line for each number of GPUs and collective."""
    ms = found["switch_seconds"] * 1e3
    lines = ["| GPUs | collective | NVLink: rate, GB/s | simulated | with PCIe: rate | simulated | gain | "
             f"rate if PCIe starts {ms:g} ms late |", "|---:|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in found["rows"]:
        one, both = row["nvlink"], row["hybrid"]
        lines.append(f"| {len(row['gpus'])} | {row['collective']} | {one['rate_gbps']:.1f} | {one['gbps']:.1f} | "
                     f"{both['rate_gbps']:.1f} | {both['gbps']:.1f} | {both['gbps'] - one['gbps']:+.1f} | "
                     f"{row['switched_rate_gbps']:.1f} |")  # fmt: skip
    return {"paper-hybrid": "\n".join(lines) + "\n"}
