"""Tuning of the chunk size (the paper's section 4), simulated: multiplicative increase, additive decrease.

``blinkmpi.planning.chunk_search``, which jobs on GPUs run, is given the cost model's times in place of measured ones.
Beside the chunks that it tries stand all others, so that what it settles on can be compared with the best.
"""

from functools import cache
from pathlib import Path
from typing import Any

from blinkmpi.planning.chunk_search import TRIALS, ChunkSearch
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees.packing import pack
from blinkmpi.util.figure import COLOURS, bare, new_figure, save
from blinkmpi.util.text import size_text

from .simulated import MIB, result, seconds_of

NAME = "chunks"
KIB = 1 << 10
LOWEST, HIGHEST = 4 * KIB, 4 * MIB
CASES = (("broadcast", (0, 1, 2, 3), 256 * MIB), ("allreduce", tuple(range(8)), 256 * MIB),
         ("allreduce", tuple(range(8)), 4 * MIB))  # fmt: skip


def run() -> dict[str, Any]:
    """A search for each case."""
    whole = machine("dgx-1v")
    rows = [{"collective": c, "gpus": gpus, "nbytes": n, **search(whole.subset(gpus), c, n)} for c, gpus, n in CASES]
    return result(NAME, machine="dgx-1v", lowest=LOWEST, highest=HIGHEST, trials=TRIALS, rows=rows)


def search(part: Topology, collective: str, nbytes: int) -> dict[str, Any]:
    """What the search tries and settles on, and the rate of every chunk."""
    packing = pack(part, collective)

    @cache
    def gbps(chunk: int) -> float:
        return nbytes / 1e9 / seconds_of(packing, part, nbytes, chunk=chunk)

    found, tried = ChunkSearch(LOWEST, HIGHEST, LOWEST), []
    while not found.done:
        tried.append({"chunk": found.chunk, "gbps": gbps(found.chunk)})
        for _ in range(TRIALS):
            found.learn(nbytes / 1e9 / gbps(found.chunk))
    chunks = [LOWEST << i for i in range((HIGHEST // LOWEST).bit_length())]
    curve = [{"chunk": chunk, "gbps": gbps(chunk)} for chunk in chunks]
    return {"tried": tried, "chunk": found.chunk, "gbps": gbps(found.chunk), "curve": curve}


def draw(found: dict[str, Any], folder: Path) -> None:
    """For each case the rate of all chunks, and the search as numbered points on it."""
    figure = new_figure(12, 3.9)
    for axes, row in zip(figure.subplots(1, len(found["rows"])), found["rows"], strict=True):
        curve, tried = row["curve"], row["tried"]
        axes.plot([p["chunk"] for p in curve], [p["gbps"] for p in curve], color="#9a9a9a", marker=".",
                  label="every power of two")  # fmt: skip
        axes.plot([p["chunk"] for p in tried], [p["gbps"] for p in tried], color=COLOURS[0], linestyle="none",
                  marker="o", label="tried, in this order")  # fmt: skip
        turns: dict[int, list[str]] = {}
        for i, p in enumerate(tried):
            turns.setdefault(p["chunk"], []).append(str(i + 1))
        rates = {p["chunk"]: p["gbps"] for p in tried}
        for place, chunk in enumerate(sorted(turns)):
            away = (0, -16 if place % 2 else 9)
            axes.annotate(",".join(turns[chunk]), (chunk, rates[chunk]), xytext=away, textcoords="offset points",
                          fontsize=8, ha="center", color=COLOURS[0])  # fmt: skip
        axes.plot([row["chunk"]], [row["gbps"]], color=COLOURS[1], marker="*", markersize=13, linestyle="none",
                  label="settled on")  # fmt: skip
        axes.set_xscale("log", base=2)
        ticks = [p["chunk"] for p in curve][::2]
        axes.set_xticks(ticks, [size_text(chunk) for chunk in ticks], fontsize=7)
        axes.set_ylim(0, 1.2 * max(p["gbps"] for p in curve))
        axes.set_title(f"{row['collective']}, {len(row['gpus'])} GPUs, {size_text(row['nbytes'])}", fontsize=10,
                       loc="left")  # fmt: skip
        axes.set_xlabel("chunk")
        bare(axes)
    figure.axes[0].set_ylabel("GB/s, simulated")
    figure.axes[0].legend(fontsize=8, frameon=False, loc="lower right")
    figure.tight_layout()
    save(figure, str(folder / f"paper-{NAME}.svg"))


def tables(found: dict[str, Any]) -> dict[str, str]:
    """A line for each case."""
    lines = ["| call on GPUs of a DGX-1V | chunks tried | settled on | GB/s | best power of two | GB/s |",
             "|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in found["rows"]:
        best = max(row["curve"], key=lambda p: p["gbps"])
        lines.append(f"| {row['collective']} of {size_text(row['nbytes'])}, {len(row['gpus'])} GPUs | "
                     f"{len(row['tried'])} | {size_text(row['chunk'])} | {row['gbps']:.1f} | "
                     f"{size_text(best['chunk'])} | {best['gbps']:.1f} |")  # fmt: skip
    return {"paper-chunks": "\n".join(lines) + "\n"}
