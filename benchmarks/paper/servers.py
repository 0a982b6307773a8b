"""AllReduce over two servers (the paper's sections 3.5 and 5), simulated: 3 GPUs of one DGX-1V and 5 of another.

The paper's three phases (reduce in each server, exchange, broadcast in each server) are one packing here. Each server
has one network card, whose rate is varied. Beside it stand rings as NCCL builds them over both servers: they cross the
network once each way, so no ring is faster than the card's rate, and rates of rings are that bound, without latency.
"""

from fractions import Fraction
from pathlib import Path
from typing import Any

from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees.packing import pack
from blinkmpi.util.figure import COLOURS, bare, new_figure, save

from .simulated import GREY, MIB, result, seconds_of

NAME = "servers"
NBYTES = 128 * MIB
GPUS = (0, 1, 2, 8, 9, 10, 11, 12)
GBITS = (40, 100, 200, 400)  # of each server's card
CARD_GBITS = 100  # in the catalogue


def two_servers(gbits: int) -> Topology:
    """The eight GPUs, and a card on the first PCIe switch of each server alone."""
    whole = machine("dgx-1v:2")
    network = next(whole.n + i for i, s in enumerate(whole.switches) if s.kind == "net")
    cards = sorted(k.src for k in whole.links if k.kind == "net" and k.dst == network)
    first = {whole.switches[v - whole.n].node: v for v in reversed(cards)}
    for vertex in cards:
        if vertex not in first.values():
            whole = whole.drop_link(vertex, network)
    return whole.scale("net", Fraction(gbits, CARD_GBITS)).subset(GPUS)


def run() -> dict[str, Any]:
    """A row for each rate of the cards."""
    rows = []
    for gbits in GBITS:
        part = two_servers(gbits)
        packing = pack(part, "allreduce")
        ring = gbits / 8 * part.n / (2 * (part.n - 1))
        seconds = seconds_of(packing, part, NBYTES)
        rows.append({"gbits": gbits, "scheme": packing.scheme, "trees": len(packing.trees),
                     "rate_gbps": float(packing.rate) / 1000, "bound_gbps": float(packing.bound) / 1000,
                     "bound": packing.certificate.text, "gbps": NBYTES / 1e9 / seconds,
                     "rings_at_most_gbps": ring})  # fmt: skip
    return result(NAME, machine="dgx-1v:2", gpus=GPUS, nbytes=NBYTES, rows=rows)


def draw(found: dict[str, Any], folder: Path) -> None:
    """Bars for each rate of the cards."""
    figure = new_figure(6.5, 3.8)
    axes = figure.subplots()
    rows = found["rows"]
    places = range(len(rows))
    axes.bar([x - 0.2 for x in places], [r["rings_at_most_gbps"] for r in rows], 0.4, color=GREY, zorder=2,
             label="rings: at most, by the network")  # fmt: skip
    axes.bar([x + 0.2 for x in places], [r["gbps"] for r in rows], 0.4, color=COLOURS[0], zorder=2,
             label="trees over both servers")  # fmt: skip
    axes.set_xticks(list(places), [f"{r['gbits']}" for r in rows])
    axes.set_xlabel("Gbit/s of each server's network card")
    axes.set_ylabel("GB/s, simulated")
    axes.set_title(f"AllReduce of {found['nbytes'] // MIB} MiB, 3 + 5 GPUs of two DGX-1V", fontsize=10, loc="left")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    bare(axes, "y")
    figure.tight_layout()
    save(figure, str(folder / f"paper-{NAME}.svg"))


def tables(found: dict[str, Any]) -> dict[str, str]:
    """A line for each rate of the cards."""
    lines = ["| card, Gbit/s | trees: rate, GB/s | of the bound | simulated | rings, at most | simulated / rings |",
             "|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for r in found["rows"]:
        lines.append(f"| {r['gbits']} | {r['rate_gbps']:.2f} | {r['rate_gbps'] / r['bound_gbps']:.0%} | "
                     f"{r['gbps']:.2f} | {r['rings_at_most_gbps']:.2f} | "
                     f"{r['gbps'] / r['rings_at_most_gbps']:.2f} |")  # fmt: skip
    return {"paper-servers": "\n".join(lines) + "\n"}
