"""AllReduce on the 16 GPUs of a DGX-2 by size (the paper's section 5), simulated: one-hop trees against rings."""

from pathlib import Path
from typing import Any

from blinkmpi.topology.machines import machine
from blinkmpi.trees.packing import pack
from blinkmpi.util.figure import COLOURS, new_figure, plain_log_axes, save
from blinkmpi.util.text import size_text, time_text

from .simulated import result, seconds_of

NAME = "dgx-2"
SIZES = tuple((1 << 10) << (2 * i) for i in range(9))  # 1 KiB to 64 MiB
METHODS = {"onehop": "one-hop trees", "rings": "NCCL's rings"}


def run() -> dict[str, Any]:
    """A row for each size."""
    whole = machine("dgx-2")
    packed = {method: pack(whole, "allreduce", method=method) for method in METHODS}
    rows = [{"nbytes": n, **{m: {"seconds": seconds_of(p, whole, n)} for m, p in packed.items()}} for n in SIZES]
    rates = {m: float(p.rate) / 1000 for m, p in packed.items()}
    depths = {m: p.depth for m, p in packed.items()}
    return result(NAME, machine="dgx-2", rates_gbps=rates, depths=depths, rows=rows)


def draw(found: dict[str, Any], folder: Path) -> None:
    """Throughput and latency against size."""
    figure = new_figure(10, 4)
    right, left = figure.subplots(1, 2)
    sizes = [row["nbytes"] for row in found["rows"]]
    for (method, label), colour in zip(METHODS.items(), (COLOURS[0], "#8a8a8a"), strict=True):
        seconds = [row[method]["seconds"] for row in found["rows"]]
        right.plot(sizes, [n / 1e9 / s for n, s in zip(sizes, seconds, strict=True)], color=colour, marker="o",
                   label=label)  # fmt: skip
        left.plot(sizes, [s * 1e6 for s in seconds], color=colour, marker="o", label=label)
    for axes, what in ((right, "GB/s, simulated"), (left, "us, simulated")):
        plain_log_axes(axes, sizes[::2], lambda n: size_text(int(n)))
        axes.set_ylabel(what)
        axes.legend(fontsize=8, frameon=False)
    right.set_title("DGX-2, 16 GPUs, AllReduce: throughput", fontsize=10, loc="left")
    left.set_title("latency", fontsize=10, loc="left")
    figure.tight_layout()
    save(figure, str(folder / f"paper-{NAME}.svg"))


def tables(found: dict[str, Any]) -> dict[str, str]:
    """A line for each size."""
    lines = [
        "| vector | one-hop trees | GB/s | rings | GB/s | rings' time over ours |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        (ours, theirs), n = (row[m]["seconds"] for m in METHODS), row["nbytes"]
        lines.append(f"| {size_text(n)} | {time_text(ours)} | {n / 1e9 / ours:.2f} | {time_text(theirs)} | "
                     f"{n / 1e9 / theirs:.2f} | {theirs / ours:.2f} |")  # fmt: skip
    return {"paper-dgx-2": "\n".join(lines) + "\n"}
